"""The detectors that are no YOLO, and what is no detector: every row of LAYOUTS.md's tables, and the pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.models.add import AddOptions, add_model
from penstock.models.inspect.inspection import Hints, Verdict
from tests.models.inspect.made_models import (
    Array,
    asked,
    cells,
    centres,
    constant_model,
    corners,
    inspected,
    joined,
    numbers,
    scores,
    whole,
)
from tests.models.inspect.mutants import Network

IMAGENET = {"offsets": "123.675;116.28;103.53", "channel-scale-factors": "4.36681222707;4.46428571429;4.44444444444"}
SQUASH_RGB = {"model-color-format": "0", "net-scale-factor": "0.0039215686274509803"}
NUMBERS = (0.485, 0.456, 0.406)


@dataclass(frozen=True)
class Row:
    """A file, and what is to be recognised. asks: flags of the questions that are open without a flag."""

    layout: str
    outputs: Mapping[str, Array]
    image: Sequence[int | str] = (1, 3, 640, 640)
    image_type: int = TensorProto.FLOAT
    size_input: str = ""
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    card: Mapping[str, str | None] = field(default_factory=dict)
    labels: int = 0
    asks: tuple[str, ...] = ()
    hints: Hints = field(default_factory=Hints)
    rows_follow_batch: bool = True

    def write(self, path: Path) -> Path:
        """The file."""
        return constant_model(
            path, self.outputs, image=self.image, image_type=self.image_type, size_input=self.size_input,
            shapes=self.shapes, metadata=self.metadata, last=self.last,
        )  # fmt: skip


def batched(*arrays: Array) -> list[Array]:
    return [array[np.newaxis] for array in arrays]


def integers(*shape: int, below: int = 80) -> Array:
    return np.random.default_rng(1).integers(0, below, shape)


def pairs(size: int, strides: Sequence[int], names: Sequence[str]) -> dict[str, Array]:
    """Scores and distributions for each stride."""
    found = {}
    for stride in strides:
        count = (-(-size // stride)) ** 2
        found[f"{names[0]}_{stride}"] = scores(count, 80)[np.newaxis]
        found[f"{names[1]}_{stride}"] = numbers(1, count, 32, low=-3, high=3)
    return found


FINAL = {"labels": whole(30, 80).ravel()[np.newaxis].astype(np.int64), "boxes": corners(30, 280)[np.newaxis]}
SCORES = np.sort(numbers(30))[::-1].copy()
FACES = scores(4420, 1)
THIRDS = "0.00392156862745;0.00392156862745;0.00392156862745"
YUNET = {
    f"{kind}_{stride}": numbers(1, (320 // stride) ** 2, columns) ** 4
    for kind, columns in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
    for stride in (8, 16, 32)
}
ROWS: dict[str, Row] = {
    "efficient-nms": Row(
        "efficient-nms",
        {
            "num_dets": np.array([[3]], np.int32), "det_boxes": corners(100, 640)[np.newaxis],
            "det_scores": np.sort(numbers(1, 100))[:, ::-1].copy(), "det_classes": integers(1, 100).astype(np.int32),
        },
        card={"padding-value": "114"},
    ),
    "efficient-nms of mmyolo": Row(
        "efficient-nms",
        {
            "num_dets": np.array([[3]], np.int32), "boxes": corners(100, 640)[np.newaxis],
            "scores": np.sort(numbers(1, 100))[:, ::-1].copy(), "labels": integers(1, 100).astype(np.int32),
        },
    ),
    "rtmo": Row(
        "rtmo", {"dets": joined(corners(50, 640), SCORES[[0] * 50]), "keypoints": numbers(1, 50, 17, 3)},
        card={"keypoint-shape": "17;3", "model-color-format": "1", "padding-value": "114"}, labels=1,
    ),
    "mmdeploy": Row(
        "mmdeploy", {"dets": joined(corners(50, 640), SCORES[[0] * 50]), "labels": integers(1, 50)},
        asks=("--mean",), hints=Hints(mean=NUMBERS, std=NUMBERS),
    ),
    "mmdeploy with the metadata of OpenVINO's Model API": Row(
        "mmdeploy", {"boxes": joined(corners(50, 640), SCORES[[0] * 50]), "labels": integers(1, 50, below=2)},
        metadata={
            "model_info model_type": "ssd", "model_info labels": "ripe_fruit leaf", "model_info mean_values": "0 0 0",
            "model_info scale_values": "255.0 255.0 255.0", "model_info reverse_input_channels": "True",
            "model_info resize_type": "fit_to_window_letterbox", "model_info pad_value": "114",
            "model_info confidence_threshold": "0.35",
        },
        card={
            "labels": "ripe fruit;leaf", "model-color-format": "0", "symmetric-padding": "1", "padding-value": "114",
            "pre-cluster-threshold": "0.35", "channel-scale-factors": THIRDS,
        },
        labels=2,
    ),
    "rt-detr": Row(
        "rt-detr", {**FINAL, "scores": SCORES[np.newaxis]}, image=("N", 3, 320, 320), size_input="orig_target_sizes",
        shapes={"labels": ("Sub", "a"), "boxes": ("Gather", "b", 4), "scores": ("Gather", "c")},
        card={"image-size-input": "orig_target_sizes", **SQUASH_RGB}, labels=80,
    ),
    "rt-detr without batch axis": Row(
        "rt-detr",
        {"labels": integers(30).ravel(), "boxes": corners(30, 280), "scores": SCORES},
        image=("N", 3, 320, 320), size_input="orig_target_sizes",
        card={"image-size-input": "orig_target_sizes"}, labels=80, rows_follow_batch=False,
    ),
    "detr": Row(
        "detr", {"pred_logits": numbers(1, 100, 92, low=-4, high=4), "pred_boxes": centres(100, 1)[np.newaxis]},
        card={**SQUASH_RGB, **IMAGENET, "scaling-filter": "area"}, labels=91,
    ),
    "detr of transformers": Row(
        "detr", {"logits": numbers(1, 100, 92, low=-4, high=4), "pred_boxes": centres(100, 1)[np.newaxis]}, labels=91
    ),
    "80 logits and pred_boxes": Row(
        "rf-detr", {"logits": numbers(1, 300, 80, low=-4, high=1), "pred_boxes": centres(300, 1)[np.newaxis]},
        asks=("--layout",), hints=Hints(layout="rf-detr"), labels=80,
    ),
    "rf-detr": Row(
        "rf-detr", {"dets": centres(300, 1)[np.newaxis], "labels": numbers(1, 300, 91, low=-6, high=1)},
        image=(1, 3, 560, 560), card={**SQUASH_RGB, **IMAGENET}, labels=91,
    ),
    "rf-detr-seg": Row(
        "rf-detr-seg",
        {
            "dets": centres(200, 1)[np.newaxis], "labels": numbers(1, 200, 91, low=-6, high=1),
            "masks": numbers(1, 200, 108, 108, low=-5),
        },
        image=(1, 3, 432, 432), card=IMAGENET, labels=91,
    ),
    "torchvision": Row(
        "torchvision", {"boxes": corners(7, 600), "labels": integers(7, below=91), "scores": SCORES[:7]},
        image=(1, 3, "height", "width"), shapes={"boxes": ("M", 4), "labels": ("M",), "scores": ("M",)},
        card=SQUASH_RGB, labels=91, rows_follow_batch=False,
    ),
    "torchvision by kinds": Row(
        "torchvision", {"3041": SCORES[:7], "3020": corners(7, 600), "3045": integers(7, below=91)},
        image=(1, 3, "height", "width"), shapes={"3020": ("M", 4), "3045": ("M",), "3041": ("M",)},
        labels=91, rows_follow_batch=False,
    ),
    "tf-detection": Row(
        "tf-detection",
        {
            "detection_boxes:0": corners(100, 1)[np.newaxis, :, [1, 0, 3, 2]],
            "detection_classes:0": whole(100, 90).ravel()[np.newaxis] + 1, "detection_scores:0": numbers(1, 100),
            "num_detections:0": np.array([40], np.float32),
        },
        image=(1, 300, 300, 3), image_type=TensorProto.UINT8, card={"network-input-order": "1"}, labels=91,
    ),
    "tf-detection of any size": Row(
        "tf-detection",
        {
            "detection_boxes:0": corners(100, 1)[np.newaxis, :, [1, 0, 3, 2]],
            "detection_classes:0": whole(100, 90).ravel()[np.newaxis] + 1, "detection_scores:0": numbers(1, 100),
            "num_detections:0": np.array([40], np.float32),
        },
        image=(1, "h", "w", 3), image_type=TensorProto.UINT8, card={"max-side": "1333"}, labels=91,
    ),
    "detr of any size": Row(
        "detr", {"logits": numbers(1, 100, 92, low=-4, high=4), "pred_boxes": centres(100, 1)[np.newaxis]},
        image=("batch_size", 3, "height", "width"), card={"min-side": "800", "max-side": "1333"}, labels=91,
    ),
    "ssd of OpenVINO": Row(
        "ssd",
        {"detection_out": np.concatenate([np.zeros((50, 1)), whole(50, 3), numbers(50, 1), corners(50, 1)], 1)
            .astype(np.float32)[np.newaxis, np.newaxis]},
        image=(1, 3, 300, 300), rows_follow_batch=False,
    ),
    "nanodet": Row(
        "nanodet", pairs(320, (8, 16, 32), ("cls_pred_stride", "dis_pred_stride")), image=(1, 3, 320, 320),
        card={"model-color-format": "1", "padding-value": "0", "offsets": "103.53;116.28;123.675"}, labels=80,
    ),
    "nanodet-plus": Row(
        "nanodet-plus",
        {"output": joined(scores(cells(320, (8, 16, 32, 64)), 80), numbers(cells(320, (8, 16, 32, 64)), 32, low=-3))},
        image=(1, 3, 320, 320), card={"model-color-format": "1"}, labels=80,
    ),
    "picodet": Row(
        "picodet", pairs(416, (8, 16, 32, 64), ("transpose", "reshape")), image=(1, 3, 416, 416),
        card={**SQUASH_RGB, **IMAGENET}, labels=80,
    ),
    "ultraface": Row(
        "ultraface",
        {"scores": joined(1 - FACES, FACES), "boxes": corners(4420, 1)[np.newaxis]},
        image=(1, 3, 240, 320), card={"pre-cluster-threshold": "0.5", "nms-iou-threshold": "0.3"}, labels=1,
    ),
    "yunet": Row(
        "yunet", YUNET, image=(1, 3, 320, 320), card={"model-color-format": "1", "padding-value": "0"}, labels=1
    ),
    "classifier of ImageNet": Row(
        "classification", {"logits": numbers(1, 1000, low=-3, high=9)}, image=(1, 3, 224, 224), labels=1000,
        card={"apply-softmax": "1", "resize-shorter-side": "256", **IMAGENET},
    ),
    "classifier with a softmax": Row(
        "classification", {"probs": np.full((1, 7), 1 / 7, np.float32)}, image=(1, 3, 224, 224),
        last={"probs": "Softmax"},
    ),
    "classifier with trailing axes": Row(
        "classification", {"logits": numbers(1, 1000, 1, 1, low=-3, high=9)}, image=(1, 3, 224, 224), labels=1000
    ),
    "classifier of Ultralytics": Row(
        "classification", {"output0": np.full((1, 3), 1 / 3, np.float32)}, image=(1, 3, 224, 224),
        metadata={"task": "classify", "names": "['a', 'b', 'c']", "imgsz": "[224, 224]"}, labels=3,
        card={"resize-shorter-side": "224", "net-scale-factor": "0.0039215686274509803"},
    ),
    "10 numbers": Row(
        "classification", {"out": numbers(1, 10, low=-3, high=3)}, image=(1, 3, 32, 32), asks=("--layout",),
        hints=Hints(layout="classification"),
    ),
    "embedding of persons": Row(
        "embedding", {"output": numbers(1, 512, high=4)}, image=("batch", 3, 256, 128),
        shapes={"output": ("batch", 512)}, card=IMAGENET,
    ),
    "embedding of faces": Row(
        "embedding", {"683": numbers(1, 512, low=-2, high=2)}, image=(1, 3, 112, 112), asks=("--mean",),
        hints=Hints(mean=(0.5,), std=(0.5,)), card={"offsets": "127.5;127.5;127.5"},
    ),
    "semantic": Row(
        "semantic", {"out": numbers(1, 21, 64, 64, low=-4)}, image=(1, 3, 512, 512), asks=("--mean",),
        hints=Hints(mean=NUMBERS, std=NUMBERS),
    ),
    "semantic NHWC": Row(
        "semantic", {"out": numbers(1, 257, 257, 21, low=-4)}, image=(1, 257, 257, 3), asks=("--mean",),
        hints=Hints(mean=(0.5,), std=(0.5,)), card={"network-input-order": "1"},
    ),
    "semantic of whole numbers": Row(
        "semantic", {"out": integers(1, 1, 512, 512, below=19)}, image=(1, 3, 512, 512), asks=("--mean",),
        hints=Hints(mean=NUMBERS, std=NUMBERS),
    ),
    "semantic of independent classes": Row(
        "semantic-multilabel", {"out": numbers(1, 4, 64, 64, low=-4)}, image=(1, 3, 64, 64), last={"out": "Sigmoid"},
        asks=("--mean",), hints=Hints(mean=NUMBERS, std=NUMBERS),
    ),
    "semantic of independent classes without a sigmoid at the end": Row(
        "semantic-multilabel", {"out": numbers(1, 64, 64, 4)}, image=(1, 64, 64, 3),
        asks=("--mean",), hints=Hints(mean=NUMBERS, std=NUMBERS),
    ),
    "semantic of independent classes, of which the best is wanted": Row(
        "semantic", {"out": numbers(1, 4, 64, 64, low=-4)}, image=(1, 3, 64, 64), last={"out": "Sigmoid"},
        asks=("--mean",), hints=Hints(mean=NUMBERS, std=NUMBERS, layout="semantic"),
    ),
    "semantic of independent logits": Row(
        "semantic-multilabel", {"out": numbers(1, 4, 64, 64, low=-4)}, image=(1, 3, 64, 64), asks=("--mean",),
        hints=Hints(mean=NUMBERS, std=NUMBERS, layout="semantic-multilabel"), card={"apply-sigmoid": "1"},
    ),
    "mask of one class": Row(
        "semantic", {"out": numbers(1, 1, 64, 64, low=-4)}, image=(1, 3, 64, 64), last={"out": "Sigmoid"},
        asks=("--layout", "--mean"), hints=Hints(mean=NUMBERS, std=NUMBERS, layout="semantic"),
        card={"apply-sigmoid": None},
    ),
    "logits of one class": Row(
        "semantic", {"out": numbers(1, 1, 64, 64, low=-4)}, image=(1, 3, 64, 64),
        asks=("--layout", "--mean"), hints=Hints(mean=NUMBERS, std=NUMBERS, layout="semantic"),
        card={"apply-sigmoid": "1"},
    ),
    "depth": Row(
        "depth", {"out": numbers(1, 256, 256, high=900)}, image=(1, 3, 256, 256), asks=("--layout", "--mean"),
        hints=Hints(layout="depth", mean=NUMBERS, std=NUMBERS),
    ),
    "ctc": Row(
        "ctc", {"softmax_11.tmp_0": scores(40, 12)[np.newaxis]}, image=("b", 3, 48, "w"),
        shapes={"softmax_11.tmp_0": ("b", "t", 12)}, metadata={"character": "'\n0\n1\n2\n3\n4\n5\n6\n7\n8"},
        card={"characters": "'012345678", "min-width": "320", "padding-value": "127.5", "model-color-format": "1"},
    ),
    "ctc without characters": Row(
        "ctc", {"out": scores(40, 12)[np.newaxis]}, image=(1, 3, 48, 320), asks=("--labels",),
        hints=Hints(labels=tuple("0123456789")), card={"characters": "0123456789"},
    ),
    "db": Row(
        "db", {"sigmoid_0.tmp_0": numbers(1, 1, 736, 736, low=-9, high=1)}, image=("b", 3, "h", "w"),
        shapes={"sigmoid_0.tmp_0": ("b", 1, "h", "w")}, last={"sigmoid_0.tmp_0": "Sigmoid"},
        card={"size-multiple": "32", "min-side": "736", "model-color-format": "1", "segmentation-threshold": "0.3"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_other_outputs_are_recognised_or_asked(tmp_path: Path, name: str) -> None:
    """Layout and card of each row; what the file leaves open is asked by name of the flag, and the flag settles it."""
    row = ROWS[name]
    path = row.write(tmp_path / "model.onnx")
    first = inspected(path)
    assert tuple(asked(first)) == row.asks, first.reason
    found = inspected(path, row.hints) if row.asks else first
    assert (found.recognition.layout, found.verdict) == (row.layout, Verdict.SERVABLE), found.reason
    assert {key: found.recognition.parameters.get(key) for key in row.card} == row.card
    assert len(found.recognition.labels) == row.labels
    assert found.recognition.rows_follow_batch is row.rows_follow_batch


def test_independent_classes_of_a_map_name_the_flag(tmp_path: Path) -> None:
    """After a sigmoid, --layout semantic would take the best class of each pixel; the card says which is used."""
    path = ROWS["semantic of independent classes"].write(tmp_path / "model.onnx")
    found = inspected(path, Hints(mean=NUMBERS, std=NUMBERS)).recognition
    question = next(one for one in found.questions if one.flag == "--layout")
    assert (question.choices, question.is_blocking) == (("semantic-multilabel", "semantic"), False)
    settled = inspected(path, Hints(mean=NUMBERS, std=NUMBERS, layout="semantic-multilabel")).recognition
    assert not any(one.flag == "--layout" for one in settled.questions)


def centerface(path: Path) -> Path:
    """A convolutional network of CenterFace's outputs, which declares 10 x 3 x 32 x 32 as the real exporter does."""
    nodes, weights, outputs = [], [], []
    for name, channels in (("heat", 1), ("scale", 2), ("offset", 2), ("points", 10)):
        values = numbers(channels, 3, 4, 4, low=-1e-4, high=1e-4)
        weights.append(numpy_helper.from_array(values, f"{name}.w"))
        nodes.append(helper.make_node("Conv", ["input.1", f"{name}.w"], [f"{name}.c"], strides=[4, 4]))
        nodes.append(helper.make_node("Sigmoid" if name == "heat" else "Identity", [f"{name}.c"], [name]))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [10, channels, 8, 8]))
    image = helper.make_tensor_value_info("input.1", TensorProto.FLOAT, [10, 3, 32, 32])
    graph = helper.make_graph(nodes, "centerface", [image], outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_an_untrue_declared_size_is_relabelled(tmp_path: Path) -> None:
    """CenterFace's 10 x 3 x 32 x 32 is an exporter's leftover: the trial and the added model take any size."""
    path = centerface(tmp_path / "faces.onnx")
    found = inspected(path)
    assert (found.recognition.layout, found.verdict) == ("centerface", Verdict.SERVABLE), found.reason
    assert found.recognition.input_shape == (1, 3, -1, -1)
    assert any("any size" in sentence for sentence in found.recognition.warnings)
    assert found.recognition.output_shapes["points"] == (1, 10, -1, -1)
    added = add_model(path, "faces", AddOptions(Hints()), home=tmp_path / "home")
    session = ort.InferenceSession(added.folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, {"input.1": numbers(1, 3, 96, 64)})[0].shape == (1, 1, 24, 16)


def test_a_vision_transformer_of_the_deim_family_is_asked(tmp_path: Path) -> None:
    """DEIMv2 on DINOv3 is fed ImageNet's mean and deviation, others of its family 0 to 1: its patches show it."""
    network = Network(ROWS["rt-detr"].write(tmp_path / "model.onnx"))
    patches = network.constant(numbers(8, 3, 16, 16))
    network.graph.node.append(helper.make_node("Conv", ["images", patches], ["patches"], strides=[16, 16]))
    path = network.save(tmp_path / "vit.onnx")
    assert asked(inspected(path)) == ["--mean"]
    assert inspected(path, Hints(mean=NUMBERS, std=NUMBERS)).verdict is Verdict.SERVABLE


def test_pictures_of_16_bits_are_fed(tmp_path: Path) -> None:
    """A half-precision export gets half-precision pixels."""
    rows = np.ascontiguousarray(joined(centres(2100, 320), scores(2100, 80)).transpose(0, 2, 1)).astype(np.float16)
    path = constant_model(
        tmp_path / "half.onnx", {"output0": rows}, image=(1, 3, 320, 320), image_type=TensorProto.FLOAT16
    )
    found = inspected(path)
    assert (found.recognition.layout, found.verdict) == ("yolov8", Verdict.SERVABLE), found.reason


def test_the_tensorrt_plugin_is_refused_with_its_reason(tmp_path: Path) -> None:
    """EfficientNMS_TRT runs only in TensorRT."""
    outputs = {"num_dets": np.array([[3]], np.int32), "det_boxes": corners(9, 640)[np.newaxis]}
    path = constant_model(tmp_path / "model.onnx", outputs, operators=[("TRT", "EfficientNMS_TRT")])
    found = inspected(path)
    assert (found.verdict, "only in TensorRT" in found.reason) == (Verdict.UNSERVABLE, True)


def test_custom_operators_are_named(tmp_path: Path) -> None:
    """A domain that ONNX Runtime does not have is one sentence with its name."""
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, 10)}, operators=[("acme.ops", "Fuse")])
    found = inspected(path)
    assert (found.verdict, "acme.ops" in found.reason) == (Verdict.UNSERVABLE, True)


def test_a_second_unknown_input_is_named(tmp_path: Path) -> None:
    """An input that is neither picture nor its size makes the model unservable, and is named."""
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, 10)}, size_input="scale_factor")
    found = inspected(path)
    assert (found.verdict, "scale_factor" in found.reason) == (Verdict.UNSERVABLE, True)


def test_unknown_outputs_list_the_layouts(tmp_path: Path) -> None:
    """Outputs that no rule knows are shown with the flag, and never guessed."""
    path = constant_model(tmp_path / "model.onnx", {"a": numbers(1, 3, 5, 7, 9), "b": numbers(1, 2, 2)})
    found = inspected(path)
    assert (found.verdict, asked(found)) == (Verdict.AMBIGUOUS, ["--layout"])
    assert "a FP32 [1, 3, 5, 7, 9]" in found.reason
