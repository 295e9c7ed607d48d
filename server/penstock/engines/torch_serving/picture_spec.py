"""How a model that decodes pictures wants them, by nvinfer's parameters. Does not import torch."""

from dataclasses import dataclass
from enum import Enum

from .parameters import Config, Parameters, TorchLoadError, whole_number

_CHANNELS = {"RGB": 3, "BGR": 3, "GRAY": 1}
_COLORS = {"0": "RGB", "1": "BGR", "2": "GRAY", "rgb": "RGB", "bgr": "BGR", "gray": "GRAY"}
_VARIABLE_SIZE = ("max-side", "min-side", "size-multiple", "min-width")
_MAX_SIDE = 16384  # pixels; the instance allocates a batch of such pictures
_MOST_ENLARGED = 4  # as in the gateway: a larger resize is costly and leaves less than a sixteenth of the picture


class PictureFit(Enum):
    """How a source is fitted to the network's size, as ResizeMode of server/penstock/vision/spec.py, without KEEP."""

    STRETCH = "stretch"
    PAD_RIGHT_BOTTOM = "pad"
    PAD_SYMMETRIC = "pad-symmetric"
    CROP = "crop"


@dataclass(frozen=True)
class PictureSpec:
    """value = scale * (pixel - offset) * channel_factor; padding is black before that. Bilinear, no antialiasing."""

    width: int
    height: int
    color: str = "RGB"  # RGB, BGR or GRAY
    fit: PictureFit = PictureFit.STRETCH
    shorter_side: int = 0  # with CROP: in pixels, before the crop
    scale: float = 1.0
    offsets: tuple[float, ...] = (0.0, 0.0, 0.0)  # one per channel, in the network's colour order
    channel_factors: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def channels(self) -> int:
        return _CHANNELS[self.color]


def picture_spec(config: Config) -> PictureSpec | None:
    """Settings of a model that decodes pictures in the engine, else None. Raises TorchLoadError."""
    parameters = Parameters(config)
    decoder = parameters.text("image-decoder").lower() or "gateway"
    if decoder not in ("0", "gateway", "1", "engine"):
        raise TorchLoadError(f"parameter image-decoder is '{decoder}': say gateway or engine")
    if decoder in ("0", "gateway"):
        return None
    _check_wire(config)
    color = _color(parameters)
    width, height = _infer_dims(parameters, _CHANNELS[color])
    fit = _fit(parameters)
    return PictureSpec(
        width=width,
        height=height,
        color=color,
        fit=fit,
        shorter_side=_shorter_side(parameters, max(width, height)) if fit is PictureFit.CROP else 0,
        scale=parameters.numbers("net-scale-factor", 1, 1.0, may_be_0=False)[0],
        offsets=parameters.numbers("offsets", _CHANNELS[color], 0.0),
        channel_factors=parameters.numbers("channel-scale-factors", _CHANNELS[color], 1.0, may_be_0=False),
    )


def _check_wire(config: Config) -> None:
    inputs = config.get("input", [])
    if len(inputs) != 1 or inputs[0].get("data_type") != "TYPE_STRING" or list(inputs[0].get("dims", [])) != [1]:
        raise TorchLoadError("parameter image-decoder: engine needs exactly one input, of TYPE_STRING and dims [ 1 ]")
    if int(config.get("max_batch_size", 0)) < 1:
        raise TorchLoadError("parameter image-decoder: engine needs max_batch_size of 1 or more")


def _color(parameters: Parameters) -> str:
    value = parameters.text("model-color-format").lower() or "rgb"
    if value not in _COLORS:
        raise TorchLoadError(f"parameter model-color-format is '{value}': say 0 or RGB, 1 or BGR, 2 or GRAY")
    return _COLORS[value]


def _infer_dims(parameters: Parameters, channels: int) -> tuple[int, int]:
    value = parameters.text("infer-dims")
    words = [word.strip() for word in value.split(";") if word.strip()]
    sides = [whole_number(word, _MAX_SIDE) for word in words]
    if len(sides) != 3 or not all(sides) or sides[0] != channels:
        raise TorchLoadError(
            f"parameter infer-dims is '{value}': say the network's channels, height and width, as {channels};224;224 "
            f"(sides up to {_MAX_SIDE})"
        )
    return sides[2], sides[1]


def _fit(parameters: Parameters) -> PictureFit:
    scaling_filter = parameters.text("scaling-filter")
    if scaling_filter.lower() not in ("", "1", "bilinear"):
        raise TorchLoadError(f"parameter scaling-filter is '{scaling_filter}': the engine resizes by bilinear alone")
    if parameters.text("network-input-order").lower() not in ("", "0", "nchw"):
        raise TorchLoadError("parameter network-input-order: a program that is sent pictures takes NCHW; leave it out")
    if parameters.numbers("padding-value", 1, 0.0) != (0.0,):
        raise TorchLoadError(
            f"parameter padding-value is '{parameters.text('padding-value')}': the engine pads only with 0; leave "
            "it out, or use image-decoder: gateway"
        )
    if key := next(filter(parameters.text, _VARIABLE_SIZE), ""):
        raise TorchLoadError(f"parameter {key} is for inputs of variable size; infer-dims gives a fixed one")
    keeps_aspect = parameters.flag("maintain-aspect-ratio", default=False)
    is_symmetric = parameters.flag("symmetric-padding", default=False)
    if parameters.text("resize-shorter-side"):
        if keeps_aspect:
            raise TorchLoadError(
                "parameter resize-shorter-side does not go with maintain-aspect-ratio, which pads instead"
            )
        return PictureFit.CROP
    if not keeps_aspect:
        return PictureFit.STRETCH
    return PictureFit.PAD_SYMMETRIC if is_symmetric else PictureFit.PAD_RIGHT_BOTTOM


def _shorter_side(parameters: Parameters, network_side: int) -> int:
    value = parameters.text("resize-shorter-side")
    least, most = network_side, _MOST_ENLARGED * network_side
    side = whole_number(value, most)
    if side < least:
        raise TorchLoadError(f"parameter resize-shorter-side is '{value}': say a number from {least} to {most}")
    return side
