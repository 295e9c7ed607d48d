"""Frames a second, runaways, and pictures that do not change."""

import pytest

from penstock_video.sources.pace import Pace, Stillness, start_offset_s


def feed(pace: Pace, fps: float, from_s: float, to_s: float, limit: float | None = 25.0) -> bool:
    """Frames at an even rate; whether any of them was one too many."""
    count = round((to_s - from_s) * fps)
    return bool(sum(pace.count(from_s + n / fps, 1, limit) for n in range(count)))


@pytest.mark.parametrize("fps", [5.0, 25.0, 120.0])
def test_fps_of_even_frames_is_their_rate(fps: float) -> None:
    """What is said is what came, to a tenth."""
    pace = Pace()
    feed(pace, fps, 100.0, 110.0)
    assert pace.fps(110.0) == pytest.approx(fps, rel=0.05)
    assert pace.fps(113.1) == 0.0


def test_starts_of_many_files_are_spread_over_a_second() -> None:
    """Of any number of them: no two keyframes of equal files are nearer than half of an even spread."""
    for count in (1, 2, 24, 315):
        starts = sorted(start_offset_s(number) for number in range(count))
        assert 0 <= starts[0] <= starts[-1] < 1
        gaps = [two - one for one, two in zip(starts, [*starts[1:], starts[0] + 1], strict=True)]
        assert min(gaps) >= 0.38 / count


def test_fps_of_a_second_is_not_divided_by_three() -> None:
    """A source that has just begun is not called slow."""
    pace = Pace()
    feed(pace, 20.0, 0.0, 1.0)
    assert pace.fps(1.0) == pytest.approx(20.0, rel=0.1)


def test_runaway_sustained_for_three_seconds_is_seen() -> None:
    """More than 10 above what is expected, for three whole seconds, is a runaway, and not before."""
    assert not feed(Pace(), 60.0, 0.0, 2.9)
    assert feed(Pace(), 60.0, 0.0, 3.2)


@pytest.mark.parametrize(("fps", "limit"), [(34.0, 25.0), (60.0, 55.0), (2000.0, None)])
def test_runaway_within_the_margin_or_without_expectation_is_none(fps: float, limit: float | None) -> None:
    """Up to 10 above is believed; where nothing is expected, nothing is too much."""
    assert not feed(Pace(), fps, 0.0, 10.0, limit)


def test_runaway_after_a_pause_of_ours_is_none() -> None:
    """Frames that waited because the machine stood still, and come at once, are no runaway."""
    pace = Pace()
    assert not feed(pace, 25.0, 0.0, 4.0)
    assert not sum(pace.count(9.0, 1, 25.0) for _ in range(125))
    assert not feed(pace, 25.0, 9.0, 14.0)


def test_runaway_that_catches_up_is_none_until_it_has() -> None:
    """Ten seconds at half the rate are made up for at double the rate in five; what goes on so is one."""
    pace = Pace()
    assert not feed(pace, 12.5, 0.0, 10.0)
    assert not feed(pace, 50.0, 10.0, 15.0)
    assert not feed(pace, 50.0, 15.0, 17.9)
    assert feed(pace, 50.0, 17.9, 19.2)


def test_runaway_of_a_camera_that_was_slow_for_hours_is_seen() -> None:
    """It may make up for ten seconds, no more."""
    pace = Pace()
    assert not feed(pace, 12.5, 0.0, 7200.0)
    assert not feed(pace, 275.0, 7200.0, 7201.0)
    assert feed(pace, 275.0, 7201.0, 7204.2)


def test_stillness_after_its_time_is_reported_until_the_picture_changes() -> None:
    """The same digest for so long is frozen; the next other one ends it."""
    stillness = Stillness(30.0)
    seen = []
    for at, digest in [(0.0, 1), (29.9, 1), (30.0, 1), (40.0, 1), (41.0, 2), (42.0, 1), (71.0, 1), (72.0, 1)]:
        stillness.see(at, digest)
        seen.append(stillness.is_frozen)
    assert seen == [False, False, True, True, False, False, False, True]
