"""Our filter is the library's, in fewer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trackers.core.bytetrack.tracklet import ByteTrackTracklet
from trackers.utils.predict_timing import PredictTiming

from deepstream_pipeline.track.kalman import CornerKalman

boxes = st.lists(st.floats(0, 2000), min_size=4, max_size=4)


@given(first=boxes, steps=st.lists(st.tuples(st.integers(1, 12), st.none() | boxes), max_size=20))
def test_filter_agrees_with_the_librarys(first: list[float], steps: list[tuple[int, list[float] | None]]) -> None:
    """After any sightings and gaps, both are in the same place with the same speed."""
    ours = ByteTrackTracklet(np.array(first), CornerKalman)
    theirs = ByteTrackTracklet(np.array(first))
    for frames, seen in steps:
        for tracklet in (ours, theirs):
            tracklet.predict(PredictTiming(float(frames), float(frames), frame_rate=1.0))
            if seen is not None:
                tracklet.update(np.array(seen))
        assert ours.get_state_bbox() == pytest.approx(theirs.get_state_bbox(), rel=1e-7, abs=1e-6)
    moved = theirs.state_estimator.kf.state[:, 0]
    assert isinstance(ours.state_estimator, CornerKalman)
    assert ours.state_estimator.ahead(3) == pytest.approx(moved[:4] + 3 * moved[4:], rel=1e-7, abs=1e-6)
