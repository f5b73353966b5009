"""OTLP/gRPC trace receiver on the dashboard's own port, so that a laptop needs no collector."""

from __future__ import annotations

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from services.dashboard.store import Store


class TraceReceiver(otlp_grpc.TraceServiceServicer):
    """Takes spans into the store's queue and answers at once; what does not fit is refused, counted and said so."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        refused = self._store.put_spans(request)
        if not refused:
            return otlp.ExportTraceServiceResponse()
        message = f"{refused} spans refused: {self._store.counters.spans_pending} wait to be written"
        return otlp.ExportTraceServiceResponse(
            partial_success=otlp.ExportTracePartialSuccess(rejected_spans=refused, error_message=message)
        )
