"""Tracker options, the tracker by its name, and the tracker that assigns no identities."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pkgutil import resolve_name
from typing import Annotated

import numpy as np
from pydantic import Field

from penstock_video.interfaces import Extension, Tracker
from penstock_video.types import Detections, Frame, Tracks, no_tracks

NO_IDENTITY = -1


class Untracked:
    """Every detection is in its frame's tracks with track_id -1 and age 1; a frame without a look has none.

    Rules that count what is there (roi-filtering's counts, overcrowding) work; those that follow one object need an
    identity and stay silent.
    """

    def __init__(self, options: object = None) -> None:
        """Has no options."""

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """The detections, in their order."""
        count = len(detections)
        return Tracks(detections, np.full(count, NO_IDENTITY, np.int64), np.ones(count, np.int64))

    def coast(self, frame: Frame) -> Tracks:
        """No tracks: the frame was not inferred."""
        return replace(no_tracks(), is_estimate=True)

    def reset(self) -> None:
        """Nothing is remembered."""


class TrackerType(StrEnum):
    """bytetrack: identities by overlap and motion. none: detections as they are, each with the track_id -1."""

    BYTETRACK = "bytetrack"
    NONE = "none"


TRACKERS = {
    TrackerType.BYTETRACK: "penstock_video.track.bytetrack:ByteTrack",
    TrackerType.NONE: "penstock_video.track.registry:Untracked",
}


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """The tracker section, in nvtracker's words where it has them.

    probation_age: probationAge, frames in a row that show a thing before it has an identity; 1 and 2 are alike, since
    it is known again at the second sighting at the earliest. max_shadow_tracking_age: maxShadowTrackingAge, frames for
    which one that is not seen is kept, gaps in frame_num included. minimum_iou: minMatchingScore4Iou, the overlap of a
    detection with where a track should be, below which they are two things. activation_threshold: minDetectorConfidence
    of a new track. high_threshold: from this score on detections are matched first; those below only keep alive what
    is known already. What the model itself leaves out (pre-cluster-threshold) never comes here.
    """

    type: TrackerType = TrackerType.BYTETRACK
    probation_age: Annotated[int, Field(alias="probationAge", ge=1, le=1000)] = 3
    max_shadow_tracking_age: Annotated[int, Field(alias="maxShadowTrackingAge", ge=0, le=100_000)] = 30
    minimum_iou: Annotated[float, Field(alias="minMatchingScore4Iou", ge=0.001, le=1)] = 0.1
    activation_threshold: Annotated[float, Field(alias="minDetectorConfidence", ge=0, le=1)] = 0.5
    high_threshold: Annotated[float, Field(alias="highThreshold", ge=0, le=1)] = 0.5

    @property
    def has_tracks(self) -> bool:
        """Whether an object keeps an identity from frame to frame."""
        return self.type is not TrackerType.NONE


def new_tracker(options: TrackerOptions | Extension) -> Tracker:
    """One source's tracker. Its library is imported with the first that needs it, which takes seconds."""
    tracker: Tracker = (
        options.create() if isinstance(options, Extension) else resolve_name(TRACKERS[options.type])(options)
    )
    return tracker
