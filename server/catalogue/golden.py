"""golden.json: what a model answered to a known input, recorded beside its config.pbtxt. Triton passes it over.

    recorded_with   by what the answers were recorded, in words
    file, sha256    the model's file then; the answers are this file's
    tensors         inputs made by a named pattern (golden_pattern), and of each output a sample with mean and deviation
    picture         golden.jpg beside it, and what the model saw in it, in the picture's pixels

Tolerances are in the file, one an output, so that a model whose answers differ from machine to machine can say so.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from server.catalogue.errors import CatalogueError
from server.core.tensor import Datatype

GOLDEN_FILE = "golden.json"
PICTURE_FILE = "golden.jpg"

Value = bool | int | float | str | None  # None: not finite


class GoldenError(CatalogueError):
    """A golden.json cannot be read, made or written, or no input can be made for the model. One sentence."""


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number is right when |got - expected| <= absolute + relative * |expected|."""

    absolute: float = 0.0
    relative: float = 0.0


class InputPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input that is made, not stored: numbers in [low, high), by the pattern, the input's name and its shape.

    shape: with the batch dimension where the model has one.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    low: float
    high: float
    pattern: Literal["splitmix32"] = "splitmix32"


class OutputRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An output as it was: its elements at sample_indexes, and mean and deviation of all finite ones.

    mean, std: None for BYTES. sample: BYTES as text.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    tolerance: Tolerance
    finite_count: int
    mean: float | None
    std: float | None
    sample: tuple[Value, ...]


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inference of made inputs."""

    inputs: tuple[InputPattern, ...]
    outputs: tuple[OutputRecord, ...]


class SeenClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of the picture, or of one box in it. xyxy: pixels of the picture; None for the whole of it."""

    class_id: int
    score: float
    xyxy: tuple[float, float, float, float] | None = None


class PictureTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """score: largest difference. iou: least overlap of two boxes that are the same.

    threshold: the score under which the model answers nothing; what lies within `score` of it may come or go.
    """

    score: float
    iou: float
    threshold: float


class PictureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was seen in golden.jpg. sha256: the picture's."""

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
_BREAKS = re.compile(rb"\n *")  # never inside a string: there a line break is \\n


def read_golden(folder: Path) -> Golden | None:
    """The model's golden.json, None where it has none. Raises GoldenError with the path and what is wrong in it."""
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
    """golden.json, at once or not at all. Raises GoldenError where one is there already: nothing is overwritten."""
    path = folder / GOLDEN_FILE
    text = _LISTS.sub(_on_one_line, msgspec.json.format(msgspec.json.encode(golden), indent=2))
    try:
        descriptor, name = tempfile.mkstemp(prefix=".golden.", dir=folder)
        staged = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text + b"\n")
            staged.chmod(0o644)
            os.link(staged, path)  # unlike a rename, this refuses a name that is taken
        finally:
            staged.unlink()
    except FileExistsError as error:
        raise GoldenError(f"{path} is there already: remove it to record it anew") from error
    except OSError as error:
        raise GoldenError(f"{path} cannot be written ({error.strerror}): check the folder's permissions") from error
    return path


def _on_one_line(found: re.Match[bytes]) -> bytes:
    """A list of numbers is looked at as one thing, not as 64 lines."""
    return _BREAKS.sub(b" ", found[0]).replace(b"[ ", b"[").replace(b" ]", b"]")
