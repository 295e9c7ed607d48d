"""Summaries of a phase: totals, a row for each second, and the live figures while it runs."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock_load.measure.ledger import Account, Columns, Floats, Ledger, at_rank, histogram_of, percentiles_of
from penstock_load.results import GeneratorHealth, Load, PhaseResult, Record, RequestSummary, Second, Side, Status

Counts = NDArray[np.intp]

LONGEST_S = 7 * 24 * 3600  # a week: beyond it a time is taken for an error, not for a second to list


def timeline_of(columns: Columns, loads: Sequence[Load], *, began_s: float, seconds: float) -> tuple[Second, ...]:
    """Every second of the phase, empty ones too, and past its schedule as long as requests were intended.

    at_s: when the second began, since the run's start. bad: what was intended in it and not answered well.
    in_flight: requests that were sent and unanswered as it ended. Loads are the means of what was read within it.
    """
    second_of = _second_of(columns.intended_s, began_s)
    count = max(int(np.ceil(seconds)), int(second_of.max()) + 1 if second_of.size else 0)
    count = min(count, LONGEST_S)
    is_ok = columns.has(Status.OK)
    offered = np.bincount(second_of, minlength=count)
    ok = np.bincount(second_of[is_ok], minlength=count)
    p50_ms, p99_ms = _percentiles_a_second(columns, second_of, count)
    in_flight = _in_flight(columns, began_s + np.arange(1, count + 1, dtype=np.float64))
    load_in = _loads_a_second(loads, began_s)
    return tuple(
        Second(
            at_s=began_s + place,
            offered=int(offered[place]),
            ok=int(ok[place]),
            bad=int(offered[place] - ok[place]),
            p50_ms=float(p50_ms[place]),
            p99_ms=float(p99_ms[place]),
            in_flight=int(in_flight[place]),
            **_load_fields(load_in.get(place, [])),
        )
        for place in range(count)
    )


def _second_of(times_s: Floats, began_s: float) -> Counts:
    return np.clip(np.floor(times_s - began_s), 0, LONGEST_S - 1).astype(np.intp)


def _percentiles_a_second(columns: Columns, second_of: Counts, count: int) -> tuple[Floats, Floats]:
    waited = columns.has(Status.OK, Status.TIMEOUT)
    latency_ms, where = columns.latency_ms[waited], second_of[waited]
    order = np.lexsort((latency_ms, where))
    edges = np.searchsorted(where[order], np.arange(count + 1))
    p50_ms, p99_ms = np.zeros(count), np.zeros(count)
    for place in np.flatnonzero(np.diff(edges)):
        ascending = latency_ms[order[edges[place] : edges[place + 1]]]
        p50_ms[place], p99_ms[place] = at_rank(ascending, 500), at_rank(ascending, 990)
    return p50_ms, p99_ms


def _in_flight(columns: Columns, at_s: Floats) -> Counts:
    was_sent = ~columns.has(Status.NOT_SENT)
    sent, done = np.sort(columns.sent_s[was_sent]), np.sort(columns.done_s[was_sent])
    return np.searchsorted(sent, at_s, side="right") - np.searchsorted(done, at_s, side="right")


def _loads_a_second(loads: Sequence[Load], began_s: float) -> dict[int, list[Load]]:
    seconds: dict[int, list[Load]] = {}
    for load in loads:
        seconds.setdefault(int(np.floor(load.at_s - began_s)), []).append(load)
    return seconds


def _load_fields(loads: Sequence[Load]) -> dict[str, float | None]:
    return {
        "server_cpu": _mean(loads, lambda load: load.server_cpu),
        "machine_cpu": _mean(loads, lambda load: load.machine_cpu),
        "gpu": _mean(loads, lambda load: load.gpu),
        "gpu_sm": _mean(loads, lambda load: load.gpu_sm),
        "rss_mib": _mean(loads, lambda load: load.rss_mib),
    }


def _mean(loads: Sequence[Load], pick: Callable[[Load], float | None]) -> float | None:
    values = [value for load in loads if (value := pick(load)) is not None]
    return sum(values) / len(values) if values else None


MAX_ERRORS = 10


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a phase besides its records.

    began_s: since the run's start. seconds: the schedule's, or how long callers were to begin new requests.
    server_cpu_s: CPU seconds that the server's processes spent in the phase; None if unreadable.
    """

    round: int
    phase: str
    side: Side = Side.TARGET
    is_judged: bool = False
    is_capacity: bool = False
    is_open_loop: bool = True
    began_s: float = 0.0
    seconds: float = 0.0
    server_cpu_s: float | None = None


def summarise_phase(
    ledger: Ledger, facts: PhaseFacts, *, slo_p99_ms: float, health: GeneratorHealth, loads: Sequence[Load] = ()
) -> PhaseResult:
    """What one phase, round and side come to by its ledger; a phase without records is all zeros.

    In an open loop the rates are over the schedule's seconds, and answers that came after its end still count: they
    answer what was asked within it. In a closed loop they are over the time until the last good answer.
    """
    columns = ledger.columns()
    seconds = _length_s(columns, facts)
    everything = _summary("all", ledger.everything, columns, slo_p99_ms)
    return PhaseResult(
        round=facts.round,
        phase=facts.phase,
        side=facts.side,
        is_judged=facts.is_judged,
        is_capacity=facts.is_capacity,
        is_open_loop=facts.is_open_loop,
        began_s=facts.began_s,
        seconds=seconds,
        offered_per_s=_rate(everything.intended, seconds),
        ok_per_s=_rate(everything.ok, seconds),
        good_per_s=_rate(everything.good, seconds),
        all=everything,
        by_request=tuple(
            _summary(label, ledger.account(label), columns.only(ledger.places(label)), slo_p99_ms)
            for label in ledger.labels
        ),
        timeline=timeline_of(columns, loads, began_s=facts.began_s, seconds=facts.seconds),
        health=health,
        cpu_ms_per_ok=_cpu_ms_per_ok(facts.server_cpu_s, everything.ok),
    )


def _length_s(columns: Columns, facts: PhaseFacts) -> float:
    answered_s = columns.done_s[columns.has(Status.OK)]
    if facts.is_open_loop or not answered_s.size:
        return facts.seconds
    return max(facts.seconds, float(answered_s.max()) - facts.began_s)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _cpu_ms_per_ok(server_cpu_s: float | None, ok: int) -> float | None:
    return server_cpu_s * 1e3 / ok if server_cpu_s is not None and ok else None


def _summary(label: str, account: Account, columns: Columns, slo_p99_ms: float) -> RequestSummary:
    is_ok = columns.has(Status.OK)
    waited = columns.has(Status.OK, Status.TIMEOUT)
    refused = columns.has(Status.REFUSED)
    return RequestSummary(
        label=label,
        intended=columns.intended_s.size,
        ok=int(is_ok.sum()),
        good=int((is_ok & (columns.latency_ms <= slo_p99_ms)).sum()),
        refused=int(refused.sum()),
        failed=int(columns.has(Status.FAILED).sum()),
        timeouts=int(columns.has(Status.TIMEOUT).sum()),
        not_sent=int(columns.has(Status.NOT_SENT).sum()),
        latency=percentiles_of(columns.latency_ms[waited]),
        service=percentiles_of(columns.service_ms[waited]),
        refusals=percentiles_of(columns.latency_ms[refused]),
        histogram=histogram_of(columns.latency_ms[waited]),
        stages=account.mean_stages,
        batch_sizes=tuple(sorted(account.batch_sizes.items())),
        errors=tuple(account.errors.most_common(MAX_ERRORS)),
    )


MAX_LATENCIES = 20_000


class Live(msgspec.Struct, frozen=True):
    """Totals so far, and rate and latencies (milliseconds) of what was answered in the last seconds."""

    sent: int
    ok: int
    refused: int
    failed: int
    timeouts: int
    not_sent: int
    ok_per_s: float
    p50_ms: float
    p99_ms: float


class LiveCounts:
    """Counts records as they come. Memory is bounded: totals, a count a second, and the newest latencies.

    At more than 20,000 answers in the window, percentiles are of the newest 20,000.
    """

    def __init__(self, *, window_s: int = 5) -> None:
        self._window_s = window_s
        self._totals: Counter[Status] = Counter()
        self._ok_in: Counter[int] = Counter()
        self._latest: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self._first_s: float | None = None

    def add(self, records: Iterable[Record]) -> None:
        """Counts what ended since the last time, in any order."""
        for record in records:
            self._totals[record.status] += 1
            self._first_s = record.intended_s if self._first_s is None else min(self._first_s, record.intended_s)
            if record.status is Status.OK:
                self._ok_in[int(record.done_s)] += 1
            if record.status in (Status.OK, Status.TIMEOUT):
                self._latest.append((record.done_s, (record.done_s - record.intended_s) * 1e3))

    def snapshot(self, now_s: float) -> Live:
        """How it stands at that moment of the run. The rate is over whole seconds: the one that runs is left out."""
        self._forget_before(int(now_s) - self._window_s)
        latest = percentiles_of(np.array([ms for done_s, ms in self._latest if done_s > now_s - self._window_s]))
        totals = self._totals
        return Live(
            sent=totals.total() - totals[Status.NOT_SENT],
            ok=totals[Status.OK],
            refused=totals[Status.REFUSED],
            failed=totals[Status.FAILED],
            timeouts=totals[Status.TIMEOUT],
            not_sent=totals[Status.NOT_SENT],
            ok_per_s=self._rate(int(now_s)),
            p50_ms=latest.p50,
            p99_ms=latest.p99,
        )

    def _rate(self, second: int) -> float:
        if self._first_s is None:
            return 0.0
        ok = sum(count for at, count in self._ok_in.items() if at < second)
        seconds = min(float(self._window_s), second - self._first_s)
        return ok / seconds if seconds >= 0.5 else 0.0

    def _forget_before(self, second: int) -> None:
        for old in [at for at in self._ok_in if at < second]:
            del self._ok_in[old]
