"""The version gate of a generation request: which weights may produce its tokens."""

from __future__ import annotations

from paceline.api.common.v1.generation_pb2 import VersionGate


def admits(gate: VersionGate, weight_version: int) -> bool:
    """Whether tokens of a version may answer a request with this gate; a gate that is not set admits every version."""
    kind = gate.WhichOneof("gate")
    if kind == "min_version":
        return weight_version >= gate.min_version
    if kind == "exact_version":
        return weight_version == gate.exact_version
    return True
