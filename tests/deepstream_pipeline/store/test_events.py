"""Events go into the store and come out of it in pages."""

import stat
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from penstock_video.errors import SinkFailed
from penstock_video.sinks.recordings import FinishedRecording
from penstock_video.store.database import FILE
from penstock_video.store.reader import EventReader, Filter, StoreUnreadable, pages
from penstock_video.store.snapshot import MAX_BYTES, WIDTH
from tests.deepstream_pipeline.sinks.results import UNIX_S, Clock, crossing, result
from tests.deepstream_pipeline.store.stores import ALL, a_store, crossed, is_set_up, result_with


def test_event_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """With its direction, object, box, score and time."""
    store = a_store(tmp_path / "events")
    store.write(result_with(3, crossed(3, direction="out")))
    store.close()
    (event,) = EventReader(tmp_path / "events").events(ALL)
    assert (event.source_id, event.kind, event.rule, event.direction) == ("cam", "line-crossing", "door", "out")
    assert (event.label, event.class_id, event.track_id, event.score) == ("person", 0, 1, 0.875)
    assert (event.xyxy, event.width, event.height) == ((10.0, 20.0, 30.0, 60.0), 320, 240)
    assert (event.frame_num, event.pts_s, event.unix_s) == (3, 0.3, UNIX_S + 0.3)


def test_event_that_counts_objects_has_no_object(tmp_path: Path) -> None:
    """Overcrowding is about a place."""
    store = a_store(tmp_path / "events")
    store.write(result_with(0, crossing(0, track_id=None)))
    store.close()
    (event,) = EventReader(tmp_path / "events").events(ALL)
    assert (event.kind, event.xyxy, event.label, event.track_id) == ("overcrowding", None, None, None)


def test_events_are_readable_a_second_after_they_happened(tmp_path: Path) -> None:
    """Also while no further frame comes: the sink's thread writes when it is idle."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock)
    store.write(result_with(0, crossed(0)))
    assert EventReader(tmp_path / "events").events(ALL) == []
    clock.now += 1.1
    store.idle()
    assert len(EventReader(tmp_path / "events").events(ALL)) == 1
    store.close()


def test_pages_have_every_event_once_and_the_newest_first(tmp_path: Path) -> None:
    """Also events of the same moment; and events that are added meanwhile shift nothing."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock)
    for number in range(10):
        store.write(result_with(number, crossed(number, track_id=1), crossed(number, track_id=2)))
    clock.now += 1.1
    store.idle()
    reading = EventReader(tmp_path / "events")
    seen = []
    for page in pages(reading.events, Filter(limit=3), lambda one: (one.unix_s, one.id)):
        seen += page
    assert [one.id for one in seen] == [20, 19, 18]
    first = reading.events(Filter(limit=7))
    store.write(result_with(11, crossed(11)))
    store.close()
    rest = reading.events(Filter(limit=100, after=(first[-1].unix_s, first[-1].id)))
    assert [one.id for one in [*first, *rest]] == list(range(20, 0, -1))


FILTERS = {
    Filter(source_id="yard"): [3],
    Filter(rule="door"): [1, 2, 3],
    Filter(kind="overcrowding"): [4],
    Filter(label="person"): [1, 2, 3],
    Filter(label="car"): [],
    Filter(since=UNIX_S + 0.1, until=UNIX_S + 0.3): [2, 3],
    Filter(source_id="cam", kind="line-crossing", rule="door", label="person", since=UNIX_S + 0.1): [2],
}


@pytest.mark.parametrize("which", FILTERS, ids=str)
def test_filters_choose_the_events_that_they_name(which: Filter, tmp_path: Path) -> None:
    """Alone and together."""
    store = a_store(tmp_path / "events")
    store.write(result_with(0, crossed(0)))
    store.write(result_with(1, crossed(1)))
    store.write(result_with(2, crossed(2, source_id="yard"), source_id="yard"))
    store.write(result_with(3, crossing(3, track_id=None)))
    store.close()
    assert sorted(one.frame_num + 1 for one in EventReader(tmp_path / "events").events(which)) == FILTERS[which]


def test_snapshot_is_the_frame_with_the_box_of_the_event(tmp_path: Path) -> None:
    """Of the frame in which it happened; other objects have no box in it."""
    store = a_store(tmp_path / "events")
    is_set_up(store)
    plain = result(5, size=(640, 480), objects=3, has_image=True)
    assert plain.frame.image is not None
    store.write(result(5, size=(640, 480), objects=3, has_image=True, events=(crossed(5, track_id=2),)))
    store.close()
    reading = EventReader(tmp_path / "events")
    (event,) = reading.events(ALL)
    assert event.snapshot_id is not None
    jpeg = reading.snapshot(event.snapshot_id)
    assert jpeg is not None
    shown = simplejpeg.decode_jpeg(jpeg).astype(np.int16)
    changed = np.abs(shown - plain.frame.image).max(axis=2) > 60
    boxes = plain.tracks.detections.xyxy.astype(int)
    edges = [changed[box[1] : box[3], box[2] - 3 : box[2] + 4].any(axis=1).mean() for box in boxes]
    assert edges[1] > 0.9
    assert max(edges[0], edges[2]) < 0.5


def test_snapshot_is_small_whatever_the_picture(tmp_path: Path) -> None:
    """A 4K picture of noise fits the bound, in a smaller size."""
    store = a_store(tmp_path / "events")
    noise = np.random.default_rng(1).integers(0, 256, (2160, 3840, 3), np.uint8)
    big = result(0, size=(3840, 2160), has_image=True, events=(crossed(0),))
    assert big.frame.image is not None
    big.frame.image[:] = noise
    store.write(big)
    store.close()
    reading = EventReader(tmp_path / "events")
    jpeg = reading.snapshot(reading.events(ALL)[0].snapshot_id or 0)
    assert jpeg is not None
    assert len(jpeg) <= MAX_BYTES
    assert simplejpeg.decode_jpeg_header(jpeg)[1] <= WIDTH


def test_recording_is_linked_to_its_events(tmp_path: Path) -> None:
    """With the second of the clip at which each happens; the folder's name is not stored."""
    store = a_store(tmp_path / "events")
    first, second = crossed(10), crossed(35)
    store.write(result_with(10, first))
    store.write(result_with(35, second))
    path = str(tmp_path / "recordings" / "cam-1.mp4")
    store.note_clip(FinishedRecording("cam", path, UNIX_S + 1.0, 5.0, 10.0, (first, second), ""))
    store.close()
    found = EventReader(tmp_path / "events").events(ALL)
    assert [(one.clip, one.clip_offset_s) for one in found] == [("cam-1.mp4", 7.5), ("cam-1.mp4", 5.0)]


def test_recording_that_ends_before_its_events_are_written_waits_for_them(tmp_path: Path) -> None:
    """The sink's queue may be long."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock)
    event = crossed(10)
    store.note_clip(FinishedRecording("cam", "cam-1.mp4", UNIX_S + 1.0, 5.0, 10.0, (event,), ""))
    clock.now += 1.1
    store.idle()
    store.write(result_with(10, event))
    store.close()
    assert [one.clip for one in EventReader(tmp_path / "events").events(ALL)] == ["cam-1.mp4"]


def test_files_are_for_this_user_only(tmp_path: Path) -> None:
    """Pictures of people: the folder is 0700 and each file 0600, also SQLite's own."""
    store = a_store(tmp_path / "events")
    store.write(result_with(0, crossed(0)))
    store.end_source("cam")
    assert stat.S_IMODE((tmp_path / "events").stat().st_mode) == 0o700
    files = sorted((tmp_path / "events").iterdir())
    assert {path.name for path in files} >= {FILE, f"{FILE}-wal", f"{FILE}-shm"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    store.close()


def test_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    """IDs are not reused."""
    for number in range(2):
        store = a_store(tmp_path / "events")
        store.write(result_with(number, crossed(number)))
        store.close()
    assert [one.id for one in EventReader(tmp_path / "events").events(ALL)] == [2, 1]


def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    """The second one says which flag names another."""
    store = a_store(tmp_path / "events")
    with pytest.raises(
        SinkFailed, match="another run stores its events there; choose another folder with --events-fol"
    ):
        a_store(tmp_path / "events")
    store.close()
    a_store(tmp_path / "events").close()


def test_folder_without_a_store_is_said_to_have_none(tmp_path: Path) -> None:
    """Reading makes no file."""
    with pytest.raises(StoreUnreadable, match="there is no event store at"):
        EventReader(tmp_path).events(ALL)
    assert list(tmp_path.iterdir()) == []
