"""Pins the wire: bytes that other languages and older processes already send must keep their meaning.

After a deliberate addition run `python tests/contract/test_wire_conformance.py --write`, which renews wire.json.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

import paceline.api
from paceline import arrays
from paceline.api.common.v1 import array_pb2, reward_pb2, sample_pb2
from paceline.api.weights.v1 import weights_pb2

SNAPSHOT = Path(__file__).with_name("wire.json")
_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def wire() -> dict[str, Any]:
    """Messages with their fields, enums with their values and services with their calls, as the stubs have them."""
    found: dict[str, Any] = {"messages": {}, "enums": {}, "services": {}}
    for info in pkgutil.walk_packages(paceline.api.__path__, "paceline.api."):
        if not info.name.endswith("_pb2"):
            continue
        file: FileDescriptor = importlib.import_module(info.name).DESCRIPTOR
        for message in file.message_types_by_name.values():
            add_message(found, message)
        for enum in file.enum_types_by_name.values():
            found["enums"][enum.full_name] = {value.name: value.number for value in enum.values}
        for service in file.services_by_name.values():
            found["services"][service.full_name] = {
                method.name: f"{method.input_type.full_name} -> {'stream ' * method.server_streaming}"
                f"{method.output_type.full_name}"
                for method in service.methods
            }
    return found


def add_message(found: dict[str, Any], message: Descriptor) -> None:
    found["messages"][message.full_name] = {
        field.name: describe(field) for field in sorted(message.fields, key=lambda item: item.number)
    }
    for nested in message.nested_types:
        add_message(found, nested)
    for enum in message.enum_types:
        found["enums"][enum.full_name] = {value.name: value.number for value in enum.values}


def describe(field: FieldDescriptor) -> str:
    """`3: repeated message paceline...Array` and, for a member of a oneof, its name."""
    kind = field.message_type or field.enum_type
    parts = [f"{field.number}:", "repeated" if field.is_repeated else "", _TYPES[field.type]]
    parts += [kind.full_name if kind is not None else ""]
    oneof = field.containing_oneof
    parts += [f"in {oneof.name}" if oneof is not None else ""]
    return " ".join(part for part in parts if part)


def committed() -> dict[str, Any]:
    return json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("section", ["messages", "enums", "services"])
def test_nothing_that_was_published_changed(section: str) -> None:
    current = wire()[section]
    changed = [
        f"{name}.{item}: was {old!r}, is {current.get(name, {}).get(item)!r}"
        for name, items in committed()[section].items()
        for item, old in items.items()
        if current.get(name, {}).get(item) != old
    ]
    assert not changed


def test_snapshot_is_complete() -> None:
    assert committed() == wire(), "run `python tests/contract/test_wire_conformance.py --write` and commit wire.json"


def full_array() -> array_pb2.Array:
    return arrays.to_wire(np.array([[1, -2], [258, 3]], np.int32))


def full_sample() -> sample_pb2.Sample:
    return sample_pb2.Sample(
        sample_id="e0.17/1",
        trajectory_id="e0.17/1",
        token_ids=arrays.to_wire(np.array([5, 70000, 2], np.int32)),
        loss_mask=arrays.to_wire(np.array([0, 1, 1], np.uint8)),
        sampler_logprobs=arrays.to_wire(np.array([0, -0.5, -1.25], np.float32)),
        version_spans=[sample_pb2.VersionSpan(weight_version=version, num_tokens=1) for version in (3, 4)],
        status=sample_pb2.SAMPLE_STATUS_TRUNCATED,
        reward=reward_pb2.Reward(value=0.75),
        temperature=0.5,
        seed=2**63 + 1,
        text="4 \u00e9",
        engine_id="engine-0",
        blobs={
            "routing": array_pb2.BlobReference(uri="blob/r", sha256="ab", dtype=array_pb2.DTYPE_UINT8, shape=[3, 2])
        },
        counters={"cached_tokens": 12},
    )


def full_group() -> sample_pb2.SampleGroup:
    missing = reward_pb2.MissingReward(reason=reward_pb2.MISSING_REASON_TIMEOUT)
    return sample_pb2.SampleGroup(
        run_id="run",
        group_id="e0.17",
        attempt=2,
        prompt_id="p17",
        prompt_text="2+2=",
        metadata_json='{"label":4}',
        samples=[sample_pb2.Sample(sample_id="e0.17/0", reward=reward_pb2.Reward(missing=missing))],
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        finished_time=1700000000.5,
    )


def full_version() -> weights_pb2.WeightVersion:
    version = weights_pb2.WeightVersion(
        weight_version=8,
        step=7,
        digest="d1",
        kind=weights_pb2.WEIGHT_KIND_ADAPTER,
        state=weights_pb2.PUBLICATION_STATE_COMMITTED,
        transport="disk",
        uri="/w/v00000008",
        trainer_incarnation="i",
        num_bytes=300,
        traceparent="00-01",
    )
    version.committed_time.FromSeconds(1700000000)
    return version


GOLDEN: dict[str, tuple[Message, str]] = {
    "array": (
        full_array(),
        "0a1001000000feffffff020100000300000010021a020202",
    ),
    "sample": (
        full_sample(),
        "0a0765302e31372f31120765302e31372f311a130a0c05000000701101000200000010021a0103220a0a030001011001"
        "1a01032a130a0c00000000000000bf0000a0bf10041a01033204080310013204080410013802420909000000000000e8"
        "3f49000000000000e03f50818080808080808080015a043420c3a96208656e67696e652d306a1d0a07726f7574696e67"
        "12120a06626c6f622f721202616218012202030272110a0d6361636865645f746f6b656e73100c",
    ),
    "group": (
        full_group(),
        "0a0372756e120565302e3137180222037031372a04322b323d320b7b226c6162656c223a347d3a0f0a0765302e31372f"
        "30420412020801423730302d30616637363531393136636434336464383434386562323131633830333139632d623761"
        "643662373136393230333333312d30314900002040fc54d941",
    ),
    "version": (
        full_version(),
        "080810071a0264312002280232046469736b3a0c2f772f7630303030303030384201694a060880e2cfaa0650ac025a0530302d3031",
    ),
}
"""Messages and their bytes in hexadecimal, map entries in the order of their keys."""


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_bytes_are_pinned(name: str) -> None:
    message, expected = GOLDEN[name]
    assert message.SerializeToString(deterministic=True).hex() == expected
    assert type(message).FromString(bytes.fromhex(expected)) == message


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_examples_set_every_field(name: str) -> None:
    message, _ = GOLDEN[name]
    present = {field.name for field, _ in message.ListFields()}
    assert present == {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("code", "array", "data"),
    [
        (array_pb2.DTYPE_UINT8, np.array([1, 255], "u1"), "01ff"),
        (array_pb2.DTYPE_INT16, np.array([1, -2], ">i2"), "0100feff"),
        (array_pb2.DTYPE_INT32, np.array([1, -2], ">i4"), "01000000feffffff"),
        (array_pb2.DTYPE_INT64, np.array([258], ">i8"), "0201000000000000"),
        (array_pb2.DTYPE_FLOAT32, np.array([1.5], ">f4"), "0000c03f"),
        (array_pb2.DTYPE_FLOAT64, np.array([1.5], ">f8"), "000000000000f83f"),
        (array_pb2.DTYPE_BFLOAT16, np.array([0x3FC0], ">u2"), "c03f"),
    ],
)
def test_arrays_are_little_endian_whatever_the_machine(code: int, array: np.ndarray, data: str) -> None:
    message = arrays.to_wire(array)
    assert (message.dtype, message.data.hex(), list(message.shape)) == (code, data, list(array.shape))
    decoded = arrays.from_wire(message, "array")
    assert (decoded == array).all()


def test_every_dtype_is_covered() -> None:
    assert set(array_pb2.Dtype.values()) - {array_pb2.DTYPE_UNSPECIFIED} == set(range(1, 8))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("pass --write to renew wire.json")
    SNAPSHOT.write_text(json.dumps(wire(), indent=1, sort_keys=True) + "\n")
