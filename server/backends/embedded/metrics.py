"""The engine's metrics under Triton's names, as Prometheus' text.

Written out here because prometheus-client ends every counter's name in _total, which Triton's do not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from server.backends.embedded.statistics import VersionStatistics

PREFIX = "nv_inference_"


@dataclass(frozen=True, slots=True)
class Counted:
    """One version's figures. pending: requests that wait for an instance now."""

    model_name: str
    version: str
    statistics: VersionStatistics
    pending: int

    @property
    def labels(self) -> str:
        return f'model="{_escaped(self.model_name)}",version="{self.version}"'


# name after nv_inference_, type, help, value of one version
_FAMILIES: tuple[tuple[str, str, str, Callable[[Counted], int]], ...] = (
    (
        "request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda row: row.statistics.success.count,
    ),
    (
        "count",
        "counter",
        "Number of inferences performed (rows of the requests)",
        lambda row: row.statistics.inference_count,
    ),
    ("exec_count", "counter", "Number of model executions performed", lambda row: row.statistics.execution_count),
    (
        "request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds",
        lambda row: row.statistics.success.ns // 1000,
    ),
    (
        "queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds",
        lambda row: row.statistics.queue.ns // 1000,
    ),
    (
        "compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds",
        lambda row: row.statistics.compute.compute_input.ns // 1000,
    ),
    (
        "compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds",
        lambda row: row.statistics.compute.compute_infer.ns // 1000,
    ),
    (
        "compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds",
        lambda row: row.statistics.compute.compute_output.ns // 1000,
    ),
    (
        "pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda row: row.pending,
    ),
)


def page(rows: Iterable[Counted]) -> bytes:
    """The metrics page of these versions."""
    counted = list(rows)
    return "".join(f"{line}\n" for line in _lines(counted)).encode() if counted else b""


def _lines(rows: list[Counted]) -> Iterator[str]:
    for name, kind, text, value in _FAMILIES:
        yield from _head(name, kind, text)
        yield from (f"{PREFIX}{name}{{{row.labels}}} {value(row)}" for row in rows)
    yield from _head("request_failure", "counter", "Number of failed inference requests, all batch sizes")
    for row in rows:
        for reason, count in row.statistics.failures.items():
            yield f'{PREFIX}request_failure{{{row.labels},reason="{reason}"}} {count}'


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
