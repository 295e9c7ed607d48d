"""Files that resemble a known layout or family, but are of another: as public files showed."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.models.inspect.inspection import Hints, Verdict
from tests.models.inspect.made_models import (
    Array,
    asked,
    cells,
    centres,
    constant_model,
    inspected,
    joined,
    numbers,
    scores,
    transposed,
)

N320 = cells(320)
CHARACTERS = tuple("0123456789")
MAPS = {f"map_{side}": numbers(1, 3, side, side, 85, low=-9, high=2) for side in (40, 20, 10)}
HEADS = {f"head_{side}": numbers(1, 144, side, side, low=-9, high=2) for side in (40, 20, 10)}
ROWS = {
    "yolov5": {"output": joined(centres(3 * N320, 320), scores(3 * N320, 81)), **MAPS},
    "yolov8": {"output": transposed(joined(centres(N320, 320), scores(N320, 80))), **HEADS},
}


def steps(blank: int) -> Array:
    """[1, 40, 11] probabilities of a recogniser that reads nothing in most steps."""
    found = np.full((1, 40, len(CHARACTERS) + 1), 0.01, np.float32)
    found[:, :, blank] = 0.9
    return found


def faces(count: int) -> Array:
    """[1, count, 16] as YOLOv5-face decodes them: a box, objectness, five points in pixels, one class."""
    return joined(centres(count, 320), scores(count, 1), numbers(count, 10, high=320), scores(count, 1))


@pytest.mark.parametrize("layout", ROWS)
def test_maps_of_the_strides_beside_the_rows_are_not_read(tmp_path: Path, layout: str) -> None:
    """Older exporters write the maps of the strides too; the rows alone are decoded."""
    found = inspected(constant_model(tmp_path / "model.onnx", ROWS[layout], image=(1, 3, 320, 320)))
    assert (found.recognition.layout, found.verdict) == (layout, Verdict.SERVABLE), found.reason
    assert found.recognition.parameters["output-blob-names"] == "output"


def test_an_unknown_output_beside_the_rows_is_not_a_map_of_a_stride(tmp_path: Path) -> None:
    """Rows with another output that is read by no layout stay unknown."""
    outputs = {"output": ROWS["yolov8"]["output"], "points": numbers(1, N320, 10)}
    found = inspected(constant_model(tmp_path / "model.onnx", outputs, image=(1, 3, 320, 320)))
    assert (found.recognition.layout, asked(found)) == ("", ["--layout"])


def test_points_between_objectness_and_class_are_not_logits(tmp_path: Path) -> None:
    """Pixels in columns of classes are reported, and no sigmoid is applied to them."""
    path = constant_model(tmp_path / "model.onnx", {"output": faces(3 * N320)}, image=(1, 3, 320, 320))
    found = inspected(path, Hints(labels=tuple(f"c{number}" for number in range(11))))
    assert (found.verdict, "apply-sigmoid" in found.recognition.parameters) == (Verdict.AMBIGUOUS, False)
    assert "points" in found.reason


def test_rows_of_a_free_size_are_not_taken_for_columns(tmp_path: Path) -> None:
    """A fixed number of rows, more than classes can be, and free columns: the size is asked, and settles both."""
    path = constant_model(
        tmp_path / "model.onnx",
        {"output": joined(centres(3 * N320, 320), scores(3 * N320, 81))},
        image=("batch", 3, "height", "width"),
        shapes={"output": ("batch", 3 * N320, "columns")},
    )
    first = inspected(path)
    assert (asked(first), first.recognition.class_count) == (["--input-size"], 0)
    found = inspected(path, Hints(input_size=(320, 320)))
    assert (found.recognition.layout, found.recognition.class_count) == ("yolov5", 80)


@pytest.mark.parametrize("is_nhwc", [False, True])
def test_grids_of_two_strides_are_not_a_map_of_classes(tmp_path: Path, is_nhwc: bool) -> None:
    """Grids of a detector, as of YOLO-FastestV2, are not served as a semantic map."""
    grids = {name: numbers(1, 16, side, side) for name, side in (("large", 22), ("small", 11))}
    outputs = {
        name: np.ascontiguousarray(grid.transpose(0, 2, 3, 1)) if is_nhwc else grid for name, grid in grids.items()
    }
    found = inspected(constant_model(tmp_path / "model.onnx", outputs, image=(1, 3, 352, 352)))
    assert (found.recognition.layout, asked(found)) == ("", ["--layout"])


@pytest.mark.parametrize(("length", "flags"), [(128, ["--mean"]), (136, ["--layout"]), (7, ["--layout"])])
def test_a_face_has_an_embedding_only_of_a_usual_length(tmp_path: Path, length: int, flags: list[str]) -> None:
    """68 points or 7 expressions of a face's 112 x 112 pixels are not served as an embedding."""
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, length, low=-2)}, image=(1, 3, 112, 112))
    assert asked(inspected(path)) == flags


@pytest.mark.parametrize(
    ("image", "flags"), [((1, 3, 256, 128), []), ((1, 256, 128, 3), ["--mean"])], ids=["NCHW", "NHWC"]
)
def test_the_normalisation_of_a_network_of_tensorflow_is_asked(
    tmp_path: Path, image: tuple[int, ...], flags: list[str]
) -> None:
    """ImageNet's numbers are usual in PyTorch: pictures [B, H, W, 3] of persons may be normalised otherwise."""
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, 256, low=-2)}, image=image)
    assert asked(inspected(path)) == flags


@pytest.mark.parametrize(
    ("image", "image_type", "flags"),
    [
        ((1, 1, 28, 28), TensorProto.FLOAT, ["--mean"]),
        ((1, 224, 224, 3), TensorProto.FLOAT, ["--mean"]),
        ((1, 224, 224, 3), TensorProto.UINT8, []),
        ((1, 3, 224, 224), TensorProto.FLOAT, []),
    ],
    ids=["grey", "NHWC", "NHWC of uint8", "NCHW"],
)
def test_the_normalisation_of_a_classifier_is_asked_where_imagenets_is_unlikely(
    tmp_path: Path, image: tuple[int, ...], image_type: int, flags: list[str]
) -> None:
    """Grey or NHWC pictures are asked for; uint8 pixels are scaled in the graph."""
    path = constant_model(
        tmp_path / "model.onnx", {"out": numbers(1, 10, low=-3, high=3)}, image=image, image_type=image_type
    )
    assert asked(inspected(path, Hints(labels=CHARACTERS))) == flags


@pytest.mark.parametrize(("blank", "flags"), [(0, []), (len(CHARACTERS), ["--layout"])], ids=["first", "last"])
def test_a_blank_that_is_the_last_column_is_reported(tmp_path: Path, blank: int, flags: list[str]) -> None:
    """The layout has the blank first: otherwise each character would be its neighbour."""
    path = constant_model(tmp_path / "model.onnx", {"out": steps(blank)}, image=(1, 3, 48, 320))
    assert asked(inspected(path, Hints(labels=CHARACTERS))) == flags


def test_characters_that_are_asked_are_no_failure(tmp_path: Path) -> None:
    """A card that waits for an answer is not reported as a failed run as well."""
    found = inspected(constant_model(tmp_path / "model.onnx", {"out": steps(0)}, image=(1, 3, 48, 320)))
    assert (asked(found), found.trial.failure) == (["--labels"], "")


def test_a_size_that_is_asked_is_no_failure(tmp_path: Path) -> None:
    """Without a size there is no run, so none fails."""
    names = [f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in (8, 16, 32)]
    widths = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    outputs = {name: numbers(1, (320 // int(name.split("_")[1])) ** 2, widths[name.split("_")[0]]) for name in names}
    path = constant_model(
        tmp_path / "model.onnx",
        outputs,
        image=("batch", 3, "height", "width"),
        shapes={name: ("batch", "rows", array.shape[2]) for name, array in outputs.items()},
    )
    found = inspected(path)
    assert (found.recognition.layout, asked(found), found.trial.failure) == ("yunet", ["--input-size"], "")


@pytest.mark.parametrize(("name", "first"), [("sigmoid_0.tmp_0", "db"), ("output", "semantic")])
def test_the_likeliest_answer_for_one_probability_per_pixel_is_first(tmp_path: Path, name: str, first: str) -> None:
    """With the names of Paddle's converter it is text, else a mask of one class."""
    path = constant_model(
        tmp_path / "model.onnx", {name: numbers(1, 1, 64, 64)}, image=(1, 3, 64, 64), last={name: "Sigmoid"}
    )
    question = next(one for one in inspected(path).recognition.questions if one.flag == "--layout")
    assert question.choices[0] == first


@pytest.mark.parametrize(("low", "high", "sentence"), [(-4, 5, "offsets from anchors"), (0, 300, "pixels")])
def test_boxes_that_are_not_fractions_are_named(tmp_path: Path, low: float, high: float, sentence: str) -> None:
    """A face detector without the decoding in its graph gives offsets, one that decodes further gives pixels."""
    likelihood = scores(4420, 1)
    outputs = {"scores": joined(1 - likelihood, likelihood), "boxes": numbers(1, 4420, 4, low=low, high=high)}
    found = inspected(constant_model(tmp_path / "model.onnx", outputs, image=(1, 3, 240, 320)))
    assert (found.verdict, sentence in found.reason) == (Verdict.AMBIGUOUS, True), found.reason


def test_a_sigmoid_before_squeezes_of_constant_axes_is_seen(tmp_path: Path) -> None:
    """Axes are a node of the graph since opset 13: they do not hide the sigmoid."""
    path = constant_model(
        tmp_path / "model.onnx", {"map": numbers(1, 1, 1, 64, 64)}, image=(1, 3, 64, 64), last={"map": "Sigmoid"}
    )
    model = onnx.load(path)
    axes = helper.make_tensor("axes.value", TensorProto.INT64, [1], [1])
    model.graph.node.append(helper.make_node("Constant", [], ["axes"], value=axes))
    model.graph.node.append(helper.make_node("Squeeze", ["map", "axes"], ["squeezed"]))
    model.graph.node.append(helper.make_node("Squeeze", ["squeezed", "axes"], ["out"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 64, 64]))
    onnx.save(model, path)
    question = next(one for one in inspected(path).recognition.questions if one.flag == "--layout")
    assert question.choices == ("semantic", "db", "depth")
