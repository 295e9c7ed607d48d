"""NanoDet, NanoDet-Plus and PicoDet, against a plain decoding in loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from tests.support.plain_detections import PlainBox, assert_same_detections, plain_nms
from tests.vision.layouts.pictures import BOXES, Array, Case, assert_harmless, batch_of, seen

CLASSES, BINS = 3, 8
STRIDES = {"nanodet": (8, 16, 32), "nanodet-plus": (8, 16, 32, 64), "picodet": (8, 16, 32, 64)}
CENTRES = {
    "nanodet": lambda cell, stride: (cell + 0.5) * stride - 0.5,
    "nanodet-plus": lambda cell, stride: cell * stride,
    "picodet": lambda cell, stride: (cell + 0.5) * stride,
}
Levels = list[tuple[int, Array, Array]]  # stride, scores (cells, classes), distances (cells, 4 * bins)


def case_of(layout: str) -> Case:
    """PicoDet stretches the picture; NanoDet keeps its aspect ratio. 120 is no multiple of 16."""
    return Case(layout, width=128, height=120, is_padded=layout != "picodet")


def quiet_levels(layout: str) -> Levels:
    case = case_of(layout)
    sizes = [(stride, math.ceil(case.width / stride) * math.ceil(case.height / stride)) for stride in STRIDES[layout]]
    return [
        (stride, np.full((cells, CLASSES), 0.02, np.float32), np.zeros((cells, 4 * BINS), np.float32))
        for stride, cells in sizes
    ]


def distribution(distance: float) -> list[float]:
    """Logits whose expectation is the distance, in strides: shares of the bins below and above it."""
    low = min(int(distance), BINS - 2)
    share = distance - low
    logits = [-60.0] * BINS
    logits[low], logits[low + 1] = math.log(max(1 - share, 1e-12)), math.log(max(share, 1e-12))
    return logits


def encoded(layout: str, boxes: tuple[PlainBox, ...]) -> Levels:
    """Each box in the cell of its centre, at the least stride whose 7 bins reach its edges."""
    case = case_of(layout)
    levels = quiet_levels(layout)
    for box in map(case.fit.to_network, boxes):
        for stride, scores, distances in levels:
            columns = math.ceil(case.width / stride)
            column, row = (int((low + high) / 2 / stride) for low, high in ((box.x0, box.x1), (box.y0, box.y1)))
            x, y = CENTRES[layout](column, stride), CENTRES[layout](row, stride)
            sides = [(x - box.x0), (y - box.y0), (box.x1 - x), (box.y1 - y)]
            cell = row * columns + column
            if max(sides) < (BINS - 1) * stride and min(sides) >= 0 and scores[cell].max() < 0.1:
                scores[cell, box.class_id] = box.score
                distances[cell] = np.ravel([distribution(side / stride) for side in sides])
                break
        else:
            raise AssertionError(f"no cell can hold {box}")
    return levels


def outputs_of(layout: str, levels: Levels) -> dict[str, Array]:
    """The order of the layouts' exporters."""
    if layout == "nanodet-plus":
        return {"output": np.concatenate([np.hstack([scores, distances]) for _, scores, distances in levels])}
    if layout == "picodet":
        return {
            **{f"scores_{stride}": scores for stride, scores, _ in levels},
            **{f"boxes_{stride}": distances for stride, _, distances in levels},
        }
    return {
        name: array
        for stride, scores, distances in levels
        for name, array in ((f"cls_pred_stride_{stride}", scores), (f"dis_pred_stride_{stride}", distances))
    }


def plain_boxes(layout: str, levels: Levels, threshold: float) -> list[PlainBox]:
    """Cell by cell, in Python's floats."""
    case = case_of(layout)
    found = []
    for stride, scores, distances in levels:
        columns = math.ceil(case.width / stride)
        for cell, row in enumerate(scores):
            score = max(float(one) for one in row)
            if score <= threshold:
                continue
            reach = []
            for side in range(4):
                powers = [math.exp(float(one)) for one in distances[cell, side * BINS : (side + 1) * BINS]]
                reach.append(sum(bin_ * power for bin_, power in enumerate(powers)) / sum(powers) * stride)
            x, y = CENTRES[layout](cell % columns, stride), CENTRES[layout](cell // columns, stride)
            class_id = [float(one) for one in row].index(score)
            found.append(PlainBox(x - reach[0], y - reach[1], x + reach[2], y + reach[3], class_id, score))
    clipped = [case.fit.to_picture(box) for box in plain_nms(found)]
    return [box for box in clipped if box.x1 > box.x0 and box.y1 > box.y0]


@pytest.mark.parametrize("layout", STRIDES)
def test_nanodet_with_known_boxes_gives_them_back(layout: str) -> None:
    """Corners in pixels of the picture, clipped to it, with class and score, by falling score."""
    boxes = BOXES[:2] + BOXES[3:]
    outputs = outputs_of(layout, encoded(layout, boxes))
    assert_same_detections(case_of(layout).detect(outputs, None), seen(boxes))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", STRIDES)
def test_nanodet_equals_the_plain_decoding(layout: str, seed: int) -> None:
    """Random distributions and scores; boxes of a class that overlap are suppressed."""
    random = np.random.default_rng(seed)
    levels = quiet_levels(layout)
    for _, scores, distances in levels:
        distances[:] = random.normal(0, 3, distances.shape)
        hot = random.permutation(len(scores))[: len(scores) // 4 + 1]
        scores[hot] = random.uniform(0.1, 0.9, (len(hot), CLASSES))
    case = case_of(layout)
    wanted = plain_boxes(layout, levels, case.threshold)
    assert len(wanted) > 20
    assert_same_detections(case.detect(outputs_of(layout, levels)), wanted)


@pytest.mark.parametrize("layout", STRIDES)
def test_nanodet_of_a_batch_is_taken_by_row(layout: str) -> None:
    """Each picture has its own row."""
    one, other = (outputs_of(layout, encoded(layout, boxes)) for boxes in (BOXES[:1], BOXES[3:]))
    batch = batch_of(one, other)
    assert_same_detections(case_of(layout).detect(batch, 0), seen(BOXES[:1]))
    assert_same_detections(case_of(layout).detect(batch, 1), seen(BOXES[3:]))


@pytest.mark.parametrize(
    ("classes", "bins", "is_reversed"), [(80, 8, True), (80, 8, False), (32, 8, True), (5, 11, True), (32, 11, False)]
)
def test_nanodet_pairs_keep_scores_and_distances_apart(classes: int, bins: int, is_reversed: bool) -> None:
    """By a multiple of 4 columns, else by their values, from 0 to 1."""
    levels = [
        (stride, np.full((len(scores), classes), 0.01, np.float32), np.full((len(scores), 4 * bins), -9, np.float32))
        for stride, scores, _ in quiet_levels("nanodet")
    ]
    _, scores, distances = levels[0]
    scores[40, 3], distances[40, 1::bins] = 0.9, 9
    outputs = outputs_of("nanodet", levels)
    found = case_of("nanodet").detect(dict(reversed(outputs.items())) if is_reversed else outputs)
    assert found.class_id.tolist() == [3]
    column, row = 40 % 16, 40 // 16
    x, y = CENTRES["nanodet"](column, 8), CENTRES["nanodet"](row, 8)
    wanted = case_of("nanodet").fit.to_picture(PlainBox(x - 8, y - 8, x + 8, y + 8, 3, 0.9))
    assert_same_detections(found, [wanted])


def test_nanodet_plus_without_the_stride_of_64_is_decoded_too() -> None:
    """The first weights of NanoDet-Plus have three strides."""
    levels = encoded("nanodet-plus", BOXES[3:])[:3]
    found = case_of("nanodet-plus").detect(outputs_of("nanodet-plus", levels))
    assert_same_detections(found, seen(BOXES[3:]))


@pytest.mark.parametrize("layout", STRIDES)
def test_nanodet_with_hostile_values_is_refused_or_bounded(layout: str) -> None:
    """NaN, infinity, huge numbers, empty outputs, wrong shapes and types."""
    assert_harmless(case_of(layout), outputs_of(layout, encoded(layout, BOXES[:1])))


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        ("nanodet", lambda outputs: outputs.popitem(), r"two outputs for each grid over the network's 128x120 pixels"),
        (
            "nanodet",
            lambda outputs: outputs.update(cls_pred_stride_8=np.zeros((239, 3), np.float32)),
            r"output 'cls_pred_stride_8' has shape \[239, 3\]",
        ),
        (
            "nanodet",
            lambda outputs: outputs.update(dis_pred_stride_8=np.zeros((240, 30), np.float32)),
            r"output 'dis_pred_stride_8' .*\[240, 4 x bins\] was expected",
        ),
        (
            "nanodet-plus",
            lambda outputs: outputs.update(output=np.zeros((319, 35), np.float32)),
            r"\[320 or 324, classes \+ 32\] was expected",
        ),
        (
            "nanodet-plus",
            lambda outputs: outputs.update(output=np.zeros((328, 32), np.float32)),
            r"\[320 or 324, classes \+ 32\] was expected",
        ),
    ],
)
def test_nanodet_of_another_shape_is_refused_with_what_is_needed(
    layout: str, change: Callable[[dict[str, Array]], object], sentence: str
) -> None:
    """The error names the output and the network's size."""
    outputs = outputs_of(layout, quiet_levels(layout))
    change(outputs)
    with pytest.raises(EngineFailed, match=sentence):
        case_of(layout).detect(outputs)
