"""Random outputs of YOLO layouts, with NaN, infinities and numbers at the ends of their types among them."""

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import LayoutOptions, Outputs
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import Geometry
from tests.vision.layouts.scenes import Array

VALUES = [0, 1, -1, 0.5, 1e-45, 3e38, -3e38, np.nan, np.inf, -np.inf, 640, 1e9, 2**31, 65504]
TYPES = [np.float32, np.float32, np.float32, np.float16, np.float64, np.int32, np.int64]
GEOMETRIES = [
    Geometry(640, 360, 320, 256, 0.5, 0.5, pad_y=38),
    Geometry(1, 1, 64, 64, 64, 64),
    Geometry(10_000, 3, 416, 416, 0.0416, 0.333),
]
SHAPES: dict[str, list[dict[str, tuple[int, ...]]]] = {
    "yolov8": [{"o": (1, 9, 1680)}, {"o": (1680, 9)}, {"o": (84, 84)}, {"o": (5, 0)}],
    "yolov5": [{"o": (1, 5040, 6)}, {"o": (9, 1680)}, {"o": (1680, 9)}],
    "yolox": [{"o": (1, 1680, 9)}, {"o": (84, 6)}, {"o": (7, 3549)}],
    "yolo-end2end": [{"o": (1, 30, 6)}, {"o": (1, 6)}],
    "deepstream-yolo": [{"o": (1, 1680, 6)}, {"o": (0, 6)}, {"b": (1, 99, 4), "s": (1, 99, 1), "c": (1, 99, 1)}],
    "deepstream-yolo-cxcywh": [{"o": (1, 1680, 6)}, {"b": (99, 4), "s": (99, 1), "c": (99, 1)}],
    "yolov7-nms": [{"o": (9, 7)}, {"o": (1, 7)}],
    "yolo-nas": [{"b": (1, 1680, 4), "s": (1, 1680, 5)}, {"b": (9, 4), "s": (5, 9)}, {"b": (0, 4), "s": (0, 5)}],
    "yolo-nas-flat": [{"o": (9, 7)}, {"o": (1, 7)}],
    "mmdeploy": [{"dets": (1, 20, 5), "labels": (1, 20)}],
    "efficient-nms": [{"num_dets": (1, 1), "det_boxes": (1, 9, 4), "det_scores": (1, 9), "det_classes": (1, 9)}],
}


def random_array(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Mostly from 0 to 1, or whole numbers below 9; perhaps some of VALUES; of any type."""
    array = random.random(shape) if random.random() < 0.6 else random.integers(0, 9, shape).astype(np.float64)
    if array.size and random.random() < 0.7:
        count = random.integers(1, array.size + 1) if random.random() < 0.3 else 1
        array.flat[random.integers(0, array.size, count)] = random.choice(VALUES, count)
    with np.errstate(all="ignore"):
        return array.astype(random.choice(np.array(TYPES, object)))


def random_options(names: tuple[str, ...], random: np.random.Generator) -> LayoutOptions:
    """Each of a card's and a client's options by chance."""
    return LayoutOptions(
        names,
        pre_cluster_threshold=float(random.choice([0, 0.001, 0.25])),
        nms_iou_threshold=float(random.choice([0, 0.45, 1])),
        topk=int(random.choice([1, 100])) if random.random() < 0.5 else None,
        has_sigmoid=bool(random.random() < 0.2),
        class_thresholds=((1, 0.1),) if random.random() < 0.3 else (),
        is_class_agnostic=bool(random.random() < 0.3),
        class_ids=(5, 6) if random.random() < 0.3 else (),
        class_filter=frozenset({1, 5}) if random.random() < 0.3 else None,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", SHAPES)
def test_random_outputs_are_boxes_in_the_picture_or_a_sentence(layout: str) -> None:
    """Never another error, a warning, a number that is not finite, or a class below 0."""
    random, answered, refusals = np.random.default_rng(5), 0, list[str]()
    for turn in range(400):
        shapes = SHAPES[layout][turn % len(SHAPES[layout])]
        arrays = {name: random_array(shape, random) for name, shape in shapes.items()}
        geometry = GEOMETRIES[turn % 3]
        outputs = Outputs(InferResponse("m", "1", tuple(map(tensor_from_numpy, arrays, arrays.values()))), None)
        try:
            found = LAYOUTS[layout].decode(outputs, random_options(tuple(arrays), random), geometry)
        except EngineFailed as error:
            refusals.append(error.message)
            continue
        assert isinstance(found, Detections)
        answered += 1
        assert np.isfinite(found.xyxy).all()
        assert ((found.xyxy >= 0) & (found.xyxy <= [geometry.source_width, geometry.source_height] * 2)).all()
        assert ((found.score > 0) & (found.score <= 1)).all()
        assert (np.diff(found.score) <= 0).all()
        assert (found.class_id >= 0).all()
    assert answered > 0
    assert all(message.startswith("model 'm' version 1: output ") for message in refusals)
