"""Rendered street scenes, whose truth is known: the shipped network, our tracker and a line give exact counts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import cv2
import pytest

from deploy.models.street.clip import Clip, Line, make_clip
from deploy.models.street.evaluate import StreetDetector
from deploy.models.street.picture import Picture
from deploy.models.street.stage import LABELS
from penstock_video.analytics.rules import LineCrossing, Rules, Segment
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.track.registry import TrackerOptions, new_tracker
from penstock_video.types import Detections, Frame

pytestmark = pytest.mark.long
FPS, SECONDS = 10.0, 12.0
SIZE = (640, 360)


def street_rules(line: Line) -> Rules:
    """A rule for each direction; "right" is towards the right of the line from its near to its far end."""
    (x1, y1), (x2, y2) = line.start, line.end
    middle = ((x1 + x2) / 2, (y1 + y2) / 2)
    beside = (middle[0] - (y2 - y1), middle[1] + (x2 - x1))
    way: Segment = (middle, beside)
    both = (LineCrossing("right", (line.start, line.end), way), LineCrossing("left", (line.start, line.end), way[::-1]))
    return Rules(line_crossing=both)


def counts_after(shown: Iterable[tuple[int, Picture | None]], line: Line, fps: float) -> Iterator[Mapping[str, int]]:
    """The counts after each (frame_num, BGR picture), by what the network sees. None: a frame that it did not see.

    Frames between may be missing.
    """
    cv2.setNumThreads(1)
    detector, tracker = StreetDetector(), new_tracker(TrackerOptions())
    analytics = SourceAnalytics(street_rules(line), LABELS)
    for number, picture in shown:
        frame = Frame("street", number, number / fps, 0.0, *SIZE)
        if picture is None:
            yield analytics.observe(frame, tracker.coast(frame)).counts
        else:
            found = detector.find([picture])[0]
            tracks = tracker.update(frame, Detections(found.xyxy, found.score, found.class_id))
            yield analytics.observe(frame, tracks).counts


def counted(clip: Clip) -> Counter[tuple[str, str]]:
    """(label, direction) of every crossing."""
    pictures = ((number, picture) for number, (picture, _) in enumerate(clip.frames()))
    *_, counts = counts_after(pictures, clip.line, clip.fps)
    keys = (key.split("/") for key in counts if key.count("/") == 2)
    return Counter({(label, way): counts[f"{kind}/{way}/{label}"] for kind, way, label in keys})


@pytest.mark.parametrize("seed", [33, 38])
def test_crossings_of_a_rendered_street_are_counted_exactly(seed: int) -> None:
    """By class and direction, as many as the scene has: people, bicycles and cars, both ways."""
    clip = make_clip(seed, SECONDS, FPS, size=SIZE)
    true = Counter((crossing.label, crossing.direction) for crossing in clip.crossings())
    assert true.total() >= 7
    assert counted(clip) == true
