"""A server's counters between two readings, and where they disagree with the client's records. No I/O."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_load.results import Percentiles, RequestSummary, ServerQuantile
from penstock_load.scenario import Kind, RequestSpec

Labels = frozenset[tuple[str, str]]
Series = Mapping[Labels, float]
Buckets = tuple[tuple[float, int], ...]


class CounterReset(Exception):
    """A counter fell or vanished between two readings: the server was started again, so their difference says nothing.

    One sentence.
    """


@dataclass(frozen=True, slots=True)
class Page:
    """Samples by name and labels, as a metrics page or a Prometheus server gives them."""

    samples: Mapping[str, Series] = field(default_factory=dict)

    def has(self, prefix: str) -> bool:
        """Whether any sample's name begins so."""
        return any(name.startswith(prefix) for name in self.samples)

    def select(self, name: str, labels: Mapping[str, str]) -> dict[Labels, float]:
        """The series of that name that carry these labels, whatever else they carry."""
        wanted = labels.items()
        return {found: value for found, value in self.samples.get(name, {}).items() if wanted <= dict(found).items()}


@dataclass(frozen=True, slots=True)
class Histogram:
    """What a histogram counted. buckets: (upper bound in s, observations up to it), ascending, the last one inf."""

    buckets: Buckets = ()
    count: int = 0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        """0 where nothing was counted."""
        return self.sum / self.count if self.count else 0.0


def counter_delta(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> float | None:
    """By how much the matching series grew together; None if the later page has none. Raises CounterReset.

    A series that the earlier page did not have yet began at 0.
    """
    grown = _grown(before, after, name, labels)
    return sum(grown.values()) if grown else None


def histogram_delta(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> Histogram | None:
    """What the matching histograms counted in between; None if the later page has none. Raises CounterReset.

    name: without _bucket, _count and _sum.
    """
    buckets: dict[float, float] = {}
    for found, grown in _grown(before, after, f"{name}_bucket", labels).items():
        bound = float(dict(found)["le"])
        buckets[bound] = buckets.get(bound, 0.0) + grown
    count = counter_delta(before, after, f"{name}_count", labels)
    if count is None:
        return None
    return Histogram(
        tuple((bound, round(number)) for bound, number in sorted(buckets.items())),
        round(count),
        counter_delta(before, after, f"{name}_sum", labels) or 0.0,
    )


def add_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """All of them as one; their buckets' bounds are taken to be the same."""
    buckets: dict[float, int] = {}
    count, total = 0, 0.0
    for histogram in histograms:
        count, total = count + histogram.count, total + histogram.sum
        for bound, number in histogram.buckets:
            buckets[bound] = buckets.get(bound, 0) + number
    return Histogram(tuple(sorted(buckets.items())), count, total)


def quantile_bounds(buckets: Buckets, q: float) -> tuple[float, float]:
    """(low, high) in s of the bucket that holds the nearest-rank quantile; (0, inf) where nothing was counted.

    No interpolation: a histogram knows no more than this. high is inf above the last bound.
    """
    count = buckets[-1][1] if buckets else 0
    rank = min(max(1, math.ceil(q * count - 1e-9)), count)
    low = 0.0
    for bound, number in buckets:
        if count and number >= rank:
            return low, bound
        low = bound
    return 0.0, math.inf


def _grown(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> dict[Labels, float]:
    earlier, later = before.select(name, labels), after.select(name, labels)
    for found, value in earlier.items():
        if later.get(found, -1.0) < value:
            raise CounterReset(f"{name}{_written(found)} fell from {value:g}: the server was started again meanwhile")
    return {found: value - earlier.get(found, 0.0) for found, value in later.items()}


def _written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels)) + "}"


GATEWAY, ENGINE = "penstock_", "nv_inference_"
GATEWAY_STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")
ENGINE_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
GRPC = (Kind.GRPC, Kind.GRPC_STREAM)

Stages = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests that the server answered. latency: its distribution, where the server keeps a histogram.

    probes_per_s: how many requests a second another client is expected to send (a gateway's canaries). batch_sizes:
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


def count_requests(before: Page, after: Page, asks: Sequence[RequestSpec]) -> Counted:
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


def _by_gateway(before: Page, after: Page, asks: Sequence[RequestSpec]) -> Counted:
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


def _by_engine(before: Page, after: Page, asks: Sequence[RequestSpec]) -> Counted:
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


TOLERANCE_SHARE = 0.2
TOLERANCE_MS = 2.0
COMPARED = (0.5, 0.99)


def disagreements(client: RequestSummary, counted: Counted, *, seconds: float) -> tuple[str, ...]:
    """One sentence for each thing on which they disagree: how many requests there were, their median, their p99.

    seconds: how long both counted. Failures and timeouts may be among the server's answers or not.
    """
    sentences = (_on_the_count(client, counted, seconds), *_on_the_quantiles(client, counted))
    return tuple(sentence for sentence in sentences if sentence)


def answers_expected(client: RequestSummary) -> tuple[int, int]:
    """The least and the most that a server which answered this client alone has counted."""
    least = client.ok + client.refused
    return least, least + client.failed + client.timeouts


def _on_the_count(client: RequestSummary, counted: Counted, seconds: float) -> str:
    least, most = answers_expected(client)
    said = f"client got {least} answers, server counted {counted.answered}"
    if counted.answered < least:
        return f"{said}: {least - counted.answered} were answered by another server, or this is another server's count"
    if counted.answered > most + counted.probes_per_s * seconds:
        return f"{said}: {counted.answered - most} are not this client's; it was not alone, or answers were lost"
    return ""


def _on_the_quantiles(client: RequestSummary, counted: Counted) -> list[str]:
    if counted.latency is None or not counted.answered or not client.service.count:
        return []
    strangers = min(1.0, (abs(counted.answered - client.ok) + client.timeouts) / counted.answered)
    found = []
    for q in COMPARED:
        # Strangers among the server's requests (refusals, other clients) may all be faster, or all be slower.
        low_s, _ = quantile_bounds(counted.latency.buckets, max(0.0, q - strangers))
        _, high_s = quantile_bounds(counted.latency.buckets, min(1.0, q + strangers))
        found.append(_outside(f"p{q * 100:g}", _percentile(client.service, q), low_s * 1e3, high_s * 1e3))
    return found


def _outside(name: str, client_ms: float, low_ms: float, high_ms: float) -> str:
    said = f"client {name} {client_ms:.3g} ms, server says {low_ms:.3g} to {high_ms:.3g} ms"
    if client_ms > high_ms * (1 + TOLERANCE_SHARE) + TOLERANCE_MS:
        return (
            f"{said}: {client_ms - high_ms:.3g} ms or more pass outside the server's measure (network, accept queue, "
            "or a busy generator)"
        )
    if client_ms < low_ms * (1 - TOLERANCE_SHARE) - TOLERANCE_MS:
        return f"{said}: the server counted requests slower than this client's by {low_ms - client_ms:.3g} ms or more"
    return ""


def _percentile(percentiles: Percentiles, q: float) -> float:
    return {0.5: percentiles.p50, 0.99: percentiles.p99}[q]
