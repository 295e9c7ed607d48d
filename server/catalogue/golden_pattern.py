"""Inputs that are the same on every machine and with every library: integer arithmetic, then one scaling."""

import math
import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from server.catalogue.golden import GoldenError, InputPattern
from server.core.model import TensorSpec
from server.core.tensor import FLOATS, Array, Datatype, Tensor, tensor_from_bytes, tensor_from_numpy
from server.vision.spec import PrepareSpec

_GOLDEN_RATIO = 0x9E3779B9
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))  # splitmix32's
_RANGES = {Datatype.UINT8: (0.0, 256.0), Datatype.INT8: (-128.0, 128.0), Datatype.BYTES: (0.0, 2.0**32)}

MOST_ELEMENTS = 1 << 26  # 64 pictures of a megapixel; while they are made they take 2 GB
Shapes = Mapping[str, tuple[int, ...]]  # given by a person, by input


class ShapeUnknown(GoldenError):
    """An input has dimensions that vary, and nobody has said which to send; or it takes what is not made here."""


def pattern_for(spec: TensorSpec, shapes: Shapes, value_range: tuple[float, float] | None = None) -> InputPattern:
    """The pattern of an input as a model's metadata declares it, batch dimension included, where there is one.

    A dimension that varies is the given shape's, or 1 where it is the first of several. value_range: [low, high),
    None for what fits the datatype: floats 0 to 1, bytes all of theirs, wider integers (indexes, masks) 0 and 1.
    Raises ShapeUnknown naming the input where its shape is not known, GoldenError where the given one does not fit.
    """
    low, high = value_range or _RANGES.get(spec.datatype) or ((0.0, 1.0) if _is_float(spec.datatype) else (0.0, 2.0))
    return InputPattern(spec.name, spec.datatype, _shape(spec, shapes), low, high)


def made_input(pattern: InputPattern) -> Tensor:
    """The tensor that the pattern describes; the same bytes everywhere. BYTES: numbers in decimal.

    Raises GoldenError for a shape that no input is made in.
    """
    count = math.prod(pattern.shape)
    if min(pattern.shape, default=1) < 0 or count > MOST_ELEMENTS:
        raise GoldenError(
            f"an input {pattern.name!r} of shape {list(pattern.shape)} is not made here: give sizes of 0 and more, at "
            f"most {MOST_ELEMENTS:,} elements in all"
        )
    numbers = _splitmix32(count, zlib.crc32(pattern.name.encode()))
    if pattern.datatype is Datatype.BYTES:
        return tensor_from_bytes(pattern.name, [b"%d" % number for number in numbers.tolist()], pattern.shape)
    scaled = pattern.low + (pattern.high - pattern.low) * (numbers.astype(np.float64) / 2.0**32)
    if pattern.datatype is Datatype.BF16:
        halves = (scaled.astype("<f4").view(np.uint32) >> 16).astype(np.uint16)
        return Tensor(pattern.name, Datatype.BF16, pattern.shape, halves.view(np.uint8).data)
    values: Array = scaled if _is_float(pattern.datatype) else np.floor(scaled).astype(np.int64)
    return tensor_from_numpy(pattern.name, values.astype(pattern.datatype.dtype).reshape(pattern.shape))


def pixel_range(spec: PrepareSpec) -> tuple[float, float] | None:
    """What an image model's input ranges over, from the darkest pixel to the brightest; None for bytes as they are."""
    if spec.datatype is Datatype.UINT8:
        return None
    ends = [
        spec.scale * (pixel - offset) * factor
        for pixel in (0.0, 255.0)
        for offset, factor in zip(spec.offsets, spec.channel_factors, strict=True)
    ]
    return min(ends), max(ends)


def _splitmix32(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """(count,) numbers below 2^32: a Weyl sequence, each term mixed so that neighbours have nothing in common."""
    mask = np.uint64(0xFFFFFFFF)
    numbers = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_RATIO) + np.uint64(seed)) & mask
    for shift, factor in _ROUNDS:
        numbers = ((numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)) & mask
    return numbers ^ (numbers >> np.uint64(15))


def _is_float(datatype: Datatype) -> bool:
    return datatype in FLOATS


def _shape(spec: TensorSpec, shapes: Shapes) -> tuple[int, ...]:
    given = shapes.get(spec.name)
    if given is not None:
        if len(given) != len(spec.shape) or any(a not in (b, -1) for a, b in zip(spec.shape, given, strict=True)):
            raise GoldenError(f"--shape {spec.name} is {list(given)}; the model declares {list(spec.shape)}")
        return given
    shape = (1, *spec.shape[1:]) if len(spec.shape) > 1 and spec.shape[0] == -1 else spec.shape
    if -1 in shape:
        example = ",".join(str(size) if size > 0 else "N" for size in spec.shape)
        raise ShapeUnknown(
            f"input {spec.name!r} has shape {list(spec.shape)}: say which to send with --shape {spec.name}:{example}"
        )
    return shape
