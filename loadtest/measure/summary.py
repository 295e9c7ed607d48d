"""A phase's records as one PhaseResult: rates, percentiles, histogram, errors, stages, batch sizes, and its seconds.

Latencies are of answers that came and of timeouts, which count as long as they were waited for: leaving those out
would praise a server that does not answer. Refusals are told apart, for a quick "no" is no quick answer.
"""

from collections.abc import Sequence

import msgspec

from loadtest.measure.columns import Columns
from loadtest.measure.ledger import Account, Ledger
from loadtest.measure.percentiles import histogram_of, percentiles_of
from loadtest.measure.timeline import timeline_of
from loadtest.results import GeneratorHealth, Load, PhaseResult, RequestSummary, Side, Status

ERRORS_KEPT = 10


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a phase besides its records.

    began_s: since the run's start. seconds: the schedule's, or how long callers were to begin new requests.
    server_cpu_s: CPU seconds that the server's processes spent in the phase; None: nobody could read them.
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
    ledger: Ledger,
    facts: PhaseFacts,
    *,
    slo_p99_ms: float,
    health: GeneratorHealth,
    loads: Sequence[Load] = (),
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
        errors=tuple(account.errors.most_common(ERRORS_KEPT)),
    )
