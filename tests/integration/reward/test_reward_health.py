"""The container health check, against a real service."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.testing.processes import ServiceProcess

RUN = """
run.name = "health"
model.path = "none"
data.source = { name = "jsonl", path = "none" }
reward.graders = [{ name = "exact_match" }]
"""


async def check(address: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.rpc.healthcheck", address, stderr=asyncio.subprocess.PIPE
    )
    _, text = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, text.decode()


async def test_the_health_check_tells_a_serving_service_from_a_stopped_one(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    service = ServiceProcess("reward", run_file, ["--coordinator-addr", "127.0.0.1:1"], [], {})
    address = await service.start()
    assert await check(address) == (0, "")
    assert await service.stop() == 0
    code, text = await check(address)
    assert code == 1
    assert f"{address} does not answer: UNAVAILABLE" in text
