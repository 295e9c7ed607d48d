"""golden.json: recorded outputs for generated inputs, equal on every machine. Triton ignores the file."""

import math
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.models.catalogue import CatalogueError
from penstock.protocol.engine import TensorSpec
from penstock.protocol.inference import FLOATS, Array, Datatype, Tensor, tensor_from_bytes, tensor_from_numpy
from penstock.vision.spec import PrepareSpec

GOLDEN_FILE = "golden.json"
PICTURE_FILE = "golden.jpg"

Value = bool | int | float | str | None  # None: not finite


class GoldenError(CatalogueError):
    """A golden.json cannot be read, made or written, or the model's inputs cannot be generated."""


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number matches if |got - expected| <= absolute + relative * |expected|."""

    absolute: float = 0.0
    relative: float = 0.0


class InputPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A generated input: numbers in [low, high), derived from the input's name and shape."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    low: float
    high: float
    pattern: Literal["splitmix32"] = "splitmix32"  # the generator


class OutputRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded output. finite_count, mean, std: of all finite elements; mean and std are None for BYTES."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    tolerance: Tolerance
    finite_count: int
    mean: float | None
    std: float | None
    sample: tuple[Value, ...]  # elements at sample_indexes; BYTES as text


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generated inputs and the recorded outputs."""

    inputs: tuple[InputPattern, ...]
    outputs: tuple[OutputRecord, ...]


class SeenClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of the picture, or of one box in it. xyxy: in pixels; None for the whole picture."""

    class_id: int
    score: float
    xyxy: tuple[float, float, float, float] | None = None


class PictureTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Maximum difference of scores, minimum IoU of boxes, and the detector's minimum score."""

    score: float
    iou: float
    threshold: float


class PictureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recorded results for golden.jpg. sha256: of the picture."""

    sha256: str
    seen: tuple[SeenClass, ...]
    tolerance: PictureTolerance


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A golden.json. file: relative to the model's folder."""

    recorded_with: str
    file: str
    sha256: str
    tensors: TensorRecord | None = None
    picture: PictureRecord | None = None


_GOLDEN = msgspec.json.Decoder(Golden)
_LISTS = re.compile(rb"\[[^][{}]*\]")
_BREAKS = re.compile(rb"\n *")  # never inside a string, where a line break is \\n


def read_golden(folder: Path) -> Golden | None:
    """The model's golden.json, or None. Raises GoldenError with the path and the problem."""
    path = folder / GOLDEN_FILE
    try:
        return _GOLDEN.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise GoldenError(
            f"{path} is none that this version of Penstock reads ({error}): remove it and record it anew with "
            f"`penstock models check {folder.name} --record`"
        ) from error


def write_golden(folder: Path, golden: Golden) -> Path:
    """Writes golden.json atomically. Raises GoldenError if it exists."""
    path = folder / GOLDEN_FILE
    text = _LISTS.sub(_on_one_line, msgspec.json.format(msgspec.json.encode(golden), indent=2))
    try:
        descriptor, name = tempfile.mkstemp(prefix=".golden.", dir=folder)
        staged = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text + b"\n")
            staged.chmod(0o644)
            os.link(staged, path)  # unlike a rename, fails if the name exists
        finally:
            staged.unlink()
    except FileExistsError as error:
        raise GoldenError(f"{path} is there already: remove it to record it anew") from error
    except OSError as error:
        raise GoldenError(f"{path} cannot be written ({error.strerror}): check the folder's permissions") from error
    return path


def _on_one_line(found: re.Match[bytes]) -> bytes:
    return _BREAKS.sub(b" ", found[0]).replace(b"[ ", b"[").replace(b" ]", b"]")


_GOLDEN_RATIO = 0x9E3779B9
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))  # of splitmix32
_RANGES = {Datatype.UINT8: (0.0, 256.0), Datatype.INT8: (-128.0, 128.0), Datatype.BYTES: (0.0, 2.0**32)}

MOST_ELEMENTS = 1 << 26  # 64 pictures of a megapixel; generating them takes 2 GB
Shapes = Mapping[str, tuple[int, ...]]  # user's shapes by input


class ShapeUnknown(GoldenError):
    """An input has variable dimensions without a given shape, or cannot be generated."""


def pattern_for(spec: TensorSpec, shapes: Shapes, value_range: tuple[float, float] | None = None) -> InputPattern:
    """The pattern of an input in a model's metadata, batch dimension included.

    A variable dimension comes from `shapes`; a variable first dimension defaults to 1. value_range: [low, high); None
    for the datatype's default: floats in [0, 1), 8-bit integers over their full range, wider integers (indexes, masks)
    0 or 1.
    Raises ShapeUnknown for an unknown shape, GoldenError for one that does not fit.
    """
    low, high = value_range or _RANGES.get(spec.datatype) or ((0.0, 1.0) if _is_float(spec.datatype) else (0.0, 2.0))
    return InputPattern(spec.name, spec.datatype, _shape(spec, shapes), low, high)


def generate_input(pattern: InputPattern) -> Tensor:
    """The tensor of the pattern, with equal bytes on every machine; BYTES are decimal numbers. Raises GoldenError."""
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
    """(minimum, maximum) of an image model's input; None for UINT8."""
    if spec.datatype is Datatype.UINT8:
        return None
    ends = [
        spec.scale * (pixel - offset) * factor
        for pixel in (0.0, 255.0)
        for offset, factor in zip(spec.offsets, spec.channel_factors, strict=True)
    ]
    return min(ends), max(ends)


def _splitmix32(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """(count,) numbers below 2^32: a Weyl sequence through a mixing function."""
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
