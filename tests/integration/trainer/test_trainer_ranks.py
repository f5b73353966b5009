"""Several ranks as real processes: an error is known everywhere, a dead rank ends all, none outlives rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SCENARIO = Path(__file__).with_name("rank_scenario.py")


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "localhost:0"]


def start(name: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCENARIO), name], env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answers(output: str) -> dict[str, str]:
    return dict(line.split(" -> ", 1) for line in output.splitlines() if " -> " in line and not line.startswith(" "))


@pytest.fixture
def idle() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = start("idle")
    try:
        assert process.stdout is not None
        line = next(item for item in process.stdout if item.startswith("PIDS"))
        yield process, [int(item) for item in line.split()[1:]]
    finally:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_an_error_anywhere_is_known_everywhere_and_the_ranks_go_on() -> None:
    process = start("errors")
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    found = answers(output)
    assert found["all-refused"] == "FailedPrecondition None refused on 0"
    assert found["rank1-full"].startswith("OSError 28 ") and "rank 1" in found["rank1-full"]
    assert found["rank2-refused"] == "RankFailed None rank 2: FailedPrecondition: refused on 2"
    assert found["rank0-full"].startswith("OSError 28 ")
    assert found["none-full"] == "done"


def test_a_rank_with_a_fault_ends_all_with_its_own_traceback() -> None:
    process = start("fault")
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 1, output
    assert "RuntimeError: a fault of this rank" in output and "in save_state" in output
    assert "rank 1 ended with exit code 1" in answers(output)["watch"]
    assert float(output.split("seconds ")[1].split()[0]) < 30, output


@pytest.mark.parametrize("rank", [1, 2])
def test_a_killed_rank_ends_the_others(idle: tuple[subprocess.Popen[str], list[int]], rank: int) -> None:
    process, pids = idle
    os.kill(pids[rank - 1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"rank {rank} was killed by signal 9" in output
    assert gone(pids, 30.0)


def test_no_rank_outlives_rank_0(idle: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = idle
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    assert gone(pids, 30.0)


def test_torchrun_starts_the_ranks_as_well() -> None:
    process = start("errors", TORCHRUN)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert answers(output)["rank1-full"].startswith("OSError 28 ")


@pytest.mark.slow
def test_no_rank_outlives_torchrun() -> None:
    process = start("idle", TORCHRUN)
    assert process.stdout is not None
    next(item for item in process.stdout if "PIDS" in item)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 3
    process.kill()
    process.wait()
    assert gone(ranks, 30.0)
