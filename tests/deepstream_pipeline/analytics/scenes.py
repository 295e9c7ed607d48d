"""Synthetic tracks: objects whose feet go where a test says, and what the rules make of them."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock_video.analytics.rules import Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.types import AnalyticsEvent, Detections, Frame, FrameAnalytics, Tracks

LABELS = ("person", "car")
SIZE = (1000, 1000)
BOX = (30.0, 40.0)  # its diagonal is 50, so a foot may tremble by 2.5 pixels
SLACK = 2.5

Place = tuple[float, float] | None
Paths = Mapping[int, Sequence[Place]]


def frame_at(
    number: int, *, fps: float = 10.0, size: tuple[int, int] = SIZE, segment: int = 0, source_id: str = "cam"
) -> Frame:
    """Without a picture."""
    return Frame(source_id, number, number / fps, 0.0, *size, captured_unix_s=1.8e9 + number / fps, segment=segment)


def tracks_at(
    places: Mapping[int, Place], class_ids: Mapping[int, int] | None = None, box: tuple[float, float] = BOX
) -> Tracks:
    """Of each identity the foot; None: not seen."""
    seen = {track_id: place for track_id, place in places.items() if place is not None}
    wide, high = box
    xyxy = [[x - wide / 2, y - high, x + wide / 2, y] for x, y in seen.values()]
    classes = [(class_ids or {}).get(track_id, 0) for track_id in seen]
    count = len(seen)
    found = Detections(
        np.array(xyxy, np.float32).reshape(-1, 4), np.full(count, 0.9, np.float32), np.array(classes, np.int64)
    )
    return Tracks(found, np.array(list(seen), np.int64), np.ones(count, np.int64))


def observe(
    rules: Rules | SourceAnalytics,
    paths: Paths,
    *,
    class_ids: Mapping[int, int] | None = None,
    fps: float = 10.0,
    size: tuple[int, int] = SIZE,
    first: int = 0,
    numbers: Sequence[int] | None = None,
    box: tuple[float, float] = BOX,
) -> list[FrameAnalytics]:
    """What is said of each frame; the paths have a place for each. numbers: of the frames, where some are missing."""
    analytics = SourceAnalytics(rules, LABELS) if isinstance(rules, Rules) else rules
    count = max((len(path) for path in paths.values()), default=0)
    said = []
    for step, number in enumerate(numbers or range(first, first + count)):
        places = {track_id: path[step] if step < len(path) else None for track_id, path in paths.items()}
        said.append(analytics.observe(frame_at(number, fps=fps, size=size), tracks_at(places, class_ids, box)))
    return said


def events_of(said: Sequence[FrameAnalytics]) -> list[AnalyticsEvent]:
    """Of all frames."""
    return [event for one in said for event in one.events]


def event_values(said: Sequence[FrameAnalytics]) -> list[tuple[int, int | None, float]]:
    """(frame_num, track_id, value) of every event."""
    return [(event.frame_num, event.track_id, event.value) for event in events_of(said)]


def straight(start: tuple[float, float], end: tuple[float, float], steps: int) -> list[Place]:
    """From start to end, both among them."""
    shares = [step / max(steps - 1, 1) for step in range(steps)]
    return [(start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])) for share in shares]
