"""What one version of a model has done, counted as Triton's ModelStatistics has it. Of one thread."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from tritonclient.grpc import service_pb2


class FailureReason(StrEnum):
    """Triton's words for why a request that was taken in failed."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Nanoseconds of one request: waiting, inputs made ready, the run, outputs made ready."""

    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @property
    def total(self) -> int:
        return self.queue + self.compute_input + self.compute_infer + self.compute_output


@dataclass(slots=True)
class Duration:
    """How often, and how long altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """One more."""
        self.count += 1
        self.ns += ns

    @property
    def message(self) -> service_pb2.StatisticDuration:
        return service_pb2.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class ComputeDurations:
    """The three parts of an execution."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, times: RunTimes) -> None:
        """One more execution."""
        self.compute_input.add(times.compute_input)
        self.compute_infer.add(times.compute_infer)
        self.compute_output.add(times.compute_output)


@dataclass(slots=True)
class VersionStatistics:
    """Counted from the load on. inference_count counts rows, execution_count runs of the session."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: ComputeDurations = field(default_factory=ComputeDurations)
    batches: dict[int, ComputeDurations] = field(default_factory=dict)
    failures: dict[FailureReason, int] = field(default_factory=lambda: dict.fromkeys(FailureReason, 0))

    def succeeded(self, rows: int, times: RunTimes) -> None:
        """A request of that many rows was answered."""
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(times.total)
        self.queue.add(times.queue)
        self.compute.add(times)
        self.batches.setdefault(rows, ComputeDurations()).add(times)

    def failed(self, reason: FailureReason, ns: int) -> None:
        """A request that had been taken in was not answered, after so long."""
        self.fail.add(ns)
        self.failures[reason] += 1

    def message(self, model_name: str, version: str) -> service_pb2.ModelStatistics:
        """As the wire has it."""
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
