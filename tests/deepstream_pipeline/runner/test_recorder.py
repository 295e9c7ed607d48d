"""Recordings that events ask for."""

from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from deepstream_pipeline.runner.recorder import Recorder
from deepstream_pipeline.sinks.recordings import RecordOptions
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind, Frame, FrameAnalytics, FrameResult, no_tracks


class Asked:
    """Sources that note what they are to record."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def record(self, source_id: str, path: str, before_s: float, after_s: float) -> None:
        self.sources.append(source_id)


def result(source_id: str, number: int) -> FrameResult:
    event = AnalyticsEvent(AnalyticsKind.LINE_CROSSING, source_id, number, 0.0, 1, "gate", 1.0)
    return FrameResult(Frame(source_id, number, 0.0, 0.0, 8, 6), no_tracks(), FrameAnalytics((event,)))


def test_events_that_get_no_recording_are_told_now_and_then(tmp_path: Path) -> None:
    """An operator learns that there were more than may be recorded at once; not with each of them."""
    recorder = Recorder(RecordOptions(tmp_path, max_at_once=1))
    sources: Any = Asked()
    recorder.start()
    with capture_logs() as said:
        for number in range(5):
            for source_id in ("a", "b"):
                recorder.observe(result(source_id, number), sources)
    assert recorder.close(10.0)
    assert sources.sources == ["a"]
    assert [one["event"] for one in said] == ["events without a recording"]
