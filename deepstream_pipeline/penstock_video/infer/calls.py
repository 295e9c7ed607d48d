"""Rows grouped into engine calls, the calls, and their results parsed to detections and classes."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from penstock.gateway.batching.merging import group_by_shape, shape_as_declared
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InferenceError, Overloaded, QuotaExceeded
from penstock.protocol.inference import InferRequest, InferResponse, SlabAddress, Tensor, tensor_from_numpy
from penstock.protocol.shared_memory import SLAB_FROM_BYTES, Lease, Slab
from penstock.protocol.vision_results import Classes, Embedding, TextLines, VisionResult
from penstock.protocol.vision_results import Detections as DetectorResult
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import Geometry, geometry_of
from penstock.vision.results import parse
from penstock.vision.spec import InputOrder
from penstock_video.errors import InferFailed, InferRefused
from penstock_video.infer.network import Network
from penstock_video.types import NO_CLASS, ClassScore, Detections, DeviceRow, FloatArray, RowArray


class EngineClient(Protocol):
    """Connection to an engine, created and called inside its event loop. Raises InferenceError only."""

    @property
    def is_up(self) -> bool:
        """Whether the engine answered the last check."""
        ...

    @property
    def reason(self) -> str:
        """Why it does not answer; empty if it does."""
        ...

    @property
    def slab(self) -> Slab | None:
        """Memory shared with the engine."""
        ...

    async def run(self) -> None:
        """Connects and polls until it is cancelled."""
        ...

    async def until_up(self) -> None:
        """Returns when the engine has answered once."""
        ...

    async def config(self, model_name: str, version: str) -> ModelConfig:
        """The configuration of a ready model."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Sends the request; cancelling this cancels it."""
        ...

    async def aclose(self) -> None:
        """Call it after run has ended."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """One row's outputs. place: index in the response, None for all of it. error: why there is none."""

    response: InferResponse | None
    place: int | None = None
    error: InferFailed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowsResult:
    """Results of submitted rows, in order. error: of the first failed row; the others still have results. infer_s: of
    the longest call."""

    error: InferFailed | None = None
    rows: tuple[RowResult, ...] = ()
    infer_s: float = 0.0

    def row(self, index: int) -> tuple[InferResponse, int | None]:
        """The row's response and its index there. Raises the row's InferFailed."""
        if index < len(self.rows):
            row = self.rows[index]
            if row.response is not None:
                return row.response, row.place
            raise row.error or InferFailed("the row was not answered")
        raise self.error or InferFailed(f"row {index} was never submitted")

    def error_of(self, index: int) -> InferFailed | None:
        """Why this row was not answered; None if it was."""
        return self.rows[index].error if index < len(self.rows) else self.error


def failed(error: InferFailed, count: int) -> RowsResult:
    """A result of `count` rows that all failed."""
    return RowsResult(error, (RowResult(None, None, error),) * count)


Row = RowArray | DeviceRow
LEFT_OUT = memoryview(b"")  # of a tensor in GPU memory


class InputLease(Protocol):
    """Released when the engine has read it."""

    def release(self) -> None: ...

    def release_later(self) -> None:
        """Releases the lease of a cancelled call once the engine cannot read it any more."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One engine call. members: row indices, in order. shape: with the batch axis if there is one. sizes: the input
    with the pictures' sizes, if the model has it."""

    members: tuple[int, ...]
    shape: tuple[int, ...]
    has_batch_axis: bool
    is_on_card: bool = False
    sizes: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A call whose rows are in memory that the engine reads. line: its connection. lease: of shared memory."""

    call: Call
    request: InferRequest
    line: EngineClient
    lease: InputLease | None


def calls_of(
    network: Network,
    rows: Sequence[Row],
    most_bytes: int,
    most_card_bytes: int = 0,
    *,
    geometries: Sequence[Geometry] = (),
) -> list[Call]:
    """Groups rows into calls of equal shape and memory, each up to most_bytes (most_card_bytes) or a single row.

    geometries: of each row, if the model takes sizes.
    """
    calls: list[Call] = []
    for is_on_card, most in ((False, most_bytes), (True, most_card_bytes)):
        indices = [index for index, row in enumerate(rows) if isinstance(row, DeviceRow) is is_on_card]
        if indices:
            calls += _calls_of(network, rows, indices, most)
    return [_with_sizes(network, call, geometries) for call in calls] if network.takes_sizes else calls


def _with_sizes(network: Network, call: Call, geometries: Sequence[Geometry]) -> Call:
    own = [geometries[index] for index in call.members]
    return replace(call, sizes=size_tensors(network.card, own, has_batch_axis=call.has_batch_axis))


def _calls_of(network: Network, rows: Sequence[Row], indices: Sequence[int], most_bytes: int) -> list[Call]:
    is_on_card = isinstance(rows[indices[0]], DeviceRow)
    if network.max_batch_size == 0:
        declared = network.input_shape
        return [Call((i,), shape_as_declared(rows[i].shape, declared), False, is_on_card) for i in indices]
    largest_bytes = max(rows[index].nbytes for index in indices)
    most_rows = min(network.max_batch_size, max(most_bytes // max(largest_bytes, 1), 1))
    groups = group_by_shape([rows[index] for index in indices], most_rows)
    members = [tuple(indices[one] for one in group) for group in groups]
    return [Call(group, (len(group), *rows[group[0]].shape), True, is_on_card) for group in members]


def load(network: Network, rows: Sequence[Row], call: Call, line: EngineClient, deadline: float) -> Loaded:
    """Copies the call's host rows into the line's slab if it has room. The rows may be overwritten afterwards."""
    members = [row for index in call.members if not isinstance(row := rows[index], DeviceRow)]
    slab = line.slab
    size_bytes = math.prod(call.shape) * network.row_dtype.itemsize
    lease = slab.lease(size_bytes) if slab is not None and size_bytes >= SLAB_FROM_BYTES else None
    try:
        tensor = _tensor(network, members, call, lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Loaded(call, _request(network, call, tensor, deadline), line, lease)


def gathered(
    network: Network, call: Call, line: EngineClient, place: SlabAddress, lease: InputLease, deadline: float
) -> Loaded:
    """The call whose rows were gathered there on the GPU."""
    tensor = Tensor(network.input_name, network.card.prepare_spec.datatype, call.shape, LEFT_OUT, place)
    return Loaded(call, _request(network, call, tensor, deadline), line, lease)


def _request(network: Network, call: Call, tensor: Tensor, deadline: float) -> InferRequest:
    return InferRequest(network.name, (tensor, *call.sizes), network.version, deadline=deadline)


def _tensor(network: Network, rows: Sequence[RowArray], call: Call, lease: Lease | None) -> Tensor:
    if lease is None:
        array = np.empty((len(rows), *rows[0].shape), network.row_dtype)
        _copy(rows, array)
        return tensor_from_numpy(network.input_name, array.reshape(call.shape))
    view = lease.view[: math.prod(call.shape) * network.row_dtype.itemsize]
    array = np.frombuffer(view, network.row_dtype).reshape(len(rows), *rows[0].shape)
    _copy(rows, array)
    return Tensor(network.input_name, network.card.prepare_spec.datatype, call.shape, view, lease.place)


def _copy(rows: Sequence[RowArray], array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
    """Copies with numpy, which releases the GIL."""
    for index, row in enumerate(rows):
        np.copyto(array[index], row)


LATE_S = 1.0  # after a deadline, which the line enforces
REFUSED = (Overloaded, QuotaExceeded, DeadlineExceeded)


async def infer_all(loaded: Sequence[Loaded]) -> RowsResult:
    """Sends all calls at once. A failed call fails only its own rows. Leases are always released."""
    if len(loaded) == 1:
        outcomes = [await _infer(loaded[0])]
    else:
        outcomes = list(await asyncio.gather(*(_infer(one) for one in loaded)))
    return _result(loaded, outcomes)


async def _infer(loaded: Loaded) -> tuple[InferResponse | InferFailed, float]:
    """The response or error, and the seconds it took."""
    started, is_answered = time.monotonic(), False
    deadline = loaded.request.deadline
    try:
        async with asyncio.timeout(None if deadline is None else max(deadline - started, 0.0) + LATE_S):
            response = await loaded.line.infer(loaded.request)
        is_answered = True
        return response, time.monotonic() - started
    except (InferenceError, TimeoutError) as error:
        return failure_of(error), time.monotonic() - started
    finally:
        if loaded.lease is not None:
            if is_answered:
                loaded.lease.release()
            else:
                loaded.lease.release_later()  # the engine may still begin to read


def failure_of(error: Exception) -> InferFailed:
    """Converts the error to the pipeline's, with the gateway's text."""
    if isinstance(error, TimeoutError):
        return InferRefused("the engine did not answer by the deadline")
    if isinstance(error, InferenceError):
        return InferRefused(error.message) if isinstance(error, REFUSED) else InferFailed(error.message)
    return InferFailed("internal error")


def _result(loaded: Sequence[Loaded], outcomes: Sequence[tuple[InferResponse | InferFailed, float]]) -> RowsResult:
    rows: dict[int, RowResult] = {}
    first: InferFailed | None = None
    infer_s = 0.0
    for one, (outcome, took_s) in zip(loaded, outcomes, strict=True):
        call = one.call
        if isinstance(outcome, InferFailed):
            first = first or outcome
            rows |= {member: RowResult(None, None, outcome) for member in call.members}
            continue
        infer_s = max(infer_s, outcome.timings.infer or took_s)
        for place, member in enumerate(call.members):
            rows[member] = RowResult(outcome, place if call.has_batch_axis else None)
    return RowsResult(first, tuple(rows[index] for index in sorted(rows)), infer_s)


def refusal_of(network: Network, row: Row) -> str:
    """Why this is no row of the network; empty if it is one."""
    spec = network.card.prepare_spec
    if row.dtype != network.row_dtype or row.ndim != 3:
        return f"a row of {network.name} is {network.row_dtype} with three axes, not {row.dtype} of {list(row.shape)}"
    channels, height, width = row.shape if spec.layout is InputOrder.NCHW else (row.shape[2], *row.shape[:2])
    expected = (spec.width or width, spec.height or height)  # 0 if it varies
    if channels != spec.color.channels or (width, height) != expected:
        size = f"{expected[0]}x{expected[1]} of {spec.color.channels} channels"
        return f"a row of {network.name} is {size}, not {list(row.shape)}"
    return "" if row.nbytes <= network.row_bytes else f"a row of {network.name} has {row.nbytes} bytes, over its limit"


def detections_of(network: Network, answer: RowsResult, index: int, width: int, height: int) -> Detections:
    """A detector's objects in a frame of width x height pixels; highest score first. Raises InferFailed."""
    seen = _parsed(network, answer, index, geometry_of(width, height, network.card.prepare_spec))
    if not isinstance(seen, DetectorResult):
        raise InferFailed(f"model {network.name!r} says what a whole picture is, and not where things are in it")
    found = Detections(
        np.ascontiguousarray(seen.xyxy, np.float32),
        np.ascontiguousarray(seen.score, np.float32),
        np.ascontiguousarray(seen.class_id, np.int64),
        seen.masks,
        seen.keypoints,
        seen.xywhr,
    )
    return found.select(np.isin(found.class_id, list(network.class_ids))) if network.class_ids else found


def classes_of(network: Network, answer: RowsResult, index: int) -> tuple[ClassScore, ...]:
    """A classifier's classes of the row's picture; highest score first. Raises InferFailed as above."""
    seen = _parsed(network, answer, index, _NOWHERE)
    if not isinstance(seen, Classes):
        raise InferFailed(f"model {network.name!r} finds objects, and does not say what a whole picture is")
    return _class_scores(network, seen)


@dataclass(frozen=True, slots=True, eq=False)
class CropResult:
    """Result of a secondary model for one object; empty without an answer.

    classes: also text or a vector, see ClassScore. keypoints: (k, 3) float32, x and y in pixels of the crop.
    """

    classes: tuple[ClassScore, ...] = ()
    keypoints: FloatArray | None = None

    def __bool__(self) -> bool:
        return bool(self.classes) or self.keypoints is not None


def crop_result_of(network: Network, answer: RowsResult, index: int, geometry: Geometry) -> CropResult:
    """The result of the row's crop: of a detector with keypoints, those of its best object. Raises InferFailed."""
    match _parsed(network, answer, index, geometry):
        case Classes() as seen:
            return CropResult(_class_scores(network, seen))
        case TextLines(lines):
            return CropResult(
                tuple(ClassScore(network.name, NO_CLASS, line.text, line.score) for line in lines if line.text)
            )
        case Embedding(vector):
            values = vector.astype(np.float64).round(_VECTOR_DECIMALS).tolist()
            return CropResult((ClassScore(network.name, NO_CLASS, "", 1.0, tuple(values)),))
        case DetectorResult(keypoints=np.ndarray() as keypoints):
            return CropResult(keypoints=keypoints[0]) if len(keypoints) else CropResult()
    raise InferFailed(f"model {network.name!r} has no classes, text, vector or keypoints for an object")


def _class_scores(network: Network, seen: Classes) -> tuple[ClassScore, ...]:
    labels = network.card.labels
    return tuple(
        ClassScore(network.name, number, labels[number] if 0 <= number < len(labels) else f"class {number}", score)
        for number, score in zip(seen.class_id.tolist(), seen.score.tolist(), strict=True)
        if not network.class_ids or number in network.class_ids
    )


def _parsed(network: Network, answer: RowsResult, index: int, geometry: Geometry) -> VisionResult:
    response, place = answer.row(index)
    try:
        return parse(network.card, response, place, geometry)
    except EngineFailed as error:
        raise InferFailed(error.message) from error
    except InferenceError as error:
        raise InferFailed(f"model {network.name!r}: {error.message}") from error


_VECTOR_DECIMALS = 6
_NOWHERE = Geometry(1, 1, 1, 1, 1.0, 1.0)  # a classifier's output has no coordinates
