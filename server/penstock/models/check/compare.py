"""Compares a model's outputs and picture results with the expected ones, without I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.models.check.golden import OutputRecord, PictureRecord, PictureTolerance, SeenClass, Tolerance, Value
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import FLOATS, Array, Datatype, Tensor
from penstock.protocol.vision_results import Classes, Detections, VisionResult
from penstock.vision.layouts.suppression import overlaps

SAMPLE_COUNT = 64
# Relative to an output's root mean square, and to each number. Covers FP32 arithmetic in any order: FastestDet with and
# without graph optimisation differs by 5e-5 on generated inputs, by 4e-4 on a picture. Does not cover a GPU's TF32,
# which moves one number of FastestDet's boxes by a quarter (set NVIDIA_TF32_OVERRIDE=0 in Triton's environment).
SHARE, SHARE_OF_HALVES = 1e-3, 2e-2
# The difference between two variants of a graph on one machine estimates the difference between machines: INT8 kernels
# differ by whole steps. At most a tenth of the root mean square, so that a wrong variant does not hide all errors.
SPREAD_MARGIN, MAX_SHARE = 8.0, 0.1
_HALVES = (Datatype.FP16, Datatype.BF16)
_STATISTICS_SLACK = 1e-9  # the same numbers summed by another numpy version


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """An expected output. indexes: (k,) flat; values: (k,) in the datatype's numpy type. record: all but these."""

    record: OutputRecord
    indexes: npt.NDArray[np.int64]
    values: Array


class OutputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One output against one reference. problem: empty where it is the same.

    difference, allowed, index, expected, got: of the element with the largest `share`; absent without one.
    """

    reference: str
    output: str
    problem: str = ""
    difference: float | None = None
    allowed: float | None = None
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""

    @property
    def share(self) -> float:
        """Difference divided by the allowed difference, over 1 is too much; 0 without a difference."""
        if not self.difference:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


def compare_outputs(expected: Sequence[ExpectedOutput], got: Sequence[Tensor], reference: str = "") -> list[OutputRow]:
    """One row for each expected output; other outputs are ignored. reference: what the expected ones are from."""
    came = {tensor.name: tensor for tensor in got}
    names = ", ".join(repr(name) for name in came) or "none"
    return [
        _compare(output, came[output.record.name], reference)
        if output.record.name in came
        else _row(output, reference, f"is not among the outputs that came ({names})")
        for output in expected
    ]


def expected_of_record(record: OutputRecord) -> ExpectedOutput:
    """The expectation from golden.json. Raises ValueError if the sample does not fit the shape and datatype."""
    indexes = sample_indexes(math.prod(record.shape))
    if len(indexes) != len(record.sample):
        raise ValueError(
            f"output {record.name!r}: {len(record.sample)} values; {list(record.shape)} has {len(indexes)}"
        )
    return ExpectedOutput(record, indexes, _array_of(record.sample, record.datatype))


def expected_of_tensor(tensor: Tensor, tolerance: Tolerance) -> ExpectedOutput:
    """The expectation from a reference's full output."""
    values = tensor.to_numpy().reshape(-1)
    return ExpectedOutput(record_of_tensor(tensor, tolerance), np.arange(values.size, dtype=np.int64), values)


def record_of_tensor(tensor: Tensor, tolerance: Tolerance) -> OutputRecord:
    """The record of an output for golden.json."""
    values = tensor.to_numpy().reshape(-1)
    sample = values[sample_indexes(values.size)]
    described = (tensor.name, tensor.datatype, tensor.shape, tolerance, *_statistics(values))
    return OutputRecord(*described, tuple(_value_of(item) for item in sample.tolist()))


def tolerance_for(one: Tensor, other: Tensor | None = None, *, is_reduced: bool = False) -> Tolerance:
    """Allowed difference between engines or machines. one, other: outputs of two variants of the graph.

    is_reduced: a GPU computes the model in FP16 or TF32.
    """
    if one.datatype is Datatype.BYTES:
        return Tolerance()
    values = one.to_numpy().astype(np.float64).reshape(-1)
    root_mean_square = _root_mean_square(values)
    share = 0.0
    if one.datatype in FLOATS:
        share = SHARE_OF_HALVES if is_reduced or one.datatype in _HALVES else SHARE
    spread = min(SPREAD_MARGIN * _spread(values, other), MAX_SHARE * root_mean_square)
    return Tolerance(absolute=float(f"{max(share * root_mean_square, spread):.3g}"), relative=share)


def is_deterministic(one: Tensor, other: Tensor) -> bool:
    """Whether the outputs of two variants of a graph are close enough for a useful tolerance."""
    if one.datatype is Datatype.BYTES:
        return True
    values = one.to_numpy().astype(np.float64).reshape(-1)
    return _spread(values, other) <= MAX_SHARE * _root_mean_square(values)


def sample_indexes(count: int) -> npt.NDArray[np.int64]:
    """Flat indexes of at most SAMPLE_COUNT elements, evenly spread, including the first and last."""
    samples = min(count, SAMPLE_COUNT)
    return np.arange(samples, dtype=np.int64) * (count - 1) // max(samples - 1, 1)


def _compare(expected: ExpectedOutput, tensor: Tensor, reference: str) -> OutputRow:
    record = expected.record
    if tensor.datatype is not record.datatype:
        return _row(expected, reference, f"is {tensor.datatype}; expected {record.datatype}")
    if tensor.shape != record.shape:
        return _row(expected, reference, f"has shape {list(tensor.shape)}; expected {list(record.shape)}")
    try:
        flat = tensor.to_numpy().reshape(-1)
    except InvalidRequest as error:
        return _row(expected, reference, f"is truncated or damaged: {error.message}")
    worst = _worst(expected, flat, reference)
    return worst if worst.problem else msgspec.structs.replace(worst, problem=_statistics_problem(record, flat))


def _row(expected: ExpectedOutput, reference: str, problem: str) -> OutputRow:
    return OutputRow(reference=reference, output=expected.record.name, problem=problem)


def _worst(expected: ExpectedOutput, flat: Array, reference: str) -> OutputRow:
    """The element with the largest difference relative to its tolerance; a problem if it exceeds that."""
    if not expected.indexes.size:
        return _row(expected, reference, "")
    record, got, wanted = expected.record, flat[expected.indexes], expected.values
    if record.datatype is Datatype.BYTES:
        differences = np.asarray([_text(a) != _text(b) for a, b in zip(got, wanted, strict=True)], np.float64)
        allowed = np.zeros_like(differences)
    else:
        differences, allowed = _differences(got, wanted, record.tolerance)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(differences == 0.0, 0.0, differences / allowed)
    worst = int(np.argmax(shares))
    index = np.unravel_index(int(expected.indexes[worst]), record.shape) if record.shape else ()
    row = OutputRow(
        reference=reference,
        output=record.name,
        difference=float(differences[worst]),
        allowed=float(allowed[worst]),
        index=tuple(int(axis) for axis in index),
        expected=_text(wanted[worst]),
        got=_text(got[worst]),
    )
    if row.share <= 1.0:
        return row
    where = f"at {list(row.index)}: " if row.index else ""
    sentence = f"differs {where}got {row.got}, expected {row.expected}"
    if math.isfinite(differences[worst]) and record.datatype is not Datatype.BYTES:
        sentence += f", {differences[worst]:.2g} apart where {allowed[worst]:.2g} is allowed"
    over = int(np.count_nonzero(differences > allowed))
    return msgspec.structs.replace(row, problem=f"{sentence} ({over} of {differences.size} values differ)")


def _differences(got: Array, wanted: Array, tolerance: Tolerance) -> tuple[npt.NDArray[np.float64], ...]:
    """(differences, allowed differences) by element. A difference is infinite if exactly one value is not finite."""
    here, there = got.astype(np.float64), wanted.astype(np.float64)
    are_finite = np.isfinite(here) & np.isfinite(there)
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.where(are_finite, np.abs(here - there), np.inf)
        allowed = np.where(are_finite, tolerance.absolute + tolerance.relative * np.abs(there), 0.0)
    if got.dtype.kind in "iu":  # integers beyond 2^53 may be equal in float64
        differences = np.where(got != wanted, np.maximum(differences, 1.0), 0.0)
    differences[~np.isfinite(here) & ~np.isfinite(there)] = 0.0
    return differences, allowed


def _statistics_problem(wanted: OutputRecord, flat: Array) -> str:
    """Checks what the sample cannot show: the number of non-finite elements, mean and standard deviation."""
    finite_count, mean, std = _statistics(flat)
    if finite_count != wanted.finite_count:
        lost = flat.size - finite_count
        first = int(np.argmin(np.isfinite(flat.astype(np.float64)))) if lost else 0
        where = f", the first at {[int(axis) for axis in np.unravel_index(first, wanted.shape)]}" if lost else ""
        return f"{lost} of {flat.size} values are not finite{where}; expected {flat.size - wanted.finite_count}"
    for name, here, there in (("mean", mean, wanted.mean), ("deviation", std, wanted.std)):
        if here is None or there is None:
            continue
        allowed = wanted.tolerance.absolute + (wanted.tolerance.relative + _STATISTICS_SLACK) * abs(there)
        if abs(here - there) > allowed + _STATISTICS_SLACK:
            return f"its {name} is {here:.6g}, expected {there:.6g}: {allowed:.3g} is allowed"
    return ""


def _statistics(values: Array) -> tuple[int, float | None, float | None]:
    """Count, mean and deviation of the finite elements; no mean and deviation for BYTES."""
    if values.dtype == np.object_:
        return values.size, None, None
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    return (finite.size, float(finite.mean()), float(finite.std())) if finite.size else (0, 0.0, 0.0)


def _root_mean_square(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def _spread(values: npt.NDArray[np.float64], other: Tensor | None) -> float:
    if other is None or other.element_count != values.size or not values.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(values - other.to_numpy().astype(np.float64).reshape(-1))
    return float(np.max(apart[np.isfinite(apart)], initial=0.0))


def _array_of(sample: Sequence[Value], datatype: Datatype) -> Array:
    """The sample in to_numpy's type. Raises ValueError for an element of another type."""
    if datatype is Datatype.BYTES:
        texts = np.empty(len(sample), np.object_)
        texts[:] = [str(item) for item in sample]
        return texts
    try:
        dtype = _numpy_type(datatype)
        return np.array([np.nan if item is None else item for item in sample], dtype)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the sample is not {datatype}: {error}") from error


def _numpy_type(datatype: Datatype) -> npt.DTypeLike:
    if datatype in FLOATS:
        return np.float64
    return Tensor("", datatype, (0,), memoryview(b"")).to_numpy().dtype


def _value_of(item: object) -> Value:
    if isinstance(item, bytes):
        return _text(item)
    if isinstance(item, float):
        return float(f"{item:.9g}") if math.isfinite(item) else None  # FP32 has 9 significant digits
    if isinstance(item, bool | int):
        return item
    raise TypeError(f"{item!r} is no element of a tensor")


def _text(item: object) -> str:
    if isinstance(item, bytes):
        return item.decode("utf-8", "backslashreplace")
    return f"{item:.9g}" if isinstance(item, float | np.floating) else str(item)


# Decoding and resizing give the same pixels everywhere; only the engine's arithmetic differs. FastestDet's scores
# change by 0.0003 with factors rounded to TF32, by 0.027 with red and blue exchanged.
SCORE_SLACK, LEAST_IOU = 0.01, 0.9


def picture_record(seen: tuple[SeenClass, ...], *, sha256: str, threshold: float) -> PictureRecord:
    """The record of a picture for golden.json. threshold: the detector's minimum score."""
    if all(item.xyxy is not None for item in seen):
        return PictureRecord(sha256, seen, PictureTolerance(SCORE_SLACK, LEAST_IOU, threshold))
    last = seen[-1].score if len(seen) > 1 else 0.0  # the last of the top classes may be another one
    return PictureRecord(sha256, seen, PictureTolerance(SCORE_SLACK, LEAST_IOU, last))


def classes_in(result: VisionResult) -> tuple[SeenClass, ...]:
    """One row per object or class, by descending score; boxes rounded to 0.1 pixels. Raises InvalidRequest."""
    if not isinstance(result, Detections | Classes):
        raise InvalidRequest(f"results of type {type(result).__name__} cannot be compared")
    boxes = np.round(result.xyxy.astype(np.float64), 1).tolist() if isinstance(result, Detections) else None
    scores = np.round(result.score.astype(np.float64), 4).tolist()
    return tuple(
        SeenClass(int(class_id), score, None if boxes is None else tuple(boxes[row]))
        for row, (class_id, score) in enumerate(zip(result.class_id.tolist(), scores, strict=True))
    )


def compare_picture(record: PictureRecord, got: tuple[SeenClass, ...]) -> str:
    """The first mismatch as a sentence; empty if none. Objects near the score threshold may be missing or new."""
    left = list(got)
    for wanted in record.seen:
        match = _best(wanted, left)
        if match is None or _overlap(wanted, match) < record.tolerance.iou:
            if not _is_borderline(wanted, record.tolerance):
                return f"{_describe(wanted)} is not seen any more{_describe_replacement(match)}"
            continue
        left.remove(match)
        if abs(match.score - wanted.score) > record.tolerance.score:
            return f"{_describe(wanted)} has score {match.score:.3f} now, {record.tolerance.score:g} apart is allowed"
    surplus = next((item for item in left if not _is_borderline(item, record.tolerance)), None)
    return f"{_describe(surplus)} is seen now, and was not when golden.json was recorded" if surplus else ""


def _best(wanted: SeenClass, among: list[SeenClass]) -> SeenClass | None:
    same = [item for item in among if item.class_id == wanted.class_id]
    return max(same, key=lambda item: _overlap(wanted, item), default=None)


def _overlap(one: SeenClass, other: SeenClass) -> float:
    """Intersection over union; 1 if neither has a box, 0 if only one has."""
    if one.xyxy is None or other.xyxy is None:
        return 1.0 if one.xyxy is other.xyxy else 0.0
    return float(overlaps(np.array([one.xyxy]), np.array([other.xyxy]))[0, 0])


def _is_borderline(item: SeenClass, tolerance: PictureTolerance) -> bool:
    return item.score - tolerance.threshold <= tolerance.score


def _describe(item: SeenClass) -> str:
    where = f" at {[round(side) for side in item.xyxy]}" if item.xyxy is not None else ""
    return f"class {item.class_id}{where}, score {item.score:.3f},"


def _describe_replacement(nearest: SeenClass | None) -> str:
    if nearest is None or nearest.xyxy is None:
        return ""
    return f" (the nearest of its class is at {[round(side) for side in nearest.xyxy]})"
