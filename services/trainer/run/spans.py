"""What a step leaves in traces: its phases under trainer.step, and its part in the trace of every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from paceline.samples import SampleGroup
from paceline.telemetry import names, tracing
from services.trainer.step.step_trainer import StepResult


def record_phases(step: int, groups: Sequence[SampleGroup], result: StepResult, claimed: float) -> None:
    """Spans of the phases, and for each group its wait in the buffer and its training. `claimed` is Unix seconds."""
    end = claimed
    for phase in result.phases:
        tracing.record_span(phase.name, phase.start, phase.end, {names.ATTRIBUTE_STEP: step})
        end = max(end, phase.end)
    for group in groups:
        if not group.traceparent:
            continue
        attributes: dict[str, AttributeValue] = {names.ATTRIBUTE_GROUP_ID: group.group_id}
        finished = min(group.finished_time or claimed, claimed)
        tracing.record_span(names.SPAN_TRAINER_BUFFER_WAIT, finished, claimed, attributes, group.traceparent)
        tracing.record_span(
            names.SPAN_TRAINER_TRAIN_GROUP, claimed, end, {**attributes, names.ATTRIBUTE_STEP: step}, group.traceparent
        )


def set_values(span: Span, record: dict[str, Any]) -> None:
    """The step's values as attributes paceline.<name>."""
    span.set_attributes({f"paceline.{name}": float(record[name]) for name in names.UNITS if name in record})
