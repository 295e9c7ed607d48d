"""Results as the pipeline would give them to a sink, made on the spot."""

from dataclasses import replace

import numpy as np

from penstock_video.analytics.rules import LineCrossing, Overcrowding, RoiFiltering, Rules
from penstock_video.sinks.osd import OsdOptions
from penstock_video.types import (
    AnalyticsEvent,
    AnalyticsKind,
    ByteArray,
    ClassScore,
    Detections,
    Frame,
    FrameAnalytics,
    FrameResult,
    Tracks,
)
from tests.deepstream_pipeline.clips import numbered_picture

UNIX_S = 1_800_000_000.5
PLAIN = OsdOptions(
    has_boxes=False,
    has_labels=False,
    has_masks=False,
    has_trails=False,
    has_rules=False,
    has_title=False,
    has_counters=False,
)

LAWN = ((40.0, 60.0), (280.0, 60.0), (280.0, 200.0), (40.0, 200.0))
RULES = Rules(
    320,
    240,
    roi_filtering=(RoiFiltering("Lawn", LAWN),),
    overcrowding=(Overcrowding("Gate", LAWN, 3),),
    line_crossing=(LineCrossing("Entry", ((20, 120), (300, 120)), ((160, 80), (160, 160))),),
)


def changed(picture: ByteArray | None, original: ByteArray | None) -> int:
    """How many pixels of the picture differ."""
    assert picture is not None
    assert original is not None
    return int((picture != original).any(axis=2).sum())


class Clock:
    """Seconds that pass only when a test adds them."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def picture(number: int, width: int, height: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """A grey slope whose brightness tells the number, coarsely."""
    slope = np.linspace(0, 60, width, dtype=np.uint8)[None, :, None]
    return np.broadcast_to(slope + np.uint8(40 + number % 120), (height, width, 3)).copy()


def result(
    number: int,
    *,
    source_id: str = "cam",
    size: tuple[int, int] = (320, 240),
    fps: float = 10.0,
    has_image: bool = True,
    objects: int = 2,
    events: tuple[AnalyticsEvent, ...] = (),
) -> FrameResult:
    """The number-th frame's result, with objects that walk to the right."""
    width, height = size
    frame = Frame(
        source_id=source_id,
        frame_num=number,
        pts_s=number / fps,
        captured_at=100.0 + number / fps,
        width=width,
        height=height,
        image=picture(number, width, height) if has_image else None,
        captured_unix_s=UNIX_S + number / fps,
    )
    left = np.arange(objects, dtype=np.float32) * width / max(objects, 1) * 0.8 + number % 20
    top, bottom = np.full_like(left, height / 4), np.full_like(left, height / 1.5)
    boxes = np.stack([left, top, left + width / 9, bottom], axis=1).astype(np.float32)
    detections = Detections(boxes, np.full(objects, 0.875, np.float32), np.arange(objects, dtype=np.int64) % 2)
    tracks = Tracks(detections, np.arange(1, objects + 1, dtype=np.int64), np.full(objects, number + 1, np.int64))
    analytics = FrameAnalytics(events, {"line-crossing/Entry": number}, (("Yard",),) * objects)
    colours = tuple((ClassScore("colour", 3, "blue", 0.75),) for _ in range(objects))
    return FrameResult(frame, tracks, analytics, labels=("person", "car"), attributes=colours)


def numbered(number: int, *, size: tuple[int, int] = (160, 96), source_id: str = "cam") -> FrameResult:
    """A result whose picture tells its number, also when it is read back."""
    reported = result(number, size=size, source_id=source_id)
    return replace(reported, frame=replace(reported.frame, image=numbered_picture(number, *size)))


def crossing(number: int, *, source_id: str = "cam", track_id: int | None = 1) -> AnalyticsEvent:
    """A line crossed in that frame; without a track, a place that is too full."""
    kind = AnalyticsKind.LINE_CROSSING if track_id is not None else AnalyticsKind.OVERCROWDING
    class_id = None if track_id is None else 0
    return AnalyticsEvent(kind, source_id, number, number / 10.0, track_id, "Entry", 1.0, class_id)
