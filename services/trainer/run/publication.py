"""Publishes weights: bytes in place, number from the coordinator, visible at once, old versions removed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.rpc import errors
from paceline.telemetry import names, tracing
from paceline.weights.manifest import Manifest, content_digest
from paceline.weights.transports.base import Transport
from services.trainer.backends.base import TrainBackend
from services.trainer.room import until_room, with_place
from services.trainer.run.control import Control

log = logging.getLogger(__name__)

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CHANGING = ("STARTING", "SYNCING", "UPDATING")


@dataclass(frozen=True)
class Snapshot:
    """The weights of one moment, as the file that engines will read. Training may go on meanwhile."""

    step: int
    kind: str
    file: str
    data: bytes
    tensors: list[dict[str, Any]]
    digest: str
    adapter_config: dict[str, Any] | None

    @classmethod
    def take(cls, backend: TrainBackend, step: int) -> Snapshot:
        """Copy the backend's weights after `step` optimizer steps. Runs in the torch thread."""
        file = "adapter_model.safetensors" if backend.kind == "adapter" else "model.safetensors"
        content = {name: item.cpu().contiguous() for name, item in backend.weights().items()}
        tensors = [
            {
                "name": name,
                "file": file,
                "dtype": _DTYPES[item.dtype],
                "shape": list(item.shape),
                "sha256": _sha256(item),
            }
            for name, item in content.items()
        ]
        digest = content_digest((t["name"], t["dtype"], t["shape"], t["sha256"]) for t in tensors)
        data = safetensors.torch.save(content, metadata={"format": "pt"})
        return cls(step, backend.kind, file, data, tensors, digest, backend.adapter_config())

    def write(self, directory: Path, weight_version: int) -> None:
        """Write file and manifest into an empty directory."""
        (directory / self.file).write_bytes(self.data)
        entry = {"name": self.file, "num_bytes": len(self.data), "sha256": hashlib.sha256(self.data).hexdigest()}
        manifest = Manifest.model_validate({
            "weight_version": weight_version, "step": self.step, "kind": self.kind, "digest": self.digest,
            "files": [entry], "tensors": self.tensors, "adapter_config": self.adapter_config,
        })  # fmt: skip
        manifest.write(directory)


class Publisher:
    """Publishes snapshots of one run through one transport."""

    def __init__(self, control: Control, transport: Transport, transport_name: str, keep: int) -> None:
        self._control = control
        self._transport = transport
        self._name = transport_name
        self._keep = keep
        self._published: list[int] = []

    async def publish(self, snapshot: Snapshot, floor: int = 0) -> WeightVersion:
        """Publish, or adopt the newest committed version when it has this content and step; numbers exceed `floor`."""
        with tracing.span(names.SPAN_TRAINER_PUBLISH) as span:
            version, committed = await self._control.prepare_version(
                snapshot.step, snapshot.digest, snapshot.kind, self._name, floor
            )
            number = version.weight_version
            span.set_attribute(names.ATTRIBUTE_WEIGHT_VERSION, number)
            if committed:
                if not await asyncio.to_thread(self.holds, version):
                    await self._place_patiently(snapshot, number)
            else:
                uri = await self._place_patiently(snapshot, number)
                trace = tracing.current_traceparent()
                version = await self._control.commit_version(number, uri, len(snapshot.data), trace)
        self._published.append(number)
        await self._collect(await self._control.engines())
        return version

    async def _place_patiently(self, snapshot: Snapshot, weight_version: int) -> str:
        """Wait for room: the number is ours, and nobody sees the version before it is there whole."""
        return await until_room(
            lambda: asyncio.to_thread(self._place, snapshot, weight_version),
            f"weight version {weight_version} (weights.transport)", self._control.waiting,
        )  # fmt: skip

    def _place(self, snapshot: Snapshot, weight_version: int) -> str:
        stage = self._transport.stage(weight_version)
        try:
            snapshot.write(stage, weight_version)
            return self._transport.publish(stage, weight_version)
        except OSError as error:
            shutil.rmtree(stage, ignore_errors=True)
            with_place(error, stage)
            raise

    def holds(self, version: WeightVersion) -> bool:
        """Whether the bytes of a version are there, whole."""
        try:
            directory = self._transport.open(version.uri)
            manifest = Manifest.read(directory)
            manifest.verify(directory)
        except (errors.NotFound, errors.DataLoss, errors.InvalidArgument) as error:
            log.warning("weight version %d is written again: %s", version.weight_version, error)
            return False
        return manifest.digest == version.digest

    async def _collect(self, engines: list[pb.Member]) -> None:
        """Remove old versions, but none that an engine serves, nor one that an engine may be loading now."""
        newest = self._published[-1]
        keep = set(self._published[-self._keep :]) | {engine.weight_version for engine in engines}
        loading = [engine.weight_version for engine in engines if engine.state in _CHANGING and engine.weight_version]
        if loading:
            keep |= set(range(min(loading), newest + 1))
        try:
            await asyncio.to_thread(self._transport.collect, keep)
        except OSError as error:
            log.warning("old weight versions were not removed: %s", error)


def _sha256(tensor: torch.Tensor) -> str:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()
