"""The shapes of the overview: what the page is sent every second, and what a stopped run is shown from."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

RunState = Literal["unknown", "active", "finished", "failed", "stopped"]
Health = Literal["ok", "starting", "failed", "silent", "left", "lost", "ended"]
""""ended": it is gone, as the run is."""
Bound = Literal["none", "rollout", "trainer", "publish", "checkpoint", "balanced"]


class RunView(BaseModel):
    """The run's head line."""

    run_id: str
    state: RunState
    reason: str
    step: int
    num_steps: int
    elapsed_seconds: float | None
    eta_seconds: float | None
    newest_version: int
    model: str
    mode: str
    """How far rollout may run ahead, or what the samples are where they are given, in words."""
    rewarded: bool = True
    """Whether samples have rewards; else the loss is what counts."""
    publishes: bool = True
    """Whether weights are published while the run trains."""


class Verdict(BaseModel):
    """What bounds the run's speed, computed from measured waiting."""

    kind: Bound
    title: str
    sentence: str
    knob: str
    """What to change; empty when there is nothing to say."""
    num_steps: int
    """Steps that it was computed from."""
    shares: dict[str, float]
    """Share of the steps' wall time by phase; they sum to 1."""
    engine_idle: float | None


class MemberView(BaseModel):
    """One process."""

    member_id: str
    service: str
    address: str
    state: str
    health: Health
    since_seconds: float | None
    """How long it has been silent, left or lost; of an ended run, how long before its end it went, if it did."""
    error: str
    weight_version: int
    behind: int
    """Committed versions that an engine has not applied yet."""
    running: int | None
    waiting: int | None
    capacity: int | None
    tokens_per_second: float | None
    facts: dict[str, str]
    labels: dict[str, str]


class WaitView(BaseModel):
    """One part of a process: what it does, or for what it waits and how long already."""

    member_id: str
    service: str
    part: str
    doing: str
    waiting_for: str
    seconds: float
    remaining_seconds: float | None
    """Until the wait gives up; None when the caller decides."""


class LedgerView(BaseModel):
    """The account of all prompts: every number of `paceline.ledger.Account.summary`, and these."""

    model_config = ConfigDict(extra="allow")

    balanced: bool
    dead: int
    sentence: str


class Alarm(BaseModel):
    """Something a person should look at, with the knob that helps."""

    level: Literal["warning", "critical"]
    title: str
    text: str
    knob: str


class SourceView(BaseModel):
    """Something that the dashboard follows."""

    name: str
    ok: bool
    error: str
    seconds: float


class TelemetryView(BaseModel):
    """Spans since the dashboard started."""

    received: int
    stored: int
    dropped: int
    pending: int


class Overview(BaseModel):
    """Everything on the first screen but the curves."""

    time: float
    revision: int
    """Newest revision of a step record."""
    awaiting: str
    """What a run without a step is waiting for; empty when it has one."""
    run: RunView
    verdict: Verdict
    members: list[MemberView]
    waits: list[WaitView]
    ledger: LedgerView | None
    alarms: list[Alarm]
    sources: list[SourceView]
    telemetry: TelemetryView
