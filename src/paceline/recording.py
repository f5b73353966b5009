"""Sample groups as lines of JSON: what `rollout.dump` writes and the source "recorded" reads, in one place.

A line is the JSON form of the message SampleGroup, arrays in base64. Blobs are left out: the run that wrote them
removes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from google.protobuf import json_format

from paceline import files
from paceline.api.common.v1 import sample_pb2
from paceline.ids import GroupId
from paceline.samples import InvalidSample, SampleGroup

SUFFIX = ".jsonl"


def write_step(directory: Path, step: int, groups: Sequence[SampleGroup]) -> Path:
    """Write the groups of a step in the order of their ids, whole or not at all; a repeat replaces the file."""
    directory.mkdir(parents=True, exist_ok=True)
    ordered = sorted(groups, key=lambda group: GroupId.parse(group.group_id))
    path = directory / f"step-{step:06d}{SUFFIX}"
    files.replace(path, "".join(_line(group) for group in ordered))
    return path


def read_line(line: bytes, where: str) -> SampleGroup:
    """The group of one line. InvalidSample, with `where`, when it cannot be read or does not hold together."""
    try:
        message = json_format.Parse(line, sample_pb2.SampleGroup())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidSample(f"{where}: {error}") from error
    return SampleGroup.from_wire(message)


def _line(group: SampleGroup) -> str:
    message = group.to_wire()
    for sample in message.samples:
        sample.ClearField("blobs")
    text = json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)
    return text + "\n"
