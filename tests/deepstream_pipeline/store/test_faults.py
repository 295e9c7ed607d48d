"""Bounds, full disks, damaged files and kill -9: the pipeline goes on, and nothing is silently lost."""

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks.recordings import FinishedRecording
from penstock_video.store.database import FILE, MAX_DAMAGED_FILES, move_store_aside
from penstock_video.store.reader import EventReader, Filter, StoreUnreadable
from penstock_video.store.writer import MAX_PENDING, EventStore
from penstock_video.types import FrameResult
from tests.deepstream_pipeline.sinks.disks import fill, small_disk
from tests.deepstream_pipeline.sinks.results import UNIX_S, Clock
from tests.deepstream_pipeline.store.stores import ALL, a_store, crossed, result_with
from tests.support.stack import CHECKOUT

MIB = 1 << 20
NOW = UNIX_S + 1000.0


def written(store: EventStore, clock: Clock, *results: FrameResult) -> None:
    """Writes the results and lets a second pass."""
    for one in results:
        store.write(one)
    clock.now += 20.0
    store.idle()


def at(one: FrameResult, unix_s: float) -> FrameResult:
    """The same, captured at another time."""
    return replace(one, frame=replace(one.frame, captured_unix_s=unix_s))


def test_events_over_the_age_are_removed_with_their_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording stays while one of its events is young enough, and files of others stay."""
    monkeypatch.setattr("time.time", lambda: NOW)
    recordings, clock = tmp_path / "recordings", Clock()
    recordings.mkdir()
    for name in ("old.mp4", "both.mp4", "other.mp4"):
        (recordings / name).touch()
    store = a_store(tmp_path / "events", clock=clock, recordings=recordings, max_days=1.0)
    old, young = NOW - 86_400 - 50, NOW - 86_400 + 50
    events = [crossed(number) for number in range(3)]
    results = [at(result_with(number, one), old if number < 2 else young) for number, one in enumerate(events)]
    clips = {"old.mp4": [events[0]], "both.mp4": events[1:]}
    for one in results:
        store.write(one)
    for name, shown in clips.items():
        store.note_clip(FinishedRecording("cam", name, NOW - 86_400, 90.0, 90.0, tuple(shown), ""))
    clock.now += 20
    store.idle()
    store.close()
    assert [one.frame_num for one in EventReader(tmp_path / "events").events(ALL)] == [2]
    assert sorted(path.name for path in recordings.iterdir()) == ["both.mp4", "other.mp4"]


def test_store_stays_within_its_bytes_and_keeps_the_newest(tmp_path: Path) -> None:
    """With snapshots that would fill it many times over; the file shrinks again."""
    clock = Clock()
    store = a_store(tmp_path / "events", clock=clock, max_bytes=16 * MIB)
    store._snapshots.make = lambda result: os.urandom(100_000)  # type: ignore[method-assign]
    for batch in range(60):
        written(store, clock, *(result_with(10 * batch + n, crossed(10 * batch + n)) for n in range(10)))
    events = EventReader(tmp_path / "events").events(Filter(limit=1000))
    assert (tmp_path / "events" / FILE).stat().st_size <= 16 * MIB
    assert store.alarm == ""
    assert (events[0].frame_num, store.lost) == (599, 0)
    assert 60 < len(events) < 170
    assert EventReader(tmp_path / "events").snapshot(events[0].snapshot_id or 0)
    store.close()


def test_full_disk_is_an_alarm_and_storing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """Events wait without their pictures; those beyond the bound are counted."""
    clock = Clock()
    with small_disk(tmp_path / "disk", size_kib=2048) as disk:
        store = a_store(disk / "events", clock=clock)
        written(store, clock, result_with(0, crossed(0)))
        filler = fill(disk)
        with pytest.raises(SinkFailed, match="full"):
            written(store, clock, *(result_with(n, *[crossed(n)] * 50) for n in range(1, 20)))
        assert "events are lost and counted" in store.alarm
        for n in range(20, 40):
            store.write(result_with(n, *[crossed(n)] * 50))
        assert store.lost == 19 * 50 + 20 * 50 - MAX_PENDING
        filler.unlink()
        written(store, clock)
        assert store.alarm == ""
        assert len(EventReader(disk / "events").events(Filter(limit=1000, since=UNIX_S + 0.05))) == MAX_PENDING
        store.close()


def spoil(file: Path) -> None:
    """Overwrites the pages behind the first."""
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xa5" * (file.stat().st_size - 4096))


def test_damaged_file_is_moved_aside_at_the_start(tmp_path: Path) -> None:
    """And never deleted; a new store begins."""
    store = a_store(tmp_path)
    store.write(result_with(0, crossed(0)))
    store.close()
    spoil(tmp_path / FILE)
    before = (tmp_path / FILE).read_bytes()
    store = a_store(tmp_path)
    store.write(result_with(1, crossed(1)))
    store.close()
    (moved,) = tmp_path.glob(f"{FILE}.damaged-*")
    assert moved.read_bytes() == before
    assert [one.frame_num for one in EventReader(tmp_path).events(ALL)] == [1]


def test_file_that_is_damaged_while_it_runs_is_moved_aside(tmp_path: Path) -> None:
    """With an alarm that says where it is; events that wait go into the new store."""
    clock = Clock()
    store = a_store(tmp_path, clock=clock)
    written(store, clock, *(result_with(n, crossed(n)) for n in range(50)))
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]
    spoil(tmp_path / FILE)
    store._connection.close()  # type: ignore[union-attr]  # its cache has whole pages
    store._connection = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    with pytest.raises(SinkFailed, match=r"was damaged .* and renamed; started a new store"):
        written(store, clock, result_with(60, crossed(60)))
    written(store, clock)
    assert store.alarm == ""
    assert [one.frame_num for one in EventReader(tmp_path).events(ALL)] == [60]
    assert len(list(tmp_path.glob(f"{FILE}.damaged-*"))) >= 1
    store.close()


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    """A disk that damages each new store is a failure that a person must look at."""
    for number in range(MAX_DAMAGED_FILES):
        (tmp_path / f"{FILE}.damaged-{number}").touch()
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(SinkFailed, match="3 earlier damaged files exist: check the disk"):
        a_store(tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"no database" * 1000


def test_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """And one of a newer version, too."""
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("CREATE TABLE notes (text)")
    other.close()
    with pytest.raises(
        SinkFailed, match="is a database of another program; choose another folder with --events-folder"
    ):
        a_store(tmp_path)
    with pytest.raises(StoreUnreadable, match="is not an event store of this version"):
        EventReader(tmp_path).events(ALL)


KILLED = """
import sys, pathlib
from tests.deepstream_pipeline.store.stores import a_store, crossed, result_with
import time
store = a_store(pathlib.Path(sys.argv[1]), clock=time.monotonic)
number = 0
while True:
    store.write(result_with(number, crossed(number)))
    store._flushed_at = 0.0
    store.idle()
    print(number, flush=True)
    number += 1
"""


def test_store_survives_kill_9(tmp_path: Path) -> None:
    """What was written is there, in order, and the next run goes on."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 30:
            pass
        process.send_signal(signal.SIGKILL)
    store = a_store(tmp_path)
    store.write(result_with(10_000, crossed(10_000)))
    store.close()
    numbers = [one.frame_num for one in EventReader(tmp_path).events(Filter(limit=1000))]
    assert numbers[0] == 10_000
    assert numbers[1] >= 30
    assert numbers[1:] == list(range(numbers[1], -1, -1))


def test_earlier_store_is_moved_aside_whole(tmp_path: Path) -> None:
    """Of a run over the same files, whose events are not counted twice; not while a run writes to it."""
    store = a_store(tmp_path)
    store.write(result_with(0, crossed(0)))
    assert move_store_aside(tmp_path) is None
    store.close()
    assert move_store_aside(tmp_path) == tmp_path / f"{FILE}.1"
    assert not (tmp_path / FILE).exists()
    assert move_store_aside(tmp_path) is None
