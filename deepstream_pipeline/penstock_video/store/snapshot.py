"""Snapshots: the frame of an event as a JPEG, with the boxes of its objects and the rules."""

from dataclasses import replace

import numpy as np

from penstock_video.sinks.jpeg import SoftwareJpeg
from penstock_video.sinks.osd import Osd
from penstock_video.types import FrameResult, Tracks

WIDTH = 960
MAX_BYTES = 256 * 1024


class SnapshotMaker:
    """Draws and encodes snapshots. osd: a separate instance, as it draws only the objects of events."""

    def __init__(self, osd: Osd) -> None:
        self._osd, self._jpeg = osd, SoftwareJpeg()

    def make(self, result: FrameResult) -> bytes | None:
        """The JPEG, at most WIDTH pixels wide and MAX_BYTES long; None if the frame has no pixels."""
        if result.frame.image is None:
            return None
        shown = with_objects_of_events(result)
        width = WIDTH
        while (picture := self._osd.draw(shown, max_width=width)) is not None:
            jpeg = self._jpeg.encode(picture)
            if len(jpeg) <= MAX_BYTES or width < WIDTH // 4:
                return jpeg if len(jpeg) <= MAX_BYTES else None
            width //= 2
        return None


def with_objects_of_events(result: FrameResult) -> FrameResult:
    """The result with only the tracks of its events; unchanged if an event counts objects."""
    ids = [event.track_id for event in result.analytics.events if event.track_id is not None]
    if len(ids) < len(result.analytics.events):
        return result
    tracks, attributes, rules_of = result.tracks, result.attributes, result.analytics.rules_of
    rows = np.flatnonzero(np.isin(tracks.track_id, ids))
    chosen = rows.tolist()
    fewer = Tracks(tracks.detections.select(rows), tracks.track_id[rows], tracks.age_frames[rows], tracks.is_estimate)
    analytics = replace(result.analytics, rules_of=tuple(rules_of[row] for row in chosen) if rules_of else ())
    return replace(
        result,
        tracks=fewer,
        attributes=tuple(attributes[row] for row in chosen) if attributes else (),
        analytics=analytics,
    )
