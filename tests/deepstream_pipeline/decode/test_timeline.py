"""Presentation times that rise strictly, whatever the stream says."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.decode.timeline import MOST_STEP_S, WRAP_S, PtsTimeline


def stamps(raw: list[float | None], first_pts_s: float = 0.0, interval_s: float = 0.1) -> list[float]:
    """What the times of one stream become."""
    timeline = PtsTimeline(first_pts_s, interval_s)
    return [timeline.stamp(one) for one in raw]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param([0.0, 0.1, 0.2], [0.0, 0.1, 0.2], id="sane"),
        pytest.param([1.4, 1.5, 1.7], [0.0, 0.1, 0.3], id="begins late"),
        pytest.param([None, None, None], [0.0, 0.1, 0.2], id="without times"),
        pytest.param([None, 7.0, 7.1], [0.0, 0.1, 0.2], id="the first without"),
        pytest.param([0.0, None, 0.2, None], [0.0, 0.1, 0.2, 0.3], id="some without"),
        pytest.param([0.0, 0.1, 0.1, 0.2], [0.0, 0.1, 0.101, 0.2], id="reported twice"),
        pytest.param([0.0, 0.2, 0.1, 0.3], [0.0, 0.2, 0.201, 0.3], id="out of order"),
        pytest.param([0.0, 0.2, 0.0, 0.1, 0.2, 0.3], [0.0, 0.2, 0.201, 0.202, 0.31, 0.41], id="a short stream again"),
        pytest.param([0.0, 0.1, 5000.0, 5000.1], [0.0, 0.1, 5000.0, 5000.1], id="a gap of more than an hour"),
        pytest.param([0.0, 60.0, 120.0, 180.0], [0.0, 60.0, 120.0, 180.0], id="a frame a minute"),
        pytest.param([0.0, 8e4, None, 2e5], [0.0, 8e4, 8e4 + 0.1, 2e5], id="a frame a day, one untimed"),
        pytest.param([0.0, 3600.0, 3600.0, 7e3], [0.0, 3600.0, 3600.001, 7e3], id="a frame an hour, one repeated"),
        pytest.param([0.0, 3600.0, 0.0, 3600.0], [0.0, 3600.0, 3600.1, 7200.1], id="an hour forward, then backward"),
        pytest.param([90.0, 90.1, 2.0, 2.1], [0.0, 0.1, 0.2, 0.3], id="jumps backward"),
        pytest.param([WRAP_S - 0.15, WRAP_S - 0.05, 0.05, 0.15], [0.0, 0.1, 0.2, 0.3], id="wraps around"),
        pytest.param([WRAP_S - 0.1, 0.4, 0.5], [0.0, 0.5, 0.6], id="wraps around over a gap"),
        pytest.param([WRAP_S - 90, WRAP_S - 30, 30.0, 90.0], [0.0, 60.0, 120.0, 180.0], id="minutes wrap around"),
    ],
)
def test_times_of_a_stream_become_sane(raw: list[float | None], expected: list[float]) -> None:
    """Differences that make sense are kept to the last digit; what breaks them costs a frame's interval."""
    assert stamps(raw) == pytest.approx(expected, abs=0.02)


def test_first_frame_continues_where_the_source_was() -> None:
    """After a reconnection the times go on from what the parent says."""
    assert stamps([3.0, 3.1], first_pts_s=100.0) == pytest.approx([100.0, 100.1])


def test_stream_that_begins_anew_goes_on() -> None:
    """A loop adds one interval; a gap that is reported is kept."""
    timeline = PtsTimeline(0.0, 0.1)
    assert [timeline.stamp(raw) for raw in (0.0, 0.1)] == pytest.approx([0.0, 0.1])
    timeline.begin()
    assert timeline.stamp(0.0) == pytest.approx(0.2)
    timeline.begin(gap_s=5.0)
    assert timeline.stamp(77.0) == pytest.approx(5.2)


def test_rate_that_changes_is_learned() -> None:
    """Frames without a time are spaced as those before them were."""
    timeline = PtsTimeline(0.0, 0.04)
    for number in range(60):
        timeline.stamp(number * 0.5)
    assert timeline.stamp(None) == pytest.approx(30.0, abs=0.02)


def test_absurd_rate_is_not_believed() -> None:
    """An interval of nothing, of ages or of no number is none."""
    for interval_s in (0.0, -1.0, 1e9, math.nan, math.inf):
        first, second = stamps([None, None], interval_s=interval_s)
        assert 0.0 < second - first <= 1.0


RAW = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.0, WRAP_S - 0.01, WRAP_S, 0.01]))


@given(st.lists(RAW, min_size=2, max_size=60), st.floats(0, 1e6))
def test_times_rise_strictly_whatever_the_stream_says(raw: list[float | None], first_pts_s: float) -> None:
    """With any input, two frames never have the same time, and times never decrease."""
    out = stamps(raw, first_pts_s)
    assert out[0] == first_pts_s
    assert all(before < after for before, after in itertools.pairwise(out))


@given(st.lists(RAW, min_size=2, max_size=60), st.floats(0.01, 5.0))
def test_live_times_never_outrun_the_clock_by_more_than_a_step(raw: list[float | None], pause_s: float) -> None:
    """With any input, a step is at most half a minute longer than the time that has passed."""
    timeline = PtsTimeline(0.0, 0.1)
    out = [timeline.stamp(one, now=number * pause_s) for number, one in enumerate(raw)]
    for before, after in itertools.pairwise(out):
        assert 0.0 < after - before <= MOST_STEP_S + pause_s + 1.0


@given(st.lists(st.floats(0.002, 1e7), min_size=1, max_size=60))
def test_file_times_that_increase_are_followed_whatever_the_step(steps_s: list[float]) -> None:
    """With milliseconds, minutes or months between frames, the timeline has the file's differences."""
    raw = [0.0, *itertools.accumulate(steps_s)]
    assert stamps(list(raw)) == pytest.approx(raw)


@pytest.mark.parametrize(
    ("passed_s", "step_s", "expected_s"),
    [
        pytest.param(0.04, 0.04, 0.04, id="as it should be"),
        pytest.param(0.04, 3600.0, 0.1, id="its clock was set an hour forward"),
        pytest.param(0.04, -3600.0, 0.1, id="its clock was set an hour back"),
        pytest.param(60.0, 60.0, 60.0, id="a frame a minute"),
        pytest.param(3600.0, 3600.0, 3600.0, id="a frame an hour"),
        pytest.param(60.0, 3600.0, 0.1, id="a frame a minute, and its clock was set"),
        pytest.param(5.0, 20.0, 20.0, id="a network that delivers late and then at once"),
    ],
)
def test_live_step_is_followed_as_far_as_time_has_passed(passed_s: float, step_s: float, expected_s: float) -> None:
    """A frame after an hour is an hour later; a clock that jumps by an hour adds one interval."""
    timeline = PtsTimeline(0.0, 0.1)
    timeline.stamp(5000.0, now=10.0)
    assert timeline.stamp(5000.0 + step_s, now=10.0 + passed_s) == pytest.approx(expected_s)
