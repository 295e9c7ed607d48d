"""What an output should be against what came. Pure.

Two kinds of expectation: a recorded sample with mean and deviation, and the whole answer of an independent reference.
A difference is told by its worst element: the one that is most times over what it may differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.catalogue.golden import OutputRecord, Tolerance, Value
from server.core.errors import InvalidRequest
from server.core.tensor import FLOATS, Array, Datatype, Tensor

SAMPLE_COUNT = 64
# Of an output's root mean square, and of each number. This is for FP32 arithmetic in whatever order: FastestDet with
# its graph optimised and not differs by 5e-5 on made inputs, by 4e-4 on a picture. A GPU's TF32 is not meant: rounded
# so, one number of FastestDet's boxes moves by a quarter (NVIDIA_TF32_OVERRIDE=0 in Triton's environment prevents it).
SHARE, SHARE_OF_HALVES = 1e-3, 2e-2
# How far two ways through one graph are apart on one machine stands for how far machines are: INT8 kernels differ by
# whole steps. Never more than a tenth of the root mean square, so that a way that is wrong does not excuse all others.
SPREAD_MARGIN, MAX_SHARE = 8.0, 0.1
_HALVES = (Datatype.FP16, Datatype.BF16)
_STATISTICS_SLACK = 1e-9  # the same numbers summed by another numpy


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of an output's finite elements; mean, std: None for BYTES."""

    finite_count: int
    mean: float | None
    std: float | None


@dataclass(frozen=True, slots=True)
class Expected:
    """An output as it should be. indexes: (k,) flat; values: (k,) in the datatype's own numpy type."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    indexes: npt.NDArray[np.int64]
    values: Array
    tolerance: Tolerance
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Difference:
    """One element that came, and what it should be.

    allowed: how far apart the two may be. over_count, count: how many elements are further apart, of how many.
    """

    index: tuple[int, ...]
    expected: str
    got: str
    difference: float
    allowed: float
    over_count: int
    count: int

    @property
    def share(self) -> float:
        """Of what is allowed: over 1 is too much."""
        if self.difference == 0.0:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """An output against its expectation. problem: what is wrong with it, else empty. worst: None where none is told."""

    output: str
    problem: str = ""
    worst: Difference | None = None


def compare_outputs(expected: Sequence[Expected], got: Sequence[Tensor]) -> list[Comparison]:
    """One comparison an expected output; outputs that nobody expects are passed over."""
    came = {tensor.name: tensor for tensor in got}
    names = ", ".join(repr(name) for name in came) or "none"
    return [
        _compare(output, came[output.name])
        if output.name in came
        else Comparison(output.name, f"is not among the outputs that came ({names})")
        for output in expected
    ]


def expected_of_record(record: OutputRecord) -> Expected:
    """What golden.json says of an output. Raises ValueError where its sample does not fit its shape and datatype."""
    indexes = sample_indexes(math.prod(record.shape))
    if len(indexes) != len(record.sample):
        raise ValueError(
            f"output {record.name!r}: {len(record.sample)} values; {list(record.shape)} has {len(indexes)}"
        )
    return Expected(
        record.name,
        record.datatype,
        record.shape,
        indexes,
        _array_of(record.sample, record.datatype),
        record.tolerance,
        Statistics(record.finite_count, record.mean, record.std),
    )


def expected_of_tensor(tensor: Tensor, tolerance: Tolerance) -> Expected:
    """The whole of a reference's answer."""
    values = tensor.to_numpy().reshape(-1)
    indexes = np.arange(values.size, dtype=np.int64)
    return Expected(tensor.name, tensor.datatype, tensor.shape, indexes, values, tolerance, _statistics(values))


def record_of_tensor(tensor: Tensor, tolerance: Tolerance) -> OutputRecord:
    """What golden.json keeps of an output."""
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
    """What an output may differ by on another machine or engine. one, other: the same output, by two ways.

    Whole numbers, truth values and BYTES must be equal, unless the two ways differ.
    """
    if one.datatype is Datatype.BYTES:
        return Tolerance()
    values = one.to_numpy().astype(np.float64).reshape(-1)
    root_mean_square = _root_mean_square(values)
    share = 0.0
    if one.datatype in FLOATS:
        share = SHARE_OF_HALVES if one.datatype in _HALVES else SHARE
    spread = min(SPREAD_MARGIN * _spread(values, other), MAX_SHARE * root_mean_square)
    return Tolerance(absolute=float(f"{max(share * root_mean_square, spread):.3g}"), relative=share)


def is_steady(one: Tensor, other: Tensor) -> bool:
    """Whether two ways to one output are near enough that a tolerance can tell right from wrong."""
    if one.datatype is Datatype.BYTES:
        return True
    values = one.to_numpy().astype(np.float64).reshape(-1)
    return _spread(values, other) <= MAX_SHARE * _root_mean_square(values)


def sample_indexes(count: int) -> npt.NDArray[np.int64]:
    """Flat indexes of at most 64 elements, first and last among them, evenly spread."""
    kept = min(count, SAMPLE_COUNT)
    return np.arange(kept, dtype=np.int64) * (count - 1) // max(kept - 1, 1)


def _compare(expected: Expected, tensor: Tensor) -> Comparison:
    problem = _misfit(expected, tensor)
    if problem:
        return Comparison(expected.name, problem)
    try:
        flat = tensor.to_numpy().reshape(-1)
    except InvalidRequest as error:
        return Comparison(expected.name, f"is truncated or damaged: {error.message}")
    worst = _worst(expected, flat)
    if worst is not None and worst.share > 1.0:
        return Comparison(expected.name, _sentence(expected, worst), worst)
    return Comparison(expected.name, _statistics_problem(expected, flat), worst)


def _misfit(expected: Expected, tensor: Tensor) -> str:
    if tensor.datatype is not expected.datatype:
        return f"is {tensor.datatype}; expected {expected.datatype}"
    if tensor.shape != expected.shape:
        return f"has shape {list(tensor.shape)}; expected {list(expected.shape)}"
    return ""


def _worst(expected: Expected, flat: Array) -> Difference | None:
    """The element that is most times over what it may differ, None where nothing was expected."""
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
    place = int(np.argmax(shares))
    index = np.unravel_index(int(expected.indexes[place]), expected.shape) if expected.shape else ()
    return Difference(
        tuple(int(axis) for axis in index),
        _text(wanted[place]),
        _text(got[place]),
        float(differences[place]),
        float(allowed[place]),
        int(np.count_nonzero(differences > allowed)),
        differences.size,
    )


def _differences(got: Array, wanted: Array, tolerance: Tolerance) -> tuple[npt.NDArray[np.float64], ...]:
    """(how far apart, how far they may be), by element. Infinite where one of the two is no number."""
    here, there = got.astype(np.float64), wanted.astype(np.float64)
    are_finite = np.isfinite(here) & np.isfinite(there)
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.where(are_finite, np.abs(here - there), np.inf)
        allowed = np.where(are_finite, tolerance.absolute + tolerance.relative * np.abs(there), 0.0)
    if got.dtype.kind in "iu":  # beyond 2^53 two that differ are one in float64
        differences = np.where(got != wanted, np.maximum(differences, 1.0), 0.0)
    differences[~np.isfinite(here) & ~np.isfinite(there)] = 0.0
    return differences, allowed


def _sentence(expected: Expected, worst: Difference) -> str:
    where = f"at {list(worst.index)}: " if worst.index else ""
    told = f"differs {where}got {worst.got}, expected {worst.expected}"
    if math.isfinite(worst.difference) and expected.datatype is not Datatype.BYTES:
        told += f", {worst.difference:.2g} apart where {worst.allowed:.2g} is allowed"
    return f"{told} ({worst.over_count} of {worst.count} values differ)"


def _statistics_problem(expected: Expected, flat: Array) -> str:
    """What the sample does not show: elements that are no number, and a mean or deviation that is another's."""
    got, wanted = _statistics(flat), expected.statistics
    if got.finite_count != wanted.finite_count:
        lost, expected_lost = flat.size - got.finite_count, flat.size - wanted.finite_count
        first = int(np.argmin(np.isfinite(flat.astype(np.float64)))) if lost else 0
        where = f", the first at {[int(axis) for axis in np.unravel_index(first, expected.shape)]}" if lost else ""
        return f"{lost} of {flat.size} values are not finite{where}; expected {expected_lost}"
    for word, here, there in (("mean", got.mean, wanted.mean), ("deviation", got.std, wanted.std)):
        if here is None or there is None:
            continue
        allowed = expected.tolerance.absolute + (expected.tolerance.relative + _STATISTICS_SLACK) * abs(there)
        if abs(here - there) > allowed + _STATISTICS_SLACK:
            return f"its {word} is {here:.6g}, expected {there:.6g}: {allowed:.3g} is allowed"
    return ""


def _statistics(values: Array) -> Statistics:
    if values.dtype == np.object_:
        return Statistics(values.size, None, None)
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return Statistics(0, 0.0, 0.0)
    return Statistics(finite.size, float(finite.mean()), float(finite.std()))


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
    """The sample in the type that to_numpy gives. Raises ValueError for what is no such number."""
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
    """An element as JSON holds it."""
    if isinstance(item, bytes):
        return _text(item)
    if isinstance(item, float):
        return float(f"{item:.9g}") if math.isfinite(item) else None  # 9 digits are all that FP32 has
    if isinstance(item, bool | int):
        return item
    raise TypeError(f"{item!r} is no element of a tensor")


def _text(item: object) -> str:
    if isinstance(item, bytes):
        return item.decode("utf-8", "backslashreplace")
    return f"{item:.9g}" if isinstance(item, float | np.floating) else str(item)
