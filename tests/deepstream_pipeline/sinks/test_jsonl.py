"""Lines of JSON in files: whole, appended, and patient with a disk that is full."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.sinks.jsonl import RETRY_S, JsonlOptions, JsonlSink
from penstock_video.sinks.schemas import Schema, read_objects_line
from tests.deepstream_pipeline.sinks.disks import fill, small_disk
from tests.deepstream_pipeline.sinks.results import Clock, crossing, result


def lines(path: Path) -> list[bytes]:
    """The whole lines of a file."""
    return path.read_bytes().splitlines()


def test_jsonl_is_on_disk_before_the_next_frame(tmp_path: Path) -> None:
    """A line can be read as soon as write came back; of every source, one after the other."""
    sink = JsonlSink(JsonlOptions(tmp_path))
    for number in range(3):
        sink.write(result(number, source_id=f"cam{number}", events=(crossing(number),)))
        assert len(lines(tmp_path / "objects.jsonl")) == len(lines(tmp_path / "events.jsonl")) == number + 1
    sink.close()
    assert [read_objects_line(line).frame.source_id for line in lines(tmp_path / "objects.jsonl")] == [
        "cam0",
        "cam1",
        "cam2",
    ]


def test_jsonl_of_an_earlier_run_is_appended_to(tmp_path: Path) -> None:
    """A second run loses nothing of the first."""
    for number in range(2):
        sink = JsonlSink(JsonlOptions(tmp_path / "new" / "folder"))
        sink.write(result(number))
        sink.close()
    read = [json.loads(line)["frame_num"] for line in lines(tmp_path / "new" / "folder" / "objects.jsonl")]
    assert read == [0, 1]


@pytest.mark.parametrize("left", [b'{"half', b"x" * 200_000])
def test_jsonl_left_with_half_a_line_starts_clean(tmp_path: Path, left: bytes) -> None:
    """What a killed run left unfinished is cut off, so that every line can be read."""
    (tmp_path / "objects.jsonl").write_bytes(b'{"a":1}\n' + left)
    (tmp_path / "events.jsonl").write_bytes(left)
    sink = JsonlSink(JsonlOptions(tmp_path))
    sink.write(result(0))
    sink.close()
    read = [json.loads(line) for line in lines(tmp_path / "objects.jsonl")]
    assert (read[0], len(read), (tmp_path / "events.jsonl").read_bytes()) == ({"a": 1}, 2, b"")


def test_jsonl_minimal_writes_deepstreams_payload(tmp_path: Path) -> None:
    """The schema is the one that was asked for, also as a plain word."""
    sink = JsonlSink(JsonlOptions(tmp_path, Schema("minimal")))
    sink.write(result(0, events=(crossing(0),)))
    sink.close()
    for name in ("objects.jsonl", "events.jsonl"):
        assert json.loads(lines(tmp_path / name)[0])["sensorId"] == "cam"


KILLED = """
import sys, pathlib
from penstock_video.sinks.jsonl import JsonlOptions, JsonlSink
from tests.deepstream_pipeline.sinks.results import result
sink = JsonlSink(JsonlOptions(pathlib.Path(sys.argv[1])))
for number in range(10**9):
    sink.write(result(number, has_image=False))
    if number == 200:
        sys.stdout.write("going\\n"); sys.stdout.flush()
"""


def test_jsonl_of_a_killed_program_has_whole_lines(tmp_path: Path) -> None:
    """kill -9 in the middle of writing loses no line that was written, and the next run goes on behind them."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"going\n"
        writer.send_signal(signal.SIGKILL)
    JsonlSink(JsonlOptions(tmp_path)).close()
    numbers = [json.loads(line)["frame_num"] for line in lines(tmp_path / "objects.jsonl")]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 200


def test_jsonl_on_a_full_disk_tells_once_counts_and_returns(tmp_path: Path) -> None:
    """FAULTS 59: a full disk is reported once, its lines are counted; with room again it writes on, all whole."""
    clock = Clock()
    with small_disk(tmp_path / "disk") as disk:
        sink = JsonlSink(JsonlOptions(disk), clock=clock)
        sink.write(result(0))
        filler = fill(disk)
        reported = []
        number = 1
        while sink.lost < 20:
            try:
                sink.write(result(number, events=(crossing(number),)))
            except SinkFailed as error:
                reported.append(error.message)
            number += 1
            assert number < 200
        assert len(reported) in (1, 2)  # each of the two files tells for itself
        assert all(str(disk) in text and "No space left" in text for text in reported)
        filler.unlink()
        sink.write(result(900))
        clock.now += RETRY_S
        with capture_logs() as said:
            sink.write(result(1000))
        assert {(line["event"], line["log_level"]) for line in said} == {("file is written again", "warning")}
        sink.close()
        numbers = [json.loads(line)["frame_num"] for line in lines(disk / "objects.jsonl")]
        assert numbers[0] == 0
        assert 900 not in numbers
        assert numbers[-1] == 1000


def test_jsonl_in_a_folder_that_cannot_be_made_says_which(tmp_path: Path) -> None:
    """FAULTS 60: where the folder cannot be, the error at the start names its path."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SinkFailed, match=r"file/out: cannot be written to"):
        JsonlSink(JsonlOptions(tmp_path / "file" / "out"))


def test_jsonl_on_a_read_only_disk_says_which(tmp_path: Path) -> None:
    """FAULTS 60: a read-only file system is reported at the start, with the path."""
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
        with pytest.raises(SinkFailed, match=r"disk: cannot be written to \(Read-only file system\)"):
            JsonlSink(JsonlOptions(disk))


def test_jsonl_whose_file_is_a_folder_says_so(tmp_path: Path) -> None:
    """A file that cannot be opened is named, and nothing stays open."""
    (tmp_path / "events.jsonl").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SinkFailed, match=r"events\.jsonl: cannot be written"):
        JsonlSink(JsonlOptions(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_outage_pauses_double_and_news_is_reported_once() -> None:
    """Tries come rarer up to a bound; only the first failure in a row is news; jitter shortens a pause."""
    outage = Outage(Backoff(1, 4))
    assert outage.worked() is None
    tries = []
    for now in range(20):
        if outage.may_try(now):
            tries.append((now, outage.failed(now)))
        outage.lost += 1
    assert tries == [(0, True), (1, False), (3, False), (7, False), (11, False), (15, False), (19, False)]
    assert outage.worked() == 20
    assert outage.failed(50, jitter=0.0) is True
    assert outage.may_try(50.5)
