"""Query parameters of POST …/image: thresholds, classes, and the form of the answer."""

import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.image_answer import MaskForm
from penstock.protocol.request_checks import quoted
from penstock.vision.layouts.suppression import MAX_CANDIDATES
from penstock.vision.results import CARD_DEFAULTS, ResultOptions

_MAX_PARAMETERS = 64
_MAX_CLASSES = 1000
_FLAGS = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, slots=True)
class ImageQuery:
    """The query of one request. is_drawn: answer with an annotated JPEG instead of JSON."""

    result_options: ResultOptions = CARD_DEFAULTS
    masks: MaskForm = MaskForm.RLE
    is_drawn: bool = False


DEFAULT_QUERY = ImageQuery()


class QueryParameter(NamedTuple):
    """read: its value from text; raises InvalidRequest. schema: OpenAPI's."""

    read: Callable[[str, str], Any]
    text: str
    schema: dict[str, Any]


def query_of(query: bytes) -> ImageQuery:
    """Parses the query string. Raises InvalidRequest for an unknown, repeated or malformed parameter."""
    if not query:
        return DEFAULT_QUERY
    pairs = query_pairs(query, QUERY_PARAMETERS)
    values: dict[str, Any] = {name: QUERY_PARAMETERS[name].read(name, text) for name, text in pairs}
    masks = values.get("masks")
    options = ResultOptions(
        conf=values.get("conf"),
        iou=values.get("iou"),
        classes=values.get("classes"),
        max_detections=values.get("max_detections"),
        needs_masks=None if masks is None else masks is not MaskForm.NONE,
    )
    return ImageQuery(options, masks or MaskForm.RLE, is_drawn=values.get("draw", False))


def query_pairs(query: bytes, allowed: Collection[str], repeatable: str = "") -> list[tuple[str, str]]:
    """(name, text) of each query parameter. Raises InvalidRequest for an unknown or repeated one, and for too many.

    repeatable: the parameter that can be given several times.
    """
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise InvalidRequest(f"the URL has more than {_MAX_PARAMETERS} query parameters; send fewer") from None
    unknown = [name for name, _ in pairs if name not in allowed] if pairs else [query.decode("latin-1")]
    if unknown:
        near = difflib.get_close_matches(unknown[0][:80].lower(), allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        shown = ", ".join(map(quoted, unknown[:8]))
        raise InvalidRequest(f"unknown query parameter {shown}; {hint}allowed: {', '.join(allowed)}")
    names = [name for name, _ in pairs if name != repeatable]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"query parameter {name!r} is given twice; send it once")
    return pairs


def _refusal(name: str, text: str, needed: str) -> InvalidRequest:
    return InvalidRequest(f"query parameter {name!r} is {quoted(text)}; {needed}")


def _fraction(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise _refusal(name, text, "it must be a number from 0 to 1")
    return number


def _count(name: str, text: str) -> int:
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_CANDIDATES))
    if not is_short or not 1 <= int(text) <= MAX_CANDIDATES:
        raise _refusal(name, text, f"it must be an integer from 1 to {MAX_CANDIDATES}")
    return int(text)


def _classes(name: str, text: str) -> tuple[str, ...]:
    classes = tuple(part.strip() for part in text.split(","))
    if not all(classes):
        raise _refusal(name, text, "it must be class ids or labels, separated by commas")
    if len(classes) > _MAX_CLASSES:
        raise InvalidRequest(f"query parameter {name!r} has {len(classes)} classes (limit {_MAX_CLASSES}); send fewer")
    return classes


def _mask_form(name: str, text: str) -> MaskForm:
    if text not in set(MaskForm):
        raise _refusal(name, text, f"it must be one of: {', '.join(MaskForm)}")
    return MaskForm(text)


def _flag(name: str, text: str) -> bool:
    if text not in _FLAGS:
        raise _refusal(name, text, f"it must be one of: {', '.join(_FLAGS)}")
    return _FLAGS[text]


_FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
QUERY_PARAMETERS = {
    "conf": QueryParameter(
        _fraction,
        "Results with a lower score are dropped. By default the model's own threshold, which may be higher or lower.",
        _FRACTION,
    ),
    "iou": QueryParameter(
        _fraction,
        "IoU threshold of NMS: of two boxes that overlap more, the one with the lower score is dropped.",
        _FRACTION,
    ),
    "classes": QueryParameter(
        _classes, "Only these classes: ids or labels, separated by commas.", {"type": "string", "minLength": 1}
    ),
    "max_detections": QueryParameter(
        _count,
        "At most this many results, by descending score.",
        {"type": "integer", "minimum": 1, "maximum": MAX_CANDIDATES},
    ),
    "masks": QueryParameter(
        _mask_form, "How masks are written; rle by default.", {"type": "string", "enum": list(MaskForm)}
    ),
    "draw": QueryParameter(
        _flag,
        "1: answer with the picture as image/jpeg, results drawn into it.",
        {"type": "string", "enum": ["0", "1"]},
    ),
}
