"""The card of a model: picture parameters of config.pbtxt for preprocessing, output layout and post-processing."""

import math
from dataclasses import dataclass
from enum import IntEnum

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.extensions import ExtensionError
from penstock.protocol.inference import Datatype
from penstock.vision.layouts.layout import Layout, LayoutOptions
from penstock.vision.layouts.registry import DEFAULT_LAYOUTS, LAYOUTS, find_layout
from penstock.vision.parameters import Parameters, meant_by
from penstock.vision.prepare_parameters import NotAnImageModel, read_prepare_spec
from penstock.vision.spec import NetworkType, PrepareSpec, ResizeMode

__all__ = ["NotAnImageModel", "VisionCard", "card_from_config", "decoder_of"]

# nvinfer's names for `layout`, by the network types that they go with.
_LAYOUT_KEYS = {
    "parse-bbox-func-name": NetworkType.DETECTOR,
    "parse-classifier-func-name": NetworkType.CLASSIFIER,
    "parse-bbox-instance-mask-func-name": NetworkType.INSTANCE_SEGMENTATION,
}
_DEFAULT_CLASSES = 5
_SIZE_TYPES = (Datatype.INT64, Datatype.INT32, Datatype.FP32)


class ImageDecoder(IntEnum):
    """What decodes the model's pictures."""

    GATEWAY = 0
    ENGINE = 1


@dataclass(frozen=True, slots=True)
class VisionCard:
    """Configuration of an image model.

    input_name, input_shape: of the picture, as in config.pbtxt. labels: by class id; may be empty. is_relayed: the
    engine decodes; prepare_spec is then the engine's preprocessing. size_input: the input that gets the picture's
    (width, height), if any. keypoint_names may be empty. skeleton: pairs of keypoints that are joined in drawings.
    """

    network_type: NetworkType
    input_name: str
    prepare_spec: PrepareSpec
    layout: Layout
    layout_options: LayoutOptions
    labels: tuple[str, ...]
    is_relayed: bool = False
    size_input: TensorSpec | None = None
    input_shape: tuple[int, ...] = ()
    keypoint_names: tuple[str, ...] = ()
    skeleton: tuple[tuple[int, int], ...] = ()


def card_from_config(config: ModelConfig) -> VisionCard | None:
    """The card, or None without `network-type`. Raises InvalidRequest, and NotAnImageModel for other inputs."""
    parameters = Parameters(config.name, config.parameters)
    for key in config.parameters:
        _refuse_typo(parameters, key)
    if "network-type" not in config.parameters:
        return None
    network_type = parameters.choice("network-type", NetworkType, NetworkType.DETECTOR)
    is_relayed = decoder_of(parameters) is ImageDecoder.ENGINE
    size_input = _size_input(parameters, config)
    image_input = _image_input(parameters, config, size_input, is_relayed=is_relayed)
    layout = _layout(parameters, network_type)
    if layout.is_one_picture and config.max_batch_size:
        why = f"is {layout.name!r}, whose rows are not a batch: max_batch_size must be 0, not {config.max_batch_size}"
        raise parameters.refusal("layout", why)
    if layout.needs_size_input and size_input is None:
        raise parameters.refusal(
            "image-size-input",
            f"is missing; layout {layout.name!r} needs the input that takes the picture's width and height. If the "
            "boxes are in pixels of the network's input, use layout 'torchvision'",
        )
    options = _layout_options(parameters, layout, config)
    names = parameters.names("keypoint-names")
    count = options.keypoint_shape[0]
    if names and len(names) != count:
        raise parameters.refusal("keypoint-names", f"has {len(names)} names; keypoint-shape says {count}")
    prepare_spec = read_prepare_spec(parameters, image_input, is_relayed=is_relayed)
    if layout.keeps_aspect_ratio and prepare_spec.fit is ResizeMode.STRETCH:
        raise parameters.refusal(
            "maintain-aspect-ratio", f"must be 1 with layout {layout.name}: stretched pictures change its angles"
        )
    return VisionCard(
        network_type=network_type,
        input_name=image_input.name,
        prepare_spec=prepare_spec,
        layout=layout,
        layout_options=options,
        labels=parameters.names("labels"),
        is_relayed=is_relayed,
        size_input=size_input,
        input_shape=image_input.shape,
        keypoint_names=names,
        skeleton=parameters.pairs("skeleton", below=count),
    )


def decoder_of(parameters: Parameters) -> ImageDecoder:
    """The value of `image-decoder`. Raises InvalidRequest."""
    return parameters.choice("image-decoder", ImageDecoder, ImageDecoder.GATEWAY)


def _refuse_typo(parameters: Parameters, key: str) -> None:
    meant = meant_by(key)
    if not meant:
        return
    refusal = parameters.refusal(key, f"is an unknown key; did you mean {meant!r}?")
    if "network-type" not in (*parameters.values, meant):  # perhaps another program's parameter
        raise NotAnImageModel(refusal.message)
    raise refusal


def _size_input(parameters: Parameters, config: ModelConfig) -> TensorSpec | None:
    name = parameters.values.get("image-size-input", "").strip()
    if not name:
        return None
    spec = next((spec for spec in config.inputs if spec.name == name), None)
    if spec is None:
        names = ", ".join(repr(spec.name) for spec in config.inputs)
        raise parameters.refusal("image-size-input", f"is not an input of the model (inputs: {names})")
    if not _may_take_size(spec):
        raise parameters.refusal(
            "image-size-input",
            f"needs an input of INT64, INT32 or FP32 with 2 values, width and height; it is {spec.datatype} of "
            f"{list(spec.shape)}",
        )
    return spec


def _may_take_size(spec: TensorSpec) -> bool:
    return spec.datatype in _SIZE_TYPES and spec.shape[-1:] in ((2,), (-1,)) and len(spec.shape) <= 2


def _image_input(
    parameters: Parameters, config: ModelConfig, size_input: TensorSpec | None, *, is_relayed: bool
) -> TensorSpec:
    inputs = [spec for spec in config.inputs if spec is not size_input]
    if len(inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in inputs) or "none"
        refusal = f"needs a model with exactly one input, the image (inputs: {names})"
        if len(inputs) == 2 and any(map(_may_take_size, inputs)):
            refusal += "; if the other one takes the picture's width and height, name it by image-size-input"
            raise parameters.refusal("network-type", refusal)
        raise NotAnImageModel(parameters.refusal("network-type", refusal).message)
    spec = inputs[0]
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


def _layout(parameters: Parameters, network_type: NetworkType) -> Layout:
    given = [key for key in ("layout", *_LAYOUT_KEYS) if key in parameters.values]
    if len(given) > 1:
        raise parameters.refusal(given[1], f"and {given[0]!r} both name an output layout; leave one out")
    key = given[0] if given else "layout"
    if _LAYOUT_KEYS.get(key, network_type) is not network_type:
        raise parameters.refusal(
            key, f"cannot be combined with network-type {network_type.name.lower()}; use layout instead"
        )
    known = tuple(name for name, layout in LAYOUTS.items() if layout.network_type is network_type)
    text = parameters.values.get(key, "").strip()
    default = DEFAULT_LAYOUTS.get(network_type, "")
    if not text and not default:
        raise parameters.refusal(
            "network-type", f"{network_type.name.lower()} needs the parameter 'layout', one of: {', '.join(known)}"
        )
    name = parameters.one_of(key, (*known, *([text] if ":" in text else [])), default)
    try:
        return find_layout(name, network_type)
    except ExtensionError as error:
        raise parameters.refusal(key, str(error)) from None


def _layout_options(parameters: Parameters, layout: Layout, config: ModelConfig) -> LayoutOptions:
    if not config.outputs:
        raise parameters.refusal("network-type", "needs a model with outputs; config.pbtxt names none")
    is_classifier = layout.network_type is NetworkType.CLASSIFIER
    if "topk" in parameters.values and "max-detections" in parameters.values:
        raise parameters.refusal("max-detections", "and 'topk' are the same; leave one out")
    most = "max-detections" if "max-detections" in parameters.values else "topk"
    topk = parameters.count(most, _DEFAULT_CLASSES if is_classifier else -1, least=-1)
    if parameters.flag("apply-softmax") and parameters.flag("apply-sigmoid"):
        raise parameters.refusal("apply-sigmoid", "cannot be combined with apply-softmax; leave one out")
    return LayoutOptions(
        output_names=_output_names(parameters, config),
        pre_cluster_threshold=parameters.fraction("pre-cluster-threshold", layout.threshold),
        nms_iou_threshold=parameters.fraction("nms-iou-threshold", layout.iou),
        topk=None if topk == -1 else topk,
        classifier_threshold=parameters.number("classifier-threshold", -math.inf),
        has_softmax=parameters.flag("apply-softmax"),
        has_sigmoid=parameters.flag("apply-sigmoid"),
        class_thresholds=parameters.class_fractions("class-thresholds"),
        is_class_agnostic=parameters.flag("class-agnostic-nms"),
        class_ids=parameters.integers("class-ids"),
        keypoint_shape=_keypoint_shape(parameters),
        segmentation_threshold=parameters.fraction("segmentation-threshold", layout.segmentation_threshold),
        characters=parameters.values.get("characters", ""),
        unclip_ratio=parameters.number("unclip-ratio", 1.5),
        is_unit_length=parameters.flag("normalize-embedding"),
        depth_scale=parameters.number("depth-scale", 1.0),
    )


def _output_names(parameters: Parameters, config: ModelConfig) -> tuple[str, ...]:
    names = parameters.names("output-blob-names")
    known = tuple(output.name for output in config.outputs)
    for name in names:
        if name not in known:
            raise parameters.refusal("output-blob-names", f"has {name!r}; the model's outputs are {', '.join(known)}")
    return names or known


def _keypoint_shape(parameters: Parameters) -> tuple[int, int]:
    if "keypoint-shape" not in parameters.values:
        return 0, 3
    shape = parameters.integers("keypoint-shape")
    if len(shape) != 2 or shape[0] < 1 or shape[1] not in (2, 3):
        raise parameters.refusal("keypoint-shape", "is not COUNT;VALUES, with 2 (x, y) or 3 (x, y, score) values")
    return shape[0], shape[1]
