"""annotated.mp4: plays, whatever happened while it was written."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks import video_file
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.video_file import RETRY_S, AnnotatedOptions, AnnotatedSink
from tests.deepstream_pipeline.clips import number_of
from tests.deepstream_pipeline.sinks.disks import fill, small_disk
from tests.deepstream_pipeline.sinks.results import PLAIN, Clock, numbered, result
from tests.deepstream_pipeline.sinks.videos import read_video


def sink_in(folder: Path) -> AnnotatedSink:
    """A sink of one source that draws nothing onto its pictures."""
    return AnnotatedSink(AnnotatedOptions(folder), Osd(PLAIN), is_single=True)


def test_annotated_video_has_every_frame_at_its_time(tmp_path: Path) -> None:
    """The file holds each picture once, in order, at its own time, also where the rate changes; H.264 that all play."""
    sink = sink_in(tmp_path)
    times = [0.0, 0.1, 0.2, 0.25, 0.251, 0.7, 3.9, 4.0]
    for number, pts_s in enumerate(times):
        reported = numbered(number)
        sink.write(replace(reported, frame=replace(reported.frame, pts_s=50.0 + pts_s)))
    sink.end_source("cam")
    read = read_video(tmp_path / "annotated.mp4")
    assert [number_of(picture) for picture in read.pictures] == list(range(8))
    assert read.times == pytest.approx(times, abs=0.0001)
    assert (read.codec, read.pixel_format, read.sizes, read.frames) == ("h264", "yuv420p", {(160, 96)}, 8)
    assert read.duration_s == pytest.approx(4.1, abs=0.01)


@pytest.mark.parametrize("shape", [Fraction(1), Fraction(2), Fraction(64, 45)])
def test_annotated_video_has_the_shape_of_its_sources_pixels(tmp_path: Path, shape: Fraction) -> None:
    """A player shows it with the source's width; another pixel shape starts another file."""
    sink = sink_in(tmp_path)
    for number, one in enumerate((shape, shape, Fraction(3))):
        reported = numbered(number)
        sink.write(replace(reported, frame=replace(reported.frame, sample_aspect_ratio=one)))
    sink.close()
    shown = []
    for name in ("annotated.mp4", "annotated-2.mp4"):
        with av.open(str(tmp_path / name)) as file:
            shown.append(file.streams.video[0].sample_aspect_ratio)
    assert shown == [shape, 3]


def test_annotated_video_shows_what_is_drawn_in_its_colours(tmp_path: Path) -> None:
    """What the OSD drew is what is seen: colours survive the way through the codec."""
    osd, reported = Osd(), result(0, size=(640, 480))
    drawn = osd.draw(reported)
    sink = AnnotatedSink(AnnotatedOptions(tmp_path, crf=10), osd, is_single=True)
    sink.write(reported)
    sink.close()
    picture = read_video(tmp_path / "annotated.mp4").pictures[0]
    assert drawn is not None
    assert abs(picture.astype(int) - drawn.astype(int)).mean() < 4


def test_annotated_video_of_several_sources_lies_in_their_folders(tmp_path: Path) -> None:
    """Each source has its file; one that was started alone has it in the folder itself."""
    several = AnnotatedSink(AnnotatedOptions(tmp_path / "a"), Osd(PLAIN))
    single = AnnotatedSink(AnnotatedOptions(tmp_path / "b"), Osd(PLAIN), is_single=True)
    for sink in (several, single):
        for number in range(6):
            sink.write(numbered(number, source_id=f"cam{number % 2}"))
        sink.close()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mp4"))
    assert found == ["a/cam0/annotated.mp4", "a/cam1/annotated.mp4", "b/annotated.mp4", "b/cam1/annotated.mp4"]
    assert all(read_video(tmp_path / path).frames == 3 for path in found)


def test_annotated_video_begins_another_file_with_another_size(tmp_path: Path) -> None:
    """A camera that changes its resolution goes on in annotated-2.mp4, at its own size; both are whole."""
    sink = sink_in(tmp_path)
    for number in range(6):
        sink.write(numbered(number, size=(160, 96) if number < 4 else (320, 240)))
    sink.close()
    first, second = (read_video(tmp_path / name) for name in ("annotated.mp4", "annotated-2.mp4"))
    assert (first.sizes, [number_of(one) for one in first.pictures]) == ({(160, 96)}, [0, 1, 2, 3])
    assert (second.sizes, [number_of(one) for one in second.pictures]) == ({(320, 240)}, [4, 5])


def test_annotated_video_of_many_frames_goes_on_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has a bound of frames, so that its index does not grow without one."""
    monkeypatch.setattr(video_file, "FRAMES_A_FILE", 5)
    sink = sink_in(tmp_path)
    for number in range(12):
        sink.write(numbered(number))
    sink.close()
    names = ["annotated.mp4", "annotated-2.mp4", "annotated-3.mp4"]
    assert [len(read_video(tmp_path / name).pictures) for name in names] == [5, 5, 2]


def test_annotated_video_of_a_source_that_comes_again_is_another_file(tmp_path: Path) -> None:
    """A source that is removed and added in one run overwrites nothing."""
    sink = sink_in(tmp_path)
    for _ in range(2):
        sink.write(numbered(0))
        sink.end_source("cam")
    assert {path.name for path in tmp_path.iterdir()} == {"annotated.mp4", "annotated-2.mp4"}


def test_annotated_video_of_an_earlier_run_is_kept_once(tmp_path: Path) -> None:
    """A second run's annotated.mp4 is its own; the first one's is beside it."""
    (tmp_path / "annotated.mp4").write_bytes(b"old")
    os.utime(tmp_path / "annotated.mp4", (1_000_000_000, 1_000_000_000))
    sink = sink_in(tmp_path)
    sink.write(numbered(0))
    sink.close()
    assert (tmp_path / "annotated.previous.mp4").read_bytes() == b"old"
    assert read_video(tmp_path / "annotated.mp4").frames == 1


KILLED = """
import itertools, pathlib, sys
from tests.deepstream_pipeline.sinks.results import numbered
from tests.deepstream_pipeline.sinks.test_video_file import sink_in
sink = sink_in(pathlib.Path(sys.argv[1]))
for number in itertools.count():
    sink.write(numbered(number))
    if number == 100:
        sys.stdout.write("going\\n"); sys.stdout.flush()
"""


def test_annotated_video_of_a_killed_program_plays(tmp_path: Path) -> None:
    """After kill -9 the file plays from its beginning; what is missing is its last seconds."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert b"going\n" in iter(writer.stdout.readline, b"")
        writer.send_signal(signal.SIGKILL)
    read = read_video(tmp_path / "annotated.mp4")
    assert len(read.pictures) > 60
    assert [number_of(picture) for picture in read.pictures] == list(range(len(read.pictures)))
    assert read.times == pytest.approx([number / 10 for number in range(len(read.times))], abs=0.001)


def write_on(sink: AnnotatedSink, numbers: Iterator[int]) -> None:
    """Write pictures until the sink fails."""
    for number in numbers:
        assert number < 2000
        sink.write(numbered(number, size=(320, 240)))


def test_annotated_video_on_a_full_disk_plays_so_far_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 59: reported once, nothing raised after that; the file so far plays; with room again comes another."""
    clock = Clock()
    monkeypatch.setattr(video_file, "MIN_FREE_BYTES", 300 * 1024)
    with small_disk(tmp_path / "disk") as disk:
        sink = AnnotatedSink(AnnotatedOptions(disk, crf=10), Osd(PLAIN), is_single=True, clock=clock)
        filler = fill(disk, leave_kib=48)
        numbers = itertools.count()
        with pytest.raises(SinkFailed, match=r"annotated\.mp4: disk full; annotated video is off"):
            write_on(sink, numbers)
        number = next(numbers)
        clock.now += RETRY_S
        for again in range(20):
            sink.write(numbered(number + again, size=(320, 240)))
        assert sink.lost == 21
        so_far = read_video(disk / "annotated.mp4")
        assert [number_of(picture) for picture in so_far.pictures] == list(range(len(so_far.pictures)))
        assert len(so_far.pictures) > 20
        filler.unlink()
        sink.write(numbered(number + 20, size=(320, 240)))
        sink.close()
        assert [number_of(one) for one in read_video(disk / "annotated-2.mp4").pictures] == [number + 20]


def test_annotated_video_cut_by_a_full_disk_anywhere_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever room ends, also at the end of the file, it is reported, and the file plays up to its last fragment."""
    sink = sink_in(tmp_path / "whole")
    for number in range(95):
        sink.write(numbered(number))
    sink.close()
    size_bytes = (tmp_path / "whole" / "annotated.mp4").stat().st_size
    write, reported, longest = os.write, 0, 0
    steps = (1, 8, 21, 25, 30, 35, 39, 40)
    for step in steps:
        room = Room(size_bytes * step // 40, write)
        monkeypatch.setattr(os, "write", room.write)
        sink = sink_in(tmp_path / str(step))
        try:
            for number in range(95):
                sink.write(numbered(number))
            sink.close()
        except SinkFailed:
            reported += 1
        sink.close()
        read = read_video(tmp_path / str(step) / "annotated.mp4") if step > 20 else None
        if read is not None:
            assert [number_of(picture) for picture in read.pictures] == list(range(len(read.pictures)))
            assert len(read.pictures) >= max(longest, 20)
            longest = len(read.pictures)
    assert (reported, longest) == (
        len(steps),
        95,
    )  # what is written over counts here, too: there is never room for all of it


class Room:
    """os.write on a disk with so much room."""

    def __init__(self, size_bytes: int, write: Callable[[int, memoryview], int]) -> None:
        self.left, self._write = size_bytes, write

    def write(self, descriptor: int, block: memoryview) -> int:
        """As much as there is room for."""
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, block[: self.left])
        self.left -= written
        return written


@pytest.mark.parametrize("source_id", ["..", ".", "a/b", "", "x" * 65])
def test_annotated_video_of_an_id_that_is_no_folder_is_refused(tmp_path: Path, source_id: str) -> None:
    """No source's id leads out of the folder."""
    sink = AnnotatedSink(AnnotatedOptions(tmp_path), Osd(PLAIN))
    with pytest.raises(SinkFailed, match="cannot be a folder's name"):
        sink.write(numbered(0, source_id=source_id))


def test_annotated_video_in_a_folder_that_cannot_be_says_which(tmp_path: Path) -> None:
    """FAULTS 60: a folder that cannot be written to is an error at the start that names it."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SinkFailed, match=r"file: cannot be written to"):
        sink_in(tmp_path / "file")
