"""The pool under every way in which a reward function can go wrong: one bad sample never costs another."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import psutil
import pytest
import pytest_asyncio

from paceline.config.services import RewardConfig
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from services.reward.catalog import GraderRequest
from services.reward.loading import GraderRefused
from services.reward.pool import Outcome, Pool

pytestmark = pytest.mark.asyncio(loop_scope="module")

REWARDS = """
import asyncio, ctypes, os, subprocess, sys, time

def length(response):
    return len(response)

def fragile(response, metadata):
    print("noise on stdout", flush=True)
    os.write(1, b"more noise")
    act = metadata.get("act", "")
    if act == "spin":
        while True: pass
    if act == "block":
        subprocess.run(["sleep", "600"])
    if act == "exit":
        os._exit(7)
    if act == "sys_exit":
        sys.exit("over")
    if act == "crash":
        ctypes.string_at(0)
    if act == "memory":
        return len(bytearray(1 << 30))
    if act == "raise":
        raise ValueError("bad\\nresponse")
    if act == "fork":
        if os.fork() == 0:
            return -1.0
    if act == "stdin":
        return len(sys.stdin.read())
    return {"nan": float("nan"), "inf": float("-inf"), "text": "1", "none": None, "true": True, "huge": 10**400,
            "pid": os.getpid()}.get(act, 1.0)

async def patient(response):
    await asyncio.sleep(0)
    return 2.0
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(REWARDS.splitlines(), 1) if text in line)


def task(name: str) -> dict:
    return GraderRequest(name, {}, 1.0, "graders[0]").task()


def item(act: str = "", response: str = "abc") -> dict:
    return {"response": response, "prompt": "", "metadata": {"act": act}}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is watched is another process
            await asyncio.sleep(0.01)


board = StatusBoard("reward", "reward-0", "i", "r")
FRAGILE = task("rewards_under_test:fragile")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_under_test.py").write_text(REWARDS)
    (folder / "broken_rewards.py").write_text("x = 1 / 0\n")
    (folder / "asking_rewards.py").write_text("def f(answer): return 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = Pool(RewardConfig(workers=1, memory_mb=256, max_waiting=8), board)
        await made.start([FRAGILE])
        running = asyncio.create_task(made.run())
        yield made
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()


async def grade(pool: Pool, act: str = "", limit: float = 20.0) -> Outcome:
    return await pool.grade(FRAGILE, item(act), limit)


async def test_a_spinning_sample_costs_itself_and_its_process_only(pool: Pool) -> None:
    pids = pool.pids
    first = (await grade(pool, "pid")).value
    began = time.monotonic()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1

    ticking = asyncio.create_task(tick())
    outcomes = await asyncio.gather(
        *(pool.grade(FRAGILE, item("spin" if index == 3 else ""), 1.0) for index in range(8))
    )
    ticking.cancel()
    assert time.monotonic() - began < 3
    assert outcomes[3].missing == "TIMEOUT" and outcomes[3].value is None
    assert outcomes[3].detail == "ran past 1.0 s"
    assert [outcome.value for index, outcome in enumerate(outcomes) if index != 3] == [1.0] * 7
    assert ticks >= 10, "the event loop was blocked"
    assert (await grade(pool, "pid")).value != first
    assert pool.pids != pids


async def test_a_kill_reaches_what_the_function_started(pool: Pool) -> None:
    workers = [psutil.Process(pid) for pid in pool.pids]
    running = asyncio.create_task(grade(pool, "block", 2.0))
    children: list[psutil.Process] = []

    def started() -> bool:
        children.extend(child for worker in workers if worker.is_running() for child in worker.children())
        return bool(children)

    await until(started)
    assert (await running).missing == "TIMEOUT"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("act", "missing", "detail"),
    [
        ("exit", "GRADER_ERROR", "exited with code 7"),
        ("crash", "GRADER_ERROR", "SIGSEGV"),
        ("memory", "GRADER_ERROR", f"MemoryError (rewards_under_test.py:{line_of('bytearray')}); the limit is 256 MiB"),
        ("raise", "GRADER_ERROR", f"ValueError: bad response (rewards_under_test.py:{line_of('raise Value')})"),
        ("sys_exit", "GRADER_ERROR", "SystemExit: over"),
        ("nan", "INVALID", "nan, which is not a finite number"),
        ("inf", "INVALID", "-inf, which is not a finite number"),
        ("huge", "INVALID", "not a finite number"),
        ("text", "INVALID", "'1', a str"),
        ("none", "NOT_GRADED", "returned None"),
    ],
)
async def test_what_is_not_a_number_is_missing_with_its_reason(pool: Pool, act: str, missing: str, detail: str) -> None:
    outcome = await grade(pool, act)
    assert (outcome.value, outcome.missing) == (None, missing)
    assert detail in outcome.detail
    assert (await grade(pool)).value == 1.0


async def test_output_input_and_forks_of_a_function_do_not_reach_the_pipe(pool: Pool) -> None:
    assert (await grade(pool, "fork")).value == 1.0
    assert (await grade(pool, "stdin")).value == 0.0
    assert (await grade(pool, "true")).value == 1.0


async def test_async_functions_are_run(pool: Pool) -> None:
    patient = task("rewards_under_test:patient")
    assert (await pool.load([patient]))[0]["name"] == "patient"
    assert (await pool.grade(patient, item(), 20.0)).value == 2.0


async def test_a_full_queue_refuses_with_a_retry_delay(pool: Pool) -> None:
    with pool.admit(9):
        with pytest.raises(errors.ResourceExhausted, match="holds 9 of 9") as full:
            with pool.admit(1):
                pass
    assert full.value.retry_delay is not None and full.value.retry_delay > 0
    with pytest.raises(errors.InvalidArgument, match="raise reward"):
        with pool.admit(10):
            pass
    with pool.admit(9):
        pass


async def test_a_cancelled_call_frees_its_slot(pool: Pool) -> None:
    running = asyncio.create_task(grade(pool, "spin", 600.0))
    waiting = asyncio.create_task(grade(pool, "spin", 600.0))
    await until(lambda: board.gauges["busy"] == 1 and board.gauges["queued"] == 1)
    waiting.cancel()
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert (await grade(pool)).value == 1.0


def pool_activity() -> tuple[str, str]:
    (found,) = [part for part in board.snapshot().activities if part.name == "pool"]
    return found.doing, found.waiting_for


async def test_the_status_says_that_tasks_wait_for_a_free_process(pool: Pool) -> None:
    running = asyncio.create_task(grade(pool, "spin", 600.0))
    await until(lambda: board.gauges["busy"] == 1)
    assert pool_activity() == ("grading 1 at once", "")
    waiting = [asyncio.create_task(grade(pool)) for _ in range(3)]
    await until(lambda: board.gauges["queued"] == 3)
    assert pool_activity()[1] == "a free grader process: 3 tasks queue for 1 (reward.workers)"
    running.cancel()
    assert [outcome.value for outcome in await asyncio.gather(*waiting)] == [1.0] * 3
    assert pool_activity() == ("idle", "")


async def test_a_worker_killed_while_idle_is_replaced(pool: Pool) -> None:
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    outcomes = [await grade(pool) for _ in range(3)]
    assert [outcome.value for outcome in outcomes][-1] == 1.0
    assert all(outcome.value == 1.0 or outcome.missing == "GRADER_ERROR" for outcome in outcomes)


async def test_a_closed_pool_leaves_no_process_and_refuses(pool: Pool) -> None:
    closing_board = StatusBoard("reward", "reward-0", "i", "r")
    closing = Pool(RewardConfig(workers=1, memory_mb=256), closing_board)
    await closing.start([FRAGILE])
    pids = closing.pids
    running = asyncio.create_task(grade(closing, "spin", 600.0))
    queued = asyncio.create_task(grade(closing))
    await until(lambda: closing_board.gauges["busy"] == 1)
    await closing.close()
    for call in (running, queued):
        with pytest.raises(errors.Unavailable, match="stopping"):
            await call
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_mach", {}, "did you mean 'exact_match'.* Built in: exact_match, math, reasoning_gym, regex"),
        ("exact_match", {"labl": 1}, "unknown key 'graders.0..labl'"),
        ("regex", {"pattern": "("}, "not a regular expression"),
        ("regex", {"pattern": "a", "group": 1}, "has 0 groups"),
        ("rewards_under_test:absent", {}, "has no 'absent'"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        ("rewards_under_test:length", {"scale": 2}, "unknown key 'graders.0..scale'"),
        ("broken_rewards:f", {}, "ZeroDivisionError: division by zero .broken_rewards.py:1."),
        ("asking_rewards:f", {}, "unknown parameter 'answer'; .* response, prompt, metadata"),
    ],
)
async def test_a_grader_that_cannot_be_made_says_why(pool: Pool, name: str, options: dict, message: str) -> None:
    with pytest.raises(GraderRefused, match=message):
        await pool.load([GraderRequest(name, options, 1.0, "graders[0]").task()])
    assert math.isfinite((await grade(pool)).value or math.nan)
