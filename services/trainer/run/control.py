"""The trainer's calls of the coordinator: under its fence, one id a change, repeated while the coordinator is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1 import weights_pb2
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.patience import until_available
from paceline.rpc.status import Activity
from paceline.rpc.steps import StepWatch
from services.trainer.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0


class Control:
    """The coordinator as this trainer sees it. Aborted means that another trainer took over."""

    def __init__(self, stub: Any, run_id: str, incarnation: str, activity: Activity) -> None:
        self._stub = stub
        self._run_id = run_id
        self.incarnation = incarnation
        self._activity = activity
        self.fence = 0

    def waiting(self, cause: str) -> AbstractContextManager[None]:
        """Around a wait of the publication, in the activity that these calls show theirs in."""
        return self._activity.waiting(cause)

    async def ensure_run(self, config_digest: str, num_steps: int) -> None:
        """Create the run unless a launcher did, so that a trainer started by hand needs nobody else."""
        try:
            await self._call("GetRun", pb.GetRunRequest(run_id=self._run_id))
        except errors.NotFound:
            request = pb.CreateRunRequest(
                request_id=new_id(), run_id=self._run_id, config_digest=config_digest, num_steps=num_steps
            )
            await self._call("CreateRun", request)

    async def acquire(self) -> weights_pb2.WeightVersion | None:
        """Take the fence; the newest committed version, if there is one."""
        request = pb.AcquireTrainerRequest(request_id=new_id(), run_id=self._run_id, incarnation=self.incarnation)
        response = await self._call("AcquireTrainer", request)
        self.fence = response.fence
        return response.newest_version if response.HasField("newest_version") else None

    async def prepare_version(
        self, step: int, digest: str, kind: str, transport: str, floor: int
    ) -> tuple[weights_pb2.WeightVersion, bool]:
        """A number for weights, and whether it is that of an equal version which is committed already."""
        wire_kind = weights_pb2.WEIGHT_KIND_ADAPTER if kind == "adapter" else weights_pb2.WEIGHT_KIND_FULL
        request = pb.PrepareVersionRequest(
            request_id=new_id(), run_id=self._run_id, fence=self.fence, step=step, digest=digest, kind=wire_kind,
            transport=transport, min_weight_version=floor,
        )  # fmt: skip
        response = await self._call("PrepareVersion", request)
        return response.version, response.already_committed

    async def commit_version(
        self, weight_version: int, uri: str, num_bytes: int, traceparent: str
    ) -> weights_pb2.WeightVersion:
        """Make a prepared version visible."""
        request = pb.CommitVersionRequest(
            request_id=new_id(), run_id=self._run_id, fence=self.fence, weight_version=weight_version, uri=uri,
            num_bytes=num_bytes, traceparent=traceparent,
        )  # fmt: skip
        return (await self._call("CommitVersion", request)).version

    async def commit_checkpoint(self, checkpoint: Checkpoint, ledger_json: str) -> None:
        """Record a checkpoint that is durable."""
        manifest = pb.CheckpointManifest(
            step=checkpoint.step, uri=str(checkpoint.directory), digest=checkpoint.digest,
            weight_version=checkpoint.weight_version, ledger_json=ledger_json,
        )  # fmt: skip
        request = pb.CommitCheckpointRequest(
            request_id=new_id(), run_id=self._run_id, fence=self.fence, manifest=manifest
        )
        await self._call("CommitCheckpoint", request)

    async def newest_checkpoint(self) -> pb.CheckpointManifest | None:
        """What the coordinator holds as the newest checkpoint."""
        response = await self._call("ListCheckpoints", pb.ListCheckpointsRequest(run_id=self._run_id))
        return response.manifests[0] if response.manifests else None

    async def record_step(self, record: pb.StepRecord) -> None:
        """Store the record of a step, in place of an earlier one."""
        request = pb.RecordStepRequest(request_id=new_id(), run_id=self._run_id, fence=self.fence, record=record)
        await self._call("RecordStep", request)

    async def engines(self) -> list[pb.Member]:
        """Live engines."""
        response = await self._call("ListMembers", pb.ListMembersRequest(run_id=self._run_id, service="engine"))
        return list(response.members)

    async def wait_for_evaluations(self, step: int, wanted: set[str], seconds: float) -> set[str]:
        """Wait until evaluations of `step` are recorded, at most `seconds`; returns the names still missing."""
        missing = set(wanted)

        watch = StepWatch(self._stub, self._run_id, self._activity, step)
        cause = f"rollout: evaluation {', '.join(sorted(wanted))} of step {step}"
        try:
            async with asyncio.timeout(seconds):
                with self._activity.waiting(cause, seconds):
                    async for response in watch.until_ended():
                        record = response.record
                        if record.kind == pb.RECORD_KIND_EVALUATION and record.step == step:
                            missing.discard(record.name)
                        if not missing or watch.ended:
                            break
        except TimeoutError:
            log.info("gave up after %g s: %s", seconds, cause)
        return missing

    async def wait_for_end(self) -> None:
        """Until the run is ended, by whomever."""
        async for _ in StepWatch(self._stub, self._run_id, self._activity).until_ended():
            pass

    async def finish(self, reason: str, failed: bool = False) -> None:
        """The run has reached its end."""
        state = pb.RUN_STATE_FAILED if failed else pb.RUN_STATE_FINISHED
        request = pb.FinishRunRequest(request_id=new_id(), run_id=self._run_id, state=state, reason=reason)
        await self._call("FinishRun", request)

    async def _call(self, method: str, request: Any) -> Any:
        call: Callable[..., Any] = getattr(self._stub, method)
        return await until_available(
            lambda: call(request, timeout=_CALL_SECONDS), f"coordinator, {method}", self._activity.waiting
        )
