"""Compares a session's outputs with those of FP32 on the CPU, before it is used. Inputs are random with fixed seeds.

Float outputs are compared channel by channel, so that large box coordinates do not hide wrong scores.
"""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config, OrtLoadError, OrtRequestError
from .placement import Precision

# Allowed difference, see `difference`. INT8: the CPU's and the GPU's kernels round at different places.
LIMITS = {Precision.FP32: 0.005, Precision.TF32: 0.03, Precision.FP16: 0.03, Precision.INT8: 0.1}
_BRIGHTNESS = (1.0, 0.5, 0.1)  # of the rows
_SIDES = (32, 1, 224)  # sizes for variable dimensions; the first that the model accepts is used
_BLOCK = 8  # pixels: neighbours in a picture are alike
_IMAGE_RANK = 3
_MAX_PIXEL = 255.0
_SORTS = (b"NonMaxSuppression", b"TopK", b"EfficientNMS")
_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}

Arrays = dict[str, Any]  # name → ndarray
Run = Callable[[Arrays], Arrays]  # raises OrtRequestError


@dataclass(frozen=True)
class Reference:
    """inputs: some rows, or one without a batch dimension. outputs: FP32 on the CPU. why_not: why not comparable."""

    inputs: Arrays
    outputs: Arrays
    row_count: int
    why_not: str = ""


def reference_of(config: Config, path: Path, run: Run) -> Reference:
    """Inputs that the model accepts, and their outputs by `run`. path: the ONNX file."""
    why = "the model accepts none of the random inputs"
    counts = (len(_BRIGHTNESS), 1) if int(config.get("max_batch_size", 0)) >= len(_BRIGHTNESS) else (1,)
    for count in counts:
        for side in _SIDES if _varies(config) else _SIDES[:1]:
            inputs = draw_inputs(config, count, side)
            if inputs is None:
                return Reference({}, {}, count, "it has an input of TYPE_STRING")
            try:
                outputs = run(inputs)
            except OrtRequestError as error:
                why = str(error)
                continue
            sorts = _sorting_operator(path)
            return Reference(inputs, outputs, count, f"it sorts its outputs ({sorts})" if sorts else "")
    return Reference({}, {}, 0, why)


def draw_inputs(config: Config, row_count: int, side: int) -> Arrays | None:
    """Inputs of that many different rows; None if one is text. side: size of variable dimensions."""
    inputs: Arrays = {}
    for number, entry in enumerate(config.get("input", [])):
        shape = (entry.get("reshape") or {}).get("shape", entry.get("dims", []))
        dims = tuple(side if int(dim) < 0 else int(dim) for dim in shape)
        kind = str(entry["data_type"]).removeprefix("TYPE_")
        if kind == "STRING":
            return None
        rows = [
            _row(config, kind, dims, seed=len(_BRIGHTNESS) * number + row, brightness=_BRIGHTNESS[row])
            for row in range(row_count)
        ]
        inputs[entry["name"]] = np.stack(rows) if config.get("max_batch_size") else rows[0]
    return inputs


def _varies(config: Config) -> bool:
    return any(int(dim) < 0 for entry in config.get("input", []) for dim in entry.get("dims", []))


def _row(config: Config, kind: str, dims: tuple[int, ...], *, seed: int, brightness: float) -> Any:
    """Blocks of random brightness for a picture, within the range of the model's card; zeros for indices."""
    random = np.random.default_rng(seed)
    is_picture = len(dims) == _IMAGE_RANK
    if kind not in _FLOATS and not (kind == "UINT8" and is_picture):
        return np.zeros(dims, "bool" if kind == "BOOL" else kind.lower())
    if not is_picture:
        return (random.random(dims) * brightness).astype(_FLOATS[kind])
    coarse = random.random(tuple(-(-dim // _BLOCK) if dim > _BLOCK else dim for dim in dims))
    for axis, dim in enumerate(dims):
        if dim > _BLOCK:
            coarse = np.repeat(coarse, _BLOCK, axis=axis).take(range(dim), axis=axis)
    pixels = brightness * (0.9 * coarse + 0.1 * random.random(dims))
    if kind == "UINT8":
        return (_MAX_PIXEL * pixels).astype(np.uint8)
    scale, offset = _pixel_range(config)
    return (scale * (_MAX_PIXEL * pixels - offset)).astype(_FLOATS[kind])


def _pixel_range(config: Config) -> tuple[float, float]:
    """(scale, offset) of the model's card: value = scale · (pixel - offset). Without a card values are 0 to 1."""
    parameters = config.get("parameters", {})
    if "network-type" not in parameters:
        return 1 / _MAX_PIXEL, 0.0
    texts = [(parameters.get(key) or {}).get("string_value", "") for key in ("net-scale-factor", "offsets")]
    numbers = [_first_number(text) for text in texts]
    return (1.0 if numbers[0] is None else numbers[0]), numbers[1] or 0.0


def _first_number(text: str) -> float | None:
    try:
        return float(text.split(";")[0])
    except ValueError:
        return None


def _sorting_operator(path: Path) -> str:
    """The operator that sorts by score, by which nearly equal values change places; empty without one."""
    if not path.stat().st_size:
        return ""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return next((name.decode() for name in _SORTS if content.find(name) >= 0), "")


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, str]:
    """(largest difference, its output) over all float outputs; infinity for another shape or a NaN of its own.

    Each is relative to the largest value of its channel, or to 1 where all values of a channel are smaller.
    """
    worst = (0.0, "")
    for name, wanted in expected.items():
        if wanted.dtype.kind != "f":
            continue
        gap = math.inf if found[name].shape != wanted.shape else _relative_gap(wanted, found[name])
        worst = max(worst, (gap, name))
    return worst


def check_outputs(run: Run, reference: Reference, precision: Precision, row_count: int, *, has_batch: bool) -> None:
    """Raises OrtLoadError if a batch of that size has other outputs than the reference; OrtRequestError of `run`.

    Outputs that cannot be compared are only checked for NaN and infinity that the reference does not have.
    """
    if not reference.outputs:
        return
    if reference.why_not:
        inputs = repeated(reference.inputs, row_count) if has_batch else reference.inputs
        if _are_finite(reference.outputs) and not _are_finite(found := run(inputs)):
            name = next(name for name in found if not _are_finite({name: found[name]}))
            raise OrtLoadError(f"output '{name}' with {row_count} rows has infinity or NaN")
        return
    expected, inputs = reference.outputs, reference.inputs
    if has_batch:
        expected, inputs = repeated(expected, row_count), repeated(inputs, row_count)
    gap, name = difference(expected, run(inputs))
    if gap <= LIMITS[precision]:
        return
    with_rows = f" with {row_count} rows" if has_batch else ""
    if math.isinf(gap):
        raise OrtLoadError(f"output '{name}'{with_rows} has another shape than FP32 on the CPU, infinity or NaN")
    limit = f"{LIMITS[precision]:.1%}"
    raise OrtLoadError(f"output '{name}'{with_rows} differs by {gap:.1%} from FP32 on the CPU (limit {limit})")


def _are_finite(outputs: Mapping[str, Any]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in outputs.values() if array.dtype.kind == "f")


def _relative_gap(wanted: Any, got: Any) -> float:
    """Infinities and NaN that both have are equal."""
    if not wanted.size:
        return 0.0
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    is_same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        gaps = np.where(is_same, 0.0, np.abs(got - wanted))
    if not np.isfinite(gaps).all():
        return math.inf
    sizes = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    others = _axes_of_a_channel(wanted.shape)
    floor = min(1.0, float(sizes.max())) or 1.0
    scales: Any = np.maximum(sizes.max(axis=others), floor)
    return float((gaps.max(axis=others) / scales).max())


def _axes_of_a_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """All axes but the channels': the smaller one of the second and the last axis."""
    if len(shape) < 3:
        return tuple(range(len(shape)))
    channels = 1 if shape[1] <= shape[-1] else len(shape) - 1
    return tuple(axis for axis in range(len(shape)) if axis != channels)


def repeated(rows: Arrays, row_count: int) -> Arrays:
    """As many rows, repeated in order."""
    return {name: array[np.arange(row_count) % len(array)] for name, array in rows.items()}
