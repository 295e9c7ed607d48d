"""Records the gateway's metrics, which penstock/metric_table.py declares."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.gateway.request_counts import Counts, samples_in, samples_of, sum_samples
from penstock.metric_table import METRICS, MetricKind, Readings
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Timings

# From prometheus_client, of the process with the metrics port: the gateway, or the core. The video program has them
# too.
PROCESS_METRICS = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


KILLED = "killed"  # reason of inferences whose process was killed
METRIC_FILES = "metrics"  # the usual folder of shared files, in a run directory


@dataclass(frozen=True, slots=True)
class MetricFiles:
    """Files in which several processes count together. process: names its files; its replacement continues."""

    folder: Path
    process: str


class Metrics:
    """The gateway's metrics registry."""

    def __init__(self, shared: MetricFiles | None = None) -> None:
        """shared: `text` then covers several processes. prometheus_client cannot undo this in a process."""
        # Disables the extra series beside each counter, with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there
        if shared is not None:
            _use_shared_files(shared)
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._readers: dict[str, Callable[[], Readings]] = {}
        # Series of frequent labels, because a look-up in the library takes longer than counting.
        self._done: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._infer_seconds: dict[str, Histogram] = {}
        self._stages: dict[str, tuple[Histogram, ...]] = {}
        self._accepted = self._answered = 0  # since the last flush
        self._folder = shared.folder if shared is not None else None
        for row in METRICS:
            name = f"penstock_{row.name}"
            if row.kind is MetricKind.COUNTER:
                self._counters[row.name] = Counter(name, row.help, row.labels, registry=self._registry)
            elif row.kind is MetricKind.HISTOGRAM:
                self._histograms[row.name] = Histogram(
                    name, row.help, row.labels, buckets=row.buckets, registry=self._registry
                )
        if shared is not None:
            self._settle(shared)
            self._registry = CollectorRegistry()
            MultiProcessCollector(self._registry, str(shared.folder))  # type: ignore[no-untyped-call]  # as above
        self.loop_lag = LoopLag()
        self.read("loop_lag_seconds", lambda: self.loop_lag.seconds)
        self._registry.register(_ReadMetrics(self._readers))
        ProcessCollector(registry=self._registry)  # read from /proc at the scrape, not counted in the shared files

    def read(self, name: str, reader: Callable[[], float | Readings]) -> None:
        """Calls the reader at each scrape for one number, or numbers by label values, as the table declares."""

        def readings() -> Readings:
            value = reader()
            return value if isinstance(value, Mapping) else {(): value}

        self._readers[name] = readings

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """Counts an answered inference. model: a bounded label, never a client's own text."""
        done = self._done.get((model, protocol, code))
        if done is None:
            counter = self._counters["requests_total"].labels(model, protocol, code)
            done = counter, self._histograms["request_seconds"].labels(model, protocol)
            self._done[model, protocol, code] = done
        done[0].inc()
        done[1].observe(seconds)

    def stages(self, model: str, timings: Timings) -> None:
        series = self._stages.get(model)
        if series is None:
            series = tuple(self._histograms[f"{stage}_seconds"].labels(model) for stage in STAGES)
            self._stages[model] = series
        for stage, seconds in zip(STAGES, series, strict=True):
            seconds.observe(getattr(timings, stage))

    def prepared(self, model: str, timings: Timings) -> None:
        """Records the preparation of encoded images that become a tensor."""
        for stage in ("decode", "preprocess", "queue"):
            self._histograms[f"{stage}_seconds"].labels(model).observe(getattr(timings, stage))

    def relayed(self, model: str, seconds: float) -> None:
        """Records the engine time of a relayed request."""
        infer_seconds = self._infer_seconds.get(model)
        if infer_seconds is None:
            infer_seconds = self._infer_seconds[model] = self._histograms["infer_seconds"].labels(model)
        infer_seconds.observe(seconds)

    def batch(self, model: str, rows: int) -> None:
        self._histograms["batch_size"].labels(model).observe(rows)

    def rejected(self, reason: str) -> None:
        """Counts a request that the gateway rejected or failed. reason: of the error's class."""
        self._counters["rejected_total"].labels(reason).inc()

    def decode_error(self, codec: str, reason: str) -> None:
        """Counts a rejected image. codec: jpeg, png, webp or unknown."""
        self._counters["decode_errors_total"].labels(codec, reason).inc()

    def cancelled(self, protocol: str) -> None:
        """Counts a client that left before its response."""
        self._counters["cancelled_total"].labels(protocol).inc()

    def inference_accepted(self) -> None:
        """Counts an inference in a slot. Exactly one of answered, failed and cancelled follows."""
        self._accepted += 1

    def inference_answered(self) -> None:
        self._answered += 1

    def flush(self) -> None:
        """Adds the counts since the last flush to the library's counters, which are slow to increment."""
        accepted, answered, self._accepted, self._answered = self._accepted, self._answered, 0, 0
        self._counters["inferences_accepted_total"].inc(accepted)
        self._counters["inferences_answered_total"].inc(answered)

    def _settle(self, shared: MetricFiles) -> None:
        """Counts a killed predecessor's unfinished inferences as failed."""
        accepted, ended = _inferences_of(shared)
        if accepted > ended:
            self._counters["inferences_failed_total"].labels(KILLED).inc(accepted - ended)
        elif ended > accepted:
            self._counters["inferences_accepted_total"].inc(ended - accepted)

    def inference_failed(self, reason: str) -> None:
        self._counters["inferences_failed_total"].labels(reason).inc()

    def inference_cancelled(self, stage: str) -> None:
        """Counts an inference whose client left."""
        self._counters["inferences_cancelled_total"].labels(stage).inc()

    @property
    def is_shared(self) -> bool:
        """Whether several processes count."""
        return self._folder is not None

    def request_counts(self) -> Counts:
        """Inferences by model, of all processes. Blocks for milliseconds if there are several."""
        if self._folder is not None:
            return sum_samples(samples_in(self._folder))
        counted = self._counters["requests_total"], self._histograms["request_seconds"]
        return sum_samples(samples_of(family for metric in counted for family in metric.collect()))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        self.flush()
        return generate_latest(self._registry)


def _inferences_of(shared: MetricFiles) -> tuple[float, float]:
    """Inferences that this process, or one before it, accepted and ended."""
    counts = dict.fromkeys(("accepted", "answered", "failed", "cancelled"), 0.0)
    files = [str(path) for path in shared.folder.glob(f"counter_{shared.process}.db")]
    for metric in MultiProcessCollector.merge(files):  # type: ignore[no-untyped-call]  # as above
        for sample in metric.samples:
            word = sample.name.removeprefix("penstock_inferences_").removesuffix("_total")
            if word in counts:
                counts[word] += sample.value
    return counts.pop("accepted"), sum(counts.values())


def _use_shared_files(shared: MetricFiles) -> None:
    shared.folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared.folder)  # the only setting that the library reads
    values.ValueClass = values.MultiProcessValue(lambda: shared.process)  # type: ignore[no-untyped-call]


class LoopLag:
    """The largest delay of an event loop's timers, in seconds, over the last one to two windows."""

    LOOK_S, LOOKS_A_WINDOW = 0.5, 20

    def __init__(self) -> None:
        self._before = self._current = 0.0
        self._looks = 0

    @property
    def seconds(self) -> float:
        return max(self._before, self._current)

    def add(self, delay_s: float) -> None:
        if self._looks == self.LOOKS_A_WINDOW:
            self._before, self._current, self._looks = self._current, 0.0, 0
        self._current = max(self._current, delay_s)
        self._looks += 1

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            due = time.monotonic() + self.LOOK_S
            await asyncio.sleep(self.LOOK_S)
            self.add(max(0.0, time.monotonic() - due))


class _ReadMetrics:
    """A collector over the readers, in the table's order."""

    def __init__(self, readers: dict[str, Callable[[], Readings]]) -> None:
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        for row in METRICS:
            reader = self._readers.get(row.name)
            if reader is None:
                continue
            family: GaugeMetricFamily | CounterMetricFamily
            if row.kind is MetricKind.READ_COUNTER:
                family = CounterMetricFamily(f"penstock_{row.name}", row.help, labels=row.labels)
            else:
                family = GaugeMetricFamily(f"penstock_{row.name}", row.help, labels=row.labels)
            for labels, value in reader().items():
                family.add_metric(list(labels), value)
            yield family


def note_refused(
    record: Metrics,
    log: structlog.typing.FilteringBoundLogger,
    error: InferenceError,
    event: str = "request refused",
    **where: str,
) -> None:
    """Counts and logs a request that the gateway refused or failed. where: further fields of the line."""
    record.rejected(error.reason)
    log.debug(event, reason=error.reason, error=error.message, **where)
