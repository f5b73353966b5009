"""What a person should look at, each with the knob that helps. Thresholds stand here and nowhere else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.telemetry import names
from services.dashboard.queries import StepView
from services.dashboard.views import Alarm, LedgerView, MemberView, RunView, TelemetryView, WaitView

LOGPROB_GAP = 0.1
"""Mean absolute difference of sampler and policy log-probabilities, nat."""
SAMPLER_KL = 0.01
"""KL(sampler || policy), nat."""
ZERO_VARIANCE_SHARE = 0.5
TRUNCATED_SHARE = 0.25
MISSING_SHARE = 0.01
STALL_FACTOR = 6.0
"""A step that takes this many times the median of the last ones is stalled ..."""
STALL_SECONDS = 60.0
"""... but never before so many seconds."""
BEHIND_VERSIONS = 2


def of_steps(steps: Sequence[StepView]) -> list[Alarm]:
    """Alarms from the numbers of the newest steps."""
    if not steps:
        return []
    alarms = [*_not_finite(steps[-1]), *_mismatch(steps)]
    groups = _total(steps, names.GROUPS_TRAINED)
    equal = _total(steps, names.GROUPS_ZERO_VARIANCE)
    if groups and equal / groups >= ZERO_VARIANCE_SHARE:
        text = f"{_percent(equal / groups)} of the last {groups:.0f} groups have equal rewards, so they teach nothing."
        knob = "rollout.filters = [{name = 'nonzero_std'}], a larger rollout.samples_per_group, or other prompts"
        alarms.append(Alarm(level="warning", title="Groups without variance", text=text, knob=knob))
    truncated = _mean(steps, names.TRUNCATED_FRACTION)
    if truncated >= TRUNCATED_SHARE:
        text = f"{_percent(truncated)} of the samples hit the token limit; their rewards judge cut answers."
        knob = "a larger rollout.sampling.max_new_tokens (and engine.max_sequence_length)"
        alarms.append(Alarm(level="warning", title="Truncated samples", text=text, knob=knob))
    return [*alarms, *_missing(steps)]


def _missing(steps: Sequence[StepView]) -> list[Alarm]:
    """Trajectories without a reward: a few, or all of them."""
    missing, samples = _total(steps, names.REWARD_MISSING), _total(steps, names.SAMPLES_TRAINED)
    if not missing:
        return []
    over = "the last step" if len(steps) == 1 else f"the last {len(steps)} steps"
    if not any(names.REWARD_MEAN in step.values for step in steps):
        text = f"Not one of the {missing:,.0f} trajectories of {over} has a reward, so nothing is trained."
        knob = "mend the grader: paceline logs -s reward names the first faults with their cause"
        return [Alarm(level="critical", title="No rewards", text=text, knob=knob)]
    if missing / (missing + samples) < MISSING_SHARE:
        return []
    text = f"{missing:.0f} trajectories of {over} have no reward; none counts as zero."
    knob = "reward.timeout_seconds, reward.workers; paceline logs -s reward names the first faults"
    return [Alarm(level="warning", title="Missing rewards", text=text, knob=knob)]


def _not_finite(step: StepView) -> list[Alarm]:
    bad = [key for key in (names.LOSS, names.GRAD_NORM) if key in step.values and step.values[key] is None]
    if not bad:
        return []
    text = f"{' and '.join(bad)} of step {step.step} is not a finite number."
    knob = "a lower trainer.optimizer.learning_rate, trainer.dtype = 'float32'"
    return [Alarm(level="critical", title="Loss is not finite", text=text, knob=knob)]


def _mismatch(steps: Sequence[StepView]) -> list[Alarm]:
    gap, divergence = _mean(steps, names.LOGPROB_GAP_MEAN), _mean(steps, names.SAMPLER_KL)
    if gap <= LOGPROB_GAP and divergence <= SAMPLER_KL:
        return []
    text = (
        f"Sampler and policy disagree: log-probabilities differ by {gap:.3g} nat (alarm {LOGPROB_GAP}), "
        f"KL {divergence:.3g} (alarm {SAMPLER_KL})."
    )
    knob = "equal engine.dtype and trainer.dtype, or trainer.behaviour = 'policy' with correction.kind = 'tis'"
    return [Alarm(level="critical", title="Sampler and policy mismatch", text=text, knob=knob)]


def stalled(run: RunView, steps: Sequence[StepView], waits: Sequence[WaitView], now: float) -> list[Alarm]:
    """The alarm of a run whose current step takes far longer than the last ones did."""
    if run.state != "active" or not steps or run.step >= run.num_steps > 0:
        return []
    usual = statistics.median(step.values.get(names.SECONDS_STEP) or 0.0 for step in steps)
    limit = max(STALL_FACTOR * usual, STALL_SECONDS)
    silent = now - steps[-1].time
    if silent <= limit:
        return []
    waiting = [item for item in waits if item.waiting_for and item.service != "dashboard"]
    blamed = max(waiting, key=lambda item: (item.service == "trainer", item.seconds), default=None)
    text = f"No step for {silent:.0f} s; the last ones took {usual:.1f} s."
    knob = "the processes and their logs: paceline status"
    if blamed is not None:
        text += f" {blamed.member_id} waits for {blamed.waiting_for}."
    return [Alarm(level="critical", title="Stalled", text=text, knob=knob)]


def of_fleet(members: Sequence[MemberView], run: RunView) -> list[Alarm]:
    """Processes that are lost, silent or failed, and engines that lag behind."""
    if run.state not in ("active", "unknown"):
        return []
    alarms = []
    for member in members:
        seconds = f" for {member.since_seconds:.0f} s" if member.since_seconds else ""
        if member.health == "lost":
            text = f"Its lease ended{seconds or ' just now'} without a good-bye."
            title = f"{member.member_id} is gone"
            alarms.append(Alarm(level="critical", title=title, text=text, knob="its log; a launcher starts it again"))
        elif member.health == "silent":
            text = f"It has not answered{seconds}: {member.error}"
            title = f"{member.member_id} does not answer"
            alarms.append(Alarm(level="critical", title=title, text=text, knob="is the process frozen? See its log"))
        elif member.health == "failed":
            title = f"{member.member_id} reports FAILED"
            alarms.append(Alarm(level="critical", title=title, text="It does no work in this state.", knob="its log"))
    return alarms + _lagging([item for item in members if item.health == "ok" and item.behind >= BEHIND_VERSIONS])


def _lagging(engines: Sequence[MemberView]) -> list[Alarm]:
    if not engines:
        return []
    worst = max(engines, key=lambda item: item.behind)
    others = f" and {len(engines) - 1} more lag" if len(engines) > 1 else " lags"
    text = f"{worst.member_id} serves version {worst.weight_version}, {worst.behind} behind the newest."
    knob = "the engine's log; engine.pause_mode, weights.transport"
    return [Alarm(level="warning", title=f"{worst.member_id}{others}", text=text, knob=knob)]


def of_ledger(ledger: LedgerView | None) -> list[Alarm]:
    """An account that does not balance, and prompts that were given up."""
    alarms = []
    if ledger is not None and not ledger.balanced:
        alarms.append(
            Alarm(
                level="critical", title="The ledger does not balance", text=ledger.sentence,
                knob="paceline audit RUN names the prompts",
            )
        )  # fmt: skip
    if ledger is not None and ledger.dead:
        text = f"{ledger.dead} prompts failed on every attempt and were given up."
        knob = "paceline audit RUN for their errors; rollout.group_deadline_seconds, rollout.max_attempts"
        alarms.append(Alarm(level="warning", title="Dead prompts", text=text, knob=knob))
    return alarms


def of_telemetry(telemetry: TelemetryView) -> list[Alarm]:
    """Spans that were lost here."""
    if not telemetry.dropped:
        return []
    text = f"{telemetry.dropped} of {telemetry.received} spans were refused; some traces have holes."
    return [Alarm(level="warning", title="Spans dropped", text=text, knob="a lower telemetry.sample_ratio")]


def _total(steps: Sequence[StepView], key: str) -> float:
    return sum(step.values.get(key) or 0.0 for step in steps)


def _mean(steps: Sequence[StepView], key: str) -> float:
    return _total(steps, key) / len(steps)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
