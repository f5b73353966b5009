"""What a process is doing and waiting for, kept by its parts and read by `paceline status`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.api.common.v1 import status_service_pb2_grpc as status_grpc


def timestamp(seconds: float) -> Timestamp:
    """A protobuf Timestamp from Unix seconds."""
    return Timestamp(seconds=int(seconds), nanos=int((seconds % 1) * 1e9))


@dataclass
class Activity:
    """One part of a process: what it does and, while it waits, for whom."""

    name: str
    doing: str = ""
    waiting_for: str = ""
    since: float = field(default_factory=time.time)
    deadline: float | None = None

    def set(self, doing: str) -> None:
        """The part now does this, and waits for nothing."""
        self.doing, self.waiting_for, self.since, self.deadline = doing, "", time.time(), None

    @contextmanager
    def waiting(self, cause: str, seconds: float | None = None) -> Iterator[None]:
        """Around every wait: names its cause and, when known, how long it may last."""
        before = (self.doing, self.waiting_for, self.since, self.deadline)
        self.waiting_for, self.since = cause, time.time()
        self.deadline = self.since + seconds if seconds is not None else None
        try:
            yield
        finally:
            self.doing, self.waiting_for, self.deadline = before[0], before[1], before[3]
            self.since = time.time()


@dataclass
class StatusBoard:
    """The status of one process. Parts write plain fields; StatusService and the heartbeat read them."""

    service: str
    member_id: str
    incarnation: str
    run_id: str
    state: str = "STARTING"
    weight_version: int = 0
    gauges: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    config_digest: str = ""
    config_json: str = ""
    _activities: dict[str, Activity] = field(default_factory=dict)

    def activity(self, name: str) -> Activity:
        """The part called `name`, made on first use."""
        return self._activities.setdefault(name, Activity(name))

    def snapshot(self) -> status_pb2.GetStatusResponse:
        response = status_pb2.GetStatusResponse(
            service=self.service,
            member_id=self.member_id,
            incarnation=self.incarnation,
            run_id=self.run_id,
            state=self.state,
            gauges=self.gauges,
            facts=self.facts,
            started_time=timestamp(self.started),
            config_digest=self.config_digest,
            config_json=self.config_json,
        )
        for item in self._activities.values():
            message = response.activities.add(
                name=item.name, doing=item.doing, waiting_for=item.waiting_for, since_time=timestamp(item.since)
            )
            if item.deadline is not None:
                message.deadline_time.CopyFrom(timestamp(item.deadline))
        return response


class StatusServer(status_grpc.StatusServiceServicer):
    """Answers GetStatus from the board."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> status_pb2.GetStatusResponse:
        return self._board.snapshot()
