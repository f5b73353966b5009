"""NumPy arrays to and from the wire: raw little-endian bytes with dtype and shape, checked at the boundary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.api.common.v1 import array_pb2

# bfloat16 travels as its 16 bits: NumPy has no such type, and torch can view them.
_TO_NUMPY: dict[int, np.dtype[Any]] = {
    array_pb2.DTYPE_UINT8: np.dtype("<u1"),
    array_pb2.DTYPE_INT16: np.dtype("<i2"),
    array_pb2.DTYPE_INT32: np.dtype("<i4"),
    array_pb2.DTYPE_INT64: np.dtype("<i8"),
    array_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    array_pb2.DTYPE_FLOAT64: np.dtype("<f8"),
    array_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_FROM_NUMPY = {dtype: code for code, dtype in _TO_NUMPY.items()}


def to_wire(array: np.ndarray) -> array_pb2.Array:
    """Encode an array; uint16 is taken as the bits of bfloat16. ValueError for any other dtype."""
    dtype = array.dtype.newbyteorder("<")
    code = _FROM_NUMPY.get(dtype)
    if code is None:
        names = ", ".join(str(item) for item in _FROM_NUMPY)
        raise ValueError(f"dtype {array.dtype} cannot go on the wire; use one of {names}")
    data = np.ascontiguousarray(array, dtype=dtype).tobytes()
    return array_pb2.Array(data=data, dtype=code, shape=array.shape)  # type: ignore[arg-type]


def from_wire(message: array_pb2.Array, what: str, dtype: str | None = None, length: int | None = None) -> np.ndarray:
    """Decode an array (read-only, no copy).

    ValueError names `what` with the two sizes when the bytes do not fit the shape, when `dtype` ("int32") is asked for
    and differs, or when `length` is asked for and the array is not of shape [length].
    """
    found = _TO_NUMPY.get(message.dtype)
    if found is None:
        raise ValueError(f"{what}: dtype {message.dtype} is unknown; was the array left unset?")
    if dtype is not None and found != np.dtype(dtype).newbyteorder("<"):
        raise ValueError(f"{what}: dtype is {found.name}, expected {dtype}")
    if any(size < 0 for size in message.shape):
        raise ValueError(f"{what}: shape {list(message.shape)} has a negative size")
    expected = math.prod(message.shape) * found.itemsize
    if expected != len(message.data):
        raise ValueError(
            f"{what}: {len(message.data)} bytes do not fit shape {list(message.shape)} "
            f"of {found.name} ({expected} bytes)"
        )
    if length is not None and list(message.shape) != [length]:
        raise ValueError(f"{what}: shape is {list(message.shape)}, expected [{length}]")
    return np.frombuffer(message.data, dtype=found).reshape(tuple(message.shape))
