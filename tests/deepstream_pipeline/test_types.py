"""The video program's nouns and seams."""

import importlib
import pkgutil
from dataclasses import replace

import numpy as np
import pytest

import penstock_video
from penstock.protocol.vision_results import Mask
from penstock_video import errors
from penstock_video.types import (
    CloseReason,
    Detections,
    Frame,
    FrameBatch,
    FrameResult,
    PreparedFrame,
    Tracks,
    no_tracks,
)


def a_frame(frame_num: int = 0) -> Frame:
    return Frame("cam", frame_num, frame_num / 10, 100.0 + frame_num / 10, 8, 6, np.zeros((6, 8, 3), np.uint8))


def detections(count: int) -> Detections:
    return Detections(
        np.tile(np.float32([1, 1, 3, 3]), (count, 1)), np.full(count, 0.5, np.float32), np.zeros(count, np.int64)
    )


@pytest.mark.parametrize(
    "image",
    [np.zeros((6, 8), np.uint8), np.zeros((6, 8, 4), np.uint8), np.zeros((6, 8, 3), np.float32)],
    ids=["grey", "four channels", "float"],
)
def test_frame_with_another_image_is_refused(image: np.ndarray) -> None:
    """A frame's image is (H, W, 3) uint8 and nothing else."""
    with pytest.raises(ValueError, match=r"\(H, W, 3\) uint8"):
        Frame("cam", 0, 0.0, 0.0, 8, 6, image)


@pytest.mark.parametrize("size", [(7, 6), (8, 5)], ids=["width", "height"])
def test_frame_whose_image_is_of_another_size_is_refused(size: tuple[int, int]) -> None:
    """A frame's image is as wide and high as the frame says."""
    with pytest.raises(ValueError, match="a frame of"):
        Frame("cam", 0, 0.0, 0.0, *size, np.zeros((6, 8, 3), np.uint8))


def test_frame_batch_with_a_frame_that_has_no_row_is_refused() -> None:
    """What is not to be inferred never gets as far as a batch."""
    row = np.zeros((3, 4, 4), np.uint8)
    whole, bare = PreparedFrame(a_frame(0), row, lambda: None), PreparedFrame(a_frame(1), None, lambda: None)
    assert len(FrameBatch((whole, whole), CloseReason.FULL, 0.0)) == 2
    with pytest.raises(ValueError, match="without a row"):
        FrameBatch((whole, bare), CloseReason.FULL, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("xyxy", np.zeros((2, 4), np.float64)),
        ("xyxy", np.zeros((2, 5), np.float32)),
        ("score", np.zeros(3, np.float32)),
        ("class_id", np.zeros(2, np.int32)),
    ],
)
def test_detections_with_a_wrong_array_name_it(field: str, value: np.ndarray) -> None:
    """The error of a wrong array says which one it is."""
    arrays = {"xyxy": np.zeros((2, 4), np.float32), "score": np.zeros(2, np.float32), "class_id": np.zeros(2, np.int64)}
    with pytest.raises(ValueError, match=field):
        Detections(**{**arrays, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("masks", ()),
        ("keypoints", np.zeros((2, 17), np.float32)),
        ("keypoints", np.zeros((3, 17, 3), np.float32)),
        ("xywhr", np.zeros((2, 4), np.float32)),
    ],
)
def test_detections_with_shapes_of_another_length_name_them(field: str, value: object) -> None:
    """Each detection has exactly one mask, one set of keypoints and one oriented box, if the model has them."""
    with pytest.raises(ValueError, match=field):
        replace(detections(2), **{field: value})


def shaped(count: int = 3) -> Detections:
    """The number-th has its number in its mask's place, keypoints and oriented box. The picture is 8 x 6."""
    numbers = np.arange(count, dtype=np.float32)
    return replace(
        detections(count),
        masks=tuple(Mask(6, 8, number, 1, np.ones((4, 5), np.bool_)) for number in range(count)),
        keypoints=np.tile(numbers[:, np.newaxis, np.newaxis], (1, 2, 3)),
        xywhr=np.tile(numbers[:, np.newaxis], (1, 5)),
    )


@pytest.mark.parametrize("rows", [np.array([2, 0]), np.array([True, False, True])], ids=["indices", "bool"])
def test_select_keeps_shapes_with_their_boxes(rows: np.ndarray) -> None:
    """Masks, keypoints and oriented boxes are those of the selected detections, in their order."""
    some = shaped().select(rows)
    assert some.masks is not None
    assert some.keypoints is not None
    assert some.xywhr is not None
    numbers = np.arange(3)[rows].tolist()
    assert len(some) == 2
    assert [mask.left for mask in some.masks] == numbers
    assert some.keypoints[:, 0, 0].tolist() == some.xywhr[:, 0].tolist() == numbers
    assert detections(3).select(rows).masks is None


def test_moved_shapes_keep_their_size_and_end_at_the_picture() -> None:
    """Keypoints keep their score, oriented boxes their size and angle; a mask loses what is outside."""
    whole = shaped(2)
    shift = np.array([[2, -2, 2, -2], [-9, 40, -9, 40]])
    there = whole.moved(whole.xyxy + shift, whole.xyxy + 2)
    assert there.masks is not None
    assert there.keypoints is not None
    assert there.xywhr is not None
    assert there.xyxy.tolist() == (whole.xyxy + 2).tolist()
    assert (there.masks[0].left, there.masks[0].top, there.masks[0].bits.shape) == (2, 0, (3, 5))
    assert there.masks[1].area == 0
    assert there.keypoints[0].tolist() == [[2, -2, 0], [2, -2, 0]]
    assert there.xywhr[1].tolist() == [-8, 41, 1, 1, 1]
    assert whole.keypoints is not None
    assert whole.keypoints[0].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_tracks_of_another_length_are_refused() -> None:
    """Each detection has exactly one track."""
    with pytest.raises(ValueError, match="track_id"):
        Tracks(detections(2), np.zeros(3, np.int64), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="age_frames"):
        Tracks(detections(2), np.zeros(2, np.int64), np.zeros(2, np.int32))


def test_errors_each_have_a_reason_of_their_own() -> None:
    """Logs and metrics tell the errors apart by a stable word, wherever in the program an error is defined."""
    for module in pkgutil.walk_packages(penstock_video.__path__, "penstock_video."):
        importlib.import_module(module.name)
    tree = [errors.PipelineError]
    for error in tree:
        tree += error.__subclasses__()
    assert len(tree) > 10
    assert len({error.reason for error in tree}) == len(tree)
    assert errors.SinkFailed("disk full on /out").message == "disk full on /out"


def test_label_that_is_missing_is_the_class_number() -> None:
    """A model may have fewer labels than classes; what is shown then is the number."""
    result = FrameResult(a_frame(), no_tracks(), labels=("person",))
    assert [result.label(0), result.label(3), result.label(-1)] == ["person", "class 3", "class -1"]
