"""What the users of one locust process send, what it counted, and the verdict on locust's statistics."""

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock_load.clients.client import Answer, Endpoint
from penstock_load.report.terminal import verdict_table
from penstock_load.results import Measurement, Spread, Status, Verdict
from penstock_load.scenario import RequestSpec, Scenario
from penstock_load.verdict import exit_code


def failure_of(answer: Answer) -> str:
    """Why a request failed, else empty; # replaces every number, so that one reason is one row of the statistics."""
    if answer.status is Status.OK:
        return ""
    reason = re.sub(r"\d+(\.\d+)?", "#", answer.error or answer.status)
    return f"{answer.code}: {reason}" if answer.code else reason


@dataclass(slots=True)
class CurrentRate:
    """What this process sends in a scenario at the moment, by the master's message of every second. rate: a second."""

    phase: str = ""
    rate: float = 0.0
    is_poisson: bool = False


@dataclass(slots=True)
class RunTerms:
    """Of the current run; locust's environment carries it as `terms`.

    now: set in a scenario. trouble: why nothing can be sent, else empty.
    """

    endpoint: Endpoint
    asks: tuple[RequestSpec, ...]
    timeout_s: float
    now: CurrentRate | None = None
    trouble: str = ""

    def name_of(self, ask: RequestSpec) -> str:
        """Row of the statistics for a request that is sent now."""
        return phase_name(ask.label, self.now.phase) if self.now else ask.label


def phase_name(label: str, phase: str) -> str:
    """A row of the statistics: what was asked in which phase."""
    return f"{label} · {phase}"


BUSY_SHARE = 0.9
SHORTEST_JUDGED_S = 5.0
MIN_SENT_SHARE = 0.95  # of the planned requests


class ProcessReport(msgspec.Struct, frozen=True):
    """What one process sent, and how busy its core was with that. seconds: how long it asked."""

    worker: str
    requests: int
    failures: int
    cpu_share: float
    seconds: float

    @property
    def complaint(self) -> str:
        """Where the generator was the bottleneck: a sentence, else empty. A run of a few seconds says nothing."""
        if self.cpu_share < BUSY_SHARE or self.seconds < SHORTEST_JUDGED_S:
            return ""
        return (
            f"the load generator was the bottleneck: {self.worker} used {self.cpu_share:.0%} of its core "
            f"(limit {BUSY_SHARE:.0%}); give it more processes (--processes) or machines (--worker)"
        )


@dataclass(slots=True)
class RequestCounter:
    """Counts what this process sends, by itself and not by locust's statistics."""

    requests: int = 0
    failures: int = 0
    began_s: float = 0.0
    cpu_s: float = 0.0
    sender_cpu_s: float = 0.0

    def begin(self, sender_cpu_s: float) -> None:
        """A run begins, and everything is prepared. sender_cpu_s: used so far by the process that sends."""
        self.requests = self.failures = 0
        self.began_s, self.cpu_s, self.sender_cpu_s = time.perf_counter(), time.process_time(), sender_cpu_s

    def count(self, exception: object = None, **_: object) -> None:
        """One request: locust's event."""
        self.requests += 1
        self.failures += exception is not None

    def account(self, worker: str, sender_cpu_s: float) -> ProcessReport:
        """Its report; of this process and the one that sends, the busier counts."""
        seconds = time.perf_counter() - self.began_s
        used_s = max(time.process_time() - self.cpu_s, sender_cpu_s - self.sender_cpu_s)
        share = used_s / seconds if seconds and self.began_s else 0.0
        return ProcessReport(worker, self.requests, self.failures, share, seconds)


PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


def bucket(response_time_ms: float) -> float:
    """A latency as locust's statistics keep it: three digits, where locust by itself rounds 104.9 ms to 100."""
    return float(f"{response_time_ms:.3g}")


def judged_entries(entries: Iterable[Any], scenario: Scenario | None) -> list[Any]:
    """The rows of locust's statistics that count: all, or those of the scenario's judged phases."""
    if scenario is None:
        return list(entries)
    phases = [phase.name for phase in scenario.phases if phase.is_judged]
    names = {phase_name(ask.label, phase) for ask, phase in itertools.product(scenario.requests, phases)}
    return [entry for entry in entries if entry.name in names]


def measurements(entries: Sequence[Any], seconds: float, *, slo_p99_ms: float) -> tuple[Measurement, ...]:
    """The figures that locust has of so many seconds; none without requests.

    slo_p99_ms: within which an answer is good. Latencies are of answers and timeouts, from the moment of sending:
    locust knows no other.
    """
    requests = sum(entry.num_requests for entry in entries)
    failures = sum(entry.num_failures for entry in entries)
    if not requests or seconds <= 0:
        return ()
    good = sum(
        count for entry in entries for latency_ms, count in entry.response_times.items() if latency_ms <= slo_p99_ms
    )
    figures = [
        ("ok_per_s", "/s", (requests - failures) / seconds),
        ("good_per_s", "/s", good / seconds),
        ("error_share", "share", failures / requests),
        *((name, "ms", value) for name, value in _percentiles(entries).items()),
    ]
    return tuple(Measurement(name, unit, Spread(value, value, value), 1) for name, unit, value in figures)


def _percentiles(entries: Sequence[Any]) -> dict[str, float]:
    """By nearest rank; none without latencies."""
    counts: dict[float, int] = {}
    for latency_ms, count in itertools.chain.from_iterable(entry.response_times.items() for entry in entries):
        counts[latency_ms] = counts.get(latency_ms, 0) + count
    total = sum(counts.values())
    return {name: _at_rank(counts, share * total) for name, share in PERCENTILES.items()} if total else {}


def _at_rank(counts: Mapping[float, int], rank: float) -> float:
    seen = itertools.accumulate(counts[latency_ms] for latency_ms in sorted(counts))
    return next(latency_ms for latency_ms, until in zip(sorted(counts), seen, strict=True) if until >= rank)


def shortfall(scenario: Scenario, intended: Mapping[str, float], requests: int) -> list[str]:
    """A sentence if far fewer requests were sent in the judged phases than planned. intended: requests by phase."""
    planned = sum(intended.get(phase.name, 0.0) for phase in scenario.phases if phase.is_judged)
    # Poisson arrivals differ from their mean by chance: three standard deviations are no shortfall.
    if requests >= MIN_SENT_SHARE * planned - 3 * planned**0.5:
        return []
    return [
        f"{requests} requests were sent of {planned:.0f} that {scenario.name} plans: a process of the load test was "
        "too slow or is gone; use more processes or a faster machine"
    ]


def show(rows: Sequence[Verdict], complaints: Sequence[str], console: Console) -> None:
    """Prints the table, what cannot be trusted, and the word for the whole; nothing where nothing was judged."""
    if rows:
        console.print(verdict_table(rows))
    for complaint in complaints:
        console.print(f"[red]not to be trusted:[/] {escape(complaint)}", soft_wrap=True)
    if rows or complaints:
        console.print("[red]FAIL[/]" if exit_code(rows, complaints) else "[green]PASS[/]")
