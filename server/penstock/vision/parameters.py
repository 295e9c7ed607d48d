"""The parameters of config.pbtxt that describe pictures: typed access, and their documentation.

An error names the key, its value and the allowed values.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from penstock.protocol.errors import InvalidRequest

_Choice = TypeVar("_Choice", bound=IntEnum)
_LARGEST = (1 << 31) - 1
_MAX_PAIRS = 1000  # each is a line in every drawing of an object
_MAX_SHOWN = 300  # characters of a value in an error
_FLAGS = {"0": False, "1": True, "false": False, "true": True, "off": False, "on": True}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Typed access to a model's parameters. Methods return defaults for missing keys, and raise InvalidRequest."""

    model_name: str
    values: Mapping[str, str]

    def refusal(self, key: str, what: str) -> InvalidRequest:
        """The error for a key. what: the rest of the sentence."""
        value = self.values.get(key, "")
        shown = repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}…"
        text = f" = {shown}" if key in self.values else ""
        return InvalidRequest(f"model {self.model_name!r}: parameter {key!r}{text} {what}")

    def choice(self, key: str, kind: type[_Choice], default: _Choice) -> _Choice:
        """An enum member by its number or its name, in any case."""
        text = self._text(key)
        if text is None:
            return default
        for member in kind:
            if text.lower() in (str(member.value), member.name.lower()):
                return member
        allowed = ", ".join(f"{member.value} or {member.name.lower()}" for member in kind)
        raise self.refusal(key, f"is not one of: {allowed}")

    def one_of(self, key: str, names: tuple[str, ...], default: str) -> str:
        """One of the names, in this case."""
        text = self._text(key)
        if text is None:
            return default
        if text not in names:
            raise self.refusal(key, f"is not one of: {', '.join(names)}")
        return text

    def flag(self, key: str) -> bool:
        """False if absent."""
        text = self._text(key)
        if text is None:
            return False
        if text.lower() not in _FLAGS:
            raise self.refusal(key, f"is not one of: {', '.join(_FLAGS)}")
        return _FLAGS[text.lower()]

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        text = self._text(key)
        return default if text is None else self._finite(key, text)

    def fraction(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        number = self.number(key, default)
        if not 0.0 <= number <= 1.0:
            raise self.refusal(key, "is not between 0 and 1")
        return number

    def count(self, key: str, default: int, *, least: int = 1, most: int = _LARGEST) -> int:
        """An integer from `least` to `most`, but not 0."""
        text = self._text(key)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            raise self.refusal(key, "is not an integer") from None
        if number < least or number == 0:
            raise self.refusal(key, "must be 1 or more" + (", or -1 for no limit" if least == -1 else ""))
        if number > most:
            raise self.refusal(key, f"is over {most}")
        return number

    def numbers(self, key: str, *, count: int, default: float) -> tuple[float, ...]:
        """Exactly `count` numbers, separated by semicolons."""
        text = self._text(key)
        if text is None:
            return (default,) * count
        parts = [part for part in text.split(";") if part.strip()]
        if len(parts) != count:
            raise self.refusal(key, f"has {len(parts)} numbers; {count} are needed, separated by ';'")
        return tuple(self._finite(key, part) for part in parts)

    def names(self, key: str) -> tuple[str, ...]:
        """Names separated by semicolons; a trailing semicolon is allowed."""
        text = self._text(key)
        return () if text is None else tuple(name.strip() for name in text.removesuffix(";").split(";"))

    def integers(self, key: str) -> tuple[int, ...]:
        """Integers of 0 or more, separated by semicolons; empty if absent."""
        parts = [part.strip() for part in (self._text(key) or "").split(";") if part.strip()]
        return tuple(
            self._integer(key, part, "has a value that is not an integer of 0 or more; separate them by ';'")
            for part in parts
        )

    def class_fractions(self, key: str) -> tuple[tuple[int, float], ...]:
        """Numbers from 0 to 1 by class id, `0:0.5;3:0.25`."""
        found = []
        for part in (self._text(key) or "").split(";"):
            class_id, separator, share = (word.strip() for word in part.partition(":"))
            if not part.strip():
                continue
            expected = "is not CLASS:NUMBER;CLASS:NUMBER, such as 0:0.5;3:0.25"
            if not separator:
                raise self.refusal(key, expected)
            number = self._finite(key, share)
            if not 0.0 <= number <= 1.0:
                raise self.refusal(key, "has a number that is not between 0 and 1")
            found.append((self._integer(key, class_id, expected), number))
        return tuple(found)

    def pairs(self, key: str, *, below: int) -> tuple[tuple[int, int], ...]:
        """Pairs of numbers from 0 to below - 1, `0-1;1-2`."""
        found = []
        for part in (self._text(key) or "").split(";"):
            if not part.strip():
                continue
            one, _, other = (word.strip() for word in part.partition("-"))
            expected = f"is not FROM-TO;FROM-TO, with numbers from 0 to {below - 1}"
            pair = self._integer(key, one, expected), self._integer(key, other, expected)
            if max(pair) >= below:
                raise self.refusal(key, expected)
            found.append(pair)
        if len(found) > _MAX_PAIRS:
            raise self.refusal(key, f"has {len(found)} pairs (limit {_MAX_PAIRS})")
        return tuple(found)

    def _integer(self, key: str, text: str, expected: str) -> int:
        """expected: the end of the error message."""
        if not (text.isascii() and text.isdigit()):
            raise self.refusal(key, expected)
        if len(text) > len(str(_LARGEST)) or int(text) > _LARGEST:
            raise self.refusal(key, f"has a number over {_LARGEST}")
        return int(text)

    def _text(self, key: str) -> str | None:
        text = self.values.get(key)
        return None if text is None else text.strip()

    def _finite(self, key: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(
                key, "is not a number" if ";" not in self.values[key] else "has a value that is not a number"
            )
        return number


class ParameterDoc(NamedTuple):
    """One row of docs/card-parameters.md, as Markdown."""

    values: str
    default: str


PARAMETERS = {
    "network-type": ParameterDoc(
        "`0` or `detector`, `1` or `classifier`, `2` or `segmentation`, `3` or `instance_segmentation`, `100` or "
        "`other` (embeddings, text, depth)",
        "none: no pictures",
    ),
    "layout": ParameterDoc(
        "the output layout, see below; nvinfer's names for it are `parse-bbox-func-name`, `parse-classifier-func-name` "
        "and `parse-bbox-instance-mask-func-name`",
        "detectors `boxes`, classifiers `classification`",
    ),
    "parse-bbox-func-name": ParameterDoc("detectors: as `layout`", "-"),
    "parse-classifier-func-name": ParameterDoc("classifiers: as `layout`", "-"),
    "parse-bbox-instance-mask-func-name": ParameterDoc("instance segmentation: as `layout`", "-"),
    "output-blob-names": ParameterDoc(
        "the outputs that the layout reads, in the order of its table row: `boxes;scores`",
        "all, as config.pbtxt has them",
    ),
    "image-size-input": ParameterDoc(
        "the name of an input of INT64, INT32 or FP32, `[ 2 ]`, that gets the picture's width and height in pixels",
        "none",
    ),
    "model-color-format": ParameterDoc("`0` or `RGB`, `1` or `BGR`, `2` or `GRAY`", "RGB"),
    "network-input-order": ParameterDoc("`0` or `NCHW`, `1` or `NHWC`", "NCHW"),
    "net-scale-factor": ParameterDoc(
        "a number, not 0. The input is net-scale-factor × (pixel − offset) × channel factor, with pixels from 0 "
        "to 255. Not with UINT8",
        "1",
    ),
    "offsets": ParameterDoc(
        "one number per channel, in the model's colour order: `123.7;116.3;103.5`. Not with UINT8", "0"
    ),
    "channel-scale-factors": ParameterDoc(
        "one number per channel, not 0, for models normalised by a standard deviation (1 / std). Not with UINT8", "1"
    ),
    "maintain-aspect-ratio": ParameterDoc(
        "`0` or `1`: keep the aspect ratio and pad at the right and the bottom", "0: stretch"
    ),
    "symmetric-padding": ParameterDoc("`0` or `1`: with maintain-aspect-ratio, pad on all sides", "0"),
    "padding-value": ParameterDoc("0 to 255: the pixel value of the padding; YOLO models use 114", "0: black"),
    "resize-shorter-side": ParameterDoc(
        "pixels: resize the shorter side to this, then cut the network's size from the centre. From the network's "
        "longer side to four times that; not with maintain-aspect-ratio or a variable size",
        "none",
    ),
    "scaling-filter": ParameterDoc("`nearest`, `bilinear`, `area`, `cubic`", "bilinear"),
    "infer-dims": ParameterDoc(
        "`3;H;W` (`1;H;W` for GRAY): the network's size, if the input's H and W are -1; needed with "
        "`image-decoder: engine`",
        "none",
    ),
    "max-side": ParameterDoc(
        "pixels; only for inputs of variable size: larger pictures are made smaller",
        "none; 4000 with `min-side`; 3200 if only W is -1",
    ),
    "min-side": ParameterDoc(
        "pixels, at most 8192; only for inputs of variable size: pictures whose shorter side is smaller are enlarged",
        "none",
    ),
    "size-multiple": ParameterDoc(
        "at most 8192; only for inputs of variable size: both sides become multiples of it", "1"
    ),
    "min-width": ParameterDoc(
        "pixels; only for inputs of given H and variable W: narrower pictures are padded at the right", "none"
    ),
    "scaled-decode": ParameterDoc(
        "`0` or `1`: decode large JPEGs, and cameras on a GPU, at a fraction of their size: faster, slightly different "
        "results",
        "0",
    ),
    "labels": ParameterDoc("names by class id: `person;bicycle;car`", "none"),
    "class-ids": ParameterDoc(
        "the class id of each class of the network, if they are not 0, 1, 2 …: `1;2;3;13`; `labels` are then by id",
        "none",
    ),
    "pre-cluster-threshold": ParameterDoc(
        "0 to 1: boxes, or lines of text, with this score or less are dropped",
        "0.25; `boxes` and the like 0.2; `db` 0.6; `ctc` 0",
    ),
    "class-thresholds": ParameterDoc("thresholds of single classes: `0:0.5;3:0.25`", "none"),
    "nms-iou-threshold": ParameterDoc(
        "detectors, 0 to 1: of two boxes of a class that overlap more, the one with the lower score is dropped",
        "0.45; `boxes` and the like 0.3",
    ),
    "class-agnostic-nms": ParameterDoc("`0` or `1`: boxes of different classes suppress each other, too", "0"),
    "topk": ParameterDoc("results returned, the best first; `-1` for all", "detectors -1, classifiers 5"),
    "max-detections": ParameterDoc("as `topk`", "-"),
    "classifier-threshold": ParameterDoc("classifiers: a number; classes with a lower score are dropped", "none"),
    "apply-softmax": ParameterDoc("classifiers and detectors, `0` or `1`: the scores are logits of one class", "0"),
    "apply-sigmoid": ParameterDoc("the same: the scores are logits of independent classes", "0"),
    "segmentation-threshold": ParameterDoc(
        "0 to 1: pixels of a mask, or of text, with this probability or less are left out", "0.5; `db` 0.3"
    ),
    "keypoint-shape": ParameterDoc(
        "poses: number of keypoints, and 2 (x, y) or 3 (x, y, score) values: `17;3`", "none"
    ),
    "keypoint-names": ParameterDoc("one name a keypoint: `nose;left_eye;right_eye`", "none"),
    "skeleton": ParameterDoc("pairs of keypoints that drawings join: `0-1;0-2`", "none"),
    "characters": ParameterDoc(
        "text recognisers: the characters in the network's order, without the blank, which is 0; nothing between them",
        "none",
    ),
    "unclip-ratio": ParameterDoc("text detectors: how much a rectangle grows, by area × ratio / perimeter", "1.5"),
    "normalize-embedding": ParameterDoc("`0` or `1`: divide an embedding by its length", "0"),
    "depth-scale": ParameterDoc("depth: factor that makes the output metres, or another unit", "1"),
    "image-decoder": ParameterDoc(
        "`0` or `gateway`, `1` or `engine`: the model decodes pictures itself, from one input TYPE_STRING, dims "
        "`[ 1 ]`; without NHWC, max-side, scaled-decode, a padding-value, and filters other than bilinear",
        "gateway",
    ),
}
_TYPO_LIKENESS = 0.84


def meant_by(key: str) -> str:
    """The nearest parameter of a misspelled key; empty for a known or an unrelated key."""
    if key in PARAMETERS:
        return ""
    plain = key.strip().lower().replace("_", "-")
    return next(iter(difflib.get_close_matches(plain, PARAMETERS, n=1, cutoff=_TYPO_LIKENESS)), "")
