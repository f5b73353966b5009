"""Looks at the run of `scripts/compose_test.sh`: `run` in a container, `http` from outside. Exits 1 with a reason."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.5


def read_steps(metrics: Path) -> list[dict[str, Any]]:
    """The step records that are whole; a last line without its end is being written."""
    text = metrics.read_text() if metrics.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_steps(metrics: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Until the run has trained `steps`."""
    deadline = time.monotonic() + seconds
    while len(records := read_steps(metrics)) < steps:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(records)} of {steps} steps within {seconds:g} s")
        time.sleep(_LOOK_SECONDS)
    return records


def check_records(records: list[dict[str, Any]]) -> None:
    """Every step once and in order, each trained from the version after the one before."""
    steps = [record["step"] for record in records]
    versions = [record["weight_version"] for record in records]
    if steps != list(range(1, len(steps) + 1)):
        raise SystemExit(f"steps have a gap or come twice: {steps}")
    if any(later <= earlier for earlier, later in itertools.pairwise(versions)):
        raise SystemExit(f"versions do not go up: {versions}")
    print(f"steps 1 to {steps[-1]}, versions {versions[0]} to {versions[-1]}, reward {records[-1]['reward_mean']:.3f}")


async def check_ledger(run_id: str) -> None:
    """Every prompt that was issued is accounted for."""
    # Here, so that the other command needs no package.
    import redis.asyncio

    from paceline.ledger import Ledger

    client = redis.asyncio.Redis.from_url(os.environ["PACELINE_REDIS_URL"], socket_timeout=10)
    async with client:
        account = await Ledger(client, run_id).account(recount=True)
    print(f"ledger: {account}")
    if not account.balanced or account.dead:
        raise SystemExit("the ledger does not balance, or has groups that failed too often")


def get(url: str, body: dict[str, Any] | None = None) -> str:
    """The text that a URL answers; urllib.error.HTTPError unless it answers 2xx."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def check_http(gateway: str, dashboard: str) -> None:
    """The gateway names its model and completes a prompt; the dashboard has a page."""
    model = json.loads(get(f"{gateway}/v1/models"))["data"][0]["id"]
    request = {"model": model, "prompt": "dacb=", "max_tokens": 5, "temperature": 0}
    answer = json.loads(get(f"{gateway}/v1/completions", request))
    text, usage = answer["choices"][0]["text"], answer["usage"]
    print(f"gateway: model {model!r} completes 'dacb=' with {text!r} {usage}")
    if usage["completion_tokens"] < 1:
        raise SystemExit("the completion is empty")
    page = get(f"{dashboard}/")
    if "<html" not in page.lower():
        raise SystemExit(f"the dashboard's page is not one: {page[:100]!r}")
    print(f"dashboard: a page of {len(page)} characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inside = commands.add_parser("run")
    inside.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl of the run")
    inside.add_argument("--run-id", required=True)
    inside.add_argument("--more", type=int, default=0, help="steps to wait for, beyond those that are there")
    inside.add_argument("--seconds", type=float, default=240.0, help="how long to wait")
    outside = commands.add_parser("http")
    outside.add_argument("gateway", help="its URL")
    outside.add_argument("dashboard", help="its URL")
    arguments = parser.parse_args()
    if arguments.command == "http":
        check_http(arguments.gateway.rstrip("/"), arguments.dashboard.rstrip("/"))
        return
    there = len(read_steps(arguments.metrics))
    check_records(wait_for_steps(arguments.metrics, there + arguments.more, arguments.seconds))
    asyncio.run(check_ledger(arguments.run_id))


if __name__ == "__main__":
    sys.exit(main())
