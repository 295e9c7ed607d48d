"""What the records of a phase come to."""

import math
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_load.measure.ledger import BINS_A_DECADE, MAX_TEXTS, OTHER_TEXTS, Ledger, histogram_of, percentiles_of
from penstock_load.measure.summary import MAX_LATENCIES, LiveCounts, PhaseFacts, summarise_phase
from penstock_load.results import GeneratorHealth, Load, PhaseResult, Record, Side, Stages, Status
from tests.loadtest.runs import make_health, make_records

HEALTH = GeneratorHealth(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
FACTS = PhaseFacts(round=1, phase="steady", began_s=100.0, seconds=2.0)
LATENCIES = st.lists(st.floats(min_value=1e-3, max_value=1e6, allow_nan=False), min_size=1, max_size=300)


def record(intended_s: float, latency_ms: float, status: Status = Status.OK, **fields: object) -> Record:
    """One record; by default it was sent 1 ms after it was meant to be."""
    known = {"request": "image street", "sent_s": intended_s + 0.001} | fields
    return msgspec.convert(
        {
            "round": 1,
            "phase": "steady",
            "side": Side.TARGET,
            "intended_s": intended_s,
            "done_s": intended_s + latency_ms / 1e3,
            "status": status,
            **known,
        },
        Record,
    )


def summarise(records: list[Record], facts: PhaseFacts = FACTS, *, loads: tuple[Load, ...] = ()) -> PhaseResult:
    """The phase's result at an SLO of 100 ms."""
    return summarise_phase(Ledger.of(records), facts, slo_p99_ms=100.0, health=HEALTH, loads=loads)


@given(LATENCIES)
def test_percentiles_are_those_of_a_sorted_list(latencies: list[float]) -> None:
    """A percentile is the smallest measured value that its share of all does not exceed."""
    found = percentiles_of(np.array(latencies))
    ascending = sorted(latencies)
    for value, per_mille in ((found.p50, 500), (found.p90, 900), (found.p95, 950), (found.p99, 990), (found.p999, 999)):
        naive = next(v for n, v in enumerate(ascending, 1) if n * 1000 >= per_mille * len(ascending))
        assert value == naive
    assert (found.count, found.highest) == (len(latencies), max(latencies))


@given(LATENCIES)
def test_histogram_holds_every_latency_below_its_bound(latencies: list[float]) -> None:
    """No latency is lost, bins ascend, and a bin's bound is less than an eighth above what is in it."""
    histogram = histogram_of(np.array(latencies))
    bounds = [bound for bound, _ in histogram]
    assert bounds == sorted(set(bounds))
    assert sum(count for _, count in histogram) == len(latencies)
    assert all(count > 0 for _, count in histogram)
    lowest, highest = max(min(latencies), 0.01), max(latencies)
    widest = 10 ** (1 / BINS_A_DECADE) * 1.001
    assert lowest <= bounds[0] <= lowest * widest
    assert highest <= bounds[-1] <= max(highest * widest, 0.01)


def test_statuses_are_counted_apart_and_timeouts_count_as_latency() -> None:
    """Refusals and failures have no part in the latencies; who waited in vain does."""
    result = summarise(
        [
            record(100.0, 10.0),
            record(100.1, 150.0),
            record(100.2, 2.0, Status.REFUSED, error="503 full"),
            record(100.3, 3.0, Status.FAILED, error="500 broken"),
            record(100.4, 10_000.0, Status.TIMEOUT, error="no answer within 10 s"),
            record(100.5, 0.0, Status.NOT_SENT),
        ]
    )
    found = result.all
    assert (found.intended, found.ok, found.good, found.refused) == (6, 2, 1, 1)
    assert (found.failed, found.timeouts, found.not_sent) == (1, 1, 1)
    assert (found.latency.count, found.refusals.count) == (3, 1)
    assert found.latency.highest == pytest.approx(10_000.0)
    assert found.latency.p50 == pytest.approx(150.0)
    assert found.service.p50 == pytest.approx(149.0)
    assert found.refusals.p99 == pytest.approx(2.0)
    assert (result.offered_per_s, result.ok_per_s, result.good_per_s) == (3.0, 1.0, 0.5)


def test_latency_counts_from_the_intended_moment() -> None:
    """A generator that sends late does not shorten what users would have waited."""
    found = summarise([record(100.0, 500.0, sent_s=100.4)]).all
    assert (found.latency.p50, found.service.p50) == (pytest.approx(500.0), pytest.approx(100.0))
    assert (found.ok, found.good) == (1, 0)


def test_phase_without_records_is_all_zeros() -> None:
    """Nothing asked is no error: each figure is 0, each second is there."""
    result = summarise([])
    assert (result.offered_per_s, result.ok_per_s, result.good_per_s) == (0.0, 0.0, 0.0)
    assert result.all.latency.count == result.all.intended == 0
    assert result.by_request == result.all.histogram == ()
    assert [(second.at_s, second.offered) for second in result.timeline] == [(100.0, 0), (101.0, 0)]
    assert summarise([], PhaseFacts(round=1, phase="none")).timeline == ()


def test_open_loop_answers_after_the_schedules_end_count() -> None:
    """The rate is what the schedule's seconds asked for and got, late or not."""
    result = summarise([record(100.0, 10.0), record(101.9, 5_000.0)])
    assert (result.ok_per_s, result.seconds) == (1.0, 2.0)


def test_closed_loop_lasts_until_its_last_good_answer() -> None:
    """Callers that still wait when time is up lengthen the phase, but a timeout does not."""
    facts = msgspec.structs.replace(FACTS, is_open_loop=False)
    result = summarise([record(100.0, 10.0), record(101.9, 600.0), record(101.9, 9_000.0, Status.TIMEOUT)], facts)
    assert result.seconds == pytest.approx(2.5)
    assert result.ok_per_s == pytest.approx(2 / 2.5)
    assert summarise([record(100.0, 10.0)], facts).seconds == 2.0


def test_timeline_tells_each_second_by_the_intended_moment() -> None:
    """A second holds what was meant to be sent in it, what was in flight as it ended, and its loads' means."""
    result = summarise(
        [record(100.0, 10.0), record(100.5, 30.0), record(100.9, 300.0), record(101.5, 2.0, Status.REFUSED)],
        loads=(Load(100.2, server_cpu=1.0), Load(100.7, server_cpu=2.0, rss_mib=50.0), Load(300.0, server_cpu=9.0)),
    )
    first, second = result.timeline
    assert (first.offered, first.ok, first.bad, first.in_flight) == (3, 3, 0, 1)
    assert (first.p50_ms, first.p99_ms) == (pytest.approx(30.0), pytest.approx(300.0))
    assert (first.server_cpu, first.rss_mib, first.gpu) == (1.5, 50.0, None)
    assert (second.offered, second.ok, second.bad, second.in_flight) == (1, 0, 1, 0)
    assert (second.p99_ms, second.server_cpu) == (0.0, None)


def test_stages_batches_and_errors_are_those_of_the_answers() -> None:
    """Means are over the answers that say anything; the ten most frequent errors are kept with their counts."""
    spoken = {"decode_ms": 2.0, "infer_ms": 4.0, "total_ms": 7.0, "batch_size": 4}
    errors = [f"error {number}" for number in range(12) for _ in range(12 - number)]
    found = summarise(
        [
            record(100.0, 10.0, **spoken),
            record(100.0, 10.0, **(spoken | {"infer_ms": 8.0})),
            record(100.0, 10.0, batch_size=1),
            *[record(100.0, 1.0, Status.FAILED, error=error) for error in errors],
        ]
    ).all
    assert found.stages == Stages(decode_ms=2.0, infer_ms=6.0, total_ms=7.0)
    assert found.batch_sizes == ((1, 1), (4, 2))
    assert found.errors[:2] == (("error 0", 12), ("error 1", 11))
    assert len(found.errors) == 10


def test_requests_of_each_label_are_separate() -> None:
    """Every label has its own summary, and their counts add up to all."""
    records = [record(100.0, 10.0), record(100.0, 20.0, request="grpc street"), record(100.0, 30.0)]
    result = summarise(records)
    assert [(one.label, one.ok, one.latency.highest) for one in result.by_request] == [
        ("grpc street", 1, pytest.approx(20.0)),
        ("image street", 2, pytest.approx(30.0)),
    ]
    assert result.all.ok == 3


def test_cpu_is_that_of_the_servers_processes_for_a_right_answer() -> None:
    """CPU seconds over right answers, in milliseconds; unknown without a reading or an answer."""
    facts = msgspec.structs.replace(FACTS, server_cpu_s=0.5)
    assert summarise([record(100.0, 10.0)] * 100, facts).cpu_ms_per_ok == pytest.approx(5.0)
    assert summarise([record(100.0, 10.0)]).cpu_ms_per_ok is None
    assert summarise([record(100.0, 10.0, Status.FAILED)], facts).cpu_ms_per_ok is None


def test_live_counts_tell_totals_and_the_last_seconds() -> None:
    """Totals are of the whole run; rate and percentiles of the window, without the second that still runs."""
    counts = LiveCounts(window_s=5)
    assert counts.snapshot(3.0).ok_per_s == 0.0
    counts.add([record(second + i / 10, 400.0) for second in range(10) for i in range(10)])
    counts.add([record(15.0 + i / 10, 20.0) for i in range(50)])
    counts.add([record(19.0, 1.0, Status.REFUSED), record(19.0, 9.0, Status.FAILED), record(19.0, 0, Status.NOT_SENT)])
    live = counts.snapshot(20.0)
    assert (live.sent, live.ok, live.refused, live.failed, live.not_sent) == (152, 150, 1, 1, 1)
    assert (live.ok_per_s, live.p50_ms, live.p99_ms) == (10.0, pytest.approx(20.0), pytest.approx(20.0))


def test_live_counts_stay_small() -> None:
    """A run of days needs no more memory than one of minutes."""
    counts = LiveCounts(window_s=5)
    for second in range(0, 3_000, 3):
        counts.add([record(float(second), 10.0)] * 50)
        if second % 50 == 0:
            counts.snapshot(float(second))
    assert counts.snapshot(3_000.0).ok == 50_000
    assert len(counts._latest) <= MAX_LATENCIES
    assert len(counts._ok_in) <= 6


def test_long_phase_takes_tens_of_bytes_a_request() -> None:
    """A soak of hours is kept whole; texts that differ with every request do not fill the memory either."""
    records = [record(at_s, 10.0, request="image street", queue_ms=1.0) for at_s in range(100)]
    texts = [record(at_s, 0.1, Status.FAILED, error=f"id {at_s}") for at_s in range(MAX_TEXTS + 7)]
    ledger = Ledger.of(texts)
    tracemalloc.start()
    for _ in range(1000):
        ledger.add(records)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 40 * 100_000
    result = summarise_phase(ledger, FACTS, slo_p99_ms=100.0, health=HEALTH)
    assert (result.all.ok, result.all.failed) == (100_000, MAX_TEXTS + 7)
    assert dict(result.all.errors)[OTHER_TEXTS] == 7


def test_made_up_records_are_as_requested() -> None:
    """Other tests may rely on them: rate, median and shares are as asked, and a seed gives the same again."""
    records = make_records(per_s=200.0, seconds=30.0, median_ms=10.0, refused=0.1, seed=3)
    facts = PhaseFacts(round=1, phase="steady", seconds=30.0)
    result = summarise_phase(Ledger.of(records), facts, slo_p99_ms=100.0, health=make_health(6000, 30.0))
    assert records == make_records(per_s=200.0, seconds=30.0, median_ms=10.0, refused=0.1, seed=3)
    assert math.isclose(result.offered_per_s, 200.0, rel_tol=0.05)
    assert math.isclose(result.all.latency.p50, 10.0, rel_tol=0.05)
    assert math.isclose(result.all.refused / result.all.intended, 0.1, rel_tol=0.15)
