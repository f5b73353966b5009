"""The gateway as a process: it announces its HTTP address, serves through the router, and ends in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from paceline.testing.processes import service_process

RUN_FILE = """
[run]
name = "gated"
[model]
path = "tests/assets/sort4"
[data]
source = {name = "jsonl", path = "data.jsonl"}
[[reward.graders]]
name = "exact_match"
[telemetry]
enabled = false
"""
ENGINE = "paceline.testing.scripted_engine"


async def test_a_request_goes_through_all_processes(tmp_path: Path, redis_url: str, redis_client: Any) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    async with service_process("coordinator", run_file, redis_url=redis_url) as (_, coordinator):
        async with service_process("router", run_file, coordinator=coordinator) as (_, router):
            flags = ("--router-addr", router)
            async with service_process("gateway", run_file, *flags, coordinator=coordinator) as (gateway, _):
                url = f"http://{gateway.labels['http_address']}"
                async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                    assert (await http.get("/health")).json()["reason"] == "no engine has joined the run"
                    models = (await http.get("/v1/models")).json()
                    assert [model["id"] for model in models["data"]] == ["policy"]
                assert await gateway.stop() == 0
