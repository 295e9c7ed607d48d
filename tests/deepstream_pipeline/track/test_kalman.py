"""Our filter is the library's, in fewer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trackers.core.bytetrack.tracklet import ByteTrackTracklet
from trackers.utils.predict_timing import PredictTiming
from trackers.utils.state_representations import XYXYStateEstimator

from penstock_video.track.bytetrack import CornerKalman

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


def test_filter_with_given_covariances_continues_like_the_librarys() -> None:
    """Every covariance that the library lets a tracklet set, the state's too, means the same here."""
    ours, theirs = CornerKalman(np.array([10.0, 20.0, 50.0, 90.0])), XYXYStateEstimator(np.array([10.0, 20, 50, 90]))
    state = np.kron(np.array([[5.0, 2.0], [2.0, 7.0]]), np.eye(4))
    for one in (ours, theirs):
        one.set_kf_covariances(3.0 * np.eye(4), np.diag([0.5] * 4 + [0.25] * 4), state)
    for seen in ([12.0, 21.0, 53.0, 92.0], None, [17.0, 22.0, 58.0, 95.0]):
        for one in (ours, theirs):
            one.predict()
            one.update(None if seen is None else np.array(seen))
        assert ours.state_to_bbox() == pytest.approx(theirs.state_to_bbox(), rel=1e-7)
