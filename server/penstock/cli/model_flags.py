"""Flags that describe a model file: shared by `models inspect`, `models add` and `serve`."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import fail, print_failure

if TYPE_CHECKING:
    from penstock.models.inspect.inspection import Hints

MAX_SIDE = 16384
_MAX_SHOWN = 200  # characters of a wrong file name
_COLORS, _RESIZES = ("rgb", "bgr", "gray"), ("letterbox", "corner", "squash", "crop", "keep")


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The given flags. Empty or None: from the file, or the default of the model's family."""

    layout: Annotated[str, typer.Option(metavar="LAYOUT", help="output layout, such as yolov8 [recognised]")] = ""
    input_size: Annotated[
        str, typer.Option(metavar="W[xH]", help="the network's size in pixels, 640 or 640x480 [the file's]")
    ] = ""
    labels: Annotated[str, typer.Option(help="file (one label per line, JSON or data.yaml), or a;b;c [the file's]")] = (
        ""
    )
    color: Annotated[str, typer.Option(metavar="|".join(_COLORS), help="colour order [by model family]")] = ""
    mean: Annotated[str, typer.Option(metavar="R,G,B", help="in the network's colour order [by model family]")] = ""
    std: Annotated[str, typer.Option(metavar="R,G,B", help="the input is (pixel × scale - mean) / std")] = ""
    scale: Annotated[float | None, typer.Option(help="factor for pixel values, such as 0.00392")] = None
    resize: Annotated[str, typer.Option(metavar="|".join(_RESIZES), help="resize mode [by model family]")] = ""
    padding: Annotated[float | None, typer.Option(min=0, max=255, help="pixel value of padding [by family]")] = None
    conf: Annotated[float | None, typer.Option(min=0, max=1, help="score threshold [0.25]")] = None
    iou: Annotated[float | None, typer.Option(min=0, max=1, help="IoU threshold of NMS [0.45]")] = None
    keypoint_names: Annotated[str, typer.Option(help="keypoint names: nose;left_eye;…")] = ""
    skeleton: Annotated[str, typer.Option(metavar="0-1;1-2", help="pairs of keypoints to join in drawings")] = ""
    parameter: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="any picture parameter (docs/card-parameters.md); repeatable"),
    ] = None
    deepstream: Annotated[
        Path | None, typer.Option(help="a config_infer_primary.txt of DeepStream that describes the model")
    ] = None
    picture: Annotated[
        list[Path] | None, typer.Option(help="photo for the trial run, with objects that the model detects; repeatable")
    ] = None

    def hints(self) -> "Hints":
        """The flags as hints for the inspection. Ends the command if one is malformed."""
        from penstock.models.inspect.inspection import Hints, merged
        from penstock.vision.layouts.registry import LAYOUTS

        labels, origin = _labels(self.labels)
        hints = Hints(
            layout=_one_of("--layout", self.layout, (*LAYOUTS,)),
            input_size=image_size(self.input_size),
            labels=labels,
            labels_origin=origin,
            color=_one_of("--color", self.color.lower(), _COLORS),
            mean=_numbers("--mean", self.mean),
            std=_divisors("--std", self.std),
            scale=self.scale,
            resize=_one_of("--resize", self.resize.lower(), _RESIZES),
            padding=self.padding,
            conf=self.conf,
            iou=self.iou,
            keypoint_names=_names(self.keypoint_names),
            skeleton=_pairs(self.skeleton),
            parameters=dict(map(_parameter, self.parameter or [])),
        )
        return hints if self.deepstream is None else merged(hints, _deepstream(self.deepstream))

    def pictures(self) -> tuple[Path, ...]:
        """Paths of the pictures. Ends the command if one is missing."""
        for path in self.picture or []:
            if not _is_file(path):
                fail(f"--picture: there is no file {path}")
        return tuple(self.picture or [])


AllowsCode = Annotated[
    bool, typer.Option("--allow-model-code", help="accept custom operators, and run PyTorch programs")
]


def with_options(
    group: str, options: Sequence[inspect.Parameter], make: Callable[..., Any] = dict
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replaces the command's parameter `group` by these options, for typer.

    The command gets make(…) of the options' values, by name, as `group`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != group]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *options)]

        def run(**given: Any) -> None:
            values = make(**{one.name: given.pop(one.name) for one in options})
            command(**given, **{group: values})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


with_model_flags = with_options(
    "flags", (*inspect.signature(ModelFlags, eval_str=True).parameters.values(),), ModelFlags
)


def _deepstream(path: Path) -> "Hints":
    from penstock.models.inspect.deepstream import NotDeepStream, hints_from_deepstream

    try:
        found = hints_from_deepstream(path)
    except NotDeepStream as error:
        fail(f"--deepstream: {error}")
    for sentence in found.unused:
        print_failure(f"--deepstream: {sentence}")
    return found.hints


def _one_of(flag: str, text: str, allowed: tuple[str, ...]) -> str:
    if text and text not in allowed and ":" not in text:
        fail(f"{flag} {text!r} is not one of: {', '.join(allowed)}")
    return text


def image_size(text: str) -> tuple[int, int] | None:
    """(height, width) of 640 or 640x480, which is width x height; None of an empty text. Ends the command otherwise."""
    if not text:
        return None
    width, _, height = text.lower().partition("x")
    sides = (height or width, width)
    if not all(_is_short_number(side) and 0 < int(side) <= MAX_SIDE for side in sides):
        fail(f"--input-size {text!r} should be a width, or a width and a height, such as 640 or 640x480")
    return int(sides[0]), int(sides[1])


def _is_short_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _labels(text: str) -> tuple[tuple[str, ...], str]:
    """Labels of a;b;c or of a file, and where they are from."""
    from penstock.models.inspect.labels import MAX_LABELS_BYTES, labels_of_file

    if not text:
        return (), ""
    if ";" in text:
        return _names(text), "--labels"
    path = Path(text)
    if not _is_file(path):
        fail(f"--labels: there is no file {text}; give a file with one label per line, or a;b;c")
    labels = labels_of_file(path)
    if not labels:
        fail(
            f"--labels: no labels in {path}; give a UTF-8 file of up to {MAX_LABELS_BYTES} bytes with one label per "
            "line, a JSON list, or a data.yaml with names"
        )
    return labels, str(path)


def check_file_name(path: Path) -> None:
    """Ends the command if the name is too long for the file system, or not UTF-8."""
    try:
        str(path).encode()
        path.exists()
    except (OSError, UnicodeEncodeError):
        fail(f"{ascii(str(path))[:_MAX_SHOWN]} cannot be a file's name here: it is too long or not UTF-8")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long
        return False


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    if not text:
        return ()
    try:
        numbers = tuple(float(part) for part in text.replace(";", ",").split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        fail(f"{flag} {text!r} should be one number per channel, such as 0.485,0.456,0.406")
    return numbers


def _divisors(flag: str, text: str) -> tuple[float, ...]:
    numbers = _numbers(flag, text)
    if 0.0 in numbers:
        fail(f"{flag} {text!r} has a 0, by which pixels cannot be divided: give numbers such as 0.229,0.224,0.225")
    return numbers


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in _names(text):
        one, _, other = part.partition("-")
        if not (_is_short_number(one) and _is_short_number(other)):
            fail(f"--skeleton {text!r} should be pairs of keypoint numbers, such as 0-1;1-2")
        found.append((int(one), int(other)))
    return tuple(found)


def _parameter(text: str) -> tuple[str, str]:
    from penstock.vision.parameters import PARAMETERS, meant_by

    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        fail(f"--parameter {text!r} should be KEY=VALUE, such as class-agnostic-nms=1")
    if key not in PARAMETERS:
        meant = meant_by(key)
        fail(
            f"--parameter {key!r} is not a picture parameter"
            + (f"; did you mean {meant!r}?" if meant else ": docs/card-parameters.md lists them")
        )
    return key, value
