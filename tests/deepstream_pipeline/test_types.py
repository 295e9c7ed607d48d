"""The video program's nouns and seams."""

import importlib
import pkgutil

import numpy as np
import pytest

import penstock_video
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
