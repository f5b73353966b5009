"""OTLP spans as rows: the one place that knows both the wire's and the store's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from paceline.telemetry import names

COLUMNS = (
    "trace_id", "span_id", "parent_id", "service", "member", "name", "start_ns", "end_ns", "error", "group_id", "step",
    "attributes", "links",
)  # fmt: skip
INSERT = f"INSERT OR IGNORE INTO spans ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"

_LARGEST = 2**63 - 1

Row = tuple[str, str, str, str, str, str, int, int, str | None, str | None, int | None, str, str | None]


def count(request: ExportTraceServiceRequest) -> int:
    """Spans in a request."""
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def rows(request: ExportTraceServiceRequest) -> Iterator[Row]:
    """Rows of `INSERT`, in the order of the request."""
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        service = str(about.get("service.name", "unknown"))
        member = str(about.get("service.instance.id", service))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _row(span, service, member)


def _row(span: Span, service: str, member: str) -> Row:
    attributes = _attributes(span.attributes)
    group = attributes.get(names.ATTRIBUTE_GROUP_ID)
    step = attributes.get(names.ATTRIBUTE_STEP)
    error = None
    if span.status.code == Status.STATUS_CODE_ERROR:
        error = span.status.message or "error"
    start = min(span.start_time_unix_nano, _LARGEST)
    links = [{"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()} for link in span.links]
    return (
        span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), service, member, span.name,
        start, max(min(span.end_time_unix_nano, _LARGEST), start), error,
        str(group) if group is not None else None,
        step if isinstance(step, int) else None,
        json.dumps(attributes), json.dumps(links) if links else None,
    )  # fmt: skip


def _attributes(items: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in items}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        pairs: list[KeyValue] = list(value.kvlist_value.values)
        return _attributes(pairs)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)
