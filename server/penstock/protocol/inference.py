"""Tensor, InferRequest, InferResponse; the trace and the interface of a batcher; detections and classes as arrays."""

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
class SlabAddress:
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
    place: SlabAddress | None = None

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def declared_bytes(self) -> int:
        """What its datatype and shape come to; 0 for BYTES, whose elements hold their own sizes."""
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


class BatchOwner(StrEnum):
    """Who forms a model's batches: one owner, since two batchers in series add two delays."""

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
    """The line through what the engine's calls took: t(b) = alpha_s + beta_s * b seconds for b rows.

    guard_s: what a call may take longer than that, by the spread of those seen. samples: calls behind it. deliver_s:
    what each row takes from the engine's answer until its caller has it.
    """

    alpha_s: float
    beta_s: float
    guard_s: float
    samples: int
    deliver_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """What a call of so many rows takes, without the guard."""
        return self.alpha_s + self.beta_s * rows

    def delivered_s(self, rows: int) -> float:
        """The same until the callers have their answers; the engine has gone on meanwhile."""
        return self.alpha_s + (self.beta_s + self.deliver_s) * rows


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """What became of one request in the gateway's batcher. Times in seconds.

    arrived_unix_s: when it came to the queue, on the wall clock. queued_s: until its batch was formed. expected_s: what
    the fit said that the engine's call would take, None without a fit; engine_s: what it took. requests, rows: of the
    whole batch. ahead: requests that waited in the queue when it came. slots: engine calls that may run at once;
    busy: how many did when the batch was formed, this one not among them. slack_s: from the batch's expected end to
    the request's deadline, None if either is unknown.
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
    """Forms the batches of the models that the gateway owns. Raises of the InferenceError tree only."""

    def owns(self, model_name: str) -> bool:
        """Whether requests for that model are to come here."""
        ...

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """For who has work to do before there is a request, such as decoding: it would be for nothing.

        rows: of the request, and of those that are being made ready before it. Raises Overloaded where all that is
        ahead of them takes the engine until after the deadline, as far as it is known here.
        """
        ...

    async def infer(self, request: "InferRequest", *, client: str, priority: int = 0) -> "InferResponse":
        """The request's own rows of its batch's answer, explained.

        client: whom the queue is fair to. priority: as v2 has it, 1 the highest, 0 for the model's default. Cancelling
        gives the place up at once, wherever the request is. Raises Overloaded where the deadline cannot be met or the
        queue is full, DeadlineExceeded where it passed, and what the engine raised for the batch.
        """
        ...


Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds; a stage that did not happen is 0.

    batch_size: rows of the engine call that carried the request, as far as the gateway formed it.
    """

    decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference.

    model_version: empty for the engine's choice. outputs: names wanted, empty for all.
    deadline: monotonic seconds, None for none. metadata: sent to an engine that speaks gRPC, such as traceparent.
    """

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
    """The answer to one inference, in the engine's order of outputs.

    explanation: of the batch that it was part of, where the gateway formed it.
    """

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    explanation: BatchTrace | None = None

    def output(self, name: str) -> Tensor | None:
        """The output of that name, or None."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image.

    xyxy: (n, 4) float32, corners in source pixels (of the image as a person sees it: EXIF applied).
    score: (n,) float32 in [0, 1], falling. class_id: (n,) int64.
    """

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray


@dataclass(frozen=True, slots=True)
class Classes:
    """The likeliest classes of one image: score (n,) float32, falling; class_id (n,) int64."""

    score: FloatArray
    class_id: IntArray


VisionResult = Detections | Classes
