"""The running pipeline: sources are added, removed, paused and queried. No call waits for a camera."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from penstock_video.decode.uri import policy_of, redacted
from penstock_video.errors import NotSetUp, PipelineError, SourceExists, SourceStuck, TooManySources, UnknownSource
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.interfaces import Analytics, ProbedSource, SourceStatistics, Tracker
from penstock_video.metrics import VideoMetrics
from penstock_video.mux import MuxOptions
from penstock_video.runner.dispatch import Dispatcher, DispatchOptions, StreamPipeline
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.runner.results import Results, ResultsParts
from penstock_video.runner.secondary import Secondaries, SecondaryModel
from penstock_video.runner.sink_worker import SinkWorker
from penstock_video.runner.source_events import Removed, SourceEvents, SourceEventsParts, SourceGauges, statistics_of
from penstock_video.source_ids import require_source_id
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.sources.options import SourceNeeds, SourcesOptions
from penstock_video.sources.probe import probe
from penstock_video.sources.sources import Sources
from penstock_video.types import DropPolicy, SourceConfig, SourceState

log = structlog.get_logger(component="video")
CHANGE_TIMEOUT_S = 8.0  # for a source to end before it is opened with other options: its process is killed after 2 s


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """interval: frames between two inferred frames. sources.max_sources: limit of the number of sources."""

    mux: MuxOptions
    dispatch: DispatchOptions
    sources: SourcesOptions
    interval: int = 0


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """network: None for no inference. section: the rules of sources without their own. new_analytics: keeps counts of
    the given former analytics, and draws the new rules; raises RuleRefused. forget_drawing: of a removed source."""

    engine: Engine
    network: Network | None
    secondaries: tuple[SecondaryModel, ...]
    new_tracker: Callable[[], Tracker]
    new_analytics: Callable[[SourceConfig, object, Analytics | None], Analytics]
    section: object
    outlets: Sequence[SinkWorker]
    recorder: SmartRecorder | None
    forget_drawing: Callable[[str], None]
    metrics: VideoMetrics


class Pipeline:
    """Implements PipelineControl. Call `start`, then `add`; `stop` once."""

    def __init__(self, parts: PipelineParts, options: PipelineOptions) -> None:
        self._parts = parts
        self._options = options
        self._ways: dict[str, StreamPipeline] = {}
        self._watched: dict[str, float] = {}  # pictures per second that viewers see, by source
        self._removed = Removed()
        self._asking = threading.Lock()  # taken before the other: serialises adds, removals and rule changes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._dispatcher = Dispatcher(parts.engine, parts.network, options.mux, options.dispatch, parts.metrics)
        self._gauges = SourceGauges(parts.metrics)
        events = SourceEventsParts(
            dispatcher=self._dispatcher,
            metrics=parts.metrics,
            gauges=self._gauges,
            recorder=parts.recorder,
            way_of=self._ways.get,
            note_last=self._note_last,
            is_stopping=lambda: self._is_stopping,
        )
        self._source_events = SourceEvents(events)
        self._sources = Sources(options.sources, self._source_events)
        self._results = Results(self._results_parts())
        self._is_stopping = False

    def _results_parts(self) -> ResultsParts:
        parts = self._parts
        secondaries = None
        if parts.secondaries:
            secondaries = Secondaries(parts.engine, parts.secondaries, parts.metrics, self._dispatcher.wake)
        return ResultsParts(
            dispatcher=self._dispatcher,
            network=parts.network,
            outlets=parts.outlets,
            secondaries=secondaries,
            metrics=parts.metrics,
            is_drawn=self._is_drawn,
            on_result=None if parts.recorder is None else partial(parts.recorder.observe, sources=self._sources),
            on_over=self._on_over,
        )

    # life

    def start(self) -> None:
        if self._parts.recorder is not None:
            self._parts.recorder.start()
        for outlet in self._parts.outlets:
            outlet.start()
        self._results.start()
        self._sources.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether every source ended within the time; False without sources. Raises PipelineError if a thread died."""
        if not (self._sources.is_running and self._results.is_running):
            raise PipelineError("a thread of the pipeline failed, and nothing comes any more; the log says why")
        return self._wait(lambda: bool(self._ways) and self._is_over(), timeout_s)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, max(timeout_s, 0.0))

    def stop(self, grace_s: float, *, is_hurried: bool = False) -> bool:
        """Ends the sources and writes what they delivered. Returns whether all was written in time."""
        until = time.monotonic() + grace_s
        with self._asking:
            self._is_stopping = True
        self.statistics()  # the sources' state before they were ended
        for way in self._present():
            way.is_leaving = is_hurried or way.policy is not DropPolicy.BLOCK
        is_clean = self._sources.close(min(grace_s, 5.0))
        is_clean &= self._wait(self._is_over, until - time.monotonic()) or is_hurried
        is_clean &= self._results.close(1.0)
        for outlet in self._parts.outlets:
            outlet.end(is_hurried=is_hurried)
        for outlet in self._parts.outlets:
            is_clean &= outlet.close(max(until - time.monotonic(), 1.0), is_hurried=is_hurried)
        if self._parts.recorder is not None:
            is_clean &= self._parts.recorder.close(max(until - time.monotonic(), 1.0))
        return is_clean

    # PipelineControl

    def add(self, source: SourceConfig, section: object = None) -> None:
        """Adds and logs a source at run time. Otherwise as `take_in`."""
        self.take_in(source, section)
        log.info("source added", source=source.source_id, uri=redacted(source.uri))

    def take_in(self, source: SourceConfig, section: object = None) -> None:
        """Adds an initial source. Raises SourceNotAllowed for its ID, SourceExists, TooManySources, RuleRefused."""
        require_source_id(source.source_id)
        with self._asking:
            self._refuse(source.source_id)
            self._take(source, self._parts.section if section is None else section)

    def _refuse(self, source_id: str) -> None:
        """Raises if the ID is in use. A source that ended by itself stays until its ID is removed or added again."""
        most = self._options.sources.max_sources
        with self._lock:
            former = self._ways.get(source_id)
            others = len(self._ways) - (former is not None)
        if self._is_stopping:
            raise PipelineError("no source is added to a program that ends")
        if former is not None and not former.is_over:
            raise SourceExists(f"there is a source {source_id!r} already; remove it first, or choose another id")
        if others >= most:
            raise TooManySources(f"{most} sources are the most here; remove one, or start another shard")

    def _take(self, source: SourceConfig, section: object, before: StreamPipeline | None = None) -> None:
        """before: the pipeline that this one continues, which is over."""
        source_id, recorder = source.source_id, self._parts.recorder
        if recorder is not None and not source.record_cache_s:
            source = replace(source, record_cache_s=recorder.cache_s(source_id))
        analytics = self._parts.new_analytics(source, section, before.analytics if before is not None else None)
        tracker = before.tracker if before is not None else self._parts.new_tracker()
        if before is not None:
            analytics.restart()
            tracker.reset()
        way = StreamPipeline(source, policy_of(source), tracker, analytics, section)
        with self._lock:
            former = self._ways.pop(source_id, None)
            if former is not None:
                self._removed.keep(statistics_of(former))
                self._forget_figures(source_id)
            self._ways[source_id] = way
        self._dispatcher.add(way)
        self._parts.metrics.state(source_id, SourceState.CONNECTING)
        try:
            self._sources.add(source, self._needs(source, section))
        except PipelineError:
            way.is_leaving = True
            self._dispatcher.on_end(source_id)
            raise

    def remove(self, source_id: str) -> None:
        """Removes a source; frames in flight are finished if that is soon. Raises UnknownSource."""
        with self._asking:
            way = self._way(source_id)
            way.is_leaving = True
            self._sources.remove(source_id)
            with self._lock:
                was_over = way.is_over
                if was_over:
                    self._forget(way)
        if was_over:  # otherwise logged when its process ends
            log.info("source", source=source_id, state="removed")

    def probe(self, source: SourceConfig) -> ProbedSource:
        """Opens an address once, in a process of its own."""
        return probe(source, self._options.sources)

    def config(self, source_id: str) -> SourceConfig:
        return self._way(source_id).config

    def change(self, source: SourceConfig) -> None:
        """Ends the source and adds it again with its rules, their counts and its tracker. Raises UnknownSource,
        SourceStuck, and what `take_in` raises."""
        with self._asking:
            way = self._way(source.source_id)
            self._end(way)
            self._take(source, way.section, way)
        log.info("source changed", source=source.source_id, uri=redacted(source.uri))

    def restart(self, source_id: str) -> None:
        """Ends the source and adds it again with its rules; counts begin at 0. Raises as `change`."""
        with self._asking:
            way = self._way(source_id)
            self._end(way)
            self._take(way.config, way.section)
        log.info("source started over", source=source_id)

    def _end(self, way: StreamPipeline) -> None:
        """Waits until the source is over. Raises SourceStuck."""
        if self._is_stopping:
            raise PipelineError("no source is changed in a program that ends")
        way.is_leaving = True
        self._sources.remove(way.source_id)
        with self._changed:
            if way.is_over:
                self._forget(way)
            is_over = self._changed.wait_for(lambda: way.is_over, CHANGE_TIMEOUT_S)
        if not is_over:
            raise SourceStuck(
                f"{way.source_id!r} did not end within {CHANGE_TIMEOUT_S:g} s and is being removed; add it again"
            )

    def pause(self, source_id: str) -> None:
        self._way(source_id)
        self._sources.pause(source_id)

    def resume(self, source_id: str) -> None:
        self._way(source_id)
        self._sources.resume(source_id)

    def record(self, source_id: str, *, before_s: float, after_s: float) -> str:
        """Raises NotSetUp without a folder for recordings, SourceNotOpen if the source has nothing to record."""
        self._way(source_id)
        if self._parts.recorder is None:
            raise NotSetUp("no folder for recordings was given; add a sink of type record")
        return self._parts.recorder.ask(source_id, self._sources, before_s=before_s, after_s=after_s)

    def statistics(self) -> tuple[SourceStatistics, ...]:
        """Statistics of every source that was not removed."""
        known = {snapshot.source_id: snapshot for snapshot in self._sources.snapshot()}
        present = self._present()
        for way in present:
            way.snapshot = known.get(way.source_id, way.snapshot)
        return tuple(map(statistics_of, present))

    def source(self, source_id: str) -> SourceStatistics:
        """Statistics of one source. Raises UnknownSource."""
        way = self._way(source_id)
        way.snapshot = self._sources.snapshot_of(source_id) or way.snapshot
        return statistics_of(way)

    def removed(self) -> tuple[SourceStatistics, ...]:
        """Last statistics of sources that were removed or replaced."""
        with self._lock:
            return self._removed.all()

    def metrics_page(self) -> bytes:
        """The current metrics in Prometheus' text format."""
        self._gauges.refresh(self._sources.snapshot(), self._sources.processes(), *self._sources.cards())
        return self._parts.metrics.page()

    def rules(self, source_id: str) -> object:
        section = self._way(source_id).section
        return {} if section is None else section

    def set_rules(self, source_id: str, section: object) -> None:
        with self._asking:
            way = self._way(source_id)
            way.next_analytics.append(self._parts.new_analytics(way.config, section, way.analytics))
            way.section = section
        self._want_images(way)

    def is_healthy(self) -> bool:
        """Whether its threads run and its engine answers."""
        threads = [self._results.is_alive, self._sources.is_alive, *(outlet.is_alive for outlet in self._parts.outlets)]
        return all(threads) and self._parts.engine.is_up

    def watch(self, source_id: str, fps: float) -> None:
        """So many frames per second carry pictures, since clients watch the source's preview; 0 for no client."""
        with self._lock:
            if fps:
                self._watched[source_id] = fps
            else:
                self._watched.pop(source_id, None)
            way = self._ways.get(source_id)
        if way is not None:
            self._want_images(way)

    # inside

    def _want_images(self, way: StreamPipeline) -> None:
        """Lets the source's frames carry pictures, or not."""
        interval_s = self._image_interval_s(way.source_id, way.section)
        if not self._always_wants_images:
            with suppress(UnknownSource):  # it is being removed
                self._sources.want_images(way.source_id, interval_s is not None, interval_s or 0.0)

    def _image_interval_s(self, source_id: str, section: object) -> float | None:
        """Seconds between frames with pictures: 0 for all, also for snapshots of its rules' events; None for none."""
        has_snapshots = any(outlet.options.has_snapshots for outlet in self._parts.outlets)
        if self._always_wants_images or (has_snapshots and bool(section)):
            return 0.0
        fps = self._watched.get(source_id, 0.0)
        return 1.0 / fps if fps else None

    @property
    def _always_wants_images(self) -> bool:
        return bool(self._parts.secondaries) or self._always_draws

    @property
    def _always_draws(self) -> bool:
        return any(outlet.options.always_draws for outlet in self._parts.outlets)

    def _is_drawn(self, source_id: str) -> bool:
        """Whether a sink uses the source's pictures."""
        return source_id in self._watched or self._always_draws

    def _needs(self, source: SourceConfig, section: object) -> SourceNeeds:
        network = self._parts.network
        interval_s = self._image_interval_s(source.source_id, section)
        return SourceNeeds(
            spec=network.spec if network is not None else b"",
            row_bytes=network.row_bytes if network is not None else 0,
            row_dtype=network.row_dtype if network is not None else "uint8",
            interval=self._options.interval,
            wants_images=interval_s is not None,
            image_interval_s=interval_s or 0.0,
        )

    def _present(self) -> tuple[StreamPipeline, ...]:
        with self._lock:
            return tuple(self._ways.values())

    def _way(self, source_id: str) -> StreamPipeline:
        with self._lock:
            way = self._ways.get(source_id)
        if way is None:
            raise UnknownSource(f"there is no source {source_id!r}")
        return way

    def _is_over(self) -> bool:
        return all(way.is_over for way in self._ways.values())

    def _note_last(self, source_id: str) -> None:
        """Stores the last statistics. If the program ended the source: its state before, with all its frames."""
        with self._lock:
            way = self._ways.get(source_id)
        last = self._sources.snapshot_of(source_id)
        if way is None or last is None:
            return
        before = way.snapshot
        if self._is_stopping and before is not None and last.reason == TAKEN_OUT:
            last = replace(last, state=before.state, reason=before.reason)
        way.snapshot = last

    def _on_over(self, way: StreamPipeline) -> None:
        if self._parts.recorder is not None:
            self._parts.recorder.forget(way.source_id)
        with self._changed:
            way.is_over = True
            if way.is_leaving and not self._is_stopping:
                self._forget(way)
            self._changed.notify_all()

    def _forget(self, way: StreamPipeline) -> None:
        """Call it with the lock, so that adding the ID again comes before or after all of it."""
        if self._ways.get(way.source_id) is way:
            del self._ways[way.source_id]
            self._removed.keep(statistics_of(way))
            self._forget_figures(way.source_id)
            self._parts.forget_drawing(way.source_id)

    def _forget_figures(self, source_id: str) -> None:
        self._source_events.forget(source_id)
        self._parts.metrics.forget(source_id)
        self._gauges.forget(source_id)
