"""Arrays on the wire: exact round trips, and errors with both numbers."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import array_pb2


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "float32", "float64", "uint16"])
def test_round_trip(dtype: str) -> None:
    value = np.arange(12).reshape(3, 4).astype(dtype)
    decoded = arrays.from_wire(arrays.to_wire(value), "x")
    assert decoded.dtype == value.dtype
    assert (decoded == value).all()


def test_bytes_are_little_endian() -> None:
    assert arrays.to_wire(np.array([1], dtype=">i4")).data == b"\x01\x00\x00\x00"


def test_wrong_length_names_both_numbers() -> None:
    message = array_pb2.Array(data=b"\x00" * 7, dtype=array_pb2.DTYPE_INT32, shape=[2])
    with pytest.raises(ValueError, match=r"token_ids: 7 bytes do not fit shape \[2\] of int32 \(8 bytes\)"):
        arrays.from_wire(message, "token_ids")


def test_wrong_dtype_and_unset_are_errors() -> None:
    with pytest.raises(ValueError, match="expected int32"):
        arrays.from_wire(arrays.to_wire(np.zeros(2, np.float32)), "x", "int32")
    with pytest.raises(ValueError, match="left unset"):
        arrays.from_wire(array_pb2.Array(), "x")
