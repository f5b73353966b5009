"""Published weight versions, in order and without gaps, over any number of coordinator restarts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors
from paceline.rpc.following import STREAM_SECONDS, follow
from paceline.rpc.status import Activity

log = logging.getLogger(__name__)


class VersionWatch:
    """Follows the committed versions of a run."""

    def __init__(self, stub: Any, run_id: str, activity: Activity) -> None:
        self._stub = stub
        self._run_id = run_id
        self._activity = activity

    async def follow(self, start_version: int = 0) -> AsyncIterator[weights_pb2.WeightVersion]:
        """Every committed version from `start_version` on (0: the newest and everything after it), for ever.

        Where the next version was trimmed meanwhile, a watch from 0 goes on at the newest; from any other start that is
        OutOfRange. All else is retried and shown in the activity.
        """
        following = start_version

        def open_stream() -> Any:
            request = pb.WatchVersionsRequest(run_id=self._run_id, start_version=following)
            return self._stub.WatchVersions(request, timeout=STREAM_SECONDS)

        while True:
            try:
                async for response in follow(open_stream, self._activity, "coordinator, WatchVersions"):
                    self._activity.set(f"watching weight versions; newest {response.header.weight_version}")
                    if not response.HasField("version") or response.version.weight_version < following:
                        continue
                    following = response.version.weight_version + 1
                    yield response.version
            except errors.OutOfRange as error:
                if start_version:
                    raise
                log.warning("weight versions are watched from the newest again: %s", error.message)
                following = 0
