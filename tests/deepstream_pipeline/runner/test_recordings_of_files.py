"""Recordings of a file that is read as fast as it can be: its own decode process, and a pipeline without an engine."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import pytest

from penstock_video.metrics import VideoMetrics
from penstock_video.mux import MuxOptions
from penstock_video.runner.dispatch import DispatchOptions
from penstock_video.runner.pipeline import Pipeline, PipelineOptions, PipelineParts
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sources.options import SourcesOptions
from penstock_video.types import AnalyticsEvent, AnalyticsKind, Frame, FrameAnalytics, SourceConfig, Tracks
from tests.deepstream_pipeline.clips import number_of, write_clip
from tests.deepstream_pipeline.runner.fakes import FakeEngine, Following

FPS, FRAMES, WAIT_S = 25, 500, 60.0


@dataclass
class Events(Following):
    """One at each of those frames; the results come behind the reading by the ring at least."""

    frames: Sequence[int]
    pause_s: float = 0.002

    def observe(self, frame: Frame, tracks: Tracks) -> FrameAnalytics:
        time.sleep(self.pause_s)
        if frame.frame_num not in self.frames:
            return FrameAnalytics()
        event = AnalyticsEvent(
            AnalyticsKind.LINE_CROSSING, frame.source_id, frame.frame_num, frame.pts_s, 1, "gate", frame.captured_at
        )
        return FrameAnalytics((event,))


def recorded(
    clip: Path, frames: Sequence[int], options: RecordOptions
) -> tuple[list[dict[str, Any]], SmartRecorder, bytes]:
    """(the lines of the index, the recorder, the metrics) of a run over the whole file with events at those frames."""
    engine: Any = FakeEngine()
    metrics = VideoMetrics()
    recorder = SmartRecorder(options, metrics)
    parts = PipelineParts(
        engine=engine,
        network=None,
        secondaries=(),
        new_tracker=Following,
        new_analytics=lambda source, section, former: Events(frames),
        section=None,
        outlets=(),
        recorder=recorder,
        forget_drawing=lambda source_id: None,
        metrics=metrics,
    )
    pipeline = Pipeline(parts, PipelineOptions(MuxOptions(4), DispatchOptions(), SourcesOptions(ring_frames=12)))
    pipeline.start()
    pipeline.add(SourceConfig(str(clip), "cam"))
    assert pipeline.wait(WAIT_S)
    page = pipeline.metrics_page()
    assert pipeline.stop(WAIT_S)
    lines = [json.loads(line) for line in (options.folder / "recordings.jsonl").read_text().splitlines()]
    return lines, recorder, page


def numbers_in(path: Path) -> list[int]:
    """Of the clip's pictures."""
    with av.open(str(path)) as container:
        return [number_of(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


@pytest.mark.parametrize("b_frames", [0, 2])
def test_every_event_of_a_file_is_in_a_recording_that_shows_it(tmp_path: Path, b_frames: int) -> None:
    """However fast it is read, to its last frame: each event with its seconds around it, and the lines tell the truth
    of every file."""
    clip = write_clip(tmp_path / "a.mp4", frames=FRAMES, gop=25, b_frames=b_frames)
    events = [10, 60, 180, 200, 240, 380, 381, FRAMES - 2]
    options = RecordOptions(tmp_path / "out", before_s=2.0, after_s=3.0, cool_down_s=0.0)
    lines, recorder, page = recorded(clip, events, options)
    assert sorted(event["frame_num"] for line in lines for event in line["events"]) == events
    assert recorder.failures() == ()
    assert b"unrecorded_events_total{" not in page
    for line in lines:
        shown = numbers_in(tmp_path / "out" / line["path"])
        assert line["before_s"] + line["after_s"] == pytest.approx(len(shown) / FPS, abs=0.15)
        for event in line["events"]:
            assert event["frame_num"] in shown
    short = {line["events"][0]["frame_num"]: line["error"] for line in lines if line["error"]}
    assert sorted(short) == [10, FRAMES - 2]
    assert "before its moment, not 2: the source was opened only then" in short[10]
    assert "after its moment, not 3: the source is over" in short[FRAMES - 2]


def test_event_of_a_file_that_is_read_far_ahead_is_shown(tmp_path: Path) -> None:
    """Frames seconds apart fill the ring with more than is kept for a late camera: what is on its way is kept, too."""
    clip = write_clip(tmp_path / "a.mp4", frames=120, fps=2, gop=1)
    events = [40, 70]
    options = RecordOptions(tmp_path / "out", before_s=1.0, after_s=2.0, cool_down_s=0.0)
    lines, _, _ = recorded(clip, events, options)
    assert [line["error"] for line in lines] == ["", ""]
    for number, line in zip(events, lines, strict=True):
        assert numbers_in(tmp_path / "out" / line["path"]) == list(range(number - 2, number + 5))


def test_events_of_a_files_cool_down_are_logged(tmp_path: Path) -> None:
    """In seconds of the video, which are not those of the reading: an event is named by a recording, or counted."""
    clip = write_clip(tmp_path / "a.mp4", frames=FRAMES, gop=25)
    events = list(range(100, 450, 50))  # every 2 s from 4 s on: 4, 6 … 14 rest | 16
    options = RecordOptions(tmp_path / "out", before_s=1.0, after_s=1.0, cool_down_s=10.0)
    lines, _, page = recorded(clip, events, options)
    named = [event["frame_num"] for line in lines for event in line["events"]]
    assert named == [100, 400]
    assert f'unrecorded_events_total{{reason="cool_down",source="cam"}} {len(events) - 2}'.encode() in page


def test_file_whose_packets_fit_no_recording_fails_the_sink(tmp_path: Path) -> None:
    """Every event is named with why it is not recorded, and the run says that its recordings failed."""
    clip = write_clip(tmp_path / "old.avi", frames=300, codec="msmpeg4v2")
    options = RecordOptions(tmp_path / "out", before_s=1.0, after_s=1.0, cool_down_s=0.0)
    lines, recorder, page = recorded(clip, [50, 150, 250], options)
    assert [event["frame_num"] for line in lines for event in line["events"]] == [50, 150, 250]
    assert {(line["before_s"], line["after_s"], line["size_bytes"]) for line in lines} == {(0.0, 0.0, 0)}
    [failure] = recorder.failures()
    assert "packets of msmpeg4v2 do not fit into MP4 (3 recordings lost)" in failure
    assert b'recordings_total{result="failed",source="cam"} 3.0' in page
