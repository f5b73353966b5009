"""Puts the overview together from the live state and the newest steps; pure, so that it is tested on made-up runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.config import RunFile
from paceline.config.kinds import is_generated, services_of
from paceline.config.place import SERVICES
from paceline.telemetry import names
from services.dashboard import alarms
from services.dashboard.queries import BusyView, StepView
from services.dashboard.state import FollowedMember, LiveState
from services.dashboard.store import Counters
from services.dashboard.verdict import WINDOW_STEPS, judge
from services.dashboard.views import (
    Health,
    LedgerView,
    MemberView,
    Overview,
    RunState,
    RunView,
    SourceView,
    TelemetryView,
    WaitView,
)

RECENT_STEPS = 20
"""Steps that the overview looks at."""
_STATES: dict[int, RunState] = {
    pb.RUN_STATE_ACTIVE: "active",
    pb.RUN_STATE_FINISHED: "finished",
    pb.RUN_STATE_FAILED: "failed",
    pb.RUN_STATE_STOPPED: "stopped",
}
_FLOW = ("trainer", "rollout", "engine", "router", "reward", "gateway")
"""In whose work a reader is interested first."""
_SILENT_AFTER_SECONDS = 3.0
_LEASE_SECONDS = 15.0
"""Who went at most this long before the end of the run, or after it, went with it."""


@dataclass(frozen=True)
class Recent:
    """What the store says: the newest training steps, and what the engines did meanwhile."""

    steps: Sequence[StepView]
    busy: BusyView
    revision: int


def window(steps: Sequence[StepView]) -> tuple[float, float]:
    """Unix times between which the verdict's steps ran; (0, 0) without steps."""
    last = steps[-WINDOW_STEPS:]
    if not last:
        return (0.0, 0.0)
    return (last[0].time - (last[0].values.get(names.SECONDS_STEP) or 0.0), last[-1].time)


def build(state: LiveState, config: RunFile, recent: Recent, counters: Counters) -> Overview:
    """The overview of this instant."""
    now = time.time()
    run = _run(state, config, recent, now)
    ended = _end_of(state)
    members = [_member(item, state.newest_version, now, ended) for item in state.members.values()]
    members.sort(key=lambda item: (SERVICES.index(item.service) if item.service in SERVICES else 99, _natural(item)))
    waits = _waits(state, now) if ended is None else []
    ledger = ledger_view(state.account) if state.account is not None else None
    telemetry = TelemetryView(
        received=counters.spans_received, stored=counters.spans_stored, dropped=counters.spans_dropped,
        pending=counters.spans_pending,
    )  # fmt: skip
    last = recent.steps[-WINDOW_STEPS:]
    found = [
        *alarms.stalled(run, recent.steps, waits, now), *alarms.of_fleet(members, run), *alarms.of_steps(last),
        *alarms.of_ledger(ledger), *alarms.of_telemetry(telemetry),
    ]  # fmt: skip
    return Overview(
        time=now,
        revision=recent.revision,
        awaiting="" if recent.steps else _awaiting(state, config, members, waits),
        run=run,
        verdict=judge(last, recent.busy, config.rollout.max_staleness == 0, engines=_publishes(config)),
        members=members,
        waits=waits,
        ledger=ledger,
        alarms=sorted(found, key=lambda item: item.level),
        sources=[
            SourceView(name=item.name, ok=item.ok, error=item.error, seconds=now - item.since)
            for item in state.sources()
        ],
        telemetry=telemetry,
    )


def _run(state: LiveState, config: RunFile, recent: Recent, now: float) -> RunView:
    run = state.run
    last = recent.steps[-1].step if recent.steps else 0
    step = max(last, run.last_step if run else 0)
    total = run.num_steps if run and run.num_steps else config.run.steps
    kind: RunState = _STATES.get(run.state, "unknown") if run else "unknown"
    elapsed = eta = None
    if run and run.HasField("created_time"):
        end = run.finished_time.ToSeconds() if kind != "active" and run.HasField("finished_time") else now
        elapsed = max(0.0, end - run.created_time.ToSeconds())
    seconds = [value for item in recent.steps if (value := item.values.get(names.SECONDS_STEP))]
    if kind == "active" and seconds and total > step:
        eta = (total - step) * statistics.median(seconds)
    return RunView(
        run_id=state.run_id, state=kind, reason=run.reason if run else "", step=step, num_steps=total,
        elapsed_seconds=elapsed, eta_seconds=eta, newest_version=state.newest_version,
        model=config.model.path.rstrip("/").rsplit("/", 1)[-1], mode=_mode(config),
        rewarded=config.run.kind == "rl", publishes=_publishes(config),
    )  # fmt: skip


def _publishes(config: RunFile) -> bool:
    """Whether engines follow the weights: they make the samples, or clients train and publish."""
    return is_generated(config) or not config.trainer.loop


def _mode(config: RunFile) -> str:
    """How far rollout may run ahead, or what the samples are where they are given."""
    bound = config.rollout.max_staleness
    if not _publishes(config):
        given = {"sft": "labelled text", "dpo": "preferences"}.get(config.run.kind, "recorded groups")
        return f"{given}, no engine"
    return "synchronous" if bound == 0 else "fully asynchronous" if bound == "unbounded" else f"max staleness {bound}"


def _end_of(state: LiveState) -> float | None:
    """When the run ended; None while it goes on."""
    run = state.run
    if run is None or not state.ended:
        return None
    return run.finished_time.ToSeconds() if run.HasField("finished_time") else 0.0


def _member(item: FollowedMember, newest: int, now: float, ended: float | None) -> MemberView:
    member, source = item.member, item.source
    health: Health = "ok"
    since = None
    if item.gone_since is not None:
        health, since = ("left" if item.left_in_order else "lost"), now - item.gone_since
    elif not source.ok and now - source.since > _SILENT_AFTER_SECONDS:
        health, since = "silent", now - source.since
    elif item.shown_state == "FAILED":
        health = "failed"
    elif item.shown_state in ("STARTING", "SYNCING"):
        health = "starting"
    if ended is not None and since is not None:
        before = ended - (now - since)
        health, since = "ended", before if before > _LEASE_SECONDS else None
    version = item.load.weight_version if item.load else item.last_version or member.weight_version
    is_engine = member.service == "engine"
    ranks = item.load.ranks if item.load else []
    return MemberView(
        member_id=member.member_id, service=member.service, address=member.address, state=item.shown_state,
        health=health, since_seconds=since, error=source.error, weight_version=version,
        behind=max(0, newest - version) if is_engine and version else 0,
        running=sum(rank.num_running for rank in ranks) if item.load else None,
        waiting=sum(rank.num_waiting for rank in ranks) if item.load else None,
        capacity=sum(rank.capacity for rank in ranks) if item.load else None,
        tokens_per_second=sum(rank.tokens_per_second for rank in ranks) if item.load else None,
        facts=dict(item.status.facts) if item.status else {}, labels=dict(member.labels),
    )  # fmt: skip


def _natural(member: MemberView) -> tuple[str, int]:
    """engine-2 before engine-10."""
    name, _, number = member.member_id.rpartition("-")
    return (name, int(number)) if number.isdigit() else (member.member_id, 0)


def _waits(state: LiveState, now: float) -> list[WaitView]:
    """Every part of every live process: the longest waits first, then those that work, the trainer's before others."""
    views = []
    for item in state.members.values():
        if item.status is None or item.gone_since is not None or not item.source.ok:
            continue
        is_us = item.member.service == "dashboard"
        for part in item.status.activities:
            if not part.waiting_for and (part.name == "membership" or part.doing in ("", "idle") or is_us):
                continue
            remaining = part.deadline_time.ToMilliseconds() / 1e3 - now if part.HasField("deadline_time") else None
            view = WaitView(
                member_id=item.member.member_id, service=item.member.service, part=part.name, doing=part.doing,
                waiting_for=part.waiting_for, seconds=max(0.0, now - part.since_time.ToMilliseconds() / 1e3),
                remaining_seconds=remaining,
            )  # fmt: skip
            views.append(view)
    return sorted(views, key=_by_interest)


def _by_interest(view: WaitView) -> tuple[bool, int, float]:
    if view.waiting_for:
        return (False, 0, -view.seconds)
    return (True, _FLOW.index(view.service) if view.service in _FLOW else len(_FLOW), view.seconds)


def ledger_view(account: dict[str, Any]) -> LedgerView:
    """The account with its sentence."""
    flight = account["in_flight"]
    dropped = sum(account["dropped"].values())
    sign = "=" if account["balanced"] else "≠"
    sentence = (
        f"issued {account['issued']:,} {sign} trained {account['trained']:,} + dropped {dropped:,} + "
        f"dead {account['dead']:,} + in flight {flight:,}"
    )
    if account["imbalances"]:
        sentence += ": " + "; ".join(account["imbalances"])
    return LedgerView.model_validate({**account, "sentence": sentence})


def _awaiting(state: LiveState, config: RunFile, members: Sequence[MemberView], waits: Sequence[WaitView]) -> str:
    """What a run without a step is waiting for, in one sentence."""
    if state.run is not None and state.ended:
        return f"The run has ended without a step: {state.run.reason or 'no reason was given'}"
    if not state.steps_source.ok:
        return f"Waiting for the coordinator: {state.steps_source.error}"
    present = {member.service for member in members if member.health in ("ok", "starting")}
    needed = services_of(config)
    missing = [name for name in _FLOW if name in needed and name != "gateway" and name not in present]
    if missing:
        return f"Waiting for {', '.join(missing)} to join the run."
    starting = [member.member_id for member in members if member.health == "starting"]
    if starting:
        return f"Waiting for {', '.join(starting)} to get ready."
    if not config.trainer.loop:
        return "Clients train over TrainerService, so there are no steps of a loop: every service is ready."
    for service in ("trainer", "rollout", "router", "engine", "reward"):
        for wait in waits:
            if wait.service == service and wait.waiting_for:
                return f"Waiting for the first step: {wait.member_id} waits for {wait.waiting_for}."
    return "Waiting for the first step: every service is ready."
