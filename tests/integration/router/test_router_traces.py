"""A request leaves one span in the router, with where it went and what it waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.telemetry import tracing
from paceline.testing.scripted_engine import ScriptedEngine


async def test_the_span_names_engine_and_version(run_router: Callable[..., Any]) -> None:
    spans = InMemorySpanExporter()
    tracing.add_processor(SimpleSpanProcessor(spans))
    async with run_router() as router:
        await router.publish(3)
        await router.join(ScriptedEngine("engine-0", weight_version=3))
        with tracing.span("rollout.generate") as root:
            await router.generate(router.request(2))
    found = {span.name: span for span in spans.get_finished_spans()}
    generate, queue = found["router.generate"], found["router.queue"]
    assert dict(generate.attributes or {}) == {"paceline.engine_id": "engine-0", "paceline.weight_version": 3}
    assert queue.parent is not None and generate.context is not None
    assert queue.parent.span_id == generate.context.span_id
    assert generate.context.trace_id == root.get_span_context().trace_id
