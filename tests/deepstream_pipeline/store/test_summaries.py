"""Tracks, occupancy and positions are summed up between writes, and add up across them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock_video.store.reader import EventReader, Filter
from penstock_video.store.records import GRID_HEIGHT, GRID_WIDTH
from penstock_video.store.summaries import MAX_LIVE_TRACKS, MAX_PATH_POINTS, PathSummary, TrackBook, unpacked_path
from penstock_video.types import FrameAnalytics, FrameResult
from tests.deepstream_pipeline.sinks.results import UNIX_S, Clock, result
from tests.deepstream_pipeline.store.stores import ALL, a_store, crossed, is_set_up

DAY = (UNIX_S - 86_400.0, UNIX_S + 86_400.0)


def counted(number: int, counts: dict[str, int], *, fps: float = 1.0) -> FrameResult:
    """A frame a second with these counts."""
    one = result(number, fps=fps, has_image=False)
    return replace(one, analytics=FrameAnalytics((), counts))


def test_track_has_its_times_zones_and_best_moment(tmp_path: Path) -> None:
    """One row a track, whatever the number of writes."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock)
    for number in range(0, 30, 3):
        clock.now += 0.6
        store.write(result(number, has_image=False, objects=2))
    store.close()
    found = EventReader(tmp_path / "events").tracks(ALL)
    assert [(one.track_id, one.label) for one in found] == [(2, "car"), (1, "person")]
    first = found[1]
    assert (first.first_unix_s, first.last_unix_s) == (UNIX_S, UNIX_S + 2.7)
    assert (first.first_pts_s, first.last_pts_s, first.frames) == (0.0, 2.7, 28)
    assert (first.score, first.zones, len(first.path)) == (0.875, ("Yard",), 10)
    assert first.path[-1] == pytest.approx(((27 % 20 + 320 / 18) / 320, 160 / 240), abs=1e-3)


def test_track_names_its_newest_event(tmp_path: Path) -> None:
    """So that a search for objects shows a picture, where the event has one."""
    store = a_store(tmp_path / "events")
    is_set_up(store)
    store.write(result(0, events=(crossed(0),)))
    store.write(result(1, events=(crossed(1),), has_image=False))
    store.close()
    tracks = {one.track_id: one for one in EventReader(tmp_path / "events").tracks(ALL)}
    assert (tracks[1].event_id, tracks[1].has_snapshot, tracks[1].zones) == (2, False, ("Yard", "door"))
    assert tracks[2].event_id is None


TRACK_FILTERS = {
    Filter(label="car"): [2],
    Filter(source_id="yard"): [],
    Filter(rule="Yard"): [1, 2],
    Filter(rule="Yard", label="person"): [1],
    Filter(rule="Attic"): [],
    Filter(since=UNIX_S + 2.0): [1, 2],
    Filter(since=UNIX_S + 3.0): [],
    Filter(until=UNIX_S): [],
    Filter(until=UNIX_S + 0.1, rule="Yard"): [1, 2],
}


@pytest.mark.parametrize("which", TRACK_FILTERS, ids=str)
def test_tracks_are_found_by_class_zone_stream_and_time(which: Filter, tmp_path: Path) -> None:
    """A track belongs to a time range if it was there in any of it."""
    store = a_store(tmp_path / "events")
    for number in (0, 25):
        store.write(result(number, has_image=False, objects=2))
    store.close()
    assert sorted(one.track_id for one in EventReader(tmp_path / "events").tracks(which)) == TRACK_FILTERS[which]


def test_path_of_any_length_is_short_and_keeps_its_ends() -> None:
    """Its points are evenly far apart in time."""
    path = PathSummary()
    for number in range(1000):
        path.add((number / 1000, 0.5))
    points = unpacked_path(path.packed())
    assert len(points) <= MAX_PATH_POINTS
    assert (points[0], points[-1]) == ((0.0, 0.5), (0.999, 0.5))
    steps = np.diff([x for x, _ in points[:-1]])
    assert steps.max() == pytest.approx(steps.min(), abs=1e-3)


def test_live_tracks_are_bounded() -> None:
    """Beyond the limit the oldest of the source ends; none is lost."""
    book = TrackBook()
    crowd = result(0, has_image=False, objects=500)
    for number in range(MAX_LIVE_TRACKS // 500 + 1):
        ids = crowd.tracks.track_id + 500 * number
        book.observe(replace(crowd, tracks=replace(crowd.tracks, track_id=ids)), UNIX_S)
    assert len(book) == MAX_LIVE_TRACKS
    assert len(book.changed()) == MAX_LIVE_TRACKS + 500


def test_occupancy_is_the_mean_over_the_whole_minute(tmp_path: Path) -> None:
    """Frames without objects count, also those before the first object, and over several writes."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock)
    begin = int(-UNIX_S % 60) + 1  # frames of one minute
    for number in range(begin, begin + 40):
        clock.now += 1.0
        people = 2 if 10 <= number - begin < 30 else 0
        store.write(counted(number, {"roi-filtering/Yard": people, "line-crossing/door.in": 7}))
    store.close()
    (row,) = EventReader(tmp_path / "events").occupancy("cam", *DAY, 60)
    assert (row.kind, row.rule, row.mean, row.most) == ("roi-filtering", "Yard", 1.0, 2)


def test_occupancy_counts_objects_of_each_class_and_events_by_direction(tmp_path: Path) -> None:
    """A rule's counts of one class are left out: the rule's own count has them."""
    store = a_store(tmp_path / "events")
    store.write(counted(0, {"objects/person": 3, "roi-filtering/Yard": 2, "roi-filtering/Yard/person": 2}))
    store.write(result(1, has_image=False, events=(crossed(1), crossed(1, direction="out"), crossed(1))))
    store.close()
    rows = {(row.kind, row.rule): row for row in EventReader(tmp_path / "events").occupancy("cam", *DAY, 86_400)}
    assert set(rows) == {("objects", "person"), ("roi-filtering", "Yard"), ("line-crossing", "door")}
    door = rows["line-crossing", "door"]
    assert (door.events, door.entered, door.left) == (3, 2, 1)
    assert rows["objects", "person"].most == 3


def test_occupancy_of_a_file_follows_its_video(tmp_path: Path) -> None:
    """An hour that is read in a minute is an hour in the chart, which ends with the newest object's position."""
    store = a_store(tmp_path / "events")
    is_set_up(store, is_live=False)
    for minute in range(3):
        one = counted(60 * minute, {"objects/person": 1})
        store.write(replace(one, frame=replace(one.frame, captured_unix_s=UNIX_S + minute)))
    store.close()
    reading = EventReader(tmp_path / "events")
    rows = reading.occupancy("cam", *DAY, 60)
    assert [row.unix_s - rows[0].unix_s for row in rows] == [0.0, 60.0, 120.0]
    times = reading.source_times("cam")
    assert times is not None
    assert (times.began_unix_s, times.is_live, times.last_unix_s) == (UNIX_S, False, UNIX_S + 120.0)


def test_heat_is_the_time_that_feet_were_in_a_cell(tmp_path: Path) -> None:
    """In seconds, added up over writes and runs."""
    for run in range(2):
        store = a_store(tmp_path / "events")
        for number in (0, 20, 40):
            store.write(result(number, has_image=False, objects=1, fps=20.0))
        store.close()
        grid = EventReader(tmp_path / "events").heat("cam", *DAY)
        assert grid.sum() == pytest.approx(2.0 * (run + 1))
        row, column = np.unravel_index(int(grid.argmax()), grid.shape)
        assert (row, column) == (int(160 / 240 * GRID_HEIGHT), int(320 / 18 / 320 * GRID_WIDTH))


def test_counters_count_events_by_rule_and_direction_in_a_time_range(tmp_path: Path) -> None:
    """From the stored events, so a restart loses none."""
    store = a_store(tmp_path / "events")
    for number, direction in enumerate(("in", "in", "out")):
        store.write(result(number, has_image=False, events=(crossed(number, direction=direction),)))
    store.close()
    reading = EventReader(tmp_path / "events")
    (whole,) = reading.counters("cam", *DAY)
    assert (whole.rule, whole.events, whole.entered, whole.left) == ("door", 3, 2, 1)
    (late,) = reading.counters("cam", UNIX_S + 0.1, UNIX_S + 9)
    assert (late.events, late.entered, late.left) == (2, 1, 1)
