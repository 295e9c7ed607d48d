"""A tensor as bytes, and the way to and from numpy."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from server.core.errors import InvalidRequest

Array = npt.NDArray[Any]


class Datatype(StrEnum):
    """KServe v2's names of element types."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    @property
    def size_bytes(self) -> int | None:
        """Bytes an element; None for BYTES, whose elements carry their own length."""
        return _SIZE_BYTES[self]

    @property
    def dtype(self) -> "np.dtype[Any] | None":
        """numpy's type of the elements; None for BYTES and BF16, which numpy has no type for."""
        return _DTYPE_OF.get(self)


_DTYPE_OF: dict[Datatype, np.dtype[Any]] = {
    Datatype.BOOL: np.dtype(np.bool_),
    Datatype.UINT8: np.dtype(np.uint8),
    Datatype.UINT16: np.dtype(np.uint16),
    Datatype.UINT32: np.dtype(np.uint32),
    Datatype.UINT64: np.dtype(np.uint64),
    Datatype.INT8: np.dtype(np.int8),
    Datatype.INT16: np.dtype(np.int16),
    Datatype.INT32: np.dtype(np.int32),
    Datatype.INT64: np.dtype(np.int64),
    Datatype.FP16: np.dtype(np.float16),
    Datatype.FP32: np.dtype(np.float32),
    Datatype.FP64: np.dtype(np.float64),
}
_OF_NUMPY = {dtype: datatype for datatype, dtype in _DTYPE_OF.items()}
_SIZE_BYTES: dict[Datatype, int | None] = {
    **{datatype: dtype.itemsize for datatype, dtype in _DTYPE_OF.items()},
    Datatype.BF16: 2,
    Datatype.BYTES: None,
}


FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie in memory that is shared with an engine on this host.

    region: the name that the engine knows it by. generation: of that memory: an engine that started later knows it not.
    """

    region: str
    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor: C order, little-endian; BYTES elements each behind a 4-byte little-endian length.

    The data is borrowed: it lives as long as the buffer behind the memoryview. place: where the same bytes can be read
    by the engine without being sent; data is there in any case, but on the line between a front and its core, and of
    what lies in a card's memory.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: memoryview
    place: Place | None = None

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def declared_bytes(self) -> int:
        """What its datatype and shape come to; 0 for BYTES, whose elements say so themselves."""
        return math.prod(self.shape) * (self.datatype.size_bytes or 0)

    def to_numpy(self) -> Array:
        """A view (BYTES: an object array of bytes; BF16: widened to float32), of this tensor's shape.

        Raises InvalidRequest where the byte count does not fit the shape.
        """
        if self.datatype is Datatype.BYTES:
            return _array_of_bytes(self)
        size_bytes = self.datatype.size_bytes or 0
        if self.data.nbytes != self.element_count * size_bytes:
            raise InvalidRequest(
                f"tensor {self.name!r} has {self.data.nbytes} bytes; {self.datatype} of shape "
                f"{list(self.shape)} needs {self.element_count * size_bytes}"
            )
        if self.datatype is Datatype.BF16:
            halves = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return halves.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, _DTYPE_OF[self.datatype]).reshape(self.shape)


def tensor_from_numpy(name: str, array: Array) -> Tensor:
    """The tensor that views the array (a copy where it is not C-contiguous). Object arrays of bytes become BYTES."""
    if array.dtype == np.object_:
        return tensor_from_bytes(name, [bytes(item) for item in array.ravel()], array.shape)
    datatype = _OF_NUMPY.get(array.dtype)
    if datatype is None:
        raise InvalidRequest(f"tensor {name!r} has numpy type {array.dtype}, which KServe v2 has no name for")
    contiguous = np.ascontiguousarray(array)
    return Tensor(name, datatype, array.shape, contiguous.reshape(-1).view(np.uint8).data)


def tensor_from_bytes(name: str, items: Sequence[bytes], shape: tuple[int, ...] | None = None) -> Tensor:
    """A BYTES tensor of the items, in one dimension unless a shape is given."""
    packed = b"".join(struct.pack("<I", len(item)) + item for item in items)
    return Tensor(name, Datatype.BYTES, shape if shape is not None else (len(items),), memoryview(packed))


def _array_of_bytes(tensor: Tensor) -> Array:
    items: list[bytes] = []
    position, data = 0, tensor.data
    while position < data.nbytes:
        if position + 4 > data.nbytes:
            raise InvalidRequest(f"tensor {tensor.name!r} ends inside a length prefix at byte {position}")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + length > data.nbytes:
            raise InvalidRequest(f"tensor {tensor.name!r} has an element of {length} bytes past its end")
        items.append(bytes(data[position : position + length]))
        position += length
    if len(items) != tensor.element_count:
        raise InvalidRequest(
            f"tensor {tensor.name!r} holds {len(items)} elements; {list(tensor.shape)} needs {tensor.element_count}"
        )
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array.reshape(tensor.shape)
