"""Tensor, InferRequest, InferResponse; the trace and the interface of a batcher; detections and classes."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import InvalidRequest

Array = npt.NDArray[Any]


class Datatype(StrEnum):
    """Element types of KServe v2."""

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
        """Bytes per element; None for BYTES."""
        return _SIZE_BYTES[self]

    @property
    def dtype(self) -> "np.dtype[Any] | None":
        """numpy's type of the elements; None for BYTES and BF16."""
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
class SlabAddress:
    """Address of a tensor in memory shared with an engine. generation: changes at each engine start."""

    region: str
    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: C order, little-endian; each BYTES element follows its 4-byte little-endian length.

    data: borrowed from the buffer of the memoryview. place: where the engine can read the same bytes. With a place,
    data may be empty between a worker and its core, and for GPU memory.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: memoryview
    place: SlabAddress | None = None

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def declared_bytes(self) -> int:
        """Bytes by datatype and shape; 0 for BYTES, whose elements have their own lengths."""
        return math.prod(self.shape) * (self.datatype.size_bytes or 0)

    def to_numpy(self) -> Array:
        """A view with this shape; BYTES: an object array; BF16: widened to float32. Raises InvalidRequest."""
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
    """A tensor that views the array, or a copy if it is not C-contiguous. Object arrays of bytes become BYTES."""
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


class BatchOwner(StrEnum):
    """What forms a model's batches: one owner, since two batchers in series add two delays."""

    GATEWAY = "gateway"
    TRITON = "triton"
    OFF = "off"


class CloseReason(StrEnum):
    """Why a batch took no more rows."""

    SLOT_FREE = "slot_free"
    DEADLINE = "deadline"
    FULL = "full"
    DELAY = "delay"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class EngineTimeFit:
    """Fitted engine time: t(b) = alpha_s + beta_s * b seconds for b rows.

    guard_s: margin for the spread. samples: fitted calls. deliver_s: per row, from the engine's response to the
    client's.
    """

    alpha_s: float
    beta_s: float
    guard_s: float
    samples: int
    deliver_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds of a call of this size, without the guard."""
        return self.alpha_s + self.beta_s * rows

    def delivered_s(self, rows: int) -> float:
        """The same, until the clients have their responses."""
        return self.alpha_s + (self.beta_s + self.deliver_s) * rows


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """Trace of one request in the gateway's batcher. Times in seconds.

    queued_s: until its batch was formed. expected_s: engine time by the fit, None without a fit; engine_s: measured.
    requests, rows: of the whole batch. ahead: requests queued on arrival. slots: concurrent engine calls; busy: others
    in flight when the batch was formed. slack_s: from the batch's expected end to the deadline, None if unknown.
    """

    model_name: str
    arrived_unix_s: float
    queued_s: float
    engine_s: float
    batch_number: int
    requests: int
    rows: int
    close_reason: CloseReason
    ahead: int
    slots: int
    busy: int
    fit: EngineTimeFit | None = None
    expected_s: float | None = None
    slack_s: float | None = None


class Batcher(Protocol):
    """Forms the batches of the models that the gateway owns. Raises InferenceError only."""

    def owns(self, model_name: str) -> bool:
        """Whether the gateway forms this model's batches."""
        ...

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """Raises Overloaded if the deadline is known to be unreachable. rows: with earlier ones in preparation."""
        ...

    async def infer(self, request: "InferRequest", *, client: str, priority: int = 0) -> "InferResponse":
        """The request's rows of its batch's response, with its trace.

        client: for fair queueing. priority: as in the v2 protocol, 1 the highest, 0 for the model's default. Cancelling
        removes the request at once. Raises Overloaded if the deadline is unreachable or the queue full,
        DeadlineExceeded if it passed, and the engine's error.
        """
        ...


Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request's stages in seconds; 0 for none. batch_size: rows of its engine call, if known."""

    decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference. model_version, outputs: empty for the default. deadline: monotonic seconds. metadata: for gRPC."""

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class InferResponse:
    """Response of one inference, outputs in the engine's order. explanation: if the gateway formed its batch."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    explanation: BatchTrace | None = None

    def output(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
