"""Service processes of tests: a failed start shows the log, and none outlives the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.testing.processes import ServiceFailed, service_process

RUN_FILE = """
[run]
name = "processes"
[model]
path = "model"
[data]
source = {name = "jsonl", path = "data.jsonl"}
[[reward.graders]]
name = "exact_match"
"""

STARTER = """
import asyncio, sys
from pathlib import Path
from paceline.testing.processes import service_process

async def main():
    async with service_process("coordinator", Path(sys.argv[1]), redis_url="redis://127.0.0.1:9/0") as (process, _):
        print(process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_failed_start_shows_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.replace("[model]", "[modell]"))
    with pytest.raises(ServiceFailed, match="modell"):
        async with service_process("coordinator", path):
            pass


def test_nothing_outlives_a_killed_starter(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = psutil.Process(int(starter.stdout.readline()))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait(10)
    starter.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
