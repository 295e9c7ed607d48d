"""What the runner remembers of sources for the end: events, their own lifetime, and those that went."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from penstock_video.interfaces import SourceStatistics
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.source_events import Removed, SourceGauges, statistics_of
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.sources.options import ProcessSnapshot, SourceSnapshot
from penstock_video.sources.protocol import Opened
from penstock_video.types import AnalyticsEvent, AnalyticsKind, Frame, FrameAnalytics, SourceConfig, SourceState, Tracks
from tests.deepstream_pipeline.runner.fakes import Following, Slots, a_way
from tests.deepstream_pipeline.runner.test_pipeline import CAMERA, WAIT_S, Stand, made


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    running = made(monkeypatch)
    yield running
    running.pipeline.stop(0.0, is_hurried=True)


def crossing(self: Following, frame: Frame, tracks: Tracks) -> FrameAnalytics:
    """One of a known class, one of a number without a name, and one without a class."""
    line, crowd = AnalyticsKind.LINE_CROSSING, AnalyticsKind.OVERCROWDING
    of = (frame.source_id, frame.frame_num, frame.pts_s)
    return FrameAnalytics(
        (
            AnalyticsEvent(line, *of, 1, "Door", 1.0, 0),
            AnalyticsEvent(line, *of, 2, "Door", 1.0, 7),
            AnalyticsEvent(crowd, *of, None, "Hall", 3.0),
        )
    )


def test_events_are_counted_where_they_come_true(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rule and class, whether or not a sink writes them down."""
    monkeypatch.setattr(Following, "observe", crossing)
    stand.pipeline.add(CAMERA)
    slots = Slots()
    for number in range(2):
        stand.frame(slots, number)
    stand.until(lambda: len(stand.sink.results) == 2)
    assert stand.pipeline.statistics()[0].events == {
        "line-crossing/Door": 4,
        "line-crossing/Door/person": 2,
        "line-crossing/Door/class 7": 2,
        "overcrowding/Hall": 2,
    }


def test_sources_that_were_removed_are_remembered(stand: Stand) -> None:
    """With their frames; also one that another of its id takes the place of. Those that are there are not of them."""
    stand.pipeline.add(CAMERA)
    began = time.monotonic()
    stand.frame(Slots(), 0)
    stand.frame(Slots(), 1)
    stand.pipeline.remove("a")
    stand.sources.end("a", state=SourceState.ENDED, reason=TAKEN_OUT, frames=2)
    stand.until(lambda: not stand.pipeline.statistics())
    (gone,) = stand.pipeline.removed()
    assert (gone.source_id, gone.frames, gone.reason) == ("a", 2, TAKEN_OUT)
    assert 0 < gone.active_s <= time.monotonic() - began
    for _ in range(2):
        stand.pipeline.add(SourceConfig("b.mp4", "b", is_loop=True))
        stand.sources.end("b", state=SourceState.FAILED, frames=3)
        stand.until(stand.over)
    assert [one.source_id for one in stand.pipeline.removed()] == ["a", "b"]
    assert [(one.source_id, one.is_loop) for one in stand.pipeline.statistics()] == [("b", True)]


def test_sources_that_the_end_takes_out_are_not_removed(stand: Stand) -> None:
    """The log says of them what the summary says: stopped; of one that a person took out: removed."""
    with capture_logs() as lines:
        for source_id in ("a", "b"):
            stand.pipeline.add(replace(CAMERA, source_id=source_id))
        stand.sources.listener.on_state("a", SourceState.ENDED, TAKEN_OUT)
        stand.pipeline.remove("a")
        stand.sources.end("a", state=SourceState.ENDED, reason=TAKEN_OUT)
        stand.until(lambda: len(stand.pipeline.statistics()) == 1)
        assert stand.pipeline.stop(WAIT_S)
        stand.sources.listener.on_state("b", SourceState.ENDED, TAKEN_OUT)
    logged = [(line["source"], line["state"], "reason" in line) for line in lines if line["event"] == "source"]
    assert logged == [("a", "removed", False), ("b", "stopped", False)]
    assert [one.source_id for one in stand.pipeline.removed()] == ["a"]
    assert [(one.source_id, one.state) for one in stand.pipeline.statistics()] == [("b", SourceState.RUNNING)]


def test_life_of_a_source_is_from_its_first_frame_to_its_last() -> None:
    """However long the program waited before and after."""
    way = a_way("a")
    assert statistics_of(way).active_s == 0.0
    for at in (50.0, 51.5, 54.0):
        way.note_frame(at)
    way.snapshot = SourceSnapshot(way.config, SourceState.ENDED, frames=3)
    assert (statistics_of(way).active_s, statistics_of(way).frames) == (4.0, 3)


def test_decoder_of_a_source_is_reported_once_it_is_open() -> None:
    """Empty before, then the decoder, in the statistics and in the metrics."""
    way = a_way("a")
    assert statistics_of(way).decoder == ""
    way.snapshot = opened("a", "nvdec", 7)
    assert statistics_of(way).decoder == "nvdec"


def test_metrics_say_who_decodes_and_in_how_many_processes() -> None:
    """A process with several sources counts once; each has its current count."""
    metrics = VideoMetrics()
    gauges = SourceGauges(metrics)
    sources = [opened("a", "nvdec", 7), opened("b", "nvdec", 7), opened("c", "cpu", 8), opened("d", "cpu", None)]
    gauges.refresh(sources, [ProcessSnapshot(7, "nvdec", 2), ProcessSnapshot(8, "cpu", 1)])
    page = metrics.page().decode()
    assert 'penstock_video_decode_processes{decoder="nvdec"} 1.0' in page
    assert 'penstock_video_decode_processes{decoder="cpu"} 1.0' in page
    assert 'penstock_video_decoder{decoder="nvdec",source="b"} 1.0' in page
    gauges.refresh([opened("b", "cpu", 9)], [ProcessSnapshot(9, "cpu", 1)])
    page = metrics.page().decode()
    assert 'penstock_video_decode_processes{decoder="nvdec"} 0.0' in page
    assert 'penstock_video_decoder{decoder="nvdec",source="b"} 0.0' in page
    assert 'penstock_video_decoder{decoder="cpu",source="b"} 1.0' in page


def opened(source_id: str, decoder: str, pid: int | None) -> SourceSnapshot:
    """A source that runs, decoded so, in the process of that number."""
    facts = Opened(
        width=1280, height=720, codec="h264", fps=30.0, frames_total=None, duration_s=None, is_live=True,
        is_recordable=True, decoder=decoder,
    )  # fmt: skip
    return SourceSnapshot(SourceConfig("rtsp://cam", source_id), SourceState.RUNNING, opened=facts, pid=pid)


def test_memory_of_removed_sources_is_bounded_and_its_sums_are_true() -> None:
    """Cameras may come and go for months."""
    removed = Removed(most=3)
    for number in range(5):
        removed.keep(
            SourceStatistics(
                f"cam-{number}", "", "", SourceState.ENDED, frames=10, inferred=9, drops={"too_old": 1},
                restarts=1, active_s=2.0, counts={"dwell/Bench": 1},
                events={"dwell/Bench": number, "dwell/Bench/dog": 1},
            )
        )  # fmt: skip
    kept = removed.all()
    assert [one.source_id for one in kept] == [Removed.OTHERS, "cam-3", "cam-4"]
    others = kept[0]
    assert (others.frames, others.inferred, others.restarts, others.active_s) == (30, 27, 3, 6.0)
    assert (others.drops, others.counts) == ({"too_old": 3}, {})
    assert others.events == {"dwell/Bench": 3, "dwell/Bench/dog": 3}
