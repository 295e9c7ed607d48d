"""config.pbtxt's parameters become a card, or a refusal that names key, value and what is allowed."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.spec import ColorFormat, InputOrder, NetworkType, PrepareSpec, ResizeMode, ScalingFilter

OUTPUTS = (TensorSpec("758", Datatype.FP32, (85, 22, 22)),)


def config(
    parameters: Mapping[str, str],
    *,
    shape: tuple[int, ...] = (3, 352, 640),
    datatype: Datatype = Datatype.FP32,
    outputs: tuple[TensorSpec, ...] = OUTPUTS,
    extra_inputs: tuple[TensorSpec, ...] = (),
) -> ModelConfig:
    inputs = (TensorSpec("input.1", datatype, shape), *extra_inputs)
    return ModelConfig("street", "onnxruntime", 8, inputs, outputs, parameters)


def card(
    parameters: Mapping[str, str], *, shape: tuple[int, ...] = (3, 352, 640), datatype: Datatype = Datatype.FP32
) -> VisionCard:
    made = card_from_config(config(parameters, shape=shape, datatype=datatype))
    assert made is not None
    return made


def test_card_of_a_model_without_network_type_is_none() -> None:
    """Such a model is served by its tensors; parameters of other people's are none of our business."""
    assert card_from_config(config({})) is None
    assert card_from_config(config({"EXECUTION_ENV_PATH": "/x", "intra_op_thread_count": "2", "labels": "a"})) is None


def test_card_with_the_least_said_has_the_documented_defaults() -> None:
    """The table in card.py's docstring."""
    made = card({"network-type": "0"})
    assert made.prepare_spec == PrepareSpec(width=640, height=352)
    assert (made.network_type, made.input_name, made.layout.name, made.labels) == (
        NetworkType.DETECTOR,
        "input.1",
        "boxes",
        (),
    )
    options = made.layout_options
    assert (options.output_names, options.pre_cluster_threshold, options.nms_iou_threshold) == (("758",), 0.2, 0.3)
    assert (options.topk, options.classifier_threshold, options.has_softmax) == (None, -math.inf, False)
    assert card({"network-type": "classifier"}).layout_options.topk == 5


def test_card_takes_every_word() -> None:
    """Every parameter reaches the place that it is for."""
    made = card(
        {
            "network-type": "Detector",
            "model-color-format": "1",
            "network-input-order": "NHWC",
            "net-scale-factor": "0.5",
            "offsets": "1;2;3",
            "channel-scale-factors": "4; 5; 6;",
            "maintain-aspect-ratio": "1",
            "symmetric-padding": "true",
            "scaling-filter": "area",
            "scaled-decode": "on",
            "parse-bbox-func-name": "fastestdet",
            "labels": "person; traffic light;",
            "pre-cluster-threshold": "0.25",
            "nms-iou-threshold": "0.45",
            "topk": "20",
            "classifier-threshold": "-1.5",
            "apply-softmax": "1",
        },
        shape=(352, 640, 3),
        datatype=Datatype.FP16,
    )
    assert made.prepare_spec == PrepareSpec(
        width=640,
        height=352,
        color=ColorFormat.BGR,
        layout=InputOrder.NHWC,
        fit=ResizeMode.PAD_SYMMETRIC,
        filter=ScalingFilter.AREA,
        datatype=Datatype.FP16,
        scale=0.5,
        offsets=(1.0, 2.0, 3.0),
        channel_factors=(4.0, 5.0, 6.0),
        has_scaled_decode=True,
    )
    assert (made.layout.name, made.labels) == ("fastestdet", ("person", "traffic light"))
    options = made.layout_options
    assert (options.pre_cluster_threshold, options.nms_iou_threshold, options.topk) == (0.25, 0.45, 20)
    assert (options.classifier_threshold, options.has_softmax) == (-1.5, True)


@pytest.mark.parametrize(
    ("parameters", "shape", "expected"),
    [
        ({}, (1, 3, 352, 640), PrepareSpec(640, 352)),
        ({}, (-1, 3, 352, 640), PrepareSpec(640, 352)),
        ({"model-color-format": "GRAY"}, (1, 28, 28), PrepareSpec(28, 28, color=ColorFormat.GRAY)),
        (
            {"model-color-format": "2", "offsets": "128", "network-input-order": "1"},
            (28, 30, 1),
            PrepareSpec(30, 28, color=ColorFormat.GRAY, layout=InputOrder.NHWC, offsets=(128.0, 128.0, 128.0)),
        ),
        ({"max-side": "1280"}, (3, -1, -1), PrepareSpec(0, 0, fit=ResizeMode.KEEP, max_side=1280)),
        ({"min-side": "736"}, (3, -1, -1), PrepareSpec(0, 0, fit=ResizeMode.KEEP, min_side=736, max_side=4000)),
        (
            {"min-side": "736", "max-side": "900"},
            (3, -1, -1),
            PrepareSpec(0, 0, fit=ResizeMode.KEEP, min_side=736, max_side=900),
        ),
        (
            {"min-width": "320"},
            (3, 48, -1),
            PrepareSpec(0, 48, fit=ResizeMode.FIT_HEIGHT, min_width=320, max_side=3200),
        ),
        ({"resize-shorter-side": "640"}, (3, 352, 640), PrepareSpec(640, 352, fit=ResizeMode.CROP, shorter_side=640)),
        ({"maintain-aspect-ratio": "1"}, (3, 352, 640), PrepareSpec(640, 352, fit=ResizeMode.PAD_RIGHT_BOTTOM)),
    ],
)
def test_card_reads_the_network_size_from_the_input(
    parameters: dict[str, str], shape: tuple[int, ...], expected: PrepareSpec
) -> None:
    """With and without a batch dimension of its own, in colour and grey, fixed and variable."""
    assert card({"network-type": "1", **parameters}, shape=shape).prepare_spec == expected


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("network-type", "4", "0 or detector, 1 or classifier"),
        ("model-color-format", "YUV", "0 or rgb, 1 or bgr, 2 or gray"),
        ("network-input-order", "CHW", "0 or nchw, 1 or nhwc"),
        ("net-scale-factor", "1/255", "not a number"),
        ("net-scale-factor", "nan", "not a number"),
        ("net-scale-factor", "0", "must not be 0"),
        ("offsets", "1;2", "has 2 numbers; 3 are needed"),
        ("offsets", "1;2;x", "not a number"),
        ("channel-scale-factors", "1;0;1", "must not have a 0"),
        ("maintain-aspect-ratio", "yes", "0, 1, false, true, off, on"),
        ("scaling-filter", "lanczos", "nearest, .*bilinear, .*area, .*cubic"),
        ("resize-shorter-side", "639", "between the network's 640 pixels and 2560"),
        ("resize-shorter-side", "2561", "between the network's 640 pixels and 2560"),
        ("max-side", "640", "variable size"),
        ("max-side", "many", "integer"),
        ("scaled-decode", "2", "off, on"),
        ("parse-bbox-func-name", "NvDsInferParseYolo", "boxes, .*fastestdet"),
        ("pre-cluster-threshold", "1.5", "between 0 and 1"),
        ("nms-iou-threshold", "-0.1", "between 0 and 1"),
        ("topk", "0", "1 or more, or -1"),
        ("classifier-threshold", "high", "not a number"),
        ("apply-softmax", "maybe", "off, on"),
    ],
)
def test_card_with_a_bad_value_is_refused_with_what_is_allowed(key: str, value: str, allowed: str) -> None:
    """The message names model, key, value and the way out."""
    with pytest.raises(InvalidRequest, match=allowed) as refusal:
        card_from_config(config({"network-type": "0", key: value}))
    assert f"model 'street': parameter {key!r} = {value!r}" in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "other", "why"),
    [((3, 352, 640), {"maintain-aspect-ratio": "1"}, "pads instead"), ((3, -1, -1), {}, "variable size")],
)
def test_card_that_crops_and_fits_otherwise_is_refused(shape: tuple[int, ...], other: dict[str, str], why: str) -> None:
    """A picture is cropped, padded or kept: one of them."""
    with pytest.raises(InvalidRequest, match=why):
        card({"network-type": "1", "resize-shorter-side": "640", **other}, shape=shape)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("network_type", "network-type"),
        ("Network-Type", "network-type"),
        ("offset", "offsets"),
        ("net-scale-facter", "net-scale-factor"),
        ("nms-iou-treshold", "nms-iou-threshold"),
        ("post-cluster-threshold", "pre-cluster-threshold"),
        ("model-colour-format", "model-color-format"),
    ],
)
def test_card_with_a_misspelled_key_is_refused_with_the_one_that_was_meant(key: str, meant: str) -> None:
    """A misspelt key is rejected, since an ignored threshold is hard to notice."""
    with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'"):
        card_from_config(config({key: "0"}))


@pytest.mark.parametrize("key", ["network-mode", "batch-size", "gie-unique-id", "cluster-mode", "execution_mode"])
def test_card_leaves_parameters_of_others_alone(key: str) -> None:
    """nvinfer's words for the engine, and onnxruntime's, may stand in the same file."""
    assert card({"network-type": "0", key: "1"}) == card({"network-type": "0"})


def test_card_of_a_model_that_cannot_take_images_is_refused() -> None:
    """Two inputs, a type that holds no pixels, a shape that fits no colour format, no outputs."""
    says = {"network-type": "0"}
    second = TensorSpec("size", Datatype.INT64, (2,))
    with pytest.raises(InvalidRequest, match=r"exactly one input.*'size'"):
        card_from_config(config(says, extra_inputs=(second,)))
    with pytest.raises(InvalidRequest, match=r"'input.1' is INT64"):
        card_from_config(config(says, datatype=Datatype.INT64))
    with pytest.raises(InvalidRequest, match="names none"):
        card_from_config(config(says, outputs=()))
    for shape in [(352, 352, 3), (1, 352, 352), (3, -1, 352), (3, 352), (2, 3, 352, 352), (3, 0, 0), (-1, -1, -1)]:
        with pytest.raises(InvalidRequest, match="input of shape"):
            card_from_config(config(says, shape=shape))
    with pytest.raises(InvalidRequest, match="UINT8"):
        card_from_config(config({**says, "net-scale-factor": "0.5"}, datatype=Datatype.UINT8))


RELAYED = {"network-type": "1", "image-decoder": "engine", "infer-dims": "3;224;256"}


def relayed_card(parameters: dict[str, str], shape: tuple[int, ...] = (1,)) -> VisionCard:
    return card(RELAYED | parameters, shape=shape, datatype=Datatype.BYTES)


def test_card_of_a_model_that_decodes_says_what_its_instances_make_of_a_picture() -> None:
    """The size is infer-dims', the words are those of the gateway's own decoding."""
    made = relayed_card({"resize-shorter-side": "256", "offsets": "1;2;3", "model-color-format": "BGR"})
    assert made.is_relayed
    assert made.prepare_spec == PrepareSpec(
        256, 224, color=ColorFormat.BGR, fit=ResizeMode.CROP, shorter_side=256, offsets=(1.0, 2.0, 3.0)
    )
    grey = relayed_card({"image-decoder": "1", "model-color-format": "GRAY", "infer-dims": "1;28;28"})
    assert grey.prepare_spec == PrepareSpec(28, 28, color=ColorFormat.GRAY)
    assert not card({"network-type": "1", "image-decoder": "gateway", "infer-dims": "3;9;9"}).is_relayed


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("image-decoder", "gpu", "0 or gateway, 1 or engine"),
        ("infer-dims", "224;224", "has 2 numbers; 3 are needed"),
        ("infer-dims", "1;224;224", "is not 3;H;W, the network's size in pixels"),
        ("infer-dims", "3;224;22.5", "is not 3;H;W"),
        ("infer-dims", "3;0;224", "is not 3;H;W"),
        ("network-input-order", "NHWC", "cannot be combined with image-decoder engine; leave it out"),
        ("scaling-filter", "area", "cannot be combined with image-decoder engine"),
        ("scaled-decode", "1", "cannot be combined with image-decoder engine"),
        ("max-side", "640", "variable size"),
        ("resize-shorter-side", "100", "between the network's 256 pixels"),
    ],
)
def test_card_of_a_model_that_decodes_refuses_what_no_instance_does(key: str, value: str, allowed: str) -> None:
    """With key, value and the way out."""
    with pytest.raises(InvalidRequest, match=allowed) as refusal:
        relayed_card({key: value})
    assert f"parameter {key!r} = {value!r}" in str(refusal.value)


def test_card_of_a_model_that_decodes_needs_words_of_one_element() -> None:
    """TYPE_STRING, dims [ 1 ], and infer-dims; words need image-decoder in turn."""
    with pytest.raises(InvalidRequest, match=r"TYPE_STRING and dims \[ 1 \]; 'input.1' is BYTES of \[2\]"):
        relayed_card({}, shape=(2,))
    with pytest.raises(InvalidRequest, match=r"'input.1' is FP32 of"):
        card(RELAYED)
    with pytest.raises(InvalidRequest, match="'infer-dims' is not 3;H;W"):
        card({"network-type": "1", "image-decoder": "engine"}, shape=(1,), datatype=Datatype.BYTES)
    with pytest.raises(InvalidRequest, match=r"'input.1' is BYTES"):
        card({"network-type": "1"}, shape=(1,), datatype=Datatype.BYTES)


@pytest.mark.parametrize(
    ("datatype", "shape"), [(Datatype.INT64, (2,)), (Datatype.INT32, (1, 2)), (Datatype.FP32, (-1, 2))]
)
def test_card_has_the_input_that_takes_the_pictures_size(datatype: Datatype, shape: tuple[int, ...]) -> None:
    """The other input is the picture."""
    size = TensorSpec("orig_target_sizes", datatype, shape)
    words = {"network-type": "0", "layout": "rt-detr", "image-size-input": "orig_target_sizes"}
    made = card_from_config(config(words, extra_inputs=(size,)))
    assert made is not None
    assert (made.size_input, made.input_name) == (size, "input.1")


@pytest.mark.parametrize(
    ("words", "size", "sentence"),
    [
        ({"image-size-input": "sizes"}, (2,), r"'sizes' is not an input of the model \(inputs: 'input.1', 'size'\)"),
        ({"image-size-input": "size"}, (3,), "2 values, width and height; it is INT64 of \\[3\\]"),
        ({"image-size-input": "size"}, (1, 1, 2), "2 values, width and height"),
        ({}, (2,), "name it by image-size-input"),
    ],
)
def test_card_refuses_a_size_input_that_is_none(words: dict[str, str], size: tuple[int, ...], sentence: str) -> None:
    """The refusal says which inputs there are, or what is needed."""
    extra = (TensorSpec("size", Datatype.INT64, size),)
    with pytest.raises(InvalidRequest, match=sentence):
        card_from_config(config({"network-type": "0", "layout": "rt-detr", **words}, extra_inputs=extra))


def test_card_of_a_layout_in_picture_pixels_needs_a_size_input() -> None:
    """Without it, the boxes would be in other pixels, and wrong without an error."""
    with pytest.raises(InvalidRequest, match="'image-size-input' is missing; layout 'rt-detr' needs the input"):
        card({"network-type": "0", "layout": "rt-detr"})


def test_layout_whose_rows_are_no_batch_is_refused_with_batches() -> None:
    """Row i of its output is a box, not a picture."""
    with pytest.raises(InvalidRequest, match="max_batch_size must be 0, not 8"):
        card_from_config(replace(config({"network-type": "0", "layout": "yolov7-nms"}), max_batch_size=8))


@pytest.mark.parametrize("ids", ["3000000000", "9" * 5000])
def test_class_id_that_no_array_holds_is_refused(ids: str) -> None:
    """Before a table of that size is made."""
    with pytest.raises(InvalidRequest, match="has a number over 2147483647"):
        card({"network-type": "0", "class-ids": f"1;{ids}"})


DIGITS = "9" * 5000  # more than Python converts


@pytest.mark.parametrize(
    ("parameters", "shape", "sentence"),
    [
        ({"class-thresholds": f"{DIGITS}:0.5"}, (3, 64, 64), "has a number over 2147483647"),
        ({"class-thresholds": "²:0.5"}, (3, 64, 64), "is not CLASS:NUMBER"),
        ({"skeleton": f"{DIGITS}-1", "keypoint-shape": "17;3"}, (3, 64, 64), "has a number over 2147483647"),
        ({"skeleton": "0-1;" * 1001, "keypoint-shape": "17;3"}, (3, 64, 64), r"has 1001 pairs \(limit 1000\)"),
        ({"class-ids": DIGITS}, (3, 64, 64), "has a number over 2147483647"),
        ({"topk": "1" + "0" * 30}, (3, 64, 64), "is over 2147483647"),
        ({"min-side": "1000000000"}, (3, -1, -1), "is over 8192"),
        ({"size-multiple": "1000000000"}, (3, -1, -1), "is over 8192"),
        ({"min-width": "1000000000"}, (3, 48, -1), "is over 32768"),
        ({"max-side": "1000000000"}, (3, -1, -1), "is over 67108864"),
        ({"infer-dims": "3;1000000;1000000"}, (3, -1, -1), "makes pictures of 1000000x1000000 pixels"),
        ({"infer-dims": "3;1e30;1e30"}, (3, -1, -1), "makes pictures of"),
        ({}, (3, 1_000_000, 1_000_000), "makes pictures of 1000000x1000000 pixels"),
    ],
)
def test_huge_numbers_are_refused_in_a_short_sentence(
    parameters: Mapping[str, str], shape: tuple[int, ...], sentence: str
) -> None:
    """A card that no picture could be prepared for is refused when it is read, not with every picture."""
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        card({"network-type": "0", **parameters}, shape=shape)
    assert len(refused.value.message) < 500
