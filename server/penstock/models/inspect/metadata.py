"""What exporters write into an ONNX file's metadata_props."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

MAX_LITERAL = 256 << 10  # characters of a Python literal; ast needs some hundred times as many bytes
MAX_CLASSES = 30_000
_MAX_LABEL = 200


@dataclass(frozen=True, slots=True)
class UltralyticsMetadata:
    """Of Ultralytics' exporter, and YOLOv5's. imgsz: (height, width). keypoint_shape: (count, values) of a pose.

    task: empty in YOLOv5's and older files. is_end_to_end: None if the file does not say.
    """

    task: str = ""
    names: tuple[str, ...] = ()
    imgsz: tuple[int, int] | None = None
    keypoint_shape: tuple[int, int] | None = None
    is_end_to_end: bool | None = None
    channels: int = 3


def ultralytics_of(metadata: Mapping[str, str]) -> UltralyticsMetadata | None:
    """The metadata, or None if the file has no `names` as Ultralytics writes them."""
    names = labels_of(literal(metadata.get("names", "")))
    if not names:
        return None
    sides, shape = literal(metadata.get("imgsz", "")), literal(metadata.get("kpt_shape", ""))
    flag = metadata.get("end2end", "").strip().lower()
    channels = metadata.get("channels", "").strip()
    return UltralyticsMetadata(
        task=metadata.get("task", "").strip().lower()[:_MAX_LABEL],
        names=names,
        imgsz=_pair(sides, most=1 << 16),
        keypoint_shape=_pair(shape, most=4096),
        is_end_to_end={"true": True, "false": False}.get(flag),
        channels=int(channels) if channels.isascii() and channels.isdigit() and len(channels) < 4 else 3,
    )


def literal(text: str) -> object:
    """The value of a Python literal; None if it is none, or too large. Never evaluated."""
    if not text or len(text) > MAX_LITERAL:
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def labels_of(value: object) -> tuple[str, ...]:
    """Names by class id from {0: "person", …} in any order, or a list; ids without a name have their number."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_CLASSES:
        return ()
    by_id = {}
    for key, name in value.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 6 else key
        if type(number) is not int or not 0 <= number < MAX_CLASSES or not isinstance(name, str | int | float):
            return ()
        by_id[number] = one_label(str(name))
    return tuple(by_id.get(number) or str(number) for number in range(max(by_id) + 1))


def one_label(text: str) -> str:
    """The label without what config.pbtxt's list cannot hold: semicolons, line breaks, control characters."""
    spaced = " ".join(text.replace(";", ",").split())[:_MAX_LABEL]
    return "".join(sign for sign in spaced if sign.isprintable())


def _pair(value: object, *, most: int) -> tuple[int, int] | None:
    if type(value) is int:
        value = (value, value)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    one, other = value
    if type(one) is not int or type(other) is not int or not (0 < one <= most and 0 < other <= most):
        return None
    return one, other
