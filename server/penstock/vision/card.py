"""Reads a model's parameters of config.pbtxt. An error names the key, its value and the allowed values."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.extensions import ExtensionError
from penstock.protocol.inference import Datatype
from penstock.vision.layouts import registry
from penstock.vision.layouts.layout import ParserOptions
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode, ScalingFilter, Triple

_Choice = TypeVar("_Choice", bound=IntEnum)
_FLAGS = {"0": False, "1": True, "false": False, "true": True, "off": False, "on": True}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Typed access to a model's parameters. Methods return defaults for missing keys, and raise InvalidRequest."""

    model_name: str
    values: Mapping[str, str]

    def refusal(self, key: str, what: str) -> InvalidRequest:
        """The error for a key. what: the rest of the sentence."""
        text = f" = {self.values[key]!r}" if key in self.values else ""
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

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        number = self.number(key, default)
        if not 0.0 <= number <= 1.0:
            raise self.refusal(key, "is not between 0 and 1")
        return number

    def count(self, key: str, default: int, *, least: int = 1) -> int:
        """An integer of at least `least`, but not 0."""
        text = self._text(key)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            raise self.refusal(key, "is not a whole number") from None
        if number < least or number == 0:
            raise self.refusal(key, "must be 1 or more" + (", or -1 for no limit" if least == -1 else ""))
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

    def _text(self, key: str) -> str | None:
        text = self.values.get(key)
        return None if text is None else text.strip()

    def _finite(self, key: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(key, "is not a number" if ";" not in self.values[key] else "holds what is not a number")
        return number


class ParameterDoc(NamedTuple):
    """One row of docs/card-parameters.md, as Markdown."""

    values: str
    default: str


PARAMETERS = {
    "network-type": ParameterDoc("`0` or `detector`, `1` or `classifier`", "none: no pictures"),
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
        "`0` or `1`: keep the aspect ratio and pad with black at the right and the bottom", "0: stretch"
    ),
    "symmetric-padding": ParameterDoc("`0` or `1`: with maintain-aspect-ratio, pad on all sides", "0"),
    "resize-shorter-side": ParameterDoc(
        "pixels: resize the shorter side to this, then cut the network's size from the centre. From the network's "
        "longer side to four times that; not with maintain-aspect-ratio or a variable size",
        "none",
    ),
    "scaling-filter": ParameterDoc("`nearest`, `bilinear`, `area`, `cubic`", "bilinear"),
    "max-side": ParameterDoc("pixels; only for inputs of variable size: larger pictures are made smaller", "none"),
    "scaled-decode": ParameterDoc(
        "`0` or `1`: decode large JPEGs at a fraction of their size: faster, slightly different results", "0"
    ),
    "labels": ParameterDoc("names by class number: `person;bicycle;car`", "none"),
    "parse-bbox-func-name": ParameterDoc("detectors: an output layout, see below", "boxes"),
    "parse-classifier-func-name": ParameterDoc("classifiers: an output layout, see below", "classification"),
    "pre-cluster-threshold": ParameterDoc("detectors, 0 to 1: boxes with this score or less are dropped", "0.2"),
    "nms-iou-threshold": ParameterDoc(
        "detectors, 0 to 1: of two boxes of a class that overlap more, the one with the lower score is dropped", "0.3"
    ),
    "topk": ParameterDoc("results returned, the best first; `-1` for all", "detectors -1, classifiers 5"),
    "classifier-threshold": ParameterDoc("classifiers: a number; classes with a lower score are dropped", "none"),
    "apply-softmax": ParameterDoc("classifiers, `0` or `1`: the scores are logits", "0"),
    "image-decoder": ParameterDoc(
        "`0` or `gateway`, `1` or `engine`: the model decodes pictures itself, from one input TYPE_STRING, dims "
        "`[ 1 ]`; without NHWC, max-side, scaled-decode, and filters other than bilinear",
        "gateway",
    ),
    "infer-dims": ParameterDoc(
        "`3;H;W` (`1;H;W` for GRAY): the network's size; needed with `image-decoder: engine`", "none"
    ),
}
_TYPO_LIKENESS = 0.84
_DEFAULT_CLASSES = 5
_MOST_ENLARGED = 4  # a larger resize is costly and leaves less than a sixteenth of the picture


class ImageDecoder(IntEnum):
    """What decodes the model's pictures."""

    GATEWAY = 0
    ENGINE = 1


class NetworkType(IntEnum):
    """The supported values of nvinfer's network-type."""

    DETECTOR = 0
    CLASSIFIER = 1


class NotAnImageModel(InvalidRequest):
    """The model's input cannot be a picture, or `network-type` is missing: it takes only tensors. 400."""


@dataclass(frozen=True, slots=True)
class VisionCard:
    """Configuration of an image model."""

    network_type: NetworkType
    input_name: str
    prepare_spec: PrepareSpec
    parser_name: str  # see vision/layouts/registry.py
    parser_options: ParserOptions
    labels: tuple[str, ...]  # by class id; may be empty
    is_relayed: bool = False  # the engine decodes; prepare_spec is then the engine's preprocessing


def card_from_config(config: ModelConfig) -> VisionCard | None:
    """The card, or None without `network-type`. Raises InvalidRequest, and NotAnImageModel for other inputs."""
    parameters = Parameters(config.name, config.parameters)
    for key in config.parameters:
        _refuse_typo(parameters, key)
    if "network-type" not in config.parameters:
        return None
    network_type = parameters.choice("network-type", NetworkType, NetworkType.DETECTOR)
    is_relayed = decoder_of(parameters) is ImageDecoder.ENGINE
    return VisionCard(
        network_type=network_type,
        input_name=_image_input(parameters, config, is_relayed=is_relayed).name,
        prepare_spec=_prepare_spec(parameters, config, is_relayed=is_relayed),
        parser_name=_parser_name(parameters, network_type),
        parser_options=_parser_options(parameters, network_type, config),
        labels=parameters.names("labels"),
        is_relayed=is_relayed,
    )


def decoder_of(parameters: Parameters) -> ImageDecoder:
    """The value of `image-decoder`. Raises InvalidRequest."""
    return parameters.choice("image-decoder", ImageDecoder, ImageDecoder.GATEWAY)


def _refuse_typo(parameters: Parameters, key: str) -> None:
    if key in PARAMETERS:
        return
    plain = key.strip().lower().replace("_", "-")
    meant = difflib.get_close_matches(plain, PARAMETERS, n=1, cutoff=_TYPO_LIKENESS)
    if not meant:
        return
    refusal = parameters.refusal(key, f"is an unknown key; did you mean {meant[0]!r}?")
    if "network-type" not in (*parameters.values, *meant):  # perhaps another program's parameter
        raise NotAnImageModel(refusal.message)
    raise refusal


def _image_input(parameters: Parameters, config: ModelConfig, *, is_relayed: bool) -> TensorSpec:
    if len(config.inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in config.inputs) or "none"
        refusal = f"needs a model with exactly one input, the image (inputs: {names})"
        raise NotAnImageModel(parameters.refusal("network-type", refusal).message)
    spec = config.inputs[0]
    if is_relayed:
        if spec.datatype is not Datatype.BYTES or spec.shape != (1,):
            raise parameters.refusal(
                "image-decoder",
                f"needs an input of data_type TYPE_STRING and dims [ 1 ]; {spec.name!r} is {spec.datatype} of "
                f"{list(spec.shape)}",
            )
        return spec
    if spec.datatype not in (Datatype.FP32, Datatype.FP16, Datatype.UINT8):
        refusal = f"needs an input of type FP32, FP16 or UINT8; {spec.name!r} is {spec.datatype}"
        raise NotAnImageModel(parameters.refusal("network-type", refusal).message)
    return spec


def _prepare_spec(parameters: Parameters, config: ModelConfig, *, is_relayed: bool) -> PrepareSpec:
    spec = _image_input(parameters, config, is_relayed=is_relayed)
    if is_relayed:
        spec = _made_by_engine(parameters, spec.name)
    color = parameters.choice("model-color-format", ColorFormat, ColorFormat.RGB)
    layout = parameters.choice("network-input-order", InputOrder, InputOrder.NCHW)
    width, height = _network_size(parameters, spec, color, layout)
    fit = _fit(parameters, has_own_size=width == 0)
    scale = parameters.number("net-scale-factor", 1.0)
    offsets = _per_channel(parameters, "offsets", color, 0.0)
    factors = _per_channel(parameters, "channel-scale-factors", color, 1.0)
    if scale == 0.0:
        raise parameters.refusal("net-scale-factor", "leaves nothing of the image")
    if 0.0 in factors:
        raise parameters.refusal("channel-scale-factors", "leaves nothing of a channel")
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
        max_side=_max_side(parameters, has_own_size=width == 0),
        has_scaled_decode=parameters.flag("scaled-decode"),
        shorter_side=_shorter_side(parameters, max(width, height)) if fit is ResizeMode.CROP else 0,
    )


def _made_by_engine(parameters: Parameters, name: str) -> TensorSpec:
    """The network's input after the engine's preprocessing. Raises InvalidRequest if the engine does not support it."""
    beyond = {
        "network-input-order": parameters.choice("network-input-order", InputOrder, InputOrder.NCHW) is InputOrder.NHWC,
        "scaling-filter": _filter(parameters) is not ScalingFilter.BILINEAR,
        "scaled-decode": parameters.flag("scaled-decode"),
    }
    for key, is_beyond in beyond.items():
        if is_beyond:
            raise parameters.refusal(key, "does not go with image-decoder engine; leave it out")
    channels = parameters.choice("model-color-format", ColorFormat, ColorFormat.RGB).channels
    sides = parameters.numbers("infer-dims", count=3, default=0.0)
    if sides[0] != channels or any(side < 1 or side != int(side) for side in sides):
        wanted = f"is not {channels};H;W, the network's size in pixels, which image-decoder engine needs"
        raise parameters.refusal("infer-dims", wanted)
    return TensorSpec(name, Datatype.FP32, tuple(int(side) for side in sides))


def _filter(parameters: Parameters) -> ScalingFilter:
    return parameters.choice("scaling-filter", ScalingFilter, ScalingFilter.BILINEAR)


def _network_size(parameters: Parameters, spec: TensorSpec, color: ColorFormat, layout: InputOrder) -> tuple[int, int]:
    """(width, height); (0, 0) if both vary. Ignores a leading dimension of 1 in models without batching."""
    shape = spec.shape[1:] if len(spec.shape) == 4 and spec.shape[0] in (1, -1) else spec.shape
    if len(shape) == 3:
        channels, height, width = shape if layout is InputOrder.NCHW else (shape[2], shape[0], shape[1])
        if channels == color.channels and (height == width == -1 or (height > 0 and width > 0)):
            return max(width, 0), max(height, 0)
    wanted = f"[{color.channels}, H, W]" if layout is InputOrder.NCHW else f"[H, W, {color.channels}]"
    refusal = parameters.refusal(
        "network-input-order",
        f"{layout.name} with model-color-format {color.name} needs an input of shape {wanted}, H and W both given or "
        f"both -1; {spec.name!r} has {list(spec.shape)}",
    )
    if len(shape) == 3 and {shape[0], shape[2]} & {1, 3}:  # a picture in another layout or colour format
        raise refusal
    raise NotAnImageModel(refusal.message)


def _per_channel(parameters: Parameters, key: str, color: ColorFormat, default: float) -> Triple:
    numbers = parameters.numbers(key, count=color.channels, default=default)
    return (numbers[0], numbers[0], numbers[0]) if color is ColorFormat.GRAY else (numbers[0], numbers[1], numbers[2])


def _fit(parameters: Parameters, *, has_own_size: bool) -> ResizeMode:
    keeps_aspect, is_symmetric = parameters.flag("maintain-aspect-ratio"), parameters.flag("symmetric-padding")
    is_cropped = "resize-shorter-side" in parameters.values
    if is_cropped and (has_own_size or keeps_aspect):
        why = "an input of variable size (H and W -1)" if has_own_size else "maintain-aspect-ratio, which pads instead"
        raise parameters.refusal("resize-shorter-side", f"does not go with {why}")
    if has_own_size:
        return ResizeMode.KEEP
    if is_cropped:
        return ResizeMode.CROP
    if not keeps_aspect:
        return ResizeMode.STRETCH
    return ResizeMode.PAD_SYMMETRIC if is_symmetric else ResizeMode.PAD_RIGHT_BOTTOM


def _max_side(parameters: Parameters, *, has_own_size: bool) -> int:
    side = parameters.count("max-side", 0)
    if side and not has_own_size:
        raise parameters.refusal("max-side", "is for inputs of variable size (H and W -1); this one has its own size")
    return side


def _shorter_side(parameters: Parameters, network_side: int) -> int:
    side = parameters.count("resize-shorter-side", 0)
    if not network_side <= side <= _MOST_ENLARGED * network_side:
        least, most = network_side, _MOST_ENLARGED * network_side
        raise parameters.refusal("resize-shorter-side", f"is not between the network's {least} pixels and {most}")
    return side


def _parser_name(parameters: Parameters, network_type: NetworkType) -> str:
    is_detector = network_type is NetworkType.DETECTOR
    key, default = (
        ("parse-bbox-func-name", "boxes") if is_detector else ("parse-classifier-func-name", "classification")
    )
    known = registry.DETECTOR_PARSERS if is_detector else registry.CLASSIFIER_PARSERS
    given = parameters.values.get(key, "").strip()
    name = parameters.one_of(key, (*known, *([given] if ":" in given else [])), default)
    try:
        registry.detector_parser(name) if is_detector else registry.classifier_parser(name)
    except ExtensionError as error:
        raise parameters.refusal(key, str(error)) from None
    return name


def _parser_options(parameters: Parameters, network_type: NetworkType, config: ModelConfig) -> ParserOptions:
    if not config.outputs:
        raise parameters.refusal("network-type", "needs a model with outputs; config.pbtxt names none")
    topk = parameters.count("topk", _DEFAULT_CLASSES if network_type is NetworkType.CLASSIFIER else -1, least=-1)
    return ParserOptions(
        output_names=tuple(output.name for output in config.outputs),
        pre_cluster_threshold=parameters.share("pre-cluster-threshold", 0.2),
        nms_iou_threshold=parameters.share("nms-iou-threshold", 0.3),
        topk=None if topk == -1 else topk,
        classifier_threshold=parameters.number("classifier-threshold", -math.inf),
        has_softmax=parameters.flag("apply-softmax"),
    )
