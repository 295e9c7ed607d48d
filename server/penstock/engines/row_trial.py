"""Whether requests to a model may share a run: output rows must follow input rows.

Used by the gateway, and beside Triton's model.py by our Python-based backends; imports nothing of penstock.
"""

import base64
import math
import mmap
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PARAMETER = "rows_follow_batch"  # parameter in config.pbtxt
DENIED = f"config.pbtxt says {PARAMETER}: 0"
SEQUENCES = "sequence and decoupled models are not tried"
FULL_PRECISION, REDUCED_PRECISION = 1e-3, 2e-2  # allowed difference, relative to the row's largest absolute value
MAX_NUMBERS = 16_000_000  # values in a row of one input
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_SIDES = (32, 1, 224)  # sizes for variable dimensions; the first that the model accepts is used
_DARK = 0.1  # scale of the second row, so that its results differ
_EIGHT_BITS = (b"QuantizeLinear", b"QuantizeLSTM", b"ConvInteger", b"MatMulInteger", b"QLinear", b"QGemm")
_REDUCED = ("FP16", "BF16")
_IMAGE_RANK = 3
_ZERO = 1e-6  # if all values of a row are smaller, differences are relative to this
GREY_JPEG = base64.b64decode(  # 16 x 16 pixels in colour, baseline, 4:2:0
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAKBueIx4ZKCMgoy0qqC+8P//8Nzc8P//////////////////////////////////////////////////"
    "////////2wBDAaq0tPDS8P//////////////////////////////////////////////////////////////////////////////wAARCAAQABAD"
    "ASIAAhEBAxEB/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABQQAQAAAAAAAAAAAAAAAAAAAAD/xAAUAQEAAAAAAAAAAAAAAAAAAAAA/8QAFBEBAAAA"
    "AAAAAAAAAAAAAAAAAP/aAAwDAQACEQMRAD8AAA//2Q=="
)
_HALF_WHITE_JPEG = base64.b64decode(  # the same, with the left half nearly white
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////m8H////6"
    "/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj/wAARCAAQABAD"
    "ASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAABgX/xAAbEAABBAMAAAAAAAAAAAAAAAAAAQECAxITUf/EABQBAQAAAAAAAAAAAAAAAAAAAAD/"
    "xAAUEQEAAAAAAAAAAAAAAAAAAAAA/9oADAMBAAIRAxEAPwCojlsNV06ycZOx6EjRy2e26dgGUnccKD//2Q=="
)

Arrays = dict[str, Any]  # name → ndarray
Answer = Arrays | str  # the outputs, or why the run failed
Run = Callable[[Arrays], Answer]
Trial = Generator[Arrays, Answer, str]


@dataclass(frozen=True)
class InputSpec:
    """An input of the model. data_type: KServe v2's name. dims: without the batch dimension, -1 for variable ones."""

    name: str
    data_type: str
    dims: tuple[int, ...]


def declared(said: str) -> bool | None:
    """The parameter's value; None if not set. Raises ValueError for other values than 0 and 1."""
    word = said.strip().lower()
    if word and word not in _FLAGS:
        raise ValueError(f"parameter {PARAMETER} is '{said}': say 1 or 0")
    return _FLAGS[word] if word else None


def tolerance_of(data_types: Sequence[str], *, is_reduced: bool = False) -> float:
    """Allowed difference. data_types: of all tensors. is_reduced: the model computes in 16 or 8 bits."""
    is_reduced = is_reduced or any(one in _REDUCED for one in data_types)
    return REDUCED_PRECISION if is_reduced else FULL_PRECISION


def computes_in_8_bits(path: Path) -> bool:
    """Whether the ONNX file has an operator that computes in 8 bits."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(name) >= 0 for name in _EIGHT_BITS)


def row_trial(inputs: Sequence[InputSpec], tolerance: float, *, takes_pictures: bool = False) -> Trial:
    """Runs two different rows alone and in one batch. Yields inputs; send it the outputs or the error.

    Returns why requests may not be merged, or empty. takes_pictures: BYTES are encoded pictures.
    """
    why = "it has no inputs"
    varies = any(dim < 0 for spec in inputs for dim in spec.dims)
    for side in (_SIDES if varies else _SIDES[:1]) if inputs else ():
        if any(math.prod(_shape(spec, side)) > MAX_NUMBERS for spec in inputs):
            why = f"a row of its inputs has more than {MAX_NUMBERS} values"
            continue
        first, second = _two_rows(inputs, side, takes_pictures)
        one = yield first
        other = (yield second) if not isinstance(one, str) else one
        if isinstance(one, str) or isinstance(other, str):
            why = str(other)
            continue
        both = yield {name: np.concatenate([first[name], second[name]]) for name in first}
        if isinstance(both, str):
            return f"a batch of two rows fails: {both}"
        if not (found := difference((one, other), both, tolerance)):
            return ""
        again = yield first
        is_same = not isinstance(again, str) and all(is_alike(again[name], one[name], tolerance) for name in one)
        return found if is_same else "its results for the same input differ between runs"
    return f"its trial fails: {why}"


def run_trial(trial: Trial, run: Run) -> str:
    """Runs the trial with a function that runs the model. Returns its result."""
    try:
        asked = next(trial)
        while True:
            asked = trial.send(run(asked))
    except StopIteration as end:
        return str(end.value)


def difference(alone: Sequence[Arrays], batch: Arrays, tolerance: float) -> str:
    """How the batch's rows differ from those of single runs; empty if they do not."""
    for name, rows in batch.items():
        for number, answer in enumerate(alone):
            single = answer[name]
            if single.shape[:1] != (1,):
                return f"output '{name}' has the shape {list(single.shape)} for one row of input"
            if rows.shape[:1] != (len(alone),):
                return f"output '{name}' has the shape {list(rows.shape)} for {len(alone)} rows of input"
            if not is_alike(rows[number : number + 1], single, tolerance):
                return (
                    f"row {number + 1} of output '{name}' differs between a batch of {len(alone)} and a request alone"
                )
    return ""


def is_alike(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two rows are equal: floats within the tolerance, everything else exactly."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    found, wanted = one.astype(np.float64), other.astype(np.float64)
    is_equal = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    finite = np.abs(wanted[np.isfinite(wanted)])
    largest = max(float(finite.max()) if finite.size else 0.0, _ZERO)
    with np.errstate(invalid="ignore"):
        return bool((is_equal | (np.abs(found - wanted) <= tolerance * largest)).all())


def _shape(spec: InputSpec, side: int) -> tuple[int, ...]:
    return (1, *[side if dim < 0 else dim for dim in spec.dims])


def _two_rows(inputs: Sequence[InputSpec], side: int, takes_pictures: bool) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(20261127)  # reproducible
    pairs = {spec.name: _pair(spec, _shape(spec, side), random, takes_pictures) for spec in inputs}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def _pair(spec: InputSpec, shape: tuple[int, ...], random: Any, takes_pictures: bool) -> tuple[Any, Any]:
    """Floats in [0, 1), or pixels; otherwise 0 and 1, because the values may be counts or indices."""
    if spec.data_type == "BYTES":
        words = (GREY_JPEG, _HALF_WHITE_JPEG) if takes_pictures else (b"0", b"1")
        return tuple(np.full(shape, word, object) for word in words)  # type: ignore[return-value]
    one, other = random.random(shape), random.random(shape) * _DARK
    if spec.data_type.startswith(("FP", "BF")):
        dtype = np.float32 if spec.data_type == "BF16" else f"float{spec.data_type[2:]}"
        return one.astype(dtype), other.astype(dtype)
    dtype = spec.data_type.lower()
    if spec.data_type == "UINT8" and len(spec.dims) >= _IMAGE_RANK:
        return (one * 255).astype(dtype), (other * 255).astype(dtype)
    bits = one > one.mean() if one.size > 1 else one < 0
    return bits.astype(dtype), (~bits).astype(dtype)
