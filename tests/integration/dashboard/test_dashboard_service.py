"""The dashboard follows a run over the true wire, and goes on when the run's parts die and come back."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from dashboard_fake_run import RUN, FakeRun, dashboard, evaluation_record, fake_run, get, step_record, until

from paceline.ledger import Ledger
from paceline.telemetry import names
from paceline.testing.processes import ServiceProcess


async def overview_when(process: ServiceProcess, test: Any, what: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any] | None:
        view = await get(process, "overview")
        return view if test(view) else None

    return await until(ask, what)


def member(view: dict[str, Any], member_id: str) -> dict[str, Any]:
    return next(
        (item for item in view["members"] if item["member_id"] == member_id), {"health": "unknown", "running": 0}
    )


async def test_a_run_is_followed_over_the_wire(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    ledger = Ledger(redis_client, RUN)
    await ledger.initialise(100, 1)
    issued = await ledger.issue("rollout-0", 12, 60, None)
    await ledger.drop(issued[0].group_id, 1, "zero_variance")
    async with fake_run() as run:
        await run.add_usual(engines=2)
        engine = run.members["engine-1"].engine
        assert engine is not None
        engine.running, engine.waiting, engine.rate, engine.version = 7, 2, 512.0, 6
        run.coordinator.version = 6
        for step in range(1, 6):
            await run.coordinator.record(step_record(step))
        await run.coordinator.record(evaluation_record(5))
        async with dashboard(run, tmp_path, redis_url) as process:
            view = await overview_when(
                process, lambda it: it["ledger"] and it["revision"] == 6 and member(it, "engine-1")["running"], "all"
            )
            assert (view["run"]["step"], view["run"]["num_steps"], view["run"]["state"]) == (5, 100, "active")
            assert view["verdict"]["kind"] == "rollout"
            assert view["ledger"]["sentence"] == "issued 12 = trained 0 + dropped 1 + dead 0 + in flight 11"
            assert view["ledger"]["dropped"] == {"zero_variance": 1}
            found = member(view, "engine-1")
            assert (found["running"], found["waiting"], found["tokens_per_second"]) == (7, 2, 512.0)
            assert (found["weight_version"], found["behind"], found["health"]) == (6, 0, "ok")
            assert view["waits"][0]["member_id"] == "trainer-0"
            assert view["waits"][0]["waiting_for"] == "8 groups of step 35 (5 are there)"
            steps = await get(process, "steps")
            assert {(step["kind"], step["step"]) for step in steps} >= {("train", 5), ("evaluation", 5)}
            history = await get(process, f"trace?group={issued[0].group_id}")
            assert [event["state"] for event in history["history"]] == ["generating", "dropped"]
            assert history["trace"] is None
        assert process.returncode == 0, process.log()
    assert "Traceback" not in process.log()


async def test_a_coordinator_that_dies_and_returns_leaves_no_gap(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        await run.coordinator.record(step_record(1))
        await overview_when(process, lambda it: it["run"]["step"] == 1, "the first step")
        await run.stop_coordinator()
        view = await overview_when(
            process,
            lambda it: not it["sources"][0]["ok"] and member(it, "coordinator")["health"] == "silent",
            "silence",
        )
        assert "UNAVAILABLE" in view["sources"][0]["error"]
        assert any(alarm["title"] == "coordinator does not answer" for alarm in view["alarms"])
        # Records that came while it was away: a replayed step and two further ones.
        for record in (step_record(1, **{names.REWARD_MEAN: 0.9}), step_record(2), step_record(3)):
            await run.coordinator.record(record)
        await run.start_coordinator()
        await overview_when(process, lambda it: it["run"]["step"] == 3 and it["sources"][0]["ok"], "the third step")
        steps = await get(process, "steps")
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert steps[0]["values"][names.REWARD_MEAN] == 0.9


async def test_dead_processes_are_shown_as_dead(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run:
        await run.add_usual(engines=2)
        async with dashboard(run, tmp_path, redis_url) as process:
            await overview_when(process, lambda it: member(it, "engine-0")["health"] == "ok", "a live engine")
            await run.vanish("engine-0")
            silent = await overview_when(process, lambda it: member(it, "engine-0")["health"] == "silent", "silence")
            assert "UNAVAILABLE" in member(silent, "engine-0")["error"]
            del run.coordinator.members["engine-0"]
            await run.coordinator.announce()
            view = await overview_when(process, lambda it: member(it, "engine-0")["health"] == "lost", "its end")
            assert member(view, "engine-1")["health"] == "ok"
            assert any(alarm["title"] == "engine-0 is gone" for alarm in view["alarms"])


async def test_a_redis_that_is_not_there_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/no.sock?db=0"
    async with fake_run() as run, dashboard(run, tmp_path, nowhere) as process:
        await run.coordinator.record(step_record(1))
        view = await overview_when(
            process, lambda it: it["run"]["step"] == 1 and "no.sock" in it["sources"][2]["error"], "the cause"
        )
        assert view["ledger"] is None and view["sources"][0]["ok"]


class Page:
    """An EventSource, as far as the tests need one."""

    def __init__(self, process: ServiceProcess, last_id: str | None = None) -> None:
        self._connection = http.client.HTTPConnection(process.labels["http_address"], timeout=10)
        self._connection.request("GET", "/api/live", headers={"Last-Event-ID": last_id} if last_id else {})
        self._answer = self._connection.getresponse()
        assert self._answer.getheader("content-type", "").startswith("text/event-stream")

    def event(self) -> tuple[str, str, Any]:
        fields: dict[str, str] = {}
        while line := self._answer.readline().decode().strip():
            key, _, value = line.partition(": ")
            fields[key] = value
        return fields["event"], fields["id"], json.loads(fields["data"])

    def first(self, name: str) -> tuple[str, Any]:
        while True:
            found, number, data = self.event()
            if found == name:
                return number, data

    def close(self) -> None:
        self._connection.close()


async def test_a_page_that_reconnects_gets_what_it_missed(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        await record_and_wait(run, process, 1, 2)
        page = await asyncio.to_thread(Page, process)
        number, steps = await asyncio.to_thread(page.first, "steps")
        assert [step["step"] for step in steps] == [1, 2]
        page.close()
        await record_and_wait(run, process, 3, 4, 2)
        again = await asyncio.to_thread(Page, process, number)
        number, steps = await asyncio.to_thread(again.first, "steps")
        assert [step["step"] for step in steps] == [2, 3, 4], "the replayed step is sent again, the first is not"
        again.close()
        # A page that knows more than the store was open while the run's folder was replaced.
        stranger = await asyncio.to_thread(Page, process, "900")
        assert (await asyncio.to_thread(stranger.event))[0] == "reset"
        stranger.close()


async def record_and_wait(run: FakeRun, process: ServiceProcess, *steps: int) -> None:
    before = (await get(process, "overview"))["revision"]
    for step in steps:
        await run.coordinator.record(step_record(step, seed=before))
    await overview_when(process, lambda it: it["revision"] >= before + len(steps), f"steps {steps}")


async def test_an_open_page_does_not_keep_the_process_from_ending(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        page = await asyncio.to_thread(Page, process)
        await asyncio.to_thread(page.event)
        assert await process.stop() == 0, process.log()
        page.close()


async def test_wrong_requests_are_refused_with_a_reason(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        for path, status, reason in (
            ("trace?group=17", 400, "e<epoch>.<index>"),
            ("trace?group=e0.17", 404, "neither in the ledger nor traced"),
            ("traces?limit=100000", 400, "whole number from 1 to 200"),
            ("steps?after=-1", 400, "whole number"),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                await get(process, path)
            assert caught.value.code == status
            assert reason in json.load(caught.value)["error"]


async def test_foreign_pages_cannot_read_the_run(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:

        def ask() -> tuple[int, str | None]:
            connection = http.client.HTTPConnection(process.labels["http_address"], timeout=5)
            connection.request("GET", "/api/overview", headers={"Host": "evil.example"})
            answer = connection.getresponse()
            return answer.status, answer.getheader("content-security-policy")

        status, policy = await asyncio.to_thread(ask)
        assert status == 400
        assert policy is not None and "default-src 'self'" in policy


async def test_the_dashboard_starts_without_torch() -> None:
    code = "import sys, services.dashboard.__main__; assert 'torch' not in sys.modules"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
