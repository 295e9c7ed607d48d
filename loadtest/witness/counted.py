"""What a server's counters say of the requests between two readings. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.results import ServerQuantile
from loadtest.scenario import Ask, Kind
from loadtest.witness.page import (
    CounterReset,
    Histogram,
    Page,
    add_histograms,
    counter_delta,
    histogram_delta,
    quantile_bounds,
)

GATEWAY, ENGINE = "penstock_", "nv_inference_"
GATEWAY_STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")
ENGINE_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
GRPC = (Kind.GRPC, Kind.GRPC_STREAM)

Stages = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests that the server answered. latency: its distribution, where the server keeps a histogram.

    probes_per_s: how many requests a second somebody else is expected to send (a gateway's canaries). batch_sizes:
    (rows, executions); a histogram's buckets stand by their upper bound, what is above the last one by that + 1.
    """

    answered: int
    mean_ms: float
    latency: Histogram | None = None
    stages_ms: Stages = ()
    batch_sizes: tuple[tuple[int, int], ...] = ()
    probes_per_s: float = 0.0

    @property
    def quantiles(self) -> tuple[ServerQuantile, ...]:
        """Those that so many requests can tell: p999 of a hundred is only their highest."""
        if self.latency is None:
            return ()
        return tuple(
            ServerQuantile(q, *(bound * 1e3 for bound in quantile_bounds(self.latency.buckets, q)))
            for q in QUANTILES
            if self.latency.count * (1 - q) >= 1
        )


def is_counted(page: Page) -> bool:
    """Whether the page has what this file reads."""
    return page.has(GATEWAY) or page.has(ENGINE)


def knows_one_of(page: Page, models: Iterable[str]) -> bool:
    """Whether the page speaks of one of these models."""
    names = ("penstock_model_ready", "nv_inference_count")
    return any(page.select(name, {"model": model}) for name in names for model in models)


def count_requests(before: Page, after: Page, asks: Sequence[Ask]) -> Counted:
    """By the gateway's histograms where the page has them, else by Triton's counters. Raises CounterReset."""
    _refuse_restart(before, after)
    is_gateway = before.has(GATEWAY) or after.has(GATEWAY)
    return _by_gateway(before, after, asks) if is_gateway else _by_engine(before, after, asks)


def _refuse_restart(before: Page, after: Page) -> None:
    """A new process may by now have counted more than the old one had, so that no counter shows that it is new."""
    if (counter_delta(before, after, "penstock_gateway_restarts_total", {}) or 0) > 0:
        raise CounterReset("the gateway was started again meanwhile (penstock_gateway_restarts_total grew)")
    started = before.samples.get("process_start_time_seconds", {})
    for labels, value in after.samples.get("process_start_time_seconds", {}).items():
        if started.get(labels, value) != value:
            raise CounterReset("the server was started again meanwhile (process_start_time_seconds changed)")


def _by_gateway(before: Page, after: Page, asks: Sequence[Ask]) -> Counted:
    pairs = {(ask.model, "grpc" if ask.kind in GRPC else "http") for ask in asks}
    labels = [{"model": model, "protocol": protocol} for model, protocol in sorted(pairs)]
    models = [{"model": model} for model in sorted({ask.model for ask in asks})]
    latency = _histogram(before, after, "penstock_request_seconds", labels)
    stages = {name: _histogram(before, after, f"penstock_{name}_seconds", models) for name in GATEWAY_STAGES}
    return Counted(
        latency.count,
        latency.mean * 1e3,
        latency,
        tuple((name, stage.mean * 1e3) for name, stage in stages.items() if stage.count),
        _rows(_histogram(before, after, "penstock_batch_size", models)),
    )


def _by_engine(before: Page, after: Page, asks: Sequence[Ask]) -> Counted:
    models = sorted({ask.model for ask in asks})

    def grown(name: str) -> float:
        return sum(counter_delta(before, after, f"{ENGINE}{name}", {"model": model}) or 0.0 for model in models)

    successes = grown("request_success")
    each_ms = 1e-3 / successes if successes else 0.0
    return Counted(
        round(successes + grown("request_failure")),
        grown("request_duration_us") * each_ms,
        stages_ms=tuple((f"engine_{stage}", grown(f"{stage}_duration_us") * each_ms) for stage in ENGINE_STAGES),
        probes_per_s=1.0,
    )


def _histogram(before: Page, after: Page, name: str, labels: Sequence[Mapping[str, str]]) -> Histogram:
    return add_histograms(found for each in labels if (found := histogram_delta(before, after, name, each)))


def _rows(histogram: Histogram) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    earlier, last = 0, 0
    for bound, count in histogram.buckets:
        last = last + 1 if bound == float("inf") else round(bound)
        if count > earlier:
            found.append((last, count - earlier))
        earlier = count
    return tuple(found)
