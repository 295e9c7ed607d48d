"""What every sink of files and pictures promises, whatever it is."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.interfaces import Sink
from penstock_video.sinks.hls import HlsOptions, HlsSink
from penstock_video.sinks.jsonl import JsonlOptions, JsonlSink
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.poster import PosterOptions, PosterSink
from penstock_video.sinks.preview import PreviewBoard, PreviewOptions
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from penstock_video.sinks.run_record import SummaryOptions, SummarySink
from penstock_video.sinks.video_file import AnnotatedOptions, AnnotatedSink
from tests.deepstream_pipeline.sinks.results import crossing, result
from tests.deepstream_pipeline.sinks.videos import read_video

# An RTSP sink's process here takes everything and pushes it nowhere; test_rtsp_out has the real one.
PATIENT = ("sh", "-c", "cat > /dev/null")

Made = Callable[[Path, Osd], Sink]
SINKS: dict[str, Made] = {
    "jsonl": lambda folder, osd: JsonlSink(JsonlOptions(folder)),
    "annotated": lambda folder, osd: AnnotatedSink(AnnotatedOptions(folder), osd),
    "poster": lambda folder, osd: PosterSink(PosterOptions(folder), osd),
    "summary": lambda folder, osd: SummarySink(SummaryOptions(folder), osd),
    "hls": lambda folder, osd: HlsSink(HlsOptions(folder), osd),
    "rtsp": lambda folder, osd: RtspOutSink(RtspOutOptions("rtsp://127.0.0.1:1"), osd, command=PATIENT),
    "preview": lambda folder, osd: watched(PreviewBoard(PreviewOptions(max_fps=1e9), osd)),
}


def watched(board: PreviewBoard) -> PreviewBoard:
    """A board at whose two sources someone looks."""
    for source_id in ("a", "b"):
        board.wait(source_id, 0, 0.0)
    return board


@pytest.fixture
def osd() -> Osd:
    """What all sinks of a program share."""
    return Osd()


@pytest.fixture(params=SINKS, ids=str)
def sink(request: pytest.FixtureRequest, tmp_path: Path, osd: Osd) -> Iterator[Sink]:
    """Each sink, in a folder of its own; nothing of it is left behind: descriptors, threads, processes."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    made = SINKS[request.param](tmp_path, osd)
    yield made
    made.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_sink_takes_frames_of_two_sources_and_ends_them(sink: Sink, osd: Osd) -> None:
    """Two sources in turn, one of which ends before the other; an end that is reported twice is one end."""
    for number in range(12):
        for source_id in ("a", "b"):
            sink.write(result(number, source_id=source_id, events=(crossing(number, source_id=source_id),)))
    sink.end_source("a")
    sink.end_source("a")
    sink.write(result(12, source_id="b"))
    sink.end_source("b")
    assert osd._memories == {}


def test_sink_takes_a_source_that_comes_again(sink: Sink) -> None:
    """A source that was taken out and added again is written as before, from its first frame."""
    for _ in range(3):
        for number in range(3):
            sink.write(result(number, source_id="a"))
        sink.end_source("a")


def test_sink_takes_frames_without_pictures(sink: Sink) -> None:
    """Frames of which no picture travelled are no fault, before and between those that have one."""
    for number in range(9):
        sink.write(result(number, source_id="a", has_image=number % 3 == 1))


@pytest.mark.parametrize("size", [(321, 241), (33, 17), (16, 16), (1, 1)])
def test_sink_takes_pictures_of_any_size(sink: Sink, size: tuple[int, int]) -> None:
    """Odd and tiny pictures are no fault."""
    for number in range(3):
        sink.write(result(number, source_id="a", size=size))


def test_sink_takes_a_change_of_size(sink: Sink) -> None:
    """A camera may change its resolution as often as it likes."""
    for number in range(9):
        sink.write(result(number, source_id="a", size=((320, 240), (640, 360), (162, 120))[number // 3]))


def test_sink_leaves_results_as_they_are(sink: Sink) -> None:
    """What all sinks share is not written to by any of them."""
    reported = result(1, source_id="a")
    assert reported.frame.image is not None
    reported.frame.image.flags.writeable = False
    reported.tracks.detections.xyxy.flags.writeable = False
    sink.write(reported)


def test_sink_closed_twice_or_unused_is_closed(sink: Sink) -> None:
    """Closing needs no frame before it, and does nothing the second time; an unknown source's end is nothing."""
    sink.end_source("unknown")
    sink.close()
    sink.close()


@pytest.mark.parametrize("name", ["jsonl", "annotated", "hls"])
def test_sink_of_files_in_a_folder_that_cannot_be_says_which(name: str, tmp_path: Path, osd: Osd) -> None:
    """FAULTS 60: a folder that cannot be written to is an error at the start, which names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkFailed, match=r"file/out: cannot be written to \(Not a directory\)"):
        SINKS[name](tmp_path / "file" / "out", osd)


def test_sinks_share_one_drawing(tmp_path: Path, osd: Osd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sinks that show a picture draw it once, and each shows all of it."""
    drawn: list[int] = []
    draw_all = osd._draw_all

    def counted(*sheet: Any) -> None:
        drawn.append(1)
        draw_all(*sheet)

    monkeypatch.setattr(osd, "_draw_all", counted)
    sinks = [SINKS[name](tmp_path / name, osd) for name in ("annotated", "hls")]
    for number in range(5):
        reported = result(number, source_id="a")
        for sink in sinks:
            sink.write(reported)
    for sink in sinks:
        sink.close()
    assert len(drawn) == 5
    pictures = read_video(tmp_path / "annotated" / "a" / "annotated.mp4").pictures
    assert len(pictures) == len(read_video(tmp_path / "hls" / "a" / "hls" / "index.m3u8").pictures) == 5
