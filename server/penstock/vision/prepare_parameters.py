"""Reads the parameters of config.pbtxt that describe a model's preprocessing."""

from penstock.protocol.engine import TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.parameters import Parameters
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode, ScalingFilter, Triple

MAX_PIXEL = 255
_DEFAULT_MAX_SIDE, _DEFAULT_MAX_WIDTH = 4000, 3200  # of enlarged pictures, and of text lines: PP-OCR's limits
_MAX_PIXELS, _MAX_SIDE = 1 << 26, 1 << 15  # of a network's picture, as `models inspect` has them
_MAX_ENLARGED_SIDE = 8192  # of min-side and size-multiple: a picture of 1 x 1 pixel becomes a square of it
_MAX_ENLARGEMENT = 4  # a larger resize is costly and leaves less than a sixteenth of the picture


class NotAnImageModel(InvalidRequest):
    """The model's input cannot be a picture, or `network-type` is missing: it takes only tensors. 400."""


def read_prepare_spec(parameters: Parameters, image_input: TensorSpec, *, is_relayed: bool) -> PrepareSpec:
    """The preprocessing of the model's pictures. image_input: its picture, or the encoded picture if is_relayed.

    Raises InvalidRequest, and NotAnImageModel if the input's shape cannot be a picture's.
    """
    spec = _engine_output_spec(parameters, image_input.name) if is_relayed else image_input
    color = parameters.choice("model-color-format", ColorFormat, ColorFormat.RGB)
    layout = parameters.choice("network-input-order", InputOrder, InputOrder.NCHW)
    width, height = _network_size(parameters, spec, color, layout)
    fit = _fit(parameters, width, height)
    has_own_size = fit is ResizeMode.KEEP
    scale = parameters.number("net-scale-factor", 1.0)
    offsets = _per_channel(parameters, "offsets", color, 0.0)
    factors = _per_channel(parameters, "channel-scale-factors", color, 1.0)
    if scale == 0.0:
        raise parameters.refusal("net-scale-factor", "must not be 0: every input value would be 0")
    if 0.0 in factors:
        raise parameters.refusal("channel-scale-factors", "must not have a 0: all values of that channel would be 0")
    if spec.datatype is Datatype.UINT8 and (scale != 1.0 or any(offsets) or factors != (1.0, 1.0, 1.0)):
        raise parameters.refusal("net-scale-factor", "and offsets cannot be applied to a UINT8 input; leave them out")
    return PrepareSpec(
        width=width,
        height=height,
        color=color,
        layout=layout,
        fit=fit,
        filter=_filter(parameters),
        datatype=spec.datatype,
        scale=scale,
        offsets=offsets,
        channel_factors=factors,
        max_side=_variable_size_count(
            parameters, "max-side", _default_max_side(parameters, fit), _MAX_PIXELS, is_variable=width == 0
        ),
        has_scaled_decode=parameters.flag("scaled-decode"),
        shorter_side=_shorter_side(parameters, max(width, height)) if fit is ResizeMode.CROP else 0,
        pad_value=_padding_value(parameters, fit),
        min_side=_variable_size_count(parameters, "min-side", 0, _MAX_ENLARGED_SIDE, is_variable=has_own_size),
        size_multiple=_variable_size_count(
            parameters, "size-multiple", 1, _MAX_ENLARGED_SIDE, is_variable=has_own_size
        ),
        min_width=_variable_size_count(parameters, "min-width", 0, _MAX_SIDE, is_variable=fit is ResizeMode.FIT_HEIGHT),
    )


def _engine_output_spec(parameters: Parameters, name: str) -> TensorSpec:
    """The network's input after the engine's preprocessing. Raises InvalidRequest if the engine does not support it."""
    unsupported = {
        "padding-value": parameters.number("padding-value", 0.0) != 0.0,
        "network-input-order": parameters.choice("network-input-order", InputOrder, InputOrder.NCHW) is InputOrder.NHWC,
        "scaling-filter": _filter(parameters) is not ScalingFilter.BILINEAR,
        "scaled-decode": parameters.flag("scaled-decode"),
    }
    for key, is_used in unsupported.items():
        if is_used:
            raise parameters.refusal(key, "cannot be combined with image-decoder engine; leave it out")
    channels = parameters.choice("model-color-format", ColorFormat, ColorFormat.RGB).channels
    sides = parameters.numbers("infer-dims", count=3, default=0.0)
    is_small = max(sides) <= _MAX_SIDE and sides[1] * sides[2] <= _MAX_PIXELS
    if sides[0] != channels or not is_small or any(side < 1 or side != int(side) for side in sides):
        expected = f"is not {channels};H;W, the network's size in pixels, which image-decoder engine needs"
        raise parameters.refusal("infer-dims", expected)
    return TensorSpec(name, Datatype.FP32, tuple(int(side) for side in sides))


def _filter(parameters: Parameters) -> ScalingFilter:
    return parameters.choice("scaling-filter", ScalingFilter, ScalingFilter.BILINEAR)


def _network_size(parameters: Parameters, spec: TensorSpec, color: ColorFormat, layout: InputOrder) -> tuple[int, int]:
    """(width, height), 0 for a side that varies. Ignores a leading dimension of 1 in models without batching."""
    shape = spec.shape[1:] if len(spec.shape) == 4 and spec.shape[0] in (1, -1) else spec.shape
    if len(shape) == 3:
        channels, height, width = shape if layout is InputOrder.NCHW else (shape[2], shape[0], shape[1])
        width, height = _stated_size(parameters, color, width, height)
        if channels == color.channels and (height == width == -1 or (height > 0 and (width > 0 or width == -1))):
            if max(width, height) > _MAX_SIDE or width * height > _MAX_PIXELS:
                raise parameters.refusal(
                    "infer-dims" if "infer-dims" in parameters.values else "network-type",
                    f"makes pictures of {width}x{height} pixels (limit {_MAX_PIXELS}, {_MAX_SIDE} per side)",
                )
            return max(width, 0), max(height, 0)
    expected = f"[{color.channels}, H, W]" if layout is InputOrder.NCHW else f"[H, W, {color.channels}]"
    refusal = parameters.refusal(
        "network-input-order",
        f"{layout.name} with model-color-format {color.name} needs an input of shape {expected}, H and W both given, "
        f"both -1, or only W -1; {spec.name!r} has {list(spec.shape)}",
    )
    if len(shape) == 3 and {shape[0], shape[2]} & {1, 3}:  # a picture in another layout or colour format
        raise refusal
    raise NotAnImageModel(refusal.message)


def _stated_size(parameters: Parameters, color: ColorFormat, width: int, height: int) -> tuple[int, int]:
    """(width, height) of `infer-dims` where the input's sides are -1."""
    if "infer-dims" not in parameters.values or (width > 0 and height > 0):
        return width, height
    channels, stated_height, stated_width = parameters.numbers("infer-dims", count=3, default=0.0)
    stated = [int(stated_width), int(stated_height)]
    if channels != color.channels or [stated_width, stated_height] != stated or min(stated) < 1:
        raise parameters.refusal("infer-dims", f"is not {color.channels};H;W, the network's size in pixels")
    if any(own not in (-1, one) for own, one in zip((width, height), stated, strict=True)):
        raise parameters.refusal("infer-dims", f"differs from the input's size, {width}x{height}")
    return stated[0], stated[1]


def _per_channel(parameters: Parameters, key: str, color: ColorFormat, default: float) -> Triple:
    numbers = parameters.numbers(key, count=color.channels, default=default)
    return (numbers[0], numbers[0], numbers[0]) if color is ColorFormat.GRAY else (numbers[0], numbers[1], numbers[2])


def _fit(parameters: Parameters, width: int, height: int) -> ResizeMode:
    keeps_aspect, is_symmetric = parameters.flag("maintain-aspect-ratio"), parameters.flag("symmetric-padding")
    is_cropped = "resize-shorter-side" in parameters.values
    if is_cropped and (width == 0 or keeps_aspect):
        why = "an input of variable size (W -1)" if width == 0 else "maintain-aspect-ratio, which pads instead"
        raise parameters.refusal("resize-shorter-side", f"cannot be combined with {why}")
    if width == 0:
        return ResizeMode.FIT_HEIGHT if height else ResizeMode.KEEP
    if is_cropped:
        return ResizeMode.CROP
    if not keeps_aspect:
        return ResizeMode.STRETCH
    return ResizeMode.PAD_SYMMETRIC if is_symmetric else ResizeMode.PAD_RIGHT_BOTTOM


_PADDED = (ResizeMode.PAD_SYMMETRIC, ResizeMode.PAD_RIGHT_BOTTOM, ResizeMode.FIT_HEIGHT)


def _padding_value(parameters: Parameters, fit: ResizeMode) -> float:
    value = parameters.number("padding-value", 0.0)
    if "padding-value" in parameters.values and fit not in _PADDED:
        raise parameters.refusal("padding-value", "needs maintain-aspect-ratio: 1; without it nothing is padded")
    if not 0.0 <= value <= MAX_PIXEL:
        raise parameters.refusal("padding-value", f"is not between 0 and {MAX_PIXEL}")
    return value


def _default_max_side(parameters: Parameters, fit: ResizeMode) -> int:
    """Default of max-side. A picture of 1 x 60000 pixels must not be enlarged until its shorter side is min-side."""
    if fit is ResizeMode.FIT_HEIGHT:
        return _DEFAULT_MAX_WIDTH
    return _DEFAULT_MAX_SIDE if "min-side" in parameters.values else 0


def _variable_size_count(parameters: Parameters, key: str, default: int, most: int, *, is_variable: bool) -> int:
    number = parameters.count(key, default, most=most)
    if key in parameters.values and not is_variable:
        raise parameters.refusal(key, "is for inputs of variable size (H and W -1, or W -1 for widths)")
    return number


def _shorter_side(parameters: Parameters, network_side: int) -> int:
    side = parameters.count("resize-shorter-side", 0)
    if not network_side <= side <= _MAX_ENLARGEMENT * network_side:
        least, most = network_side, _MAX_ENLARGEMENT * network_side
        raise parameters.refusal("resize-shorter-side", f"is not between the network's {least} pixels and {most}")
    return side
