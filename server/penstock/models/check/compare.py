"""Compares a model's outputs and picture results with the expected ones, without I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.models.check.golden import OutputRecord, PictureRecord, PictureTolerance, SeenClass, Tolerance, Value
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import FLOATS, Array, Datatype, Detections, Tensor, VisionResult
from penstock.vision.layouts.layout import overlaps

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
class OutputStatistics:
    """Statistics of an output's finite elements; mean, std: None for BYTES."""

    finite_count: int
    mean: float | None
    std: float | None


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """An expected output. indexes: (k,) flat; values: (k,) in the datatype's numpy type."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    indexes: npt.NDArray[np.int64]
    values: Array
    tolerance: Tolerance
    statistics: OutputStatistics


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """The worst element of an output. over_count of `count` elements exceed their allowed difference."""

    index: tuple[int, ...]
    expected: str
    got: str
    difference: float
    allowed: float  # maximum allowed difference
    over_count: int
    count: int

    @property
    def share(self) -> float:
        """Difference relative to the allowed one; over 1 is too much."""
        if self.difference == 0.0:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """Result for one output. problem: empty if it is equal. worst: None if nothing was compared."""

    output: str
    problem: str = ""
    worst: ElementDifference | None = None


def compare_outputs(expected: Sequence[ExpectedOutput], got: Sequence[Tensor]) -> list[OutputComparison]:
    """One comparison for each expected output; other outputs are ignored."""
    came = {tensor.name: tensor for tensor in got}
    names = ", ".join(repr(name) for name in came) or "none"
    return [
        _compare(output, came[output.name])
        if output.name in came
        else OutputComparison(output.name, f"is not among the outputs that came ({names})")
        for output in expected
    ]


def expected_of_record(record: OutputRecord) -> ExpectedOutput:
    """The expectation from golden.json. Raises ValueError if the sample does not fit the shape and datatype."""
    indexes = sample_indexes(math.prod(record.shape))
    if len(indexes) != len(record.sample):
        raise ValueError(
            f"output {record.name!r}: {len(record.sample)} values; {list(record.shape)} has {len(indexes)}"
        )
    return ExpectedOutput(
        record.name,
        record.datatype,
        record.shape,
        indexes,
        _array_of(record.sample, record.datatype),
        record.tolerance,
        OutputStatistics(record.finite_count, record.mean, record.std),
    )


def expected_of_tensor(tensor: Tensor, tolerance: Tolerance) -> ExpectedOutput:
    """The expectation from a reference's full output."""
    values = tensor.to_numpy().reshape(-1)
    indexes = np.arange(values.size, dtype=np.int64)
    return ExpectedOutput(tensor.name, tensor.datatype, tensor.shape, indexes, values, tolerance, _statistics(values))


def record_of_tensor(tensor: Tensor, tolerance: Tolerance) -> OutputRecord:
    """The record of an output for golden.json."""
    values = tensor.to_numpy().reshape(-1)
    statistics = _statistics(values)
    sample = values[sample_indexes(values.size)]
    return OutputRecord(
        tensor.name,
        tensor.datatype,
        tensor.shape,
        tolerance,
        statistics.finite_count,
        statistics.mean,
        statistics.std,
        tuple(_value_of(item) for item in sample.tolist()),
    )


def tolerance_for(one: Tensor, other: Tensor | None = None) -> Tolerance:
    """Allowed difference between engines or machines. one, other: outputs of two variants of the graph."""
    if one.datatype is Datatype.BYTES:
        return Tolerance()
    values = one.to_numpy().astype(np.float64).reshape(-1)
    root_mean_square = _root_mean_square(values)
    share = 0.0
    if one.datatype in FLOATS:
        share = SHARE_OF_HALVES if one.datatype in _HALVES else SHARE
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


def _compare(expected: ExpectedOutput, tensor: Tensor) -> OutputComparison:
    problem = _misfit(expected, tensor)
    if problem:
        return OutputComparison(expected.name, problem)
    try:
        flat = tensor.to_numpy().reshape(-1)
    except InvalidRequest as error:
        return OutputComparison(expected.name, f"is truncated or damaged: {error.message}")
    worst = _worst(expected, flat)
    if worst is not None and worst.share > 1.0:
        return OutputComparison(expected.name, _sentence(expected, worst), worst)
    return OutputComparison(expected.name, _statistics_problem(expected, flat), worst)


def _misfit(expected: ExpectedOutput, tensor: Tensor) -> str:
    if tensor.datatype is not expected.datatype:
        return f"is {tensor.datatype}; expected {expected.datatype}"
    if tensor.shape != expected.shape:
        return f"has shape {list(tensor.shape)}; expected {list(expected.shape)}"
    return ""


def _worst(expected: ExpectedOutput, flat: Array) -> ElementDifference | None:
    """The element with the largest difference relative to its tolerance, or None without expected values."""
    if not expected.indexes.size:
        return None
    got, wanted = flat[expected.indexes], expected.values
    if expected.datatype is Datatype.BYTES:
        differences = np.asarray([_text(a) != _text(b) for a, b in zip(got, wanted, strict=True)], np.float64)
        allowed = np.zeros_like(differences)
    else:
        differences, allowed = _differences(got, wanted, expected.tolerance)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(differences == 0.0, 0.0, differences / allowed)
    worst = int(np.argmax(shares))
    index = np.unravel_index(int(expected.indexes[worst]), expected.shape) if expected.shape else ()
    return ElementDifference(
        tuple(int(axis) for axis in index),
        _text(wanted[worst]),
        _text(got[worst]),
        float(differences[worst]),
        float(allowed[worst]),
        int(np.count_nonzero(differences > allowed)),
        differences.size,
    )


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


def _sentence(expected: ExpectedOutput, worst: ElementDifference) -> str:
    where = f"at {list(worst.index)}: " if worst.index else ""
    sentence = f"differs {where}got {worst.got}, expected {worst.expected}"
    if math.isfinite(worst.difference) and expected.datatype is not Datatype.BYTES:
        sentence += f", {worst.difference:.2g} apart where {worst.allowed:.2g} is allowed"
    return f"{sentence} ({worst.over_count} of {worst.count} values differ)"


def _statistics_problem(expected: ExpectedOutput, flat: Array) -> str:
    """Checks what the sample cannot show: the number of non-finite elements, mean and standard deviation."""
    got, wanted = _statistics(flat), expected.statistics
    if got.finite_count != wanted.finite_count:
        lost, expected_lost = flat.size - got.finite_count, flat.size - wanted.finite_count
        first = int(np.argmin(np.isfinite(flat.astype(np.float64)))) if lost else 0
        where = f", the first at {[int(axis) for axis in np.unravel_index(first, expected.shape)]}" if lost else ""
        return f"{lost} of {flat.size} values are not finite{where}; expected {expected_lost}"
    for name, here, there in (("mean", got.mean, wanted.mean), ("deviation", got.std, wanted.std)):
        if here is None or there is None:
            continue
        allowed = expected.tolerance.absolute + (expected.tolerance.relative + _STATISTICS_SLACK) * abs(there)
        if abs(here - there) > allowed + _STATISTICS_SLACK:
            return f"its {name} is {here:.6g}, expected {there:.6g}: {allowed:.3g} is allowed"
    return ""


def _statistics(values: Array) -> OutputStatistics:
    if values.dtype == np.object_:
        return OutputStatistics(values.size, None, None)
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return OutputStatistics(0, 0.0, 0.0)
    return OutputStatistics(finite.size, float(finite.mean()), float(finite.std()))


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
    """One row per object or class, by descending score; boxes rounded to 0.1 pixels."""
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
