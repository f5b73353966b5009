"""Tracing: set up once a process; a trace goes through gRPC metadata and anything that holds a traceparent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.util.types import AttributeValue

from paceline.telemetry import names
from paceline.telemetry.calls import CallTracing

_TRACER = trace.get_tracer("paceline")
_QUIET_METHODS = (
    "Health/",
    "StatusService/",
    "/Heartbeat",
    "/Watch",
    "/Probe",
    "/GetLoad",
    "/ListMembers",
    "Reflection/",
    "TraceService/",
)
_state: dict[str, Any] = {"enabled": False}


class GroupSampler(Sampler):
    """Samples a share of the groups' traces, and everything else that starts a trace: steps, publications."""

    def __init__(self, ratio: float) -> None:
        self._groups = TraceIdRatioBased(ratio)

    def should_sample(self, parent_context: Any, trace_id: int, name: str, *rest: Any, **named: Any) -> SamplingResult:
        chosen = self._groups if name == names.SPAN_ROLLOUT_GROUP else ALWAYS_ON
        return chosen.should_sample(parent_context, trace_id, name, *rest, **named)

    def get_description(self) -> str:
        return f"GroupSampler{{{self._groups.rate}}}"


def set_up(service: str, run_id: str, member_id: str, endpoint: str, sample_ratio: float = 1.0) -> None:
    """Export spans to the OTLP/gRPC receiver at `endpoint` (host:port). An empty endpoint leaves tracing off.

    Export runs in a background thread with a bounded queue: a dead receiver costs spans, never time.
    """
    if not endpoint:
        return
    resource = Resource.create({
        "service.name": service,
        "service.instance.id": member_id,
        "paceline.run_id": run_id,
    })  # fmt: skip
    provider = TracerProvider(resource=resource, sampler=ParentBased(GroupSampler(sample_ratio)))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    _state["enabled"] = True
    _state["provider"] = provider


def shut_down() -> None:
    """Send what is queued, for at most a few seconds."""
    provider = _state.pop("provider", None)
    if provider is not None:
        provider.force_flush(2000)
        provider.shutdown()


def add_processor(processor: SpanProcessor) -> None:
    """Also give every span to `processor`; sets a provider up when there is none. For tests."""
    provider = _state.get("provider")
    if provider is None:
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
        _state["provider"] = provider
    _state["enabled"] = True
    provider.add_span_processor(processor)


@contextmanager
def span(
    name: str,
    attributes: dict[str, AttributeValue] | None = None,
    parent: str | None = None,
    links: Iterable[str] = (),
    start_time: float | None = None,
) -> Iterator[trace.Span]:
    """A span around a block. `parent` and `links` are traceparents; without parent the current span is the parent.

    `start_time` is Unix seconds, for a phase that began before this call.
    """
    context = context_from(parent) if parent else None
    linked = [trace.Link(item) for item in map(_span_context, links) if item.is_valid]
    start = int(start_time * 1e9) if start_time is not None else None
    with _TRACER.start_as_current_span(
        name, context=context, attributes=attributes, links=linked, start_time=start
    ) as current:
        yield current


def record_span(
    name: str, start: float, end: float, attributes: dict[str, AttributeValue] | None = None, parent: str | None = None
) -> None:
    """A finished span from `start` to `end`, in Unix seconds."""
    context = context_from(parent) if parent else None
    item = _TRACER.start_span(name, context=context, attributes=attributes, start_time=int(start * 1e9))
    item.end(end_time=int(end * 1e9))


def current_traceparent() -> str:
    """The W3C traceparent of the current span; empty when tracing is off."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


def context_from(traceparent: str) -> Context:
    """The context that a traceparent names; the empty one continues nothing."""
    return propagate.extract({"traceparent": traceparent} if traceparent else {}, context=Context())


def trace_id(traceparent: str) -> str:
    """The hexadecimal trace id of a traceparent, empty when it has none."""
    context = _span_context(traceparent)
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def _span_context(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(context_from(traceparent)).get_span_context()


def client_interceptors() -> Sequence[Any]:
    """gRPC client interceptors that pass the trace on; none when tracing is off."""
    if not _state["enabled"]:
        return ()
    return CallTracing(_wanted).interceptors()


def server_interceptors() -> Sequence[Any]:
    """gRPC server interceptors that continue the caller's trace; none when tracing is off."""
    if not _state["enabled"]:
        return ()
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    return (aio_server_interceptor(filter_=_wanted),)


def _wanted(call: Any) -> bool:
    method = getattr(call, "method", None) or getattr(call, "full_method", "")
    if isinstance(method, bytes):
        method = method.decode()
    return not any(quiet in method for quiet in _QUIET_METHODS)


__all__ = [
    "ReadableSpan", "Span", "add_processor", "client_interceptors", "context_from", "current_traceparent",
    "record_span", "server_interceptors", "set_up", "shut_down", "span", "trace_id",
]  # fmt: skip
