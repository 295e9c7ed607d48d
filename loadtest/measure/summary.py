"""A phase's records as one PhaseResult: rates, percentiles, histogram, errors, stages, batch sizes, and its seconds.

Latencies are of answers that came and of timeouts, which count as long as they were waited for: leaving those out
would praise a server that does not answer. Refusals are told apart, for a quick "no" is no quick answer.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtest.measure.columns import Columns, columns_of
from loadtest.measure.percentiles import histogram_of, percentiles_of
from loadtest.measure.timeline import timeline_of
from loadtest.results import GeneratorHealth, Load, PhaseResult, Record, RequestSummary, Side, Stages, Status

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
    records: Sequence[Record],
    facts: PhaseFacts,
    *,
    slo_p99_ms: float,
    health: GeneratorHealth,
    loads: Sequence[Load] = (),
) -> PhaseResult:
    """What the records of one phase, round and side come to; a phase without records is all zeros.

    In an open loop the rates are over the schedule's seconds, and answers that came after its end still count: they
    answer what was asked within it. In a closed loop they are over the time until the last good answer.
    """
    columns = columns_of(records)
    seconds = _length_s(columns, facts)
    everything = _summary("all", records, columns, slo_p99_ms)
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
        by_request=_by_request(records, columns, slo_p99_ms),
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


def _by_request(records: Sequence[Record], columns: Columns, slo_p99_ms: float) -> tuple[RequestSummary, ...]:
    places: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        places.setdefault(record.request, []).append(place)
    return tuple(
        _summary(label, [records[place] for place in places[label]], columns.only(np.array(places[label])), slo_p99_ms)
        for label in sorted(places)
    )


def _summary(label: str, records: Sequence[Record], columns: Columns, slo_p99_ms: float) -> RequestSummary:
    is_ok = columns.has(Status.OK)
    waited = columns.has(Status.OK, Status.TIMEOUT)
    refused = columns.has(Status.REFUSED)
    answers = [record for record in records if record.status is Status.OK]
    return RequestSummary(
        label=label,
        intended=len(records),
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
        stages=_mean_stages(answers),
        batch_sizes=tuple(sorted(Counter(record.batch_size for record in answers if record.batch_size).items())),
        errors=tuple(Counter(record.error for record in records if record.error).most_common(ERRORS_KEPT)),
    )


def _mean_stages(answers: Sequence[Record]) -> Stages | None:
    """The mean over the answers that say anything of their stages; None where none does."""
    table = np.array([_stages(record) for record in answers if any(_stages(record))])
    return Stages(*(float(mean) for mean in table.mean(axis=0))) if table.size else None


def _stages(record: Record) -> tuple[float, ...]:
    return (
        record.decode_ms,
        record.preprocess_ms,
        record.queue_ms,
        record.infer_ms,
        record.postprocess_ms,
        record.total_ms,
    )
