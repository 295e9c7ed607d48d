"""The running pipeline: who comes, goes and is asked about, with an engine and sources in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock_video.errors import (
    PipelineError,
    SourceExists,
    SourceNotAllowed,
    SourceStuck,
    TooManySources,
    UnknownSource,
)
from penstock_video.metrics import VideoMetrics
from penstock_video.mux import MuxOptions
from penstock_video.runner import pipeline as room
from penstock_video.runner.dispatch import DispatchOptions
from penstock_video.runner.pipeline import Pipeline, PipelineOptions, PipelineParts
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.runner.sink_worker import SinkWorker, SinkWorkerOptions
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sources.decoder_cards import CardSnapshot
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.sources.options import ProcessSnapshot, SourceListener, SourceNeeds, SourceSnapshot, SourcesOptions
from penstock_video.sources.protocol import Beat, Cut, Recorded
from penstock_video.types import PreparedFrame, SourceConfig, SourceState
from tests.deepstream_pipeline.runner.fakes import NETWORK, FakeEngine, Following, KeptSink, Slots

WAIT_S = 30.0
CAMERA = SourceConfig("rtsp://camera/a", "a", camera_name="Door")


class FakeSources:
    """Sources without a process: the test says what comes of them."""

    def __init__(self, options: SourcesOptions, listener: SourceListener) -> None:
        self.listener = listener
        self.configs: dict[str, SourceConfig] = {}
        self.needs: dict[str, SourceNeeds] = {}
        self.images: list[tuple[str, float | None]] = []
        self.shown: dict[str, SourceSnapshot] = {}
        self.refusal: PipelineError | None = None
        self.is_running = self.is_alive = True

    def start(self) -> None:
        """Nothing runs."""

    def add(self, config: SourceConfig, needs: SourceNeeds) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.configs[config.source_id], self.needs[config.source_id] = config, needs
        self.shown[config.source_id] = SourceSnapshot(config, SourceState.RUNNING)

    def remove(self, source_id: str) -> None:
        if source_id not in self.configs:
            raise UnknownSource(source_id)
        del self.configs[source_id]

    def want_images(self, source_id: str, is_wanted: bool, interval_s: float = 0.0) -> None:
        if source_id not in self.configs:
            raise UnknownSource(source_id)
        self.images.append((source_id, interval_s if is_wanted else None))

    def processes(self) -> tuple[ProcessSnapshot, ...]:
        """None: nothing is decoded here."""
        return ()

    def cards(self) -> tuple[tuple[CardSnapshot, ...], int]:
        """None, and none refused a source."""
        return (), 0

    def snapshot(self) -> tuple[SourceSnapshot, ...]:
        return tuple(one for one in self.shown.values() if one.source_id in self.configs)

    def snapshot_of(self, source_id: str) -> SourceSnapshot | None:
        return self.shown.get(source_id)

    def end(self, source_id: str, **facts: Any) -> None:
        """It is over, as these facts of its snapshot say."""
        if source_id in self.shown:
            self.shown[source_id] = replace(self.shown[source_id], **facts)
        self.listener.on_ended(source_id)
        self.shown.pop(source_id, None)

    def close(self, timeout_s: float) -> bool:
        for source_id in list(self.shown):
            self.end(source_id, state=SourceState.ENDED, reason=TAKEN_OUT, frames=7)
        return True


@dataclass
class Stand:
    """A pipeline that runs. analysed: what rules were made of."""

    pipeline: Pipeline
    sources: FakeSources
    metrics: VideoMetrics
    engine: FakeEngine
    sink: KeptSink
    analysed: list[tuple[str, object]]
    forgotten: list[str]

    def frame(self, slots: Slots, number: int) -> PreparedFrame:
        """Of source a, without a row: it goes on at once."""
        prepared = slots.prepared("a", number, has_row=False, captured_at=time.monotonic())
        self.sources.listener.on_frame(prepared)
        return prepared

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, "it never came to be so"
            time.sleep(0.005)

    def over(self) -> bool:
        return self.pipeline.wait(0.0)


def made(monkeypatch: pytest.MonkeyPatch, recorder: SmartRecorder | None = None, most: int = 3) -> Stand:
    monkeypatch.setattr(room, "Sources", FakeSources)
    engine, metrics, sink = FakeEngine(), VideoMetrics(), KeptSink()
    analysed: list[tuple[str, object]] = []
    forgotten: list[str] = []

    def analytics_of(source: SourceConfig, section: object, former: object) -> Following:
        analysed.append((source.source_id, section))
        return Following()

    whole: Any = engine
    parts = PipelineParts(
        engine=whole,
        network=NETWORK_WITH_ROWS,
        secondaries=(),
        new_tracker=Following,
        new_analytics=analytics_of,
        section=None,
        outlets=(SinkWorker(sink, SinkWorkerOptions("kept", 100), metrics),),
        recorder=recorder,
        forget_drawing=forgotten.append,
        metrics=metrics,
    )
    options = PipelineOptions(MuxOptions(4), DispatchOptions(), SourcesOptions(max_sources=most))
    pipeline = Pipeline(parts, options)
    pipeline.start()
    sources: Any = pipeline._sources
    return Stand(pipeline, sources, metrics, engine, sink, analysed, forgotten)


NETWORK_WITH_ROWS: Any = NETWORK
NETWORK_WITH_ROWS.spec, NETWORK_WITH_ROWS.row_bytes, NETWORK_WITH_ROWS.row_dtype = b"", 12, "uint8"


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    running = made(monkeypatch)
    yield running
    running.pipeline.stop(0.0, is_hurried=True)


def test_source_that_cannot_be_read_after_all_leaves_nothing(stand: Stand) -> None:
    """Adding it raises, and the pipeline neither waits for it nor keeps its figures."""
    stand.sources.refusal = PipelineError("no source is added to a program that ends")
    with pytest.raises(PipelineError, match="that ends"):
        stand.pipeline.add(CAMERA)
    stand.until(lambda: not stand.pipeline.statistics())
    assert stand.forgotten == ["a"]
    assert b'source="a"' not in stand.metrics.page()


def test_sources_that_are_over_count_until_they_are_removed(stand: Stand) -> None:
    """What the pipeline takes in, its sources take in, too."""
    for number in range(3):
        stand.pipeline.add(SourceConfig(f"{number}.mp4", f"clip-{number}"))
        stand.sources.listener.on_ended(f"clip-{number}")
    stand.until(stand.over)
    with pytest.raises(TooManySources, match="remove one"):
        stand.pipeline.add(CAMERA)
    stand.pipeline.add(SourceConfig("0.mp4", "clip-0"))
    stand.pipeline.remove("clip-1")
    stand.pipeline.add(CAMERA)
    assert [one.source_id for one in stand.pipeline.statistics()] == ["clip-2", "clip-0", "a"]


def test_refused_source_changes_nothing_of_the_one_that_is_there(stand: Stand) -> None:
    """Its rules are not even read, since they would be drawn."""
    stand.pipeline.add(CAMERA)
    with pytest.raises(SourceExists):
        stand.pipeline.add(CAMERA, {"other": "rules"})
    assert stand.analysed == [("a", None)]


def test_source_that_comes_back_is_logged_at_the_level_of_its_loss(stand: Stand) -> None:
    """Who hears only warnings is not left with a camera that is away; one that runs at once is no warning."""
    stand.pipeline.add(CAMERA)
    on_state = stand.sources.listener.on_state
    with capture_logs() as lines:
        for state in (SourceState.RUNNING, SourceState.RECONNECTING, SourceState.RUNNING, SourceState.ENDED):
            on_state("a", state, "")
        on_state("a", SourceState.FAILED, "no such file")
        stand.sources.end("a", state=SourceState.FAILED)
        stand.until(stand.over)
        stand.pipeline.add(CAMERA)
        on_state("a", SourceState.RUNNING, "")
    levels = [line["log_level"] for line in lines if line["event"] == "source"]
    assert levels == ["info", "warning", "warning", "info", "warning", "info"]


@pytest.mark.parametrize("source_id", ["hls", "../x", ""])
def test_source_that_can_have_no_such_id_is_refused(stand: Stand, source_id: str) -> None:
    """Its folder would lie elsewhere, or stand where a sink's file does."""
    with pytest.raises(SourceNotAllowed, match="cannot be a source's id: 1 to 64 of"):
        stand.pipeline.add(replace(CAMERA, source_id=source_id))
    assert not stand.pipeline.statistics()


def test_source_that_comes_or_goes_while_it_runs_is_logged_once(stand: Stand) -> None:
    """Without its password; those that it began with are in the line of its start, and in their states."""
    with capture_logs() as lines:
        stand.pipeline.take_in(CAMERA)
        stand.pipeline.add(SourceConfig("rtsp://user:hush@camera/b", "b"))
        stand.sources.end("b", state=SourceState.ENDED)
        stand.until(lambda: stand.pipeline._ways["b"].is_over)
        stand.pipeline.remove("b")
    logged = [{name: value for name, value in line.items() if name in ("event", "uri", "state")} for line in lines]
    assert logged[0]["event"] == "source added"
    assert "hush" not in str(logged)
    assert logged[1:] == [{"event": "source", "state": "removed"}]
    assert {line["log_level"] for line in lines} == {"info"}


def test_source_added_again_counts_anew(stand: Stand) -> None:
    """Its statistics and its metrics begin at zero."""
    for _ in range(2):
        stand.pipeline.add(SourceConfig("a.mp4", "a"))
        stand.sources.listener.on_beat("a", Beat(25, 0, 1.0, 0.5))
        assert b'penstock_video_frames_total{source="a"} 25.0' in stand.pipeline.metrics_page()
        stand.sources.end("a", state=SourceState.ENDED)
        stand.until(stand.over)


def test_source_is_gone_with_all_that_was_kept_of_it(stand: Stand) -> None:
    """A removed source is forgotten after its last frame; its id is free again and appears nowhere."""
    stand.pipeline.add(CAMERA)
    stand.pipeline.remove("a")
    with pytest.raises(UnknownSource):
        stand.pipeline.remove("a")
    stand.sources.end("a")
    stand.until(lambda: not stand.pipeline.statistics())
    stand.until(lambda: stand.sink.ended == ["a"])
    assert stand.forgotten == ["a"]
    stand.pipeline.add(CAMERA)
    assert b'penstock_video_state{source="a",state="connecting"} 1.0' in stand.metrics.page()


def test_statistics_after_the_stop_hold_every_frame_and_how_it_was(stand: Stand) -> None:
    """A camera that was running when everything was stopped is not said to have ended by itself."""
    stand.pipeline.add(CAMERA)
    assert stand.pipeline.stop(WAIT_S)
    (said,) = stand.pipeline.statistics()
    assert (said.state, said.frames) == (SourceState.RUNNING, 7)


def test_source_that_comes_during_the_stop_is_refused(stand: Stand) -> None:
    """The stop waits for no source that will not end."""
    stand.pipeline.add(CAMERA)
    assert stand.pipeline.stop(WAIT_S)
    with pytest.raises(PipelineError, match="that ends"):
        stand.pipeline.add(replace(CAMERA, source_id="b"))
    assert stand.pipeline.stop(WAIT_S)


def test_frame_of_a_source_that_is_leaving_is_counted(stand: Stand) -> None:
    """Whatever was decoded is answered, or counted as lost."""
    slots = Slots()
    stand.pipeline.add(CAMERA)
    stand.pipeline.remove("a")
    stand.frame(slots, 0)
    assert slots.released == [("a", 0)]
    assert b'penstock_video_dropped_total{reason="stopped",source="a"} 1.0' in stand.metrics.page()


def test_rules_that_are_read_can_be_written_back(stand: Stand) -> None:
    """Of a source without rules, too; of several in a row the last ones hold."""
    stand.pipeline.add(CAMERA)
    assert stand.pipeline.rules("a") == {}
    for section in ({}, {"one": 1}, {"two": 2}):
        stand.pipeline.set_rules("a", section)
    assert stand.pipeline.rules("a") == {"two": 2}
    slots = Slots()
    stand.frame(slots, 0)
    stand.until(lambda: bool(stand.sink.results))
    way = stand.pipeline._ways["a"]
    assert not way.next_analytics


def test_source_that_is_changed_keeps_its_rules_and_tracker(stand: Stand) -> None:
    """It ends first, and is added again with the section that it had; its ID is never free in between."""
    stand.pipeline.add(CAMERA)
    stand.pipeline.set_rules("a", {"one": 1})
    before = stand.pipeline._ways["a"]
    ending = threading.Timer(0.05, lambda: stand.sources.end("a", reason=TAKEN_OUT))
    ending.start()
    stand.pipeline.change(replace(CAMERA, uri="rtsp://other/1"))
    ending.join()
    after = stand.pipeline._ways["a"]
    assert (after.config.uri, after.section, after.tracker) == ("rtsp://other/1", {"one": 1}, before.tracker)
    assert stand.analysed[-1] == ("a", {"one": 1})
    assert stand.sources.configs["a"].uri == "rtsp://other/1"


def test_source_that_ended_is_opened_again_by_a_change(stand: Stand) -> None:
    """A file that is over, or a camera that failed, needs no removal."""
    stand.pipeline.add(CAMERA)
    stand.sources.end("a")
    stand.until(stand.over)
    stand.pipeline.change(CAMERA)
    assert not stand.pipeline._ways["a"].is_over


def test_source_that_is_started_over_counts_from_zero(stand: Stand) -> None:
    """With its rules, and its changes of them, but a tracker and counts of its own."""
    stand.pipeline.add(CAMERA)
    stand.pipeline.set_rules("a", {"one": 1})
    before = stand.pipeline._ways["a"]
    stand.sources.end("a")
    stand.until(stand.over)
    stand.pipeline.restart("a")
    after = stand.pipeline._ways["a"]
    assert (after.config, after.section, after.is_over) == (before.config, {"one": 1}, False)
    assert after.tracker is not before.tracker
    assert after.analytics is not before.analytics
    with pytest.raises(UnknownSource):
        stand.pipeline.restart("b")


def test_source_that_does_not_end_is_not_changed(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller learns that it is being removed; an unknown one is refused."""
    monkeypatch.setattr(room, "CHANGE_TIMEOUT_S", 0.05)
    stand.pipeline.add(CAMERA)
    with pytest.raises(SourceStuck, match="add it again"):
        stand.pipeline.change(CAMERA)
    with pytest.raises(UnknownSource):
        stand.pipeline.change(replace(CAMERA, source_id="b"))


def test_viewer_of_a_source_that_is_being_taken_out_costs_nothing(stand: Stand) -> None:
    """Frames carry pictures while a client watches; a source that just left is not asked for any."""
    stand.pipeline.add(CAMERA)
    stand.pipeline.watch("a", 5.0)
    stand.pipeline.remove("a")
    stand.pipeline.watch("a", 0.0)
    assert stand.sources.images == [("a", 0.2)]


def test_pipeline_whose_thread_failed_is_not_waited_for(stand: Stand) -> None:
    """No more pictures come, and waiting viewers get None."""
    stand.pipeline.add(CAMERA)
    stand.sources.is_running = False
    with pytest.raises(PipelineError, match="log says why"):
        stand.pipeline.wait(WAIT_S)


def test_camera_that_comes_later_is_recorded_from_before_its_event(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who adds a camera while it runs need not know that recordings are made."""
    running = made(monkeypatch, SmartRecorder(RecordOptions(tmp_path, before_s=4.0, sources=("a",)), VideoMetrics()))
    running.pipeline.add(CAMERA)
    running.pipeline.add(replace(CAMERA, source_id="b"))
    running.pipeline.add(replace(CAMERA, source_id="c", record_cache_s=9.0))
    assert [config.record_cache_s for config in running.sources.configs.values()] == [4.0, 0.0, 9.0]
    assert running.pipeline.stop(WAIT_S)


def test_disk_that_hangs_under_recordings_holds_up_no_camera(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Events on the thread that all sources share wait for no disk."""
    recorder, is_let_go = SmartRecorder(RecordOptions(tmp_path), VideoMetrics()), threading.Event()
    hung: Any = recorder._folder
    monkeypatch.setattr(hung, "keep_quota", lambda running=(): is_let_go.wait(WAIT_S))
    running = made(monkeypatch, recorder)
    running.pipeline.add(CAMERA)
    path = recorder.ask("a", _NoSources(), before_s=1.0, after_s=1.0)
    began = time.monotonic()
    running.sources.listener.on_recorded("a", Recorded(path, ""))
    recorder.forget("a")
    assert time.monotonic() - began < WAIT_S / 2
    is_let_go.set()
    assert running.pipeline.stop(WAIT_S)
    assert Path(path).name in (tmp_path / "recordings.jsonl").read_text()


class _NoSources:
    def snapshot(self) -> tuple[SourceSnapshot, ...]:
        return (SourceSnapshot(CAMERA, SourceState.RUNNING, is_open=True),)

    def record(self, source_id: str, cut: Cut) -> None:
        """Asked."""
