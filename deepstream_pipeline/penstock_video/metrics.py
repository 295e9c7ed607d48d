"""Metrics of the video program, declared in one table, and the object that records them."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)

from penstock_video.types import CloseReason, DecoderKind, DecoderSharing, DropReason, SourceState

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FRAMES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DECODERS = (DecoderKind.CPU.value, DecoderKind.NVDEC.value)
_REMEMBERED = 4096  # IDs of removed sources, so that their late events begin no new series


class Kind(Enum):
    """Metric types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One row of the table. Names get the prefix penstock_video_; buckets are upper bounds in the name's unit."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
# Sum and count without buckets: decode processes send sums of a second, and every bucket is a series per source.
_S = Kind.SUMMARY
TABLE = (
    Declaration("frames_total", _C, "Frames decoded.", ("source",)),
    Declaration("inferred_total", _C, "Frames that the network answered.", ("source",)),
    Declaration("dropped_total", _C, "Decoded frames that were given up, by reason.", ("source", "reason")),
    Declaration("restarts_total", _C, "Times that a source was opened anew.", ("source",)),
    Declaration(
        "events_total",
        _C,
        "Events of the rules, by kind. direction: in or out of a line that counts both ways, else empty.",
        ("source", "kind", "direction"),
    ),
    Declaration("recordings_total", _C, "Recordings that ended, by result: ok, short, failed.", ("source", "result")),
    Declaration("unrecorded_events_total", _C, "Events without a recording, by reason.", ("source", "reason")),
    Declaration("fps", _G, "Frames decoded a second, over the last seconds.", ("source",)),
    Declaration("state", _G, "1 for the state that a source is in, 0 for the others.", ("source", "state")),
    Declaration("frozen", _G, "1 while a source shows the same picture.", ("source",)),
    Declaration("decoder", _G, "1 for the decoder of a source's pictures, 0 for the others.", ("source", "decoder")),
    Declaration("decoder_shared", _G, "1 while a source shares its NVDEC decoder with another one.", ("source",)),
    Declaration("decoder_mismatches_total", _C, "Times that pictures of a shared decoder were wrong.", ("source",)),
    Declaration("decoder_utilization", _G, "Share of time that a GPU's NVDEC decoders are busy.", ("card",)),
    Declaration("decoder_refusals_total", _C, "Times that GPUs whose decoders are full refused a source."),
    Declaration("decode_seconds", _S, "CPU time of decoding a frame.", ("source",)),
    Declaration("prepare_seconds", _S, "CPU time of making a frame ready for the network.", ("source",)),
    Declaration("glass_to_event_seconds", _H, "From a frame's packet's coming to its result.", ("source",), SECONDS),
    Declaration("decode_processes", _G, "Decode processes that run, each with a source or several.", ("decoder",)),
    Declaration("rows_total", _C, "Rows that the engine was given, by where they lay.", ("hand_over",)),
    Declaration("mux_wait_seconds", _H, "From a frame's packet's coming to its batch.", (), SECONDS),
    Declaration("batch_frames", _H, "Frames of a batch.", (), FRAMES),
    Declaration("batches_total", _C, "Batches formed, by why they closed.", ("reason",)),
    Declaration("infer_seconds", _H, "A batch's call to the engine.", ("model",), SECONDS),
    Declaration("sink_queue_results", _G, "Results and messages that wait for a sink.", ("sink",)),
    Declaration("sink_queue_bytes", _G, "Bytes of what waits for a sink, where they are known.", ("sink",)),
    Declaration("sink_dropped_total", _C, "Results and messages that a sink lost.", ("sink",)),
    Declaration("sink_errors_total", _C, "Times that a sink failed.", ("sink",)),
)


_CLASSES: dict[Kind, Any] = {  # their constructors share no type
    Kind.COUNTER: Counter,
    Kind.GAUGE: Gauge,
    Kind.HISTOGRAM: Histogram,
    Kind.SUMMARY: Summary,
}


class _Source:
    """The series of one source, cached: looking up a series takes longer than counting."""

    def __init__(self, source: str, metrics: dict[str, Any], lock: threading.Lock) -> None:
        self._metrics = metrics
        self._lock = lock  # taken to make or remove a metric
        self._is_removed = False
        self._labels: list[tuple[str, tuple[str, ...]]] = []
        self._source = source
        self._counters: dict[tuple[str, ...], Counter] = {}
        self.frames: Counter = self._series("frames_total")
        self.inferred: Counter = self._series("inferred_total")
        self.restarts: Counter = self._series("restarts_total")
        self.fps: Gauge = self._series("fps")
        self.frozen: Gauge = self._series("frozen")
        self.states: dict[SourceState, Gauge] = {state: self._series("state", state.value) for state in SourceState}
        self.decoders: dict[str, Gauge] = {kind: self._series("decoder", kind) for kind in DECODERS}
        self.shared: Gauge = self._series("decoder_shared")
        self.is_mismatch = False
        self.decode: Summary = self._series("decode_seconds")
        self.prepare: Summary = self._series("prepare_seconds")
        self.glass_to_event: Histogram = self._series("glass_to_event_seconds")

    def count(self, name: str, *words: str, n: int = 1) -> None:
        """Increments a counter with further labels, values of enums."""
        counter = self._counters.get((name, *words))
        if counter is None:
            with self._lock:
                if self._is_removed:
                    return
                counter = self._counters[name, *words] = self._series(name, *words)
        counter.inc(n)

    def remove(self) -> None:
        self._is_removed = True
        for name, labels in self._labels:
            self._metrics[name].remove(*labels)

    def _series(self, name: str, *words: str) -> Any:
        """The metric's series of this source; its class is the table's."""
        labels = (self._source, *words)
        self._labels.append((name, labels))
        return self._metrics[name].labels(*labels)


class _Sink:
    def __init__(self, sink: str, metrics: dict[str, Any]) -> None:
        self.depth: Gauge = metrics["sink_queue_results"].labels(sink)
        self.depth_bytes: Gauge = metrics["sink_queue_bytes"].labels(sink)
        self.dropped: Counter = metrics["sink_dropped_total"].labels(sink)
        self.errors: Counter = metrics["sink_errors_total"].labels(sink)


class VideoMetrics:
    """The video program's metrics registry. Thread-safe. A source's series begin with its first event and end with
    `forget`. Later events are not counted, until a source with this ID is connecting again."""

    def __init__(self) -> None:
        # Disables the extra series beside each counter, with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._all: dict[str, Any] = {row.name: self._declared(row) for row in TABLE}  # of the table's classes
        ProcessCollector(registry=self._registry)  # of this process, without decode processes
        self._mux_wait: Histogram = self._all["mux_wait_seconds"]
        self._batch_frames: Histogram = self._all["batch_frames"]
        self._batches: dict[str, Counter] = {}
        for decoder in DECODERS:
            self.decode_processes(decoder, 0)
        rows: Counter = self._all["rows_total"]
        self._rows = {False: rows.labels("host"), True: rows.labels("device")}  # by whether they are on the GPU
        self._infer: dict[str, Histogram] = {}
        self._sources: dict[str, _Source] = {}
        self._sinks: dict[str, _Sink] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._refusals = 0

    def _declared(self, row: Declaration) -> Any:
        buckets = {"buckets": row.buckets} if row.buckets else {}
        return _CLASSES[row.kind](
            f"penstock_video_{row.name}", row.help, row.labels, registry=self._registry, **buckets
        )

    def decoded(self, source: str, n: int = 1) -> None:
        if (series := self._of(source)) is not None:
            series.frames.inc(n)

    def inferred(self, source: str, n: int = 1) -> None:
        """Counts frames that the network answered."""
        if (series := self._of(source)) is not None:
            series.inferred.inc(n)

    def dropped(self, source: str, reason: DropReason, n: int = 1) -> None:
        if n and (series := self._of(source)) is not None:
            series.count("dropped_total", DropReason(reason).value, n=n)

    def restarted(self, source: str) -> None:
        if (series := self._of(source)) is not None:
            series.restarts.inc()

    def event(self, source: str, kind: str, direction: str = "") -> None:
        """Counts an event. direction: in or out, of a line that counts both ways."""
        if (series := self._of(source)) is not None:
            series.count("events_total", str(kind), direction)

    def recording(self, source: str, result: str) -> None:
        """Counts a recording. result: ok, short or failed."""
        if (series := self._of(source)) is not None:
            series.count("recordings_total", result)

    def unrecorded(self, source: str, reason: str, n: int) -> None:
        """Counts events without a recording. reason: cool_down or max_at_once."""
        if (series := self._of(source)) is not None:
            series.count("unrecorded_events_total", reason, n=n)

    def state(self, source: str, state: SourceState) -> None:
        """Sets the source's only state."""
        if state is SourceState.CONNECTING:
            with self._lock:
                self._gone.pop(source, None)
        if (series := self._of(source)) is not None:
            for each, gauge in series.states.items():
                gauge.set(each is state)

    def frozen(self, source: str, is_frozen: bool) -> None:
        """Sets whether the picture is frozen."""
        if (series := self._of(source)) is not None:
            series.frozen.set(is_frozen)

    def decoder(self, source: str, decoder: str) -> None:
        """Sets the source's decoder: cpu or nvdec."""
        if (series := self._of(source)) is not None:
            for each, gauge in series.decoders.items():
                gauge.set(each == decoder)

    def sharing(self, source: str, sharing: DecoderSharing) -> None:
        """Sets how the source uses its NVDEC decoder."""
        if (series := self._of(source)) is not None:
            series.shared.set(sharing is DecoderSharing.SHARED)
            is_mismatch, series.is_mismatch = series.is_mismatch, sharing is DecoderSharing.MISMATCH
            if series.is_mismatch and not is_mismatch:
                series.count("decoder_mismatches_total")

    def decode_processes(self, decoder: str, n: int) -> None:
        """Sets the number of decode processes with this decoder."""
        self._all["decode_processes"].labels(decoder).set(n)

    def cards(self, utilisation: Mapping[str, float | None], refusals: int) -> None:
        """Sets the utilisation of each card's decoders, None if it is not known, and counts sources that were refused.
        refusals: so far."""
        for card, share in utilisation.items():
            if share is not None:
                self._all["decoder_utilization"].labels(card).set(share)
        with self._lock:
            more, self._refusals = refusals - self._refusals, refusals
        self._all["decoder_refusals_total"].inc(more)

    def rows(self, n: int, *, on_device: bool) -> None:
        """Counts rows sent to the engine, by memory: GPU or host."""
        self._rows[on_device].inc(n)

    def fps(self, source: str, fps: float) -> None:
        """Sets frames decoded per second, over the last seconds."""
        if (series := self._of(source)) is not None:
            series.fps.set(fps)

    def decode_s(self, source: str, seconds: float, n: int = 1) -> None:
        """Observes decoding time per frame, for n frames (a child sends sums once a second)."""
        if (series := self._of(source)) is not None:
            for _ in range(n):
                series.decode.observe(seconds)

    def prepare_s(self, source: str, seconds: float, n: int = 1) -> None:
        """Observes preparation time per frame, for n frames."""
        if (series := self._of(source)) is not None:
            for _ in range(n):
                series.prepare.observe(seconds)

    def glass_to_event(self, source: str, seconds: float) -> None:
        """Observes the time from a frame's packet to its result."""
        if (series := self._of(source)) is not None:
            series.glass_to_event.observe(seconds)

    def forget(self, source: str) -> None:
        with self._lock:
            self._gone[source] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
            series = self._sources.pop(source, None)
            if series is not None:
                series.remove()

    def mux_wait(self, seconds: float) -> None:
        """Observes the time from a frame's packet to its batch."""
        self._mux_wait.observe(seconds)

    def batch(self, size: int, reason: CloseReason) -> None:
        self._batch_frames.observe(size)
        counter = self._batches.get(reason)
        if counter is None:
            counter = self._batches[reason] = self._all["batches_total"].labels(CloseReason(reason).value)
        counter.inc()

    def infer(self, model: str, seconds: float) -> None:
        """Observes the engine's time for a batch. model: its configured name."""
        histogram = self._infer.get(model)
        if histogram is None:
            histogram = self._infer[model] = self._all["infer_seconds"].labels(model)
        histogram.observe(seconds)

    def sink_depth(self, sink: str, n: int, size_bytes: int = 0) -> None:
        """Sets what waits for the sink, in its channel and its spool."""
        series = self._of_sink(sink)
        series.depth.set(n)
        series.depth_bytes.set(size_bytes)

    def sink_dropped(self, sink: str, n: int = 1) -> None:
        """Counts results or messages that the sink dropped."""
        self._of_sink(sink).dropped.inc(n)

    def sink_errors(self, sink: str) -> None:
        self._of_sink(sink).errors.inc()

    def page(self) -> bytes:
        """The metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def _of(self, source: str) -> _Source | None:
        """The source's series; None if it was removed."""
        series = self._sources.get(source)
        if series is not None:
            return series
        with self._lock:
            if source in self._gone:
                return None
            if source not in self._sources:
                self._sources[source] = _Source(source, self._all, self._lock)
            return self._sources[source]

    def _of_sink(self, sink: str) -> _Sink:
        series = self._sinks.get(sink)
        if series is None:
            series = self._sinks[sink] = _Sink(sink, self._all)
        return series
