"""Outputs of any shape and value: an EngineFailed with a sentence, or a result inside the picture. Never a warning."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import EngineFailed
from penstock.protocol.vision_results import DepthMap, Detections, Embedding, SegmentationMap, TextLines
from penstock.vision.preprocess import Geometry, geometry_of
from penstock.vision.spec import PrepareSpec, ResizeMode
from tests.vision.layouts.decoding import Array, decoded, whole

# A layout, and shapes of its outputs for one picture with a network of 64 x 64.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "yolov8-seg": ((4 + 2 + 8, 84), (8, 16, 16)),
    "yolov5-seg": ((252, 5 + 2 + 8), (8, 16, 16)),
    "yolo-end2end-seg": ((30, 6 + 8), (8, 16, 16)),
    "rf-detr-seg": ((30, 4), (30, 5), (30, 16, 16)),
    "yolov8-pose": ((4 + 1 + 6, 84),),
    "yolo-end2end-pose": ((30, 6 + 6),),
    "rtmo": ((30, 5), (30, 2, 3)),
    "yolov8-obb": ((4 + 2 + 1, 84),),
    "yolo-end2end-obb": ((30, 7),),
    "semantic": ((5, 16, 16),),
    "depth": ((1, 16, 16),),
    "embedding": ((32,),),
    "ctc": ((10, 12),),
    "db": ((1, 64, 64),),
}
FITS = (ResizeMode.STRETCH, ResizeMode.PAD_SYMMETRIC, ResizeMode.PAD_RIGHT_BOTTOM, ResizeMode.CROP)
SOURCES = ((100, 80), (64, 64), (1, 1), (3, 500), (2000, 2), (31, 17))
VALUES = np.array([0, 1, 0.5, 0.9, -1, 2, 30, 64, 1e6, 1e20, -1e20, 1e38, -3e38, np.nan, np.inf, -np.inf], np.float64)


@st.composite
def damaged(draw: st.DrawFn, shape: tuple[int, ...], *, has_batch: bool) -> Array:
    """A float output, or integers, whose shape and values may be wrong."""
    sides = list(shape)
    match draw(st.sampled_from(["same", "same", "same", "longer", "empty", "fewer", "more"])):
        case "longer":
            sides[draw(st.integers(0, len(sides) - 1))] += draw(st.integers(1, 3))
        case "empty":
            sides[draw(st.integers(0, len(sides) - 1))] = 0
        case "fewer":
            sides = sides[1:]
        case "more":
            sides = [*sides, draw(st.integers(1, 2))]
    if has_batch:
        sides = [2, *sides]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    last = draw(st.sampled_from([len(VALUES), 13, 13, 9, 8]))  # of the values: the wilder ones come later
    array = random.choice(VALUES[:last], sides)
    kind = draw(st.sampled_from([np.float32, np.float32, np.float64, np.float16, np.int64]))
    with np.errstate(all="ignore"):
        return array.astype(kind)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    fit = draw(st.sampled_from(FITS))
    spec = PrepareSpec(64, 64, fit=fit, shorter_side=80 if fit is ResizeMode.CROP else 0)
    return geometry_of(*draw(st.sampled_from(SOURCES)), spec)


@pytest.mark.parametrize("layout", SHAPES)
@given(data=st.data())
def test_damaged_outputs_are_refused_or_bounded(layout: str, data: st.DataObject) -> None:
    """Wrong shapes and types, NaN, infinite and huge values, empty outputs, batches, pictures of any shape."""
    row = data.draw(st.sampled_from([None, 0, 1]))
    arrays = tuple(data.draw(damaged(shape, has_batch=row is not None)) for shape in SHAPES[layout])
    geometry = data.draw(geometries())
    options = {
        "pre_cluster_threshold": data.draw(st.sampled_from([0.0, 0.25, 1.0])),
        "nms_iou_threshold": data.draw(st.sampled_from([0.0, 0.45, 1.0])),
        "segmentation_threshold": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "has_sigmoid": data.draw(st.booleans()),
        "keypoint_shape": data.draw(st.sampled_from([(2, 3), (3, 2), (0, 3)])),
        "characters": "0123456789",
        "is_unit_length": data.draw(st.booleans()),
        "unclip_ratio": data.draw(st.sampled_from([1.5, 0.0, -2.0, 1e9])),
        "depth_scale": data.draw(st.sampled_from([1.0, 0.0, 1e300])),
    }
    try:
        result = decoded(object, layout, arrays, geometry, row, **options)
    except EngineFailed:
        return
    assert_bounded(result, geometry)


def assert_bounded(result: object, geometry: Geometry) -> None:
    limit = np.array([geometry.source_width, geometry.source_height])
    match result:
        case Detections():
            assert ((result.score >= 0) & (result.score <= 1)).all()
            assert ((result.xyxy >= 0) & (result.xyxy <= np.tile(limit, 2))).all()
            for mask in result.masks or ():
                assert whole(mask).shape == (geometry.source_height, geometry.source_width)
            if result.keypoints is not None:
                assert ((result.keypoints >= 0) & (result.keypoints <= (*limit, 1))).all()
            assert result.xywhr is None or np.isfinite(result.xywhr).all()
        case SegmentationMap():
            assert all(whole(mask).any() for mask in result.masks)
        case DepthMap():
            assert np.isfinite(result.values).all()
            assert result.values.shape == (geometry.source_height, geometry.source_width)
        case Embedding():
            assert np.isfinite(result.vector).all()
        case TextLines():
            for line in result.lines:
                assert 0 <= line.score <= 1
                assert line.polygon is None or ((line.polygon >= 0) & (line.polygon <= limit)).all()
        case _:
            raise AssertionError(result)
