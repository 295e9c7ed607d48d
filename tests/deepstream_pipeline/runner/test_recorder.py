"""Recordings that events ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock_video.errors import SourceNotOpen, SourceNotRecordable
from penstock_video.metrics import VideoMetrics
from penstock_video.runner import recorder as recording
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sources.options import SourceSnapshot
from penstock_video.sources.protocol import Cut, Opened, Recorded
from penstock_video.types import (
    AnalyticsEvent,
    AnalyticsKind,
    Frame,
    FrameAnalytics,
    FrameResult,
    SourceConfig,
    SourceState,
    no_tracks,
)


class Asked:
    """Sources that note what they are to record."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.cuts: list[Cut] = []
        self.known: tuple[SourceSnapshot, ...] = ()

    def snapshot(self) -> tuple[SourceSnapshot, ...]:
        return self.known

    def record(self, source_id: str, cut: Cut) -> None:
        self.cuts.append(cut)
        self.sources.append(source_id)


def result(source_id: str, number: int) -> FrameResult:
    event = AnalyticsEvent(AnalyticsKind.LINE_CROSSING, source_id, number, 0.0, 1, "gate", 1.0)
    return FrameResult(Frame(source_id, number, 0.0, 0.0, 8, 6), no_tracks(), FrameAnalytics((event,)))


def test_events_that_get_no_recording_are_logged_now_and_then(tmp_path: Path) -> None:
    """An operator learns that there were more than may be recorded at once; not with each of them."""
    recorder = SmartRecorder(RecordOptions(tmp_path, max_at_once=1), VideoMetrics())
    sources: Any = Asked()
    recorder.start()
    with capture_logs() as said:
        for number in range(5):
            for source_id in ("a", "b"):
                recorder.observe(result(source_id, number), sources)
    assert recorder.close(10.0)
    assert sources.sources == ["a"]
    assert [one["event"] for one in said] == ["events without a recording"]


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ((), "'a' is connecting: nothing of it is there to be recorded; ask again once it is running"),
        ((SourceState.CONNECTING, "connection refused"), r"'a' is connecting \(connection refused\): nothing of it"),
        ((SourceState.RECONNECTING, ""), "is reconnecting: .* ask again"),
        ((SourceState.PAUSED, ""), "is paused: .* resume it first"),
        ((SourceState.FAILED, ""), "is failed: .* start it over first"),
    ],
)
def test_recording_of_a_source_that_is_not_open_is_refused(
    known: tuple[SourceState, str] | tuple[()], message: str, tmp_path: Path
) -> None:
    """The request fails at once, without a line in the index: no process has packets of it, and none would write it."""
    recorder, sources = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), Asked()
    source = SourceConfig("rtsp://camera/a", "a")
    sources.known = (SourceSnapshot(source, *known),) if known else ()
    whole: Any = sources
    with pytest.raises(SourceNotOpen, match=message):
        recorder.ask("a", whole, before_s=1.0, after_s=1.0)
    assert sources.sources == []
    sources.known = (SourceSnapshot(source, SourceState.RECONNECTING, is_open=True),)
    assert recorder.ask("a", whole, before_s=1.0, after_s=1.0).startswith(f"{tmp_path}/a-")
    assert sources.sources == ["a"]
    assert recorder.close(1.0)


def test_recording_of_a_file_that_is_paused_is_refused(tmp_path: Path) -> None:
    """Its process still has it open, but nothing comes that could be recorded."""
    recorder, sources = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), Asked()
    sources.known = (SourceSnapshot(SourceConfig("clip.mp4", "a"), SourceState.PAUSED, is_open=True),)
    whole: Any = sources
    with pytest.raises(SourceNotOpen, match=r"'a' is paused: .* resume it first"):
        recorder.ask("a", whole, before_s=1.0, after_s=1.0)
    assert (sources.cuts, recorder.close(1.0)) == ([], True)


def test_recording_of_a_codec_that_fits_no_mp4_is_refused_by_its_name(tmp_path: Path) -> None:
    """No path is promised that will never be."""
    recorder, sources = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), Asked()
    opened = Opened(width=8, height=6, fps=25.0, codec="msmpeg4v2", is_live=False, is_recordable=False)
    source = SourceSnapshot(SourceConfig("old.avi", "a"), SourceState.RUNNING, is_open=True, opened=opened)
    sources.known = (source,)
    whole: Any = sources
    with pytest.raises(SourceNotRecordable, match="'a' is msmpeg4v2, whose packets do not fit into MP4"):
        recorder.ask("a", whole, before_s=1.0, after_s=1.0)
    assert (sources.cuts, recorder.close(1.0)) == ([], True)


def test_recordings_that_fail_alike_are_logged_once_and_counted(tmp_path: Path) -> None:
    """One line in the log, one in the index for each, and one sentence at the run's end; what only its source cut off
    is no fault of the sink."""
    recorder, sources = SmartRecorder(RecordOptions(tmp_path, cool_down_s=0.0), VideoMetrics()), Asked()
    whole: Any = sources
    recorder.start()
    with capture_logs() as said:
        for number in range(5):
            recorder.observe(result("a", number), whole)
            recorder.ended("a", Recorded(sources.cuts[-1].path, "the disk is full", is_unwritable=True))
    assert [one["event"] for one in said] == ["a recording failed"]
    recorder.observe(result("b", 0), whole)
    recorder.ended("b", Recorded(sources.cuts[-1].path, "its decode process ended"))
    assert recorder.close(10.0)
    assert recorder.failures() == ("record failed: the disk is full (5 recordings lost)",)
    lines = [json.loads(line) for line in (tmp_path / "recordings.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == ["the disk is full"] * 5 + ["its decode process ended"]
    assert all(line["after_s"] == 0.0 and len(line["events"]) == 1 for line in lines)


def test_source_that_cannot_be_recorded_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it runs; again when a recording of it was written in between."""
    monkeypatch.setattr(recording, "LOG_EVERY_S", 0.0)
    recorder, error = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), "packets of msmpeg4v2 do not fit into MP4"
    with capture_logs() as said:
        for _ in range(3):
            recorder.ended("a", Recorded("a.mp4", error, is_unwritable=True))
        recorder.ended("b", Recorded("b.mp4", error, is_unwritable=True))
        assert [one["source"] for one in said] == ["a", "b"]
        recorder.ended("a", Recorded("a.mp4", "", 1.0, 1.0))
        recorder.ended("a", Recorded("a.mp4", error, is_unwritable=True))
    assert [one["source"] for one in said] == ["a", "b", "a"]
    assert recorder.close(1.0)


def test_recording_without_an_end_is_named_at_the_end(tmp_path: Path) -> None:
    """An event is in a recording, or in a line that says that there is none."""
    recorder, sources = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), Asked()
    whole: Any = sources
    recorder.start()
    recorder.observe(result("a", 3), whole)
    assert sources.cuts[0].frame_num == 3
    assert recorder.close(10.0)
    [line] = [json.loads(line) for line in (tmp_path / "recordings.jsonl").read_text().splitlines()]
    assert (line["error"], line["events"][0]["frame_num"]) == ("its process never reported its end", 3)
