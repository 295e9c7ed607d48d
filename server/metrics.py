"""Every metric of the gateway, declared in one table, and the one object that the other rooms record with."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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

from server.core.infer import Timings

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Kind(Enum):
    """How a metric's value comes about: counted or observed as it happens, or read when somebody scrapes."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    READ_GAUGE = "gauge, read at the scrape"
    READ_COUNTER = "counter, read at the scrape"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One row of the table. Names get the prefix penstock_; buckets are the histogram's upper bounds in its unit."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE = (
    Declaration(
        "requests_total",
        Kind.COUNTER,
        "Inference requests answered, by final status: HTTP's, or gRPC's for the protocols grpc and guest.",
        ("model", "protocol", "code"),
    ),
    Declaration(
        "request_seconds",
        Kind.HISTOGRAM,
        "From the head of an inference request to its answer.",
        ("model", "protocol"),
        SECONDS,
    ),
    Declaration("decode_seconds", Kind.HISTOGRAM, "Decoding an image.", ("model",), SECONDS),
    Declaration("preprocess_seconds", Kind.HISTOGRAM, "Resizing and normalising a decoded image.", ("model",), SECONDS),
    Declaration(
        "queue_seconds", Kind.HISTOGRAM, "Waiting in the gateway, for a decoder or an engine.", ("model",), SECONDS
    ),
    Declaration("infer_seconds", Kind.HISTOGRAM, "The call to the engine.", ("model",), SECONDS),
    Declaration("postprocess_seconds", Kind.HISTOGRAM, "From output tensors to results.", ("model",), SECONDS),
    Declaration("batch_size", Kind.HISTOGRAM, "Rows of an engine call that the gateway formed.", ("model",), ROWS),
    Declaration(
        "rejected_total", Kind.COUNTER, "Requests that the gateway refused or failed itself, by reason.", ("reason",)
    ),
    Declaration("inferences_accepted_total", Kind.COUNTER, "Inferences that got a place in flight."),
    Declaration(
        "inferences_answered_total",
        Kind.COUNTER,
        "Of these, those that came to an answer: a model's, or the engine's own refusal, handed on.",
    ),
    Declaration(
        "inferences_failed_total", Kind.COUNTER, "Of these, those that the gateway failed, by reason.", ("reason",)
    ),
    Declaration(
        "inferences_cancelled_total",
        Kind.COUNTER,
        "Of these, those whose caller left, by where they were: decode, queue, batch, engine, stream.",
        ("stage",),
    ),
    Declaration(
        "decode_errors_total", Kind.COUNTER, "Images that could not be decoded or were not taken.", ("codec", "reason")
    ),
    Declaration("cancelled_total", Kind.COUNTER, "Requests whose client went away, by transport.", ("protocol",)),
    Declaration("inflight_requests", Kind.READ_GAUGE, "Requests in flight now."),
    Declaration(
        "inflight_bytes",
        Kind.READ_GAUGE,
        "Bytes of the requests in flight now, and of answers that nobody has read yet.",
    ),
    Declaration("max_inflight_requests", Kind.READ_GAUGE, "How many requests may be in flight."),
    Declaration("max_inflight_bytes", Kind.READ_GAUGE, "How many bytes of them."),
    Declaration("receiving_bytes", Kind.READ_GAUGE, "Bytes of HTTP bodies that are still on their way."),
    Declaration("http_connections", Kind.READ_GAUGE, "Connections to the REST port."),
    Declaration("queue_depth", Kind.READ_GAUGE, "Jobs waiting in a queue now.", ("queue",)),
    Declaration("batch_queue_requests", Kind.READ_GAUGE, "Requests that wait for a batch now.", ("model",)),
    Declaration("batch_queue_bytes", Kind.READ_GAUGE, "Bytes of the tensors that wait for a batch now.", ("model",)),
    Declaration("batch_calls", Kind.READ_GAUGE, "Batches that the engine has now.", ("model",)),
    Declaration(
        "batch_wait_seconds",
        Kind.READ_GAUGE,
        "Until a request of one row that came now would be answered, as predicted.",
        ("model",),
    ),
    Declaration("batches_total", Kind.READ_COUNTER, "Batches formed, by why they closed.", ("model", "reason")),
    Declaration(
        "batch_refused_total", Kind.READ_COUNTER, "Requests that the queue gave up, by reason.", ("model", "reason")
    ),
    Declaration("decoder_restarts_total", Kind.READ_COUNTER, "Decoder processes that were replaced."),
    Declaration("engine_up", Kind.READ_GAUGE, "1 while the engine answers and its canary inference succeeds."),
    Declaration("engine_restarts_total", Kind.READ_COUNTER, "Restarts of the engine since the stack started."),
    Declaration(
        "engine_stalls_total", Kind.READ_COUNTER, "Times that calls and a probe went unanswered: the circuit opened."
    ),
    Declaration("engine_retries_total", Kind.READ_COUNTER, "Calls that were sent to the engine a second time."),
    Declaration(
        "replica_up",
        Kind.READ_GAUGE,
        "1 for a replica of the engine that gets calls, 0 for one left out.",
        ("replica",),
    ),
    Declaration(
        "replica_ejections_total",
        Kind.READ_COUNTER,
        "Times that a replica was left out for failing more than the others.",
        ("replica",),
    ),
    Declaration("gateway_restarts_total", Kind.READ_COUNTER, "Restarts of the gateway since the stack started."),
    Declaration("fronts", Kind.READ_GAUGE, "Fronts that the core serves now; 0 where one process does all."),
    Declaration("guests", Kind.READ_GAUGE, "Other programs of this host that the core serves now, such as video."),
    Declaration("front_restarts_total", Kind.READ_COUNTER, "Restarts of fronts since the stack started."),
    Declaration("access_keys", Kind.READ_GAUGE, "API keys that let a caller in now."),
    Declaration("access_failed_reads_total", Kind.READ_COUNTER, "Changes of the access file that were not taken."),
    Declaration(
        "key_inflight_requests",
        Kind.READ_GAUGE,
        "Requests in flight now by API key; of all tokens as `tokens`, of all callers without a key as `none`.",
        ("key",),
    ),
    Declaration("spans_dropped_total", Kind.READ_COUNTER, "Spans that the collector of traces did not get."),
    Declaration(
        "slab_leased_bytes", Kind.READ_GAUGE, "Bytes of the memory shared with the engine that are in use now."
    ),
    Declaration("shared_memory_regions", Kind.READ_GAUGE, "Regions of memory that clients share with the engine now."),
    Declaration("shared_memory_bytes", Kind.READ_GAUGE, "Bytes of the regions that clients share now."),
    Declaration(
        "shared_memory_expired_total",
        Kind.READ_COUNTER,
        "Regions that went without being unregistered: unused for their lease, or their client's connection gone.",
        ("reason",),
    ),
    Declaration("ready", Kind.READ_GAUGE, "1 while the gateway says that it is ready."),
    Declaration(
        "model_ready",
        Kind.READ_GAUGE,
        "1 for a model that serves, 0 for one that failed or is refused; none for one that nobody wants loaded.",
        ("model",),
    ),
    Declaration(
        "mps_up",
        Kind.READ_GAUGE,
        "1 while an MPS daemon listens in CUDA_MPS_PIPE_DIRECTORY, as seen in the last 30 s; only where that is set.",
    ),
    Declaration("build_info", Kind.READ_GAUGE, "Always 1; which version serves.", ("version",)),
)
# By the library, of the process that has the page: the gateway, or the core where there are fronts. Video has them too.
PROCESS_METRICS = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")
Readings = Mapping[tuple[str, ...], float]


KILLED = "killed"  # why an inference failed whose process was
METRIC_FILES = "metrics"  # the usual folder of shared files, in a run directory


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Where several processes of one gateway count together, each in files of its own.

    process: whose files; one that replaces another under the same name counts on from where that one was.
    """

    folder: Path
    process: str


class Metrics:
    """The gateway's registry. Not a singleton: the composer makes one and hands it on."""

    def __init__(self, shared: SharedFiles | None = None) -> None:
        """shared: of one process among several; its text is of all of them, but for what is read at the scrape.

        The library knows one kind of value a process: a process that has said `shared` once says it always.
        """
        # The library's own series beside each counter says when it began, which nobody asks.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there
        if shared is not None:
            _count_in_files(shared)
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._readers: dict[str, Callable[[], Readings]] = {}
        # What each request meets: the library takes longer to find a series by its labels than to count in it.
        self._done: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._infer_seconds: dict[str, Histogram] = {}
        self._accepted = self._answered = 0  # since the last flush
        for row in TABLE:
            name = f"penstock_{row.name}"
            if row.kind is Kind.COUNTER:
                self._counters[row.name] = Counter(name, row.help, row.labels, registry=self._registry)
            elif row.kind is Kind.HISTOGRAM:
                self._histograms[row.name] = Histogram(
                    name, row.help, row.labels, buckets=row.buckets, registry=self._registry
                )
        if shared is not None:
            self._settle(shared)
            self._registry = CollectorRegistry()
            MultiProcessCollector(self._registry, str(shared.folder))  # type: ignore[no-untyped-call]  # as above
        self._registry.register(_ReadMetrics(self._readers))
        ProcessCollector(registry=self._registry)  # read from /proc when asked, not counted in the shared files

    def read(self, name: str, reader: Callable[[], float | Readings]) -> None:
        """Ask the reader at each scrape: one number, or numbers by label values, as the table declares."""

        def readings() -> Readings:
            value = reader()
            return value if isinstance(value, Mapping) else {(): value}

        self._readers[name] = readings

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """An inference request was answered. model: a bounded label, never a client's own word."""
        done = self._done.get((model, protocol, code))
        if done is None:
            counter = self._counters["requests_total"].labels(model, protocol, code)
            done = counter, self._histograms["request_seconds"].labels(model, protocol)
            self._done[model, protocol, code] = done
        done[0].inc()
        done[1].observe(seconds)

    def stages(self, model: str, timings: Timings) -> None:
        """The stages of an image request."""
        for stage in STAGES:
            self._histograms[f"{stage}_seconds"].labels(model).observe(getattr(timings, stage))

    def prepared(self, model: str, timings: Timings) -> None:
        """The stages of encoded images that go on to the engine as a tensor."""
        for stage in ("decode", "preprocess", "queue"):
            self._histograms[f"{stage}_seconds"].labels(model).observe(getattr(timings, stage))

    def relayed(self, model: str, seconds: float) -> None:
        """The engine answered a request that passed through as bytes."""
        infer_seconds = self._infer_seconds.get(model)
        if infer_seconds is None:
            infer_seconds = self._infer_seconds[model] = self._histograms["infer_seconds"].labels(model)
        infer_seconds.observe(seconds)

    def batch(self, model: str, rows: int) -> None:
        """The gateway formed an engine call of so many rows."""
        self._histograms["batch_size"].labels(model).observe(rows)

    def rejected(self, reason: str) -> None:
        """The gateway refused or failed a request itself. reason: an error class's stable word."""
        self._counters["rejected_total"].labels(reason).inc()

    def decode_error(self, codec: str, reason: str) -> None:
        """An image was not taken. codec: jpeg, png, webp or unknown."""
        self._counters["decode_errors_total"].labels(codec, reason).inc()

    def cancelled(self, protocol: str) -> None:
        """A client went away before its answer."""
        self._counters["cancelled_total"].labels(protocol).inc()

    def inference_accepted(self) -> None:
        """An inference got its place: exactly one of answered, failed and cancelled follows."""
        self._accepted += 1

    def inference_answered(self) -> None:
        """It came to an answer."""
        self._answered += 1

    def flush(self) -> None:
        """Write down what is counted in passing: the library's counters cost a request more than its whole passage."""
        accepted, answered, self._accepted, self._answered = self._accepted, self._answered, 0, 0
        self._counters["inferences_accepted_total"].inc(accepted)
        self._counters["inferences_answered_total"].inc(answered)

    def _settle(self, shared: SharedFiles) -> None:
        """A process of this name was killed: what it had accepted, and not ended, failed with it.

        What it had ended, and not yet written down as accepted, it had accepted.
        """
        accepted, ended = _inferences_of(shared)
        if accepted > ended:
            self._counters["inferences_failed_total"].labels(KILLED).inc(accepted - ended)
        elif ended > accepted:
            self._counters["inferences_accepted_total"].inc(ended - accepted)

    def inference_failed(self, reason: str) -> None:
        """The gateway failed it. reason: an error class's stable word."""
        self._counters["inferences_failed_total"].labels(reason).inc()

    def inference_cancelled(self, stage: str) -> None:
        """Its caller left."""
        self._counters["inferences_cancelled_total"].labels(stage).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format 0.0.4."""
        self.flush()
        return generate_latest(self._registry)


def _inferences_of(shared: SharedFiles) -> tuple[float, float]:
    """Those that this process, or one before it, accepted; and those that it ended, one way or the other."""
    counts = dict.fromkeys(("accepted", "answered", "failed", "cancelled"), 0.0)
    files = [str(path) for path in shared.folder.glob(f"counter_{shared.process}.db")]
    for metric in MultiProcessCollector.merge(files):  # type: ignore[no-untyped-call]  # as above
        for sample in metric.samples:
            word = sample.name.removeprefix("penstock_inferences_").removesuffix("_total")
            if word in counts:
                counts[word] += sample.value
    return counts.pop("accepted"), sum(counts.values())


def _count_in_files(shared: SharedFiles) -> None:
    shared.folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared.folder)  # the library's only way to be told
    values.ValueClass = values.MultiProcessValue(lambda: shared.process)  # type: ignore[no-untyped-call]


class _ReadMetrics:
    """A collector over the readers, in the table's order."""

    def __init__(self, readers: dict[str, Callable[[], Readings]]) -> None:
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        for row in TABLE:
            reader = self._readers.get(row.name)
            if reader is None:
                continue
            family: GaugeMetricFamily | CounterMetricFamily
            if row.kind is Kind.READ_COUNTER:
                family = CounterMetricFamily(f"penstock_{row.name}", row.help, labels=row.labels)
            else:
                family = GaugeMetricFamily(f"penstock_{row.name}", row.help, labels=row.labels)
            for labels, value in reader().items():
                family.add_metric(list(labels), value)
            yield family
