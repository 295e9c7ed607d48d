"""Recordings that events ask for."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from deepstream_pipeline.errors import SourceNotOpen
from deepstream_pipeline.runner.recorder import Recorder
from deepstream_pipeline.sinks.recordings import RecordOptions
from deepstream_pipeline.sources.snapshot import SourceSnapshot
from deepstream_pipeline.types import (
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
        self.known: tuple[SourceSnapshot, ...] = ()

    def snapshot(self) -> tuple[SourceSnapshot, ...]:
        return self.known

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


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ((), "'a' is connecting: nothing of it is there to be recorded; ask again once it is running"),
        ((SourceState.CONNECTING, "connection refused"), r"'a' is connecting \(connection refused\): nothing of it"),
        ((SourceState.RECONNECTING, ""), "is reconnecting: .* ask again"),
        ((SourceState.PAUSED, ""), "is paused: .* resume it first"),
        ((SourceState.FAILED, ""), "is failed: .* add it again first"),
    ],
)
def test_recording_of_a_source_that_is_not_open_is_refused(
    known: tuple[SourceState, str] | tuple[()], told: str, tmp_path: Path
) -> None:
    """Whoever asks is told now, not by a line in the index: no process has packets of it, and none would write it."""
    recorder, sources = Recorder(RecordOptions(tmp_path)), Asked()
    source = SourceConfig("rtsp://camera/a", "a")
    sources.known = (SourceSnapshot(source, *known),) if known else ()
    whole: Any = sources
    with pytest.raises(SourceNotOpen, match=told):
        recorder.ask("a", whole, before_s=1.0, after_s=1.0)
    assert sources.sources == []
    sources.known = (SourceSnapshot(source, SourceState.RECONNECTING, is_open=True),)
    assert recorder.ask("a", whole, before_s=1.0, after_s=1.0).startswith(f"{tmp_path}/a-")
    assert sources.sources == ["a"]
    assert recorder.close(1.0)
