"""The search for the knee, against simulated servers whose capacity is known."""

from collections.abc import Callable

import numpy as np
import pytest

from penstock_load.main import KneeOptions, trial_s
from penstock_load.results import PhaseResult, Record, Side, Status
from penstock_load.search import TRIALS_AT_MOST, Knee, KneeSearch, TrialOutcome, find_knee, trial_verdict
from tests.loadtest.runs import make_phase, make_records

Trial = Callable[[float, bool], tuple[TrialOutcome, str]]


def search(trial: Trial, **limits: float) -> tuple[Knee, list[tuple[float, bool]]]:
    """What a search finds when trial(rate, is_confirming) answers, and the trials in their order."""
    looking = KneeSearch(**{"start_per_s": 10.0, "highest_per_s": 10_000.0} | limits)
    trials: list[tuple[float, bool]] = []
    while (rate := looking.next_rate()) is not None:
        assert looking.result is None
        trials.append((rate, looking.is_confirming))
        looking.record(rate, *trial(rate, looking.is_confirming))
    assert looking.result is not None
    assert looking.result.trials == len(trials)
    return looking.result, trials


def keeps_up_to(capacity_per_s: float) -> Trial:
    """A server that keeps every rate up to one, and no other."""
    return lambda rate, _: (
        (TrialOutcome.KEPT, "") if rate <= capacity_per_s else (TrialOutcome.BROKEN, "p99 was 300 ms")
    )


def queue(rate_per_s: float, *, service_s: float, seconds: float, seed: int) -> PhaseResult:
    """A server that takes the same time for each request, one after the other, under Poisson arrivals (M/D/1)."""
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0.0, seconds, random.poisson(rate_per_s * seconds)))
    free_s = 0.0
    records = []
    for at_s in arrivals.tolist():
        free_s = max(free_s, at_s) + service_s
        records.append(Record(1, "trial", Side.TARGET, "rest x", at_s, at_s, free_s, Status.OK))
    return make_phase(records, seconds=seconds, began_s=0.0)


@pytest.mark.parametrize("capacity_per_s", [3.0, 10.0, 77.0, 1_234.0])
def test_knee_of_a_steady_server_is_within_the_precision(capacity_per_s: float) -> None:
    """The highest kept rate is at most 5 % below the capacity; both got a longer trial."""
    found, trials = search(keeps_up_to(capacity_per_s))
    assert found.sustained_per_s is not None
    assert found.broken_per_s is not None
    assert found.sustained_per_s <= capacity_per_s < found.broken_per_s <= found.sustained_per_s * 1.05
    assert trials[-2:] == [(found.sustained_per_s, True), (found.broken_per_s, True)]
    assert found.why == "p99 was 300 ms"
    assert "did not: p99 was 300 ms." in found.sentence


def test_knee_of_a_simulated_queue_is_where_theory_puts_it() -> None:
    """Waiting in M/D/1 ends p99 at 20 service times at about 0.89 of the capacity (exponential tail)."""
    seeds = iter(range(1_000))

    def trial(rate: float, is_confirming: bool) -> tuple[TrialOutcome, str]:
        seconds = 40.0 if is_confirming else 15.0
        phase = queue(rate, service_s=0.002, seconds=seconds, seed=next(seeds))
        return trial_verdict(phase, slo_p99_ms=40.0)

    found, _ = search(trial)
    assert found.sustained_per_s is not None
    assert 0.80 <= found.sustained_per_s / 500.0 <= 0.97


@pytest.mark.parametrize("seed", range(20))
def test_knee_of_a_noisy_server_is_near_its_capacity(seed: int) -> None:
    """Though one trial in ten breaks by accident, and a rate within 5 % of the capacity by the toss of a coin."""
    random = np.random.default_rng(seed)

    def trial(rate: float, _: bool) -> tuple[TrialOutcome, str]:
        is_kept = rate < 500 * random.uniform(0.95, 1.05) and random.uniform() > 0.1
        return (TrialOutcome.KEPT, "") if is_kept else (TrialOutcome.BROKEN, "p99 was 300 ms")

    found, _ = search(trial)
    assert found.sustained_per_s is not None
    assert found.sustained_per_s <= 525.0
    assert found.sustained_per_s >= 450.0


def test_rate_that_breaks_once_is_tried_again() -> None:
    """One hiccup does not count; the second trial decides."""
    calls: list[float] = []

    def trial(rate: float, _: bool) -> tuple[TrialOutcome, str]:
        calls.append(rate)
        return (TrialOutcome.BROKEN, "a hiccup") if rate > 500 or calls.count(rate) == 1 else (TrialOutcome.KEPT, "")

    found, _ = search(trial)
    assert found.sustained_per_s == pytest.approx(500.0, rel=0.05)


def test_rate_that_broke_by_accident_is_given_its_chance_at_the_end() -> None:
    """Two accidents in a row at 40/s do not hide the knee at 500/s."""
    accidents = iter([True, True])

    def trial(rate: float, _: bool) -> tuple[TrialOutcome, str]:
        is_broken = rate > 500 or (rate == 40 and next(accidents, False))
        return (TrialOutcome.BROKEN, "an accident") if is_broken else (TrialOutcome.KEPT, "")

    found, trials = search(trial)
    assert found.sustained_per_s == pytest.approx(500.0, rel=0.05)
    assert (40.0, True) in trials


def test_rate_that_only_short_trials_keep_does_not_count() -> None:
    """What breaks when it lasts is broken, and the search goes on below it."""
    found, trials = search(
        lambda rate, is_long: (
            (TrialOutcome.KEPT, "") if rate <= (300 if is_long else 500) else (TrialOutcome.BROKEN, "the queue grew")
        )
    )
    assert found.sustained_per_s == pytest.approx(300.0, rel=0.1)
    assert found.sustained_per_s is not None
    assert found.sustained_per_s <= 300.0
    assert (found.sustained_per_s, True) in trials


def test_server_that_never_keeps_has_no_knee() -> None:
    """The search halves down to the lowest rate and says what broke there."""
    found, trials = search(lambda *_: (TrialOutcome.BROKEN, "p99 was 300 ms"), lowest_per_s=2.0)
    assert (found.sustained_per_s, found.broken_per_s) == (None, 2.0)
    assert found.sentence == "The SLO was not kept even at 2/s: p99 was 300 ms."
    assert [rate for rate, _ in trials] == [10.0, 10.0, 5.0, 5.0, 2.5, 2.5, 2.0, 2.0]


def test_server_that_never_breaks_is_tried_up_to_the_highest_rate() -> None:
    """And no knee is claimed beyond."""
    found, trials = search(lambda *_: (TrialOutcome.KEPT, ""), highest_per_s=100.0)
    assert (found.sustained_per_s, found.broken_per_s) == (100.0, None)
    assert trials == [(10.0, False), (20.0, False), (40.0, False), (80.0, False), (100.0, False), (100.0, True)]
    assert "the knee lies above" in found.sentence


def test_generator_that_breaks_first_differs_from_a_server_that_does() -> None:
    """Where the generator cannot go, the knee may lie higher, and the result says so."""
    found, _ = search(
        lambda rate, _: (TrialOutcome.KEPT, "") if rate < 800 else (TrialOutcome.UNUSABLE, "sent 1 s late")
    )
    assert found.is_generators_limit
    assert "the generator failed: sent 1 s late." in found.sentence


def test_search_ends_even_where_trials_contradict_each_other() -> None:
    """A server that keeps every short trial and no long one is left after a bounded number of trials."""
    found, trials = search(lambda _, is_long: (TrialOutcome.BROKEN, "no") if is_long else (TrialOutcome.KEPT, ""))
    assert found.sustained_per_s is None
    assert len(trials) == TRIALS_AT_MOST


def test_search_refuses_what_it_did_not_ask_for() -> None:
    """A trial of another rate, and limits that cannot be."""
    with pytest.raises(ValueError, match="recorded where 10"):
        KneeSearch(10.0, 100.0).record(11.0, TrialOutcome.KEPT, "")
    with pytest.raises(ValueError, match="impossible"):
        KneeSearch(200.0, 100.0)


def test_trial_is_kept_broken_or_unusable_with_a_reason() -> None:
    """The reason holds what was measured and what was allowed."""
    good = make_records(seed=1)
    assert trial_verdict(make_phase(good), slo_p99_ms=100.0) == (TrialOutcome.KEPT, "")
    outcome, why = trial_verdict(make_phase(good), slo_p99_ms=5.0)
    assert outcome is TrialOutcome.BROKEN
    assert why.startswith("p99 was 2")
    assert why.endswith("ms (SLO 5 ms)")
    errors = make_phase(make_records(refused=0.2, seed=1))
    outcome, why = trial_verdict(errors, slo_p99_ms=100.0)
    assert outcome is TrialOutcome.BROKEN
    assert "of the requests got no right answer (allowed: 1.00%)" in why
    outcome, why = trial_verdict(errors, slo_p99_ms=100.0, error_share=0.5)
    assert outcome is TrialOutcome.BROKEN
    assert "were answered of" in why
    complaint = "the generator's processor was 99 % busy."
    assert trial_verdict(make_phase(good, complaint=complaint), slo_p99_ms=100.0) == (
        TrialOutcome.UNUSABLE,
        "the generator's processor was 99 % busy",
    )


def test_knee_of_a_curve_is_the_last_rate_before_the_first_that_broke() -> None:
    """In any order; a lucky point above a broken one does not count."""
    curve = [(400.0, 399.0, 50.0), (100.0, 100.0, 9.0), (200.0, 199.0, 12.0), (300.0, 250.0, 30.0)]
    assert find_knee(curve, 100.0) == 200.0
    assert find_knee(curve, 10.0) == 100.0
    assert find_knee(curve, 5.0) is None
    assert find_knee([], 100.0) is None


def test_trial_of_a_low_rate_lasts_until_there_is_something_to_judge() -> None:
    """A trial of a second at 1/s often asks nothing, and the search took that for the limit of the generator."""
    options = KneeOptions(trial_s=1.0)
    assert trial_s(options, 100.0) == 1.0
    assert trial_s(options, 1.0) == 10.0
