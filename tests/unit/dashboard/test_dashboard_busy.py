"""How busy an engine was, from its counter of busy seconds between two looks."""

from __future__ import annotations

import pytest

from paceline.api.common.v1 import status_service_pb2 as status_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from services.dashboard.state import FollowedMember, Source


def look(item: FollowedMember, now: float, busy: float) -> float | None:
    item.status = status_pb.GetStatusResponse(gauges={"busy_seconds_total": busy})
    item.look_at_busy(now)
    return item.busy_share


def test_the_share_is_that_of_the_time_between_two_looks() -> None:
    item = FollowedMember(pb.Member(service="engine"), Source("engine-0"))
    assert look(item, 10.0, 3.0) is None
    assert look(item, 12.0, 4.0) == pytest.approx(0.5)
    assert look(item, 13.0, 5.5) == 1.0
    assert look(item, 14.0, 0.0) == 0.0, "it was restarted, and counts from the beginning"
    item.status = status_pb.GetStatusResponse()
    item.look_at_busy(15.0)
    assert item.busy_share is None
