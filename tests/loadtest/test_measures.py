"""The figures that targets speak of, from hand-made phases."""

import msgspec
import pytest

from penstock_load.measure.ledger import NOTHING
from penstock_load.measure.measures import MEASURES, UNITS, capacity_per_s, knee_measurement, measure
from penstock_load.results import (
    GeneratorHealth,
    Measurement,
    Percentiles,
    PhaseResult,
    Reload,
    RequestSummary,
    Second,
    Side,
    Spread,
)
from tests.loadtest.runs import make_run, make_run_records

HEALTH = GeneratorHealth(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)


def latencies(p50: float, p99: float, count: int = 90) -> Percentiles:
    """Percentiles of which only the median and p99 matter."""
    return Percentiles(count=count, mean=p50, p50=p50, p90=p50, p95=p99, p99=p99, p999=p99, highest=p99)


def phase(round: int = 1, *, ok: int = 90, good: int = 80, seconds: float = 10.0, **fields: object) -> PhaseResult:
    """A judged phase of 100 requests: 90 answered (80 in time), 4 refused, 3 failed, 2 timeouts, 1 not sent."""
    summary = RequestSummary(
        label="all",
        intended=100,
        ok=ok,
        good=good,
        refused=4,
        failed=3,
        timeouts=2,
        not_sent=1,
        latency=latencies(10.0, 20.0),
        service=NOTHING,
        refusals=latencies(1.0, 2.0, count=4),
        batch_sizes=((1, 10), (4, 80)),
    )
    known = PhaseResult(
        round=round,
        phase="steady",
        side=Side.TARGET,
        is_judged=True,
        is_capacity=False,
        is_open_loop=True,
        began_s=0.0,
        seconds=seconds,
        offered_per_s=10.0,
        ok_per_s=ok / seconds,
        good_per_s=good / seconds,
        all=summary,
        by_request=(),
        timeline=(),
        health=HEALTH,
        cpu_ms_per_ok=4.0,
    )
    return msgspec.structs.replace(known, **fields)


def of_latency(result: PhaseResult, latency: Percentiles) -> PhaseResult:
    """The same phase with other latencies."""
    return msgspec.structs.replace(result, all=msgspec.structs.replace(result.all, latency=latency))


def seconds(count: int, *, p99_ms: tuple[float, ...] = (), rss_a_second: float = 0.0) -> tuple[Second, ...]:
    """A timeline with a p99 a third, or with memory that grows steadily after a first fifth of loading."""
    return tuple(
        Second(
            at_s=float(place),
            offered=10,
            ok=10,
            bad=0,
            p50_ms=1.0,
            p99_ms=p99_ms[place * len(p99_ms) // count] if p99_ms else 0.0,
            in_flight=1,
            rss_mib=place * 50.0 if place < count // 5 else 1_000.0 + place * rss_a_second,
        )
        for place in range(count)
    )


def figures(*phases: PhaseResult, reloads: tuple[Reload, ...] = ()) -> dict[str, Measurement]:
    """What was measured, by name."""
    return {found.measure: found for found in measure(phases, reloads)}


def test_every_figure_of_one_phase_is_what_its_counts_say() -> None:
    """Rates, shares, percentiles, refusals, CPU and batches of one judged phase."""
    found = {name: it.spread.median for name, it in figures(phase()).items()}
    assert found == {
        "ok_per_s": 9.0,
        "good_per_s": 8.0,
        "offered_per_s": 10.0,
        "error_share": 0.1,
        "failure_share": 0.05,
        "p50_ms": 10.0,
        "p90_ms": 10.0,
        "p95_ms": 20.0,
        "p99_ms": 20.0,
        "p999_ms": 20.0,
        "refusal_p99_ms": 2.0,
        "cpu_ms_per_ok": 4.0,
        "batch_size_mean": 3.0,  # 10 batches of 1, 20 of 4
    }


def test_spread_is_over_the_rounds() -> None:
    """A figure a round; the median, the lowest and the highest of them."""
    found = figures(phase(1, ok=90), phase(2, ok=70), phase(3, ok=80))["ok_per_s"]
    assert found == Measurement("ok_per_s", "/s", Spread(median=8.0, low=7.0, high=9.0), rounds=3)


def test_judged_phases_of_a_round_add_up_and_the_worst_percentile_stands() -> None:
    """Counts over seconds; the p99 of the slower phase."""
    slow = of_latency(phase(ok=50, seconds=40.0, phase="slow"), latencies(50.0, 400.0))
    found = figures(phase(), slow)
    assert found["ok_per_s"].spread.median == pytest.approx(140 / 50)
    assert found["p99_ms"].spread.median == 400.0


def test_phases_that_are_not_judged_are_not_measured() -> None:
    """A warm-up leaves no figure, and neither does the other side."""
    assert figures(phase(is_judged=False), phase(side=Side.BESIDE)) == {}
    assert figures() == {}


def test_phase_without_any_answer_has_errors_but_no_latency() -> None:
    """Without answers there is no p99, not one of 0 ms."""
    found = figures(of_latency(phase(ok=0, good=0), NOTHING))
    assert found["ok_per_s"].spread.median == 0.0
    assert not {"p50_ms", "p99_ms", "cpu_ms_per_ok"} & set(found)


def test_goodput_is_held_against_the_capacity_of_the_same_round() -> None:
    """Each round has its own capacity, for a machine's speed drifts."""
    capacity = [phase(round, ok=ok, is_judged=False, is_capacity=True) for round, ok in ((1, 100), (2, 160))]
    found = figures(phase(1), phase(2), *capacity)
    assert found["capacity_per_s"].spread == Spread(median=13.0, low=10.0, high=16.0)
    assert found["goodput_of_capacity"].spread == Spread(median=0.65, low=0.5, high=0.8)
    assert capacity_per_s(capacity, round=2, side=Side.TARGET) == 16.0
    assert capacity_per_s(capacity, round=2, side=Side.BESIDE) is None


def test_other_side_counts_in_comparisons_only() -> None:
    """rate_ratio is of capacities, added latency of the same judged phase; nothing else changes."""
    beside = of_latency(phase(side=Side.BESIDE), latencies(8.0, 15.0))
    capacity = {"is_judged": False, "is_capacity": True, "phase": "capacity"}
    found = figures(phase(), beside, phase(ok=80, **capacity), phase(ok=100, side=Side.BESIDE, **capacity))
    assert found["rate_ratio"].spread.median == pytest.approx(0.8)
    assert found["added_p50_ms"].spread.median == pytest.approx(2.0)
    assert found["added_p99_ms"].spread.median == pytest.approx(5.0)
    assert (found["p99_ms"].spread.median, found["ok_per_s"].spread.median) == (20.0, 9.0)


def test_memory_slope_leaves_the_warm_up_out() -> None:
    """Loading is not a leak: 0.5 MiB a second after the first fifth is 30 MiB a minute."""
    found = figures(phase(timeline=seconds(100, rss_a_second=0.5)))
    assert found["rss_slope_mib_per_min"].spread.median == pytest.approx(30.0)


def test_memory_slope_of_a_short_phase_is_not_measured() -> None:
    """Half a minute says nothing of growth by the minute."""
    assert "rss_slope_mib_per_min" not in figures(phase(timeline=seconds(40, rss_a_second=0.5)))


def test_drift_is_the_last_third_against_the_first() -> None:
    """From 10 ms to 15 ms is 0.5; what lies between does not matter."""
    found = figures(phase(timeline=seconds(30, p99_ms=(10.0, 99.0, 15.0))))
    assert found["p99_drift"].spread.median == pytest.approx(0.5)
    assert "p99_drift" not in figures(phase(timeline=seconds(6, p99_ms=(10.0, 99.0, 15.0))))


def test_reloads_are_measured_without_any_phase() -> None:
    """The median of a round's reloads, then over the rounds; the other side's do not count."""
    reloads = tuple(
        Reload(round, side, "street", load_ms=load_ms, first_answer_ms=5.0, second_answer_ms=1.0)
        for round, side, load_ms in (
            (1, Side.TARGET, 100.0),
            (1, Side.TARGET, 110.0),
            (1, Side.TARGET, 900.0),
            (1, Side.BESIDE, 1.0),
            (2, Side.TARGET, 130.0),
        )
    )
    found = figures(reloads=reloads)
    assert found["load_ms"].spread == Spread(median=120.0, low=110.0, high=130.0)
    assert found["first_answer_ms"].rounds == 2


def test_every_measurement_has_its_row_in_the_table() -> None:
    """What a run measures is documented, once, in the same unit."""
    run = make_run(make_run_records(has_beside=True, refused=0.05, seconds=9.0), has_reloads=True, seconds=9.0)
    found = {it.measure: it.unit for it in run.measurements}
    assert len(UNITS) == len(MEASURES)
    assert found.items() <= UNITS.items()
    assert set(UNITS) - set(found) == {"rss_slope_mib_per_min", "knee_per_s"}
    assert all(it.meaning and it.origin for it in MEASURES)


def test_knee_is_a_measurement_like_any_other() -> None:
    """A rate a round."""
    assert knee_measurement([90.0, 110.0, 100.0]) == Measurement("knee_per_s", "/s", Spread(100.0, 90.0, 110.0), 3)
