"""What an RTSP server plays of a file, reported with its length, by the real decode process."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock_video.sources.options import SourceNeeds, SourcesOptions
from penstock_video.sources.sources import Sources
from penstock_video.types import SourceConfig, SourceState
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.rtsp.cameras import Camera, RtspServer, rtsp_server
from tests.deepstream_pipeline.sources.parent import EventLog, one, running

PICTURES = SourceNeeds(b"", 0, np.uint8, 0, True)
SECONDS = 8


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RtspServer]:
    """It has one recording, of eight seconds."""
    clip = write_clip(tmp_path / "kept.mp4", frames=SECONDS * 10, fps=10, gop=5)
    with rtsp_server([Camera("/kept", recording=str(clip))], tmp_path) as server:
        yield server


def test_recording_that_is_played_out_is_over(recorder: RtspServer) -> None:
    """It is not opened again: it would begin anew."""
    event_log = EventLog()
    with running(event_log, SourcesOptions()) as sources:
        sources.add(SourceConfig(recorder.url("/kept"), "a"), PICTURES)
        event_log.wait_for("ended")
        facts = one(sources)
    assert (facts.state, facts.restarts) == (SourceState.ENDED, 0)
    assert facts.frames >= SECONDS * 10 - 10
    assert facts.opened is not None
    assert facts.opened.duration_s == pytest.approx(SECONDS, abs=0.5)


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
def test_recording_whose_server_goes_in_the_middle_is_opened_again(recorder: RtspServer, trouble: str) -> None:
    """As a camera is: an outage is no end, and the source runs when the server is back."""
    event_log = EventLog()
    with running(event_log, SourcesOptions()) as sources:
        config = SourceConfig(recorder.url("/kept"), "a", reconnect_interval_s=2.0)
        sources.add(config, PICTURES)
        event_log.wait_for("frame", 10)
        _begin(recorder, trouble)
        event_log.wait(lambda: _state(sources) in (SourceState.RECONNECTING, SourceState.STALLED))
        _end(recorder, trouble)
        event_log.wait(lambda: _state(sources) is SourceState.RUNNING)
        assert one(sources).restarts >= 1


def _begin(recorder: RtspServer, trouble: str) -> None:
    if trouble == "killed":
        recorder.kill()
    else:
        recorder.freeze()


def _end(recorder: RtspServer, trouble: str) -> None:
    if trouble == "killed":
        recorder.restart()
    else:
        recorder.thaw()


def _state(sources: Sources) -> SourceState:
    return one(sources).state
