"""The video program's nouns and seams."""

from collections.abc import Sequence

import numpy as np
import pytest

from deepstream_pipeline import errors
from deepstream_pipeline.interfaces import Analytics, Decoder, Sink, Tracker
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind, Detections, Frame, FrameBatch, Tracks


def a_frame(frame_num: int = 0) -> Frame:
    return Frame("cam", frame_num, frame_num / 10, 100.0 + frame_num / 10, np.zeros((6, 8, 3), np.uint8))


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
        Frame("cam", 0, 0.0, 0.0, image)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 1, 4, 4), (2, 3, 4)], ids=["rows", "channels", "rank"])
def test_frame_batch_whose_rows_do_not_fit_its_frames_is_refused(shape: tuple[int, ...]) -> None:
    """Row i of a batch is made of frame i, so there are as many rows as frames."""
    with pytest.raises(ValueError, match="2 frames"):
        FrameBatch((a_frame(0), a_frame(1)), np.zeros(shape, np.uint8))


def test_frame_batch_of_bytes_and_of_floats_is_taken() -> None:
    """A network may take pixels as bytes or as floats."""
    for dtype in (np.uint8, np.float32):
        batch = FrameBatch((a_frame(),), np.zeros((1, 3, 4, 4), dtype))
        assert batch.images.dtype == dtype


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


def test_detections_of_nothing_are_empty() -> None:
    """A frame without objects has detections of length 0."""
    assert len(detections(0)) == 0


def test_tracks_of_another_length_are_refused() -> None:
    """Each detection has exactly one track."""
    with pytest.raises(ValueError, match="track_id"):
        Tracks(detections(2), np.zeros(3, np.int64), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="age_frames"):
        Tracks(detections(2), np.zeros(2, np.int64), np.zeros(2, np.int32))


def test_values_once_made_cannot_change() -> None:
    """Values between the parts are frozen."""
    with pytest.raises(AttributeError):
        a_frame().frame_num = 3  # type: ignore[misc]


def test_errors_each_have_a_reason_of_their_own() -> None:
    """Logs and metrics tell the errors apart by a stable word."""
    tree = errors.PipelineError.__subclasses__()
    assert len(tree) == 5
    assert len({error.reason for error in tree} | {errors.PipelineError.reason}) == 6
    assert errors.SinkFailed("disk full on /out").message == "disk full on /out"


class Clip:
    """A decoder of two frames."""

    def __init__(self) -> None:
        self._left = [a_frame(0), a_frame(1)]

    def read(self) -> Frame:
        if not self._left:
            raise errors.StreamEnded("cam: end of file")
        return self._left.pop(0)

    def close(self) -> None:
        self._left = []


class Counting:
    """A tracker that calls everything one object, and a rule that says when it is back."""

    def __init__(self) -> None:
        self._age = 0

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        self._age += 1
        count = len(detections)
        return Tracks(detections, np.full(count, 7, np.int64), np.full(count, self._age, np.int64))

    def reset(self) -> None:
        self._age = 0

    def observe(self, frame: Frame, tracks: Tracks) -> Sequence[AnalyticsEvent]:
        kind = AnalyticsKind.ROI_FILTERING
        seen = [int(age) for age in tracks.age_frames if age > 1]
        return [AnalyticsEvent(kind, frame.source_id, frame.frame_num, frame.pts_s, 7, "door", age) for age in seen]


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.events: list[AnalyticsEvent] = []

    def write(self, frame: Frame, tracks: Tracks, events: Sequence[AnalyticsEvent]) -> None:
        self.events.extend(events)

    def close(self) -> None:
        self.events.append(AnalyticsEvent(AnalyticsKind.OVERCROWDING, "cam", -1, 0.0, None, "closed", 1.0))


def run(decoder: Decoder, tracker: Tracker, rules: Analytics, sink: Sink) -> None:
    """The whole flow in one thread, by the seams alone."""
    try:
        while True:
            frame = decoder.read()
            tracks = tracker.update(frame, detections(1))
            sink.write(frame, tracks, rules.observe(frame, tracks))
    except errors.StreamEnded:
        tracker.reset()
        sink.close()


def test_seams_carry_a_clip_from_decoder_to_sink() -> None:
    """Decoder, tracker, rules and sink fit together by their interfaces, and the end of a file ends the flow."""
    both, sink = Counting(), Kept()
    run(Clip(), both, both, sink)
    assert [(event.frame_num, event.rule, event.value) for event in sink.events] == [(1, "door", 2), (-1, "closed", 1)]
    assert both.update(a_frame(), detections(1)).age_frames.tolist() == [1]
