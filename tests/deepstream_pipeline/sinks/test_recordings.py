"""Which events are recorded, and what is kept."""

import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.sinks.recordings import (
    LATE_S,
    FinishedRecording,
    RecordingsFolder,
    RecordOptions,
    RecordPolicy,
    over_quota,
)
from penstock_video.types import AnalyticsKind
from tests.deepstream_pipeline.sinks.disks import small_disk
from tests.deepstream_pipeline.sinks.results import UNIX_S, crossing

FOLDER = Path("/recordings")


def policy(**options: object) -> RecordPolicy:
    """With 5 s before, 10 s after, and 20 s of cool-down."""
    chosen = {"before_s": 5.0, "after_s": 10.0, "cool_down_s": 20.0} | options
    return RecordPolicy(RecordOptions(FOLDER, **chosen))  # type: ignore[arg-type]


def test_record_event_begins_a_recording_around_it() -> None:
    """An event asks for so long before and after it, into a file named after source and time."""
    request = policy().observe("cam", [crossing(1)], 100.0, UNIX_S)
    assert request is not None
    assert (request.source_id, request.before_s, request.after_s) == ("cam", 5.0, 10.0)
    assert request.path == "/recordings/cam-2027-01-15T080000.500Z.mp4"


def test_record_events_that_are_not_meant_begin_none() -> None:
    """Only the kinds and sources that were named; a frame without events begins nothing."""
    chooser = policy(kinds=(AnalyticsKind.OVERCROWDING,), sources=("cam",))
    assert chooser.observe("cam", [crossing(1)], 0.0, UNIX_S) is None
    assert chooser.observe("other", [crossing(1, source_id="other", track_id=None)], 0.0, UNIX_S) is None
    assert chooser.observe("cam", [], 0.0, UNIX_S) is None
    assert chooser.observe("cam", [crossing(1, track_id=None)], 0.0, UNIX_S) is not None


def test_record_events_during_a_recording_are_part_of_it() -> None:
    """What happens while it runs is named by it; it begins nothing of its own."""
    chooser = policy(after_s=10.0)
    first = chooser.observe("cam", [crossing(1)], 0.0, UNIX_S)
    assert first is not None
    for now in range(1, 10):
        assert chooser.observe("cam", [crossing(now + 1)], float(now), UNIX_S + now) is None
    assert chooser.finished(first.path, 5.0, 10.0, "") == []
    assert chooser.passed("cam", 9.9, 0.0) == []
    [over] = chooser.passed("cam", 10.0, 0.0)
    assert [event.frame_num for event in over.events] == list(range(1, 11))


def test_record_of_a_file_that_is_read_ahead_names_the_events_to_come() -> None:
    """Its recording is finished before the frames that it shows are through: what happens in them is named by it."""
    chooser = policy()
    first = chooser.observe("cam", [crossing(1)], 20.0, UNIX_S)
    assert first is not None
    assert chooser.finished(first.path, 5.0, 10.0, "") == []
    assert chooser.observe("cam", [crossing(2)], 25.0, UNIX_S + 0.01) is None
    [over] = chooser.passed("cam", 30.1, 0.0)
    assert [event.frame_num for event in over.events] == [1, 2]
    assert (over.before_s, over.after_s, over.error) == (5.0, 10.0, "")


def test_record_that_ended_early_takes_no_more_events() -> None:
    """A recording that failed, or whose pictures changed, shows nothing more: what comes then begins another."""
    chooser = policy()
    first = chooser.observe("cam", [crossing(1)], 20.0, UNIX_S)
    assert first is not None
    [over] = chooser.finished(first.path, 5.0, 1.5, "1.5 s after its moment")
    assert (over.after_s, over.error, len(over.events)) == (1.5, "1.5 s after its moment", 1)
    assert chooser.observe("cam", [crossing(2)], 22.0, UNIX_S + 2) is not None


def test_record_of_a_source_that_is_over_is_reported_at_once() -> None:
    """Its recordings that are finished; others are given up after a while, or at the program's end."""
    chooser = policy()
    first = chooser.observe("cam", [crossing(1)], 20.0, UNIX_S)
    assert first is not None
    assert chooser.finished(first.path, 5.0, 10.0, "") == []
    second = chooser.asked("cam", 1.0, 1.0, 21.0, UNIX_S)
    assert [over.path for over in chooser.forget("cam", 100.0)] == [first.path]
    assert chooser.passed("other", 0.0, 100.0 + LATE_S) == []
    [late] = chooser.passed("other", 0.0, 100.1 + LATE_S)
    assert (late.path, bool(late.error)) == (second.path, True)
    chooser.asked("cam", 1.0, 1.0, 21.0, UNIX_S)
    assert len(chooser.give_up()) == 1


def test_record_events_of_the_cool_down_are_counted() -> None:
    """They are in no recording, which is reported."""
    chooser = policy()
    assert chooser.observe("cam", [crossing(1)], 0.0, UNIX_S)
    assert chooser.observe("cam", [crossing(2)], 12.0, UNIX_S + 12) is None
    assert chooser.observe("cam", [], 13.0, UNIX_S + 13) is None
    assert chooser.observe("cam", [crossing(3), crossing(4)], 29.9, UNIX_S + 29) is None
    assert chooser.unrecorded == {("cam", "cool_down"): 3}


def test_record_event_near_the_end_goes_on_in_another_recording() -> None:
    """Each event has its time behind it: where a recording ends too early for one, another goes on with it."""
    chooser = policy()
    assert chooser.observe("cam", [crossing(1)], 0.0, UNIX_S)
    assert chooser.observe("cam", [crossing(90)], 9.0, UNIX_S + 9) is None
    assert chooser.observe("cam", [], 9.9, UNIX_S + 9.9) is None
    request = chooser.observe("cam", [], 10.5, UNIX_S + 10.5)
    assert request is not None
    assert [request.before_s, request.after_s] == pytest.approx([1.5, 8.5])
    assert chooser.observe("cam", [], 19.5, UNIX_S + 19.5) is None


def test_record_cool_down_of_a_source_is_its_own() -> None:
    """After a recording its source rests; others do not."""
    chooser = policy()
    assert chooser.observe("cam", [crossing(1)], 0.0, UNIX_S)
    assert chooser.observe("cam", [crossing(2)], 29.9, UNIX_S + 29.9) is None
    assert chooser.observe("other", [crossing(2, source_id="other")], 29.9, UNIX_S + 29.9)
    assert chooser.observe("cam", [crossing(3)], 30.0, UNIX_S + 30)


def test_record_no_more_than_so_many_at_once() -> None:
    """A storm of events on many cameras begins no storm of recordings; what was refused is counted."""
    chooser = policy(max_at_once=2)
    requests = [chooser.observe(f"cam{n}", [crossing(1, source_id=f"cam{n}")], 0.0, UNIX_S) for n in range(5)]
    assert [request is not None for request in requests] == [True, True, False, False, False]
    assert chooser.unrecorded == {(f"cam{n}", "max_at_once"): 1 for n in (2, 3, 4)}
    assert requests[0] is not None
    assert chooser.finished(requests[0].path, 5.0, 10.0, "") == []
    assert chooser.observe("cam4", [crossing(2, source_id="cam4")], 1.0, UNIX_S + 1) is not None


def test_record_asked_by_hand_needs_no_event() -> None:
    """A person gets a recording at any time, each into a file of its own."""
    chooser = policy(max_at_once=0)
    first, second = (chooser.asked("cam", 2.0, 3.0, 0.0, UNIX_S) for _ in range(2))
    assert first.path != second.path
    [over] = chooser.finished(first.path, 0.0, 0.0, "disk full")
    assert (over.events, over.error) == ((), "disk full")
    assert chooser.finished(first.path, 0.0, 0.0, "") == []


def test_record_of_a_process_that_died_is_given_up() -> None:
    """A recording of which no word comes does not count as running for ever."""
    chooser = policy(max_at_once=1)
    assert chooser.observe("cam", [crossing(1)], 0.0, UNIX_S)
    assert chooser.passed("cam", 9.9, 1000.0) == []
    assert chooser.passed("cam", 10.0, 1001.0) == []
    assert chooser.passed("cam", 99.0, 1001.0 + LATE_S) == []
    (late,) = chooser.passed("cam", 99.1, 1001.1 + LATE_S)
    assert (late.before_s, late.after_s, late.error) == (0.0, 0.0, "its process never reported its end")
    assert chooser.running_paths() == set()


def test_record_sources_that_come_and_go_leave_nothing() -> None:
    """A policy remembers only sources that are there."""
    chooser = policy()
    for number in range(100):
        request = chooser.observe(f"cam{number}", [crossing(1, source_id=f"cam{number}")], float(number), UNIX_S)
        assert request is not None
        chooser.finished(request.path, 5.0, 10.0, "")
        assert chooser.forget(f"cam{number}", 0.0)
    assert (chooser._automatic, chooser._running) == ({}, {})


def test_quota_deletes_the_oldest_until_the_rest_fits() -> None:
    """The newest recordings stay, whole; of those that do not fit any more the oldest come first."""
    files = [
        (Path(name), size, when) for name, size, when in (("b", 40, 2.0), ("d", 30, 4.0), ("a", 5, 1.0), ("c", 40, 3.0))
    ]
    assert over_quota(files, 110) == [Path("a")]
    assert over_quota(files, 75) == [Path("a"), Path("b")]
    assert over_quota(files, 1000) == []
    assert over_quota(files, 1) == [Path("a"), Path("b"), Path("c")]


def test_recordings_folder_keeps_index_and_quota(tmp_path: Path) -> None:
    """The index names what was recorded and why; the folder keeps its quota, but deletes nothing that is running."""
    options = RecordOptions(tmp_path, quota_bytes=250)
    folder, chooser = RecordingsFolder(options), RecordPolicy(options)
    paths = []
    for number in range(5):
        request = chooser.observe(f"cam{number}", [crossing(7, source_id=f"cam{number}")], 0.0, UNIX_S)
        assert request is not None
        Path(request.path).write_bytes(bytes(100))
        os.utime(request.path, (1000 + number, 1000 + number))
        paths.append(Path(request.path))
    for path in paths[1:]:
        assert chooser.finished(str(path), 5.0, 10.0, "") == []
        [over] = chooser.passed(path.name[:4], 10.0, 0.0)
        folder.add(over, 0.0, running=chooser.running_paths())
    folder.close()
    folder.close()
    assert [path.exists() for path in paths] == [True, False, False, True, True]
    lines = [json.loads(line) for line in (tmp_path / "recordings.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[3] == {
        "source_id": "cam4",
        "path": paths[4].name,
        "time": "2027-01-15T08:00:00.500Z",
        "before_s": 5.0,
        "after_s": 10.0,
        "size_bytes": 100,
        "error": "",
        "events": [
            {"kind": "line-crossing", "rule": "Entry", "direction": None, "frame_num": 7, "pts_s": 0.7, "track_id": 1}
        ],
    }


def test_recording_that_is_larger_than_the_quota_stays(tmp_path: Path) -> None:
    """What was just recorded is not deleted as if it had never been, however old the file system thinks it is; the log
    says that the quota is too small."""
    folder = RecordingsFolder(RecordOptions(tmp_path, quota_bytes=50))
    for number in range(2):
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(bytes(100))
        os.utime(path, (2000 - number, 2000 - number))
        with capture_logs() as said:
            folder.add(FinishedRecording("cam", str(path), UNIX_S, 5.0, 10.0, (), ""), 0.0)
        assert [one["event"] for one in said if one["log_level"] == "warning"] == ["recordings are over quota"]
    folder.close()
    lines = [json.loads(line) for line in (tmp_path / "recordings.jsonl").read_text().splitlines()]
    assert [line["size_bytes"] for line in lines] == [100, 100]
    assert (tmp_path / "1.mp4").exists()


def test_recordings_folder_that_is_read_only_says_which(tmp_path: Path) -> None:
    """FAULTS 60: a folder that cannot be written to is reported at the start."""
    with small_disk(tmp_path / "disk") as disk:
        os.system(f"mount -o remount,ro {disk}")
        with pytest.raises(SinkFailed, match="disk: cannot be written to"):
            RecordingsFolder(RecordOptions(disk))
