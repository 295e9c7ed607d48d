"""Layouts with a row for each box: known boxes come back, padding rows do not; broken outputs are refused."""

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.vision.results import ResultOptions
from tests.support.plain_detections import PlainBox, PlainFit, assert_same_detections, plain_nms
from tests.vision.layouts.scenes import (
    LETTERBOX,
    STREET,
    STREET_SIZE,
    YARD,
    YARD_SIZE,
    Array,
    card_of,
    corner_rows,
    decode,
    fit_of,
)

SIZE = (320, 256)
COUNT = 8  # rows of a picture
FINAL = ["yolo-end2end", "yolov7-nms", "mmdeploy", "efficient-nms"]
NAMES = {
    "yolo-end2end": ["output0"],
    "deepstream-yolo": ["output"],
    "yolov7-nms": ["output"],
    "mmdeploy": ["dets", "labels"],
    "efficient-nms": ["num_dets", "det_boxes", "det_scores", "det_classes"],
}


def outputs_of(layout: str, rows: Array, *, count: int | None = None) -> dict[str, Array]:
    """The layout's outputs of (batch, n, 6) corner rows; count: of valid rows, for efficient-nms."""
    batch, width = rows.shape[0], rows.shape[1]
    classes = rows[..., 5]
    if layout == "yolov7-nms":
        image = np.repeat(np.arange(batch), width)[:, np.newaxis]
        flat = rows.reshape(-1, 6)
        return {"output": np.hstack([image, flat[:, :4], flat[:, 5:], flat[:, 4:5]]).astype(np.float32)}
    if layout == "mmdeploy":
        return {"dets": rows[..., :5], "labels": classes.astype(np.int64)}
    if layout == "efficient-nms":
        counts = np.full((batch, 1), width if count is None else count, np.int32)
        values = counts, rows[..., :4], rows[..., 4], classes.astype(np.int32)
        return dict(zip(NAMES[layout], values, strict=True))
    return {NAMES[layout][0]: rows}


def padded(boxes: list[PlainBox], fit: PlainFit, padding: float = 0.0) -> Array:
    """(COUNT, 6): the boxes by falling score, then rows that only fill up."""
    rows = np.full((COUNT, 6), padding, np.float32)
    known = corner_rows(sorted(boxes, key=lambda box: -box.score), fit)
    rows[: len(known)] = known
    rows[len(known) :, 4] = 0.0
    return rows


def clipped(boxes: list[PlainBox], fit: PlainFit) -> list[PlainBox]:
    """Known boxes over the threshold as a decoding must find them."""
    return [fit.to_picture(fit.to_network(box)) for box in boxes if box.score > 0.25]


@pytest.mark.parametrize("padding", [0.0, -1.0])
@pytest.mark.parametrize("layout", ["yolo-end2end", "mmdeploy", "efficient-nms"])
def test_final_rows_of_a_batch_are_the_known_boxes_without_suppression(layout: str, padding: float) -> None:
    """Two of one class that overlap both stay. Rows of score 0 fill up, with any box and class."""
    fits = [fit_of(STREET_SIZE, SIZE), fit_of(YARD_SIZE, SIZE)]
    rows = np.stack([padded(list(STREET), fits[0], padding), padded(list(YARD), fits[1], padding)])
    outputs = outputs_of(layout, rows)
    card = card_of(layout, SIZE, NAMES[layout])
    assert_same_detections(decode(card, outputs, STREET_SIZE, row=0), clipped(list(STREET), fits[0]))
    assert_same_detections(decode(card, outputs, YARD_SIZE, row=1), clipped(list(YARD), fits[1]))


@pytest.mark.parametrize("layout", FINAL)
def test_final_rows_without_a_batch_axis_are_the_known_boxes(layout: str) -> None:
    """As a model with max_batch_size 0 answers them; a leading 1 is no difference."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = padded(list(STREET), fit)
    card = card_of(layout, SIZE, NAMES[layout])
    with_batch = outputs_of(layout, rows[np.newaxis])
    assert_same_detections(decode(card, with_batch, STREET_SIZE, row=None), clipped(list(STREET), fit))
    if layout != "yolov7-nms":
        without = {name: array[0] for name, array in with_batch.items()}
        assert_same_detections(decode(card, without, STREET_SIZE, row=None), clipped(list(STREET), fit))


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_yolov7_nms_takes_any_number_of_rows_of_its_own_image(count: int) -> None:
    """The first column is the image; one row is no batch of one."""
    fit = fit_of(STREET_SIZE, SIZE)
    boxes = list(STREET)[:count]
    rows = outputs_of("yolov7-nms", np.stack([corner_rows(boxes, fit), corner_rows(boxes, fit)]))
    card = card_of("yolov7-nms", SIZE, ["output"])
    assert_same_detections(decode(card, rows, STREET_SIZE, row=None), clipped(boxes, fit))
    assert_same_detections(decode(card, {"output": rows["output"][:count]}, STREET_SIZE), clipped(boxes, fit))


@pytest.mark.parametrize("valid", [0, 1, 3, 6])
@pytest.mark.parametrize(
    "names",
    [
        ("num_dets", "det_boxes", "det_scores", "det_classes"),
        ("num_detections", "detection_boxes", "detection_scores", "detection_classes"),
        ("num_dets", "boxes", "scores", "labels"),
        ("a", "b", "c", "d"),
    ],
)
def test_efficient_nms_takes_the_first_rows_by_the_count(names: tuple[str, ...], valid: int) -> None:
    """Of outputs with the usual names in any order, and of others in the order of output-blob-names."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = corner_rows(list(STREET), fit)[np.newaxis]
    outputs = dict(zip(names, outputs_of("efficient-nms", rows, count=valid).values(), strict=True))
    swapped = [names[2], names[0], names[3], names[1]]
    card = card_of("efficient-nms", SIZE, swapped, LETTERBOX | {"output-blob-names": ";".join(names)})
    assert_same_detections(decode(card, outputs, STREET_SIZE), clipped(list(STREET)[:valid], fit))
    if names[0] != "a":
        card = card_of("efficient-nms", SIZE, swapped)
        assert_same_detections(decode(card, outputs, STREET_SIZE), clipped(list(STREET)[:valid], fit))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float16, np.float32, np.float64])
def test_efficient_nms_takes_a_count_of_any_shape_and_type(shape: tuple[int, ...], dtype: type) -> None:
    """With and without a batch axis; classes may be floats, too."""
    fit = fit_of(STREET_SIZE, SIZE)
    outputs = outputs_of("efficient-nms", corner_rows(list(STREET), fit)[np.newaxis])
    outputs["num_dets"] = np.full(shape, 3, dtype)
    outputs["det_classes"] = outputs["det_classes"].astype(dtype)
    card = card_of("efficient-nms", SIZE, NAMES["efficient-nms"])
    assert_same_detections(decode(card, outputs, STREET_SIZE, row=None), clipped(list(STREET)[:3], fit))


def test_efficient_nms_of_a_batch_has_a_count_for_each_picture() -> None:
    """Also as a vector without a second axis."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = corner_rows(list(STREET), fit)
    outputs = outputs_of("efficient-nms", np.stack([rows, rows]))
    outputs["num_dets"] = np.array([2, 4], np.int32)
    card = card_of("efficient-nms", SIZE, NAMES["efficient-nms"])
    assert_same_detections(decode(card, outputs, STREET_SIZE, row=0), clipped(list(STREET)[:2], fit))
    assert_same_detections(decode(card, outputs, STREET_SIZE, row=1), clipped(list(STREET)[:4], fit))


def test_mmdeploy_takes_outputs_of_other_names_in_their_order() -> None:
    """The names that the exporter uses are found in any order."""
    fit = fit_of(STREET_SIZE, SIZE)
    dets, labels = outputs_of("mmdeploy", corner_rows(list(STREET), fit)[np.newaxis]).values()
    usual = decode(card_of("mmdeploy", SIZE, ["labels", "dets"]), {"dets": dets, "labels": labels}, STREET_SIZE)
    assert_same_detections(usual, clipped(list(STREET), fit))
    other = decode(card_of("mmdeploy", SIZE, ["x", "y"]), {"x": dets, "y": labels}, STREET_SIZE)
    assert_same_detections(other, clipped(list(STREET), fit))


def test_deepstream_yolo_rows_are_suppressed_per_class() -> None:
    """nvinfer does it where these models come from."""
    fits = [fit_of(STREET_SIZE, SIZE), fit_of(YARD_SIZE, SIZE)]
    random = np.random.default_rng(3)
    rows = np.zeros((2, 1680, 6), np.float32)
    rows[..., :4], rows[..., 4] = random.uniform(0, 250, (2, 1680, 4)), random.uniform(0, 0.2, (2, 1680))
    rows[..., 5] = random.integers(0, 80, (2, 1680))
    for index, boxes in enumerate((STREET, YARD)):
        rows[index, random.permutation(1680)[: len(boxes)]] = corner_rows(boxes, fits[index])
    card = card_of("deepstream-yolo", SIZE, ["output"])
    assert_same_detections(decode(card, {"output": rows}, STREET_SIZE), clipped(plain_nms(STREET), fits[0]))
    assert_same_detections(decode(card, {"output": rows}, YARD_SIZE, row=1), clipped(plain_nms(YARD), fits[1]))
    card = card_of("deepstream-yolo", SIZE, ["output"], LETTERBOX | {"class-agnostic-nms": "1"})
    agnostic = plain_nms(STREET, is_class_agnostic=True)
    assert_same_detections(decode(card, {"output": rows}, STREET_SIZE), clipped(agnostic, fits[0]))
    assert len(agnostic) < len(plain_nms(STREET))


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("layout", ["deepstream-yolo", "deepstream-yolo-cxcywh"])
def test_deepstream_yolo_has_one_output_or_three_with_corners_or_centres(layout: str, is_single: bool) -> None:
    """Older exports have boxes, scores and classes in three outputs; Ultralytics' models had centre and size."""
    pictures: list[tuple[list[PlainBox], tuple[int, int]]] = [(list(STREET), STREET_SIZE), (list(YARD), YARD_SIZE)]
    random = np.random.default_rng(4)
    rows = np.zeros((2, 1680, 6), np.float32)
    rows[..., :4], rows[..., 4] = random.uniform(0, 250, (2, 1680, 4)), random.uniform(0, 0.2, (2, 1680))
    for index, (boxes, size) in enumerate(pictures):
        for place, box in zip(random.permutation(1680), boxes, strict=False):
            x0, y0, x1, y1, class_id, score = fit_of(size, SIZE).to_network(box)
            centre = (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0
            rows[index, place] = *(centre if "cxcywh" in layout else (x0, y0, x1, y1)), score, class_id
    three = {"classes": rows[..., 5:], "boxes": rows[..., :4], "scores": rows[..., 4:5]}
    outputs = {"output": rows} if is_single else three
    card = card_of(layout, SIZE, list(outputs))
    for index, (boxes, size) in enumerate(pictures):
        wanted = clipped(plain_nms(boxes), fit_of(size, SIZE))
        assert_same_detections(decode(card, outputs, size, row=index), wanted)
        alone = {name: array[index : index + 1] for name, array in outputs.items()}
        assert_same_detections(decode(card, alone, size, row=None), wanted)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"boxes": (1, 9, 5)}, r"'boxes' has shape \[9, 5\] for one image; \[9, 4\] \(a box per score of 'scores'\)"),
        ({"scores": (1, 8, 1)}, r"'boxes' has shape \[9, 4\] for one image; \[8, 4\]"),
        ({"classes": (1, 7, 1)}, r"'classes' has shape \[7\] for one image; \[9\] \(a class per box\)"),
    ],
)
def test_three_outputs_of_deepstream_yolo_of_wrong_shapes_are_the_models_fault(
    changed: dict[str, tuple[int, ...]], sentence: str
) -> None:
    """The sentence names the output, its shape, and what was expected."""
    shapes = {"boxes": (1, 9, 4), "scores": (1, 9, 1), "classes": (1, 9, 1), **changed}
    outputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(EngineFailed, match=sentence):
        decode(card_of("deepstream-yolo", SIZE, list(outputs)), outputs, STREET_SIZE)


@pytest.mark.parametrize("layout", [*FINAL, "deepstream-yolo"])
def test_options_choose_among_the_rows(layout: str) -> None:
    """Thresholds, also per class, class ids, the client's classes and number; no row is too low for a lower conf."""
    fit = fit_of(STREET_SIZE, SIZE)
    outputs = outputs_of(layout, corner_rows(plain_nms(STREET), fit)[np.newaxis])

    def classes(parameters: Mapping[str, str], wanted: ResultOptions | None = None) -> list[int]:
        card = card_of(layout, SIZE, NAMES[layout], LETTERBOX | dict(parameters))
        found = decode(card, outputs, STREET_SIZE, wanted=wanted or ResultOptions(), row=None)
        return [int(one) for one in found.class_id]

    assert classes({}) == [2, 1, 0, 4, 3]
    assert classes({"pre-cluster-threshold": "0.6"}) == [2, 1, 0]
    assert classes({"class-thresholds": "2:0.95"}) == [1, 0, 4, 3]
    assert classes({"class-ids": "1;90"}) == [2, 90, 1, 4, 3]
    assert classes({"topk": "1"}) == [2]
    assert classes({}, ResultOptions(classes=("3", "1"))) == [1, 3]
    assert classes({"pre-cluster-threshold": "0.9"}, ResultOptions(conf=0.5, max_detections=3)) == [2, 1, 0]


@pytest.mark.parametrize("layout", FINAL)
def test_iou_of_a_client_is_refused_where_nothing_is_suppressed(layout: str) -> None:
    """It would have no effect. DeepStream-Yolo's rows are suppressed here."""
    outputs = outputs_of(layout, corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis])
    with pytest.raises(InvalidRequest, match=f"iou has no effect on this model .*layout '{layout}'"):
        decode(card_of(layout, SIZE, NAMES[layout]), outputs, STREET_SIZE, wanted=ResultOptions(iou=0.5))
    rows = {"output": corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis]}
    found = decode(card_of("deepstream-yolo", SIZE, ["output"]), rows, STREET_SIZE, wanted=ResultOptions(iou=0.99))
    assert len(found.score) == len(STREET)


# hostile values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["yolo-end2end", "deepstream-yolo", "yolov7-nms", "efficient-nms"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5; an integer of 32 bits was expected"),
        (-1.0, "-1; classes are counted from 0"),
        (1e38, r"9.99\d*e\+37; an integer of 32 bits"),
        (3e9, r"3000000000.0; an integer of 32 bits"),
    ],
)
def test_class_that_is_no_whole_number_is_the_models_fault(layout: str, value: float, text: str) -> None:
    """In rows over the threshold: it is the sign of another layout, and would need unbounded memory."""
    rows = corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis]
    outputs = outputs_of(layout, rows)
    rows[0, 2, 5] = value
    outputs = outputs | {"det_classes": rows[..., 5]} if layout == "efficient-nms" else outputs_of(layout, rows)
    card = card_of(layout, SIZE, NAMES[layout], LETTERBOX | {"class-ids": "1;2"})
    with pytest.raises(EngineFailed, match=f"holds {text}"):
        decode(card, outputs, STREET_SIZE, row=None)


@pytest.mark.parametrize("label", [-1, 2**40, -(2**63)])
def test_label_of_mmdeploy_that_is_no_class_is_the_models_fault(label: int) -> None:
    """In rows over the threshold."""
    outputs = outputs_of("mmdeploy", corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis])
    outputs["labels"][0, 0] = label
    with pytest.raises(EngineFailed, match=f"output 'labels' holds {label}; "):
        decode(card_of("mmdeploy", SIZE, NAMES["mmdeploy"]), outputs, STREET_SIZE)


def test_classes_that_are_nearly_whole_are_rounded() -> None:
    """As 16-bit arithmetic leaves them."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = corner_rows(list(STREET), fit)
    rows[:, 5] += np.array([0.004, -0.004, 0.0, 0.003, -0.003, 0.001], np.float32)
    found = decode(card_of("yolo-end2end", SIZE, ["o"]), {"o": rows[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, clipped(list(STREET), fit))


@pytest.mark.parametrize(
    ("count", "sentence"), [(7, r"'det_boxes' has shape \[6, 4\] for one image; \[7, 4\]"), (-1, "'num_dets' is -1")]
)
def test_count_beyond_the_rows_is_the_models_fault(count: int, sentence: str) -> None:
    """Nothing is read beyond the output."""
    outputs = outputs_of("efficient-nms", corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis], count=count)
    with pytest.raises(EngineFailed, match=f"output {sentence}"):
        decode(card_of("efficient-nms", SIZE, NAMES["efficient-nms"]), outputs, STREET_SIZE)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", [*FINAL, "deepstream-yolo"])
@pytest.mark.parametrize("value", [3e38, -3e38, 1e38, 0.0, -1.0])
def test_huge_and_negative_boxes_stay_in_the_picture_without_a_warning(layout: str, value: float) -> None:
    """Boxes are cut; those with a side of 0 or less are none."""
    for columns in (slice(0, 4), slice(2, 4), slice(0, 2), slice(0, 5)):
        rows = corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis]
        rows[0, :3, columns] = value
        found = decode(card_of(layout, SIZE, NAMES[layout]), outputs_of(layout, rows), STREET_SIZE, row=None)
        assert ((found.xyxy >= 0) & (found.xyxy <= [640, 360, 640, 360])).all()
        assert ((found.score > 0) & (found.score <= 1)).all()


@pytest.mark.parametrize("layout", [*FINAL, "deepstream-yolo"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 4])
def test_rows_that_are_not_finite_are_the_models_fault(layout: str, value: float, column: int) -> None:
    """In a box or a score."""
    rows = corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis]
    rows[0, 1, column] = value
    with pytest.raises(EngineFailed, match="has 1 values that are NaN or infinite"):
        decode(card_of(layout, SIZE, NAMES[layout]), outputs_of(layout, rows), STREET_SIZE, row=None)


@pytest.mark.parametrize("layout", [*FINAL, "deepstream-yolo"])
def test_no_rows_are_no_detections(layout: str) -> None:
    """Nothing seen is a result."""
    outputs = outputs_of(layout, np.zeros((1, 0, 6), np.float32))
    found = decode(card_of(layout, SIZE, NAMES[layout]), outputs, STREET_SIZE, row=None)
    assert (found.xyxy.shape, found.score.shape, found.class_id.shape) == ((0, 4), (0,), (0,))


@pytest.mark.parametrize(
    ("layout", "changed", "sentence"),
    [
        ("yolo-end2end", {"output0": (1, 9, 7)}, r"\[9, 7\] for one image; \[n, 6\] \(x0, y0, x1, y1, score, class\)"),
        ("deepstream-yolo", {"output": (1, 9, 5)}, r"\[9, 5\] for one image; \[n, 6\]"),
        ("yolov7-nms", {"output": (9, 6)}, r"\[9, 6\] for one image; \[n, 7\] \(image, x0"),
        ("mmdeploy", {"dets": (1, 6, 4)}, r"'dets' has shape \[6, 4\] for one image; \[n, 5\]"),
        (
            "mmdeploy",
            {"labels": (1, 7)},
            r"'labels' has shape \[7\] for one image; \[6\] \(a class per row of 'dets'\)",
        ),
        ("efficient-nms", {"det_boxes": (1, 6, 5)}, r"'det_boxes' has shape \[6, 5\] for one image; \[6, 4\]"),
        ("efficient-nms", {"det_scores": (1, 5)}, r"'det_scores' has shape \[5\] for one image; \[6\]"),
        ("efficient-nms", {"det_classes": (1, 5)}, r"'det_classes' has shape \[5\] for one image; \[6\]"),
        ("efficient-nms", {"num_dets": (1, 2)}, r"'num_dets' has shape \[1, 2\], in which row 0 .* no 0-D part"),
    ],
)
def test_wrong_shapes_are_the_models_fault(layout: str, changed: dict[str, tuple[int, ...]], sentence: str) -> None:
    """The sentence names the output, its shape, and what was expected."""
    outputs = outputs_of(layout, corner_rows(list(STREET), fit_of(STREET_SIZE, SIZE))[np.newaxis])
    outputs |= {name: np.zeros(shape, outputs[name].dtype) for name, shape in changed.items()}
    with pytest.raises(EngineFailed, match=sentence):
        decode(card_of(layout, SIZE, NAMES[layout]), outputs, STREET_SIZE)


def test_output_that_the_model_lacks_is_named() -> None:
    """With those that it has, and the parameter that settles it."""
    card = card_of("efficient-nms", SIZE, ["x", "y"])
    with pytest.raises(
        EngineFailed, match="'y' is not enough; the layout reads num_dets, det_boxes, det_scores, det_cl"
    ):
        decode(card, {"x": np.zeros(1, np.float32)}, STREET_SIZE)
