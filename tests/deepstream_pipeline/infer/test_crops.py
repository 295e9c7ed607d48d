"""Which objects a secondary model looks at, and what it is given of them."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode
from penstock_video.infer.calls import CropResult
from penstock_video.infer.crops import (
    AGAIN_AFTER_FRAMES,
    FORGET_AFTER_FRAMES,
    MAX_CROPS,
    Crop,
    SecondaryOptions,
    SecondaryPlan,
    cut_out,
)
from penstock_video.infer.network import Network, network_from
from penstock_video.types import NO_CLASS, ByteArray, ClassScore, Detections, Frame, Tracks

IMAGE = np.zeros((100, 200, 3), np.uint8)
IMAGE[..., 0], IMAGE[..., 2] = 200, 20  # red, and a little blue
RED = CropResult((ClassScore("colors", 0, "red", 0.9),))


def network() -> Network:
    inputs = (TensorSpec("x", Datatype.UINT8, (3, 8, 8)),)
    parameters = {"network-type": "1", "model-color-format": "BGR"}
    return network_from(
        ModelConfig("colors", "onnxruntime", 8, inputs, (TensorSpec("y", Datatype.FP32, (2,)),), parameters)
    )


def frame(number: int, *, segment: int = 0) -> Frame:
    return Frame("camera", number, number / 10, 0.0, 200, 100, IMAGE, segment=segment)


def tracks(
    *boxes: tuple[float, float, float, float], ids: tuple[int, ...] = (), classes: tuple[int, ...] = ()
) -> Tracks:
    count = len(boxes)
    seen = Detections(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.ones(count, np.float32),
        np.array(classes or [0] * count, np.int64),
    )
    return Tracks(seen, np.array(ids or range(1, count + 1), np.int64), np.ones(count, np.int64))


ONE = tracks((10, 10, 30, 50))


def look(plan: SecondaryPlan, number: int, seen: Tracks = ONE, *, segment: int = 0) -> list[Crop]:
    return plan.cut(network(), IMAGE, frame(number, segment=segment), seen)


def test_object_is_looked_at_once_and_its_classes_stay() -> None:
    """While its answer is awaited, and after it."""
    plan = SecondaryPlan(SecondaryOptions())
    (crop,) = look(plan, 0)
    assert (crop.track_id, crop.row.shape, crop.row.dtype) == (1, (3, 8, 8), np.uint8)
    assert look(plan, 1) == []
    assert plan.attributes(ONE) == ((),)
    plan.take(crop, RED)
    assert look(plan, 2) == []
    assert plan.attributes(ONE) == (RED.classes,)
    assert plan.attributes(tracks((0, 0, 9, 9), (10, 10, 30, 50), ids=(7, 1))) == ((), RED.classes)


def test_object_is_looked_at_again_after_the_interval_and_when_it_grew() -> None:
    """Until the new answer comes, the former one is reported."""
    plan = SecondaryPlan(SecondaryOptions(reinfer_interval=5))
    plan.take(look(plan, 0)[0], RED)
    assert look(plan, 4) == []
    (again,) = look(plan, 5)
    assert plan.attributes(ONE) == (RED.classes,)
    plan.take(again, RED)
    assert look(plan, 6, tracks((10, 10, 30, 60))) == []
    assert len(look(plan, 7, tracks((10, 10, 30, 80)))) == 1


def test_keypoints_follow_the_box() -> None:
    """They are made of a crop's pixels, and lie in the frame where the box has moved and grown; others have none."""
    plan = SecondaryPlan(SecondaryOptions())
    seen = tracks((-10, 20, 30, 60), (100, 20, 140, 60))
    assert plan.keypoints(seen) is None
    crop = next(crop for crop in look(plan, 0, seen) if crop.track_id == 1)
    assert (crop.left, crop.top, crop.geometry.source_width) == (0, 20, 30)
    plan.take(crop, CropResult(keypoints=np.array([[10, 20, 0.9], [0, 0, 0.5]], np.float32)))
    found = plan.keypoints(seen)
    assert found is not None
    assert found[0].tolist() == pytest.approx(np.array([[10, 40, 0.9], [0, 20, 0.5]]))
    assert found[1, :, 2].tolist() == [0, 0]
    moved = plan.keypoints(tracks((100, 20, 180, 60), ids=(1,)))
    assert moved is not None
    assert moved[0, 0].tolist() == pytest.approx([140, 40, 0.9])
    plan.take(crop, CropResult())
    assert plan.keypoints(seen) is not None
    assert plan.keypoints(tracks((0, 0, 9, 9), ids=(7,))) is None


def test_vector_is_given_once() -> None:
    """A new vector comes with the next frame that has the track; a former one does not come again."""
    plan = SecondaryPlan(SecondaryOptions(reinfer_interval=5))
    vector = (ClassScore("reid", NO_CLASS, "", 1.0, (0.6, 0.8)),)
    plan.take(look(plan, 0)[0], CropResult(vector))
    assert plan.attributes(tracks((0, 0, 9, 9), ids=(7,))) == ((),)
    assert [plan.attributes(ONE) for _ in range(2)] == [(vector,), ((),)]
    plan.take(look(plan, 5)[0], CropResult(vector))
    assert plan.attributes(ONE) == (vector,)


def test_object_is_not_looked_at_twice_at_once_and_keeps_what_was_said_of_it() -> None:
    """Neither when it grows nor when its interval is over meanwhile; a failure later takes nothing away."""
    plan = SecondaryPlan(SecondaryOptions(reinfer_interval=5))
    plan.take(look(plan, 0)[0], RED)
    (again,) = look(plan, 5)
    assert look(plan, 20, tracks((10, 10, 90, 90))) == []
    plan.take(again, CropResult())
    assert plan.attributes(ONE) == (RED.classes,)
    assert len(look(plan, 21)) == 1


def test_object_that_was_not_answered_is_looked_at_again_soon_and_not_in_every_frame() -> None:
    """A model that fails is not asked with all objects each time."""
    plan = SecondaryPlan(SecondaryOptions())
    plan.take(look(plan, 0)[0], CropResult())
    assert [bool(look(plan, number)) for number in (1, AGAIN_AFTER_FRAMES - 1, AGAIN_AFTER_FRAMES)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (SecondaryOptions(), [2, 3, 1]),
        (SecondaryOptions(class_ids=frozenset((0,))), [2, 1]),
        (SecondaryOptions(min_width=30), [2, 3]),
        (SecondaryOptions(min_height=45), [2]),
    ],
)
def test_objects_of_the_wanted_classes_and_sizes_are_looked_at_the_largest_first(
    options: SecondaryOptions, ids: list[int]
) -> None:
    """operate-on-class-ids, input-object-min-width and -height."""
    seen = tracks((0, 0, 20, 40), (0, 0, 60, 80), (0, 0, 40, 40), classes=(0, 0, 1))
    assert [crop.track_id for crop in look(SecondaryPlan(options), 0, seen)] == ids


def test_crowd_is_looked_at_in_turns() -> None:
    """One frame asks for so many crops at most; the others come with the next."""
    seen = tracks(*[(0.0, 0.0, 10.0, 10.0 + index / 10) for index in range(MAX_CROPS + 5)])
    plan = SecondaryPlan(SecondaryOptions())
    assert len(look(plan, 0, seen)) == MAX_CROPS
    assert len(look(plan, 1, seen)) == 5


def test_track_that_is_gone_is_forgotten() -> None:
    """What is remembered of a source is bounded by what is seen in it, and ends with its segment."""
    plan = SecondaryPlan(SecondaryOptions())
    (crop,) = look(plan, 0)
    plan.take(crop, RED)
    other = tracks((0, 0, 9, 9), ids=(2,))
    look(plan, FORGET_AFTER_FRAMES, other)
    assert plan.attributes(ONE) == (RED.classes,)
    look(plan, FORGET_AFTER_FRAMES + 1, other)
    assert plan.attributes(ONE) == ((),)
    plan.take(replace(crop, track_id=2), RED)
    look(plan, FORGET_AFTER_FRAMES + 2, tracks(), segment=1)
    assert plan.attributes(other) == ((),)
    plan.take(replace(crop, track_id=99), RED)


def test_box_that_lies_outside_the_picture_is_no_crop() -> None:
    """A tracker's estimate may have left it; one that reaches over the edge is cut there."""
    assert look(SecondaryPlan(SecondaryOptions()), 0, tracks((210, 10, 250, 50), (-40, -40, -2, -2))) == []
    spec = PrepareSpec(0, 0, layout=InputOrder.NHWC, fit=ResizeMode.KEEP, datatype=Datatype.UINT8)
    cut = cut_out(IMAGE, 1, np.array([190.5, -5, 230, 20.2], np.float32), spec)
    assert cut is not None
    assert (cut.row.shape, cut.left, cut.top) == ((21, 10, 3), 190, 0)


@pytest.mark.parametrize(
    ("color", "pixel"), [(ColorFormat.RGB, [200, 0, 20]), (ColorFormat.BGR, [20, 0, 200]), (ColorFormat.GRAY, [62])]
)
def test_crop_has_the_networks_colours_and_size(color: ColorFormat, pixel: list[int]) -> None:
    """Prepared as the gateway prepares a picture of that part alone."""
    spec = PrepareSpec(8, 8, color=color, layout=InputOrder.NHWC, datatype=Datatype.UINT8)
    box = np.array([10, 10, 30, 50], np.float32)
    cut = cut_out(IMAGE, 1, box, spec)
    assert cut is not None
    assert cut.row.shape == (8, 8, len(pixel))
    assert cut.row[4, 4].tolist() == pixel
    scaled = cut_out(IMAGE, 1, box, replace(spec, datatype=Datatype.FP32, scale=0.5))
    assert scaled is not None
    assert scaled.row[4, 4].tolist() == [value / 2 for value in pixel]


def test_crop_leaves_the_picture_as_it_is() -> None:
    """Frames are borrowed."""
    image: ByteArray = IMAGE.copy()
    image.flags.writeable = False
    look_at = SecondaryPlan(SecondaryOptions()).cut(network(), image, frame(0), ONE)
    assert len(look_at) == 1
