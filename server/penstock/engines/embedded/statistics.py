"""Counters of a model version, as Triton's ModelStatistics and as Prometheus text with Triton's names."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from tritonclient.grpc import service_pb2

from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded


class FailureReason(StrEnum):
    """Triton's reasons for failed requests."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Nanoseconds of one request: queue, input preparation, run, output preparation."""

    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @property
    def total(self) -> int:
        return self.queue + self.compute_input + self.compute_infer + self.compute_output


@dataclass(slots=True)
class DurationCounter:
    """A number of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Counts one event."""
        self.count += 1
        self.ns += ns

    @property
    def message(self) -> service_pb2.StatisticDuration:
        return service_pb2.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class ComputeCounters:
    """Durations of the three parts of an execution."""

    compute_input: DurationCounter = field(default_factory=DurationCounter)
    compute_infer: DurationCounter = field(default_factory=DurationCounter)
    compute_output: DurationCounter = field(default_factory=DurationCounter)

    def add(self, times: RunTimes) -> None:
        """Counts one execution."""
        self.compute_input.add(times.compute_input)
        self.compute_infer.add(times.compute_infer)
        self.compute_output.add(times.compute_output)


@dataclass(slots=True)
class VersionCounters:
    """Counters since the load. inference_count: rows. execution_count: session runs."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: DurationCounter = field(default_factory=DurationCounter)
    fail: DurationCounter = field(default_factory=DurationCounter)
    queue: DurationCounter = field(default_factory=DurationCounter)
    compute: ComputeCounters = field(default_factory=ComputeCounters)
    batches: dict[int, ComputeCounters] = field(default_factory=dict)
    failures: dict[FailureReason, int] = field(default_factory=lambda: dict.fromkeys(FailureReason, 0))

    def succeeded(self, rows: int, times: RunTimes) -> None:
        """Counts a request of that many rows."""
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(times.total)
        self.queue.add(times.queue)
        self.compute.add(times)
        self.batches.setdefault(rows, ComputeCounters()).add(times)

    def failed(self, error: BaseException, ns: int) -> None:
        """Counts an accepted request that failed after ns nanoseconds."""
        self.fail.add(ns)
        self.failures[_failure_reason(error)] += 1

    def message(self, model_name: str, version: str) -> service_pb2.ModelStatistics:
        """The counters as protobuf message."""
        nothing = service_pb2.StatisticDuration()
        return service_pb2.ModelStatistics(
            name=model_name,
            version=version,
            last_inference=self.last_inference_ms,
            inference_count=self.inference_count,
            execution_count=self.execution_count,
            inference_stats=service_pb2.InferStatistics(
                success=self.success.message,
                fail=self.fail.message,
                queue=self.queue.message,
                compute_input=self.compute.compute_input.message,
                compute_infer=self.compute.compute_infer.message,
                compute_output=self.compute.compute_output.message,
                cache_hit=nothing,
                cache_miss=nothing,
            ),
            batch_stats=[
                service_pb2.InferBatchStatistics(
                    batch_size=rows,
                    compute_input=batch.compute_input.message,
                    compute_infer=batch.compute_infer.message,
                    compute_output=batch.compute_output.message,
                )
                for rows, batch in sorted(self.batches.items())
            ],
        )


def _failure_reason(error: BaseException) -> FailureReason:
    """REJECTED: never run. CANCELED: the client left. BACKEND: the run failed."""
    if isinstance(error, Overloaded):
        return FailureReason.REJECTED
    if isinstance(error, asyncio.CancelledError | DeadlineExceeded):
        return FailureReason.CANCELED
    return FailureReason.BACKEND if isinstance(error, EngineFailed | InvalidRequest) else FailureReason.OTHER


PREFIX = "nv_inference_"


@dataclass(frozen=True, slots=True)
class VersionMetrics:
    """One version's counters. pending: requests that wait for an instance."""

    model_name: str
    version: str
    statistics: VersionCounters
    pending: int

    @property
    def labels(self) -> str:
        return f'model="{_escaped(self.model_name)}",version="{self.version}"'


# Name after nv_inference_, help, attribute of VersionCounters, and what it is divided by.
_COUNTERS = (
    ("request_success", "Number of successful inference requests, all batch sizes", "success.count", 1),
    ("count", "Number of inferences performed (rows of the requests)", "inference_count", 1),
    ("exec_count", "Number of model executions performed", "execution_count", 1),
    ("request_duration_us", "Cumulative inference request duration in microseconds", "success.ns", 1000),
    ("queue_duration_us", "Cumulative inference queuing duration in microseconds", "queue.ns", 1000),
    (
        "compute_input_duration_us",
        "Cumulative compute input duration in microseconds",
        "compute.compute_input.ns",
        1000,
    ),
    (
        "compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds",
        "compute.compute_infer.ns",
        1000,
    ),
    (
        "compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds",
        "compute.compute_output.ns",
        1000,
    ),
)


def metrics_page(rows: Iterable[VersionMetrics]) -> bytes:
    """The metrics page of these versions."""
    counted = list(rows)
    return "".join(f"{line}\n" for line in _metric_lines(counted)).encode() if counted else b""


def _metric_lines(rows: list[VersionMetrics]) -> Iterator[str]:
    for name, text, attribute, divisor in _COUNTERS:
        yield from _metric_head(name, "counter", text)
        value = attrgetter(attribute)
        yield from (f"{PREFIX}{name}{{{row.labels}}} {value(row.statistics) // divisor}" for row in rows)
    pending = "Instantaneous number of pending requests awaiting execution per-model."
    yield from _metric_head("pending_request_count", "gauge", pending)
    yield from (f"{PREFIX}pending_request_count{{{row.labels}}} {row.pending}" for row in rows)
    yield from _metric_head("request_failure", "counter", "Number of failed inference requests, all batch sizes")
    for row in rows:
        for reason, count in row.statistics.failures.items():
            yield f'{PREFIX}request_failure{{{row.labels},reason="{reason}"}} {count}'


def _metric_head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
