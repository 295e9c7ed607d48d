"""How a network wants to see the encoded pictures that the engine itself decodes: nvinfer's words as a record. Pure.

The words and their defaults are those of server/vision/card.py, where they are explained.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .errors import LoadError

_CHANNELS = {"RGB": 3, "BGR": 3, "GRAY": 1}
_COLORS = {"0": "RGB", "1": "BGR", "2": "GRAY", "rgb": "RGB", "bgr": "BGR", "gray": "GRAY"}
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}
_MOST_ENLARGED = 4  # as the gateway: a resize to more would cost much and leave less than a sixteenth of the picture


class Fit(Enum):
    """How a source becomes the network's size: as server/vision/spec.py's Fit, without KEEP (the size is fixed)."""

    STRETCH = "stretch"
    PAD_RIGHT_BOTTOM = "pad"
    PAD_SYMMETRIC = "pad-symmetric"
    CROP = "crop"


@dataclass(frozen=True)
class PictureSpec:
    """value = scale * (pixel - offset) * channel_factor, in the network's own colour order; padding is black before it.

    color: "RGB", "BGR" or "GRAY". shorter_side: with Fit.CROP, what the source's shorter side becomes before the cut,
    else 0. offsets, channel_factors: one a channel. Resized by cv2.INTER_LINEAR (bilinear without antialiasing).
    """

    width: int
    height: int
    color: str = "RGB"
    fit: Fit = Fit.STRETCH
    shorter_side: int = 0
    scale: float = 1.0
    offsets: tuple[float, ...] = (0.0, 0.0, 0.0)
    channel_factors: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def channels(self) -> int:
        return _CHANNELS[self.color]


def picture_spec(config: dict[str, Any], text: Callable[[str], str]) -> PictureSpec | None:
    """The record of a model whose engine decodes; None where the gateway does. text: a parameter's value, "" for none.

    Raises LoadError naming parameter, value and what is allowed.
    """
    decoder = text("image-decoder").lower() or "gateway"
    if decoder not in ("0", "gateway", "1", "engine"):
        raise LoadError(f"parameter image-decoder is '{decoder}': say gateway or engine")
    if decoder in ("0", "gateway"):
        return None
    _check_wire(config)
    color = _color(text)
    width, height = _infer_dims(text, _CHANNELS[color])
    fit = _fit(text)
    return PictureSpec(
        width=width,
        height=height,
        color=color,
        fit=fit,
        shorter_side=_shorter_side(text, max(width, height)) if fit is Fit.CROP else 0,
        scale=_factors(text, "net-scale-factor", 1)[0],
        offsets=_numbers(text, "offsets", _CHANNELS[color], 0.0),
        channel_factors=_factors(text, "channel-scale-factors", _CHANNELS[color]),
    )


def _check_wire(config: dict[str, Any]) -> None:
    inputs = config.get("input", [])
    if len(inputs) != 1 or inputs[0].get("data_type") != "TYPE_STRING" or list(inputs[0].get("dims", [])) != [1]:
        raise LoadError("parameter image-decoder: engine needs exactly one input, of TYPE_STRING and dims [ 1 ]")
    if int(config.get("max_batch_size", 0)) < 1:
        raise LoadError("parameter image-decoder: engine needs max_batch_size of 1 or more")


def _color(text: Callable[[str], str]) -> str:
    said = text("model-color-format").lower() or "rgb"
    if said not in _COLORS:
        raise LoadError(f"parameter model-color-format is '{said}': say 0 or RGB, 1 or BGR, 2 or GRAY")
    return _COLORS[said]


def _infer_dims(text: Callable[[str], str], channels: int) -> tuple[int, int]:
    """(width, height)."""
    said = text("infer-dims")
    words = [word.strip() for word in said.split(";") if word.strip()]
    if len(words) != 3 or not all(word.isdigit() and int(word) > 0 for word in words) or int(words[0]) != channels:
        raise LoadError(
            f"parameter infer-dims is '{said}': say the network's channels, height and width, as {channels};224;224"
        )
    return int(words[2]), int(words[1])


def _fit(text: Callable[[str], str]) -> Fit:
    if text("scaling-filter").lower() not in ("", "1", "bilinear"):
        raise LoadError(f"parameter scaling-filter is '{text('scaling-filter')}': the engine resizes by bilinear alone")
    if text("network-input-order").lower() not in ("", "0", "nchw"):
        raise LoadError("parameter network-input-order: a program that is sent pictures takes NCHW; leave it out")
    keeps_aspect, is_symmetric = (_flag(text, key) for key in ("maintain-aspect-ratio", "symmetric-padding"))
    if text("resize-shorter-side") and keeps_aspect:
        raise LoadError("parameter resize-shorter-side does not go with maintain-aspect-ratio, which pads instead")
    if text("resize-shorter-side"):
        return Fit.CROP
    if not keeps_aspect:
        return Fit.STRETCH
    return Fit.PAD_SYMMETRIC if is_symmetric else Fit.PAD_RIGHT_BOTTOM


def _flag(text: Callable[[str], str], key: str) -> bool:
    said = text(key).lower() or "0"
    if said not in _FLAGS:
        raise LoadError(f"parameter {key} is '{said}': say 1 or 0")
    return _FLAGS[said]


def _shorter_side(text: Callable[[str], str], network_side: int) -> int:
    said = text("resize-shorter-side")
    least, most = network_side, _MOST_ENLARGED * network_side
    if not said.isdigit() or not least <= int(said) <= most:
        raise LoadError(f"parameter resize-shorter-side is '{said}': say a number from {least} to {most}")
    return int(said)


def _factors(text: Callable[[str], str], key: str, count: int) -> tuple[float, ...]:
    factors = _numbers(text, key, count, 1.0)
    if 0.0 in factors:
        raise LoadError(f"parameter {key} is '{text(key)}': 0 leaves nothing of a picture")
    return factors


def _numbers(text: Callable[[str], str], key: str, count: int, default: float) -> tuple[float, ...]:
    said = text(key)
    if not said:
        return (default,) * count
    try:
        numbers = tuple(float(word) for word in said.split(";") if word.strip())
    except ValueError:
        numbers = ()
    if len(numbers) != count or not all(math.isfinite(number) for number in numbers):
        raise LoadError(f"parameter {key} is '{said}': say {count} numbers with ';' between")
    return numbers
