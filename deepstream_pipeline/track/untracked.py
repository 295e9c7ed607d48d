"""No tracker: what the detector saw is passed on, and nothing has an identity."""

from dataclasses import replace

import numpy as np

from deepstream_pipeline.types import Detections, Frame, Tracks, no_tracks

NO_IDENTITY = -1


class Untracked:
    """Every detection is in its frame's tracks with track_id -1 and age 1; a frame without a look has none.

    Rules that count what is there (roi-filtering's counts, overcrowding) work; those that follow one object need an
    identity and stay silent.
    """

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """The detections, in their order."""
        count = len(detections)
        return Tracks(detections, np.full(count, NO_IDENTITY, np.int64), np.ones(count, np.int64))

    def coast(self, frame: Frame) -> Tracks:
        """Nothing: nobody looked, and nothing is known to be still there."""
        return replace(no_tracks(), is_estimate=True)

    def reset(self) -> None:
        """Nothing is remembered."""
