"""The parent's side with the real decode process and a real file."""

from pathlib import Path

import numpy as np
import pytest

from penstock_video.sources.options import SourceNeeds, SourcesOptions
from penstock_video.types import SourceConfig, SourceState
from tests.deepstream_pipeline.clips import number_of, write_clip
from tests.deepstream_pipeline.sources.parent import EventLog, one, running

PICTURES = SourceNeeds(b"", 0, np.uint8, 0, True)


def test_clip_comes_whole_with_its_pictures(tmp_path: Path) -> None:
    """Every picture of a file, once and in order, at its time, and then the end."""
    path = tmp_path / "clip.mp4"
    write_clip(path, frames=30, fps=10, size=(320, 240), codec="libx264")
    event_log = EventLog()
    seen: list[tuple[int, int, float]] = []
    event_log.on_frame_call = lambda prepared: seen.append(
        (prepared.frame.frame_num, number_of(prepared.frame.image), prepared.frame.pts_s)
    )
    with running(event_log, SourcesOptions()) as sources:
        sources.add(SourceConfig(str(path), "a"), PICTURES)
        event_log.wait_for("ended")
        facts = one(sources)
    assert (facts.state, facts.reason, facts.frames, facts.restarts) == (SourceState.ENDED, "", 30, 0)
    assert [(number, picture) for number, picture, _ in seen] == [(number, number) for number in range(30)]
    assert [pts_s for _, _, pts_s in seen] == pytest.approx([number / 10 for number in range(30)])
    assert facts.start_s is not None
    assert facts.opened is not None
    assert (facts.opened.width, facts.opened.height, facts.opened.is_live) == (320, 240, False)


def test_clip_that_is_not_there_or_no_clip_fails_at_once(tmp_path: Path) -> None:
    """Neither is waited for, and the reason says which."""
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 64)
    event_log = EventLog()
    with running(event_log, SourcesOptions()) as sources:
        sources.add(SourceConfig(str(tmp_path / "nowhere.mp4"), "a"), PICTURES)
        sources.add(SourceConfig(str(tmp_path / "noise.mp4"), "b"), PICTURES)
        event_log.wait_for("ended", source_id="a")
        event_log.wait_for("ended", source_id="b")
        assert [one(sources, name).state for name in "ab"] == [SourceState.FAILED] * 2
        assert "is not there" in one(sources, "a").reason
        assert "noise.mp4" in one(sources, "b").reason


def test_looped_clip_goes_on_until_it_is_removed(tmp_path: Path) -> None:
    """Numbers and times rise over the loops, and each begins another segment."""
    path = tmp_path / "clip.mp4"
    write_clip(path, frames=5, fps=10, size=(320, 240), codec="libx264")
    event_log = EventLog()
    with running(event_log, SourcesOptions()) as sources:
        sources.add(SourceConfig(str(path), "a", is_loop=True), PICTURES)
        event_log.wait_for("frame", 12)
        sources.remove("a")
        event_log.wait_for("ended")
    frames = event_log.of("frame")[:12]
    assert [getattr(frame, "frame_num", None) for frame in frames] == list(range(12))
    assert getattr(frames[11], "segment", 0) >= 2
