"""A model's health depends on its canary; clients' calls determine when it runs."""

from collections.abc import Callable

import pytest

from penstock.engines.model_health import Cause, ModelHealth

INTERVAL_S, TIMEOUT_S = 5.0, 30.0


class Bench:
    """The health of some models, with a manual clock. changes: the models that changed, in order."""

    def __init__(self, *names: str, has_passed: bool = True) -> None:
        self.now = 100.0
        self.changes: list[str] = []
        self.health = ModelHealth(limit=3, interval_s=INTERVAL_S, changed=self.changes.append)
        for name in names:
            self.health.loaded(name, self.now)
            if has_passed:
                self.health.begun(name, self.now)
                self.health.passed(name, self.now, self.now)

    def due_within(self, seconds: float) -> list[str]:
        """The models whose canary starts first, and the time; empty if none starts in that time."""
        until = self.now + seconds
        while self.now < until:
            if names := self.health.due(self.now):
                return names
            self.now += 0.25
        return []

    def fail(self, name: str, times: int) -> bool:
        """Fails its canary this many times; returns whether the last failure requests a restart."""
        is_restart = False
        for _ in range(times):
            self.health.begun(name, self.now)
            is_restart = self.health.failed(name, "boom", self.now, self.now)
            self.now += 1.0
        return is_restart

    def hang(self, name: str) -> bool:
        sent = self.now
        self.health.begun(name, sent)
        self.now += TIMEOUT_S
        return self.health.late(name, TIMEOUT_S, sent, self.now)

    def cause(self, name: str) -> Cause | None:
        why = self.health.unavailable(name)
        return why.cause if why is not None else None


def test_model_whose_canary_fails_three_times_in_a_row_is_unavailable_alone() -> None:
    """The reason names the last error; another model stays available; the third failure requests a restart."""
    bench = Bench("bad", "good")
    assert not bench.fail("bad", 2)
    assert bench.cause("bad") is None
    assert bench.fail("bad", 1)
    assert (bench.cause("bad"), bench.cause("good")) == (Cause.CANARY, None)
    why = bench.health.unavailable("bad")
    assert why is not None
    assert why.reason == "3 canary inferences in a row failed, the last: boom"
    assert bench.changes == ["bad"]


def test_model_is_available_again_when_its_canary_passes() -> None:
    """It recovers without other action; three more failures make it unavailable again."""
    bench = Bench("bad", "good")
    bench.fail("bad", 3)
    assert bench.due_within(INTERVAL_S) == ["bad"]
    bench.health.passed("bad", bench.now, bench.now)
    assert bench.cause("bad") is None
    bench.fail("bad", 3)
    assert bench.changes == ["bad"] * 3


def test_success_of_a_client_between_canary_failures_keeps_the_model_available() -> None:
    """A model that serves clients works, even if it fails for zeros."""
    bench = Bench("m")
    for _ in range(5):
        bench.fail("m", 2)
        bench.health.served("m", bench.now)
    assert bench.cause("m") is None


def test_canary_that_never_passed_says_nothing_of_the_model() -> None:
    """Zeros may not be a valid input of the model."""
    bench = Bench("m", has_passed=False)
    assert not bench.fail("m", 20)
    assert bench.cause("m") is None


@pytest.mark.parametrize("evidence", ["failed", "late"])
def test_calls_that_fail_or_are_late_bring_the_canary_forward_and_judge_nothing(evidence: str) -> None:
    """Otherwise one client could make the model unavailable for all. At most one canary runs per second."""
    bench = Bench("m", "other")
    bench.now += 1.0
    calls: dict[str, Callable[[], bool]] = {
        "failed": lambda: bench.health.call_failed("m", bench.now),
        "late": lambda: bench.health.call_late("m", 0.5, bench.now),
    }
    outcomes = [calls[evidence]() for _ in range(100)]
    assert outcomes[-1]
    assert bench.health.due(bench.now) == ["m"]
    bench.health.passed("m", bench.now, bench.now)
    assert bench.cause("m") is None
    assert not any(calls[evidence]() for _ in range(100))
    assert bench.health.due(bench.now + 0.9) == []


def test_clients_success_puts_the_canary_off() -> None:
    """A model that serves clients needs no canary; an idle one of several gets a canary within six intervals."""
    bench = Bench(*"abcdefghij")
    for _ in range(100):
        bench.health.served("a", bench.now)
        bench.now += 1.0
        assert "a" not in bench.health.due(bench.now)
    bench = Bench(*"abcdefghij")
    start = bench.now
    assert bench.due_within(60.0) == list("abcdefghij")
    assert bench.now - start == 6 * INTERVAL_S


def test_model_without_an_answer_for_its_execution_timeout_hangs() -> None:
    """Its canary waited that long, and nothing else was answered meanwhile."""
    bench = Bench("m", "other")
    assert bench.hang("m")
    assert (bench.cause("m"), bench.cause("other")) == (Cause.HANG, None)


@pytest.mark.parametrize("answer", ["served", "call_failed"])
def test_model_that_answers_others_while_its_canary_waits_does_not_hang(answer: str) -> None:
    """Behind a long queue a canary is late; any answer of the model, an error too, shows that it works."""
    bench = Bench("m")
    bench.health.begun("m", bench.now)
    getattr(bench.health, answer)("m", bench.now + 10.0)
    bench.now += TIMEOUT_S
    assert not bench.health.late("m", TIMEOUT_S, bench.now - TIMEOUT_S, bench.now)
    assert bench.cause("m") is None


def test_model_that_hangs_again_and_again_is_tried_after_growing_pauses() -> None:
    """Each attempt restarts the model, after 1, 2, 4 … 30 s; a canary that passes resets the pause."""
    bench = Bench("m", "other")
    pauses = []
    for _ in range(7):
        bench.hang("m")
        began = bench.now
        while "m" not in bench.due_within(60.0):
            bench.health.passed("other", bench.now, bench.now)
        pauses.append(bench.now - began)
        bench.health.over("m", bench.now, bench.now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_model_that_no_canary_judges_is_unavailable_when_all_its_calls_fail_for_a_while() -> None:
    """Ten failures in a row over ten seconds count, but not a client's burst; a success restores the model."""
    bench = Bench("m", has_passed=False)
    for _ in range(50):
        bench.health.call_failed("m", bench.now)
    assert bench.cause("m") is None
    bench.now += 10.0
    bench.health.call_failed("m", bench.now)
    assert bench.cause("m") is Cause.TRAFFIC
    bench.health.served("m", bench.now)
    assert bench.cause("m") is None


def test_model_that_no_canary_judges_hangs_by_a_call_that_waited_for_the_timeout() -> None:
    """A shorter wait does not count, nor one during which another client got an answer."""
    bench = Bench("m", has_passed=False)
    assert not bench.health.call_hung("m", TIMEOUT_S - 1, TIMEOUT_S, bench.now)
    bench.health.served("m", bench.now - 5.0)
    assert not bench.health.call_hung("m", TIMEOUT_S, TIMEOUT_S, bench.now)
    bench.now += TIMEOUT_S
    assert bench.health.call_hung("m", TIMEOUT_S, TIMEOUT_S, bench.now)
    assert bench.cause("m") is Cause.HANG


def test_call_alone_does_not_make_a_model_hang_that_a_canary_judges() -> None:
    """Its canary runs earlier instead."""
    bench = Bench("m")
    bench.now += 100.0
    assert not bench.health.call_hung("m", TIMEOUT_S, TIMEOUT_S, bench.now)
    assert bench.cause("m") is None


def test_failed_trial_of_a_load_lasts_until_the_next_load() -> None:
    """Neither a canary nor a call ends it."""
    bench = Bench("m")
    bench.health.mark("m", Cause.TRIAL, "its output is a scalar", bench.now)
    bench.health.served("m", bench.now)
    assert bench.due_within(100.0) == []
    assert bench.cause("m") is Cause.TRIAL
    bench.health.loaded("m", bench.now)
    assert bench.cause("m") is None


def test_engine_is_sick_when_no_model_of_it_serves_any_more() -> None:
    """One failing model is restarted alone; when the last one fails, the engine is restarted."""
    bench = Bench("a", "b")
    bench.fail("a", 3)
    assert bench.health.sick_reason("a") == ""
    bench.fail("b", 3)
    assert "model 'b': 3 canary inferences in a row failed, the last: boom" in bench.health.sick_reason("b")


def test_engine_is_not_sick_while_a_model_without_a_canary_serves() -> None:
    """A restart would interrupt its clients."""
    bench = Bench("a")
    bench.health.loaded("b", bench.now)
    bench.health.skipped("b")
    bench.health.served("b", bench.now)
    bench.fail("a", 3)
    assert bench.health.sick_reason("a") == ""


def test_only_model_that_hangs_is_restarted_alone_first_and_with_the_engine_when_it_hangs_again() -> None:
    """The second hang shows that its own restart did not help."""
    bench = Bench("a")
    bench.hang("a")
    assert bench.health.sick_reason("a") == ""
    bench.hang("a")
    assert "model 'a': it answered nothing for 30 s" in bench.health.sick_reason("a")


def test_outcome_of_a_canary_that_began_before_a_reload_is_dropped() -> None:
    """The result belongs to the model before the reload."""
    bench = Bench("m")
    bench.health.begun("m", bench.now)
    bench.health.loaded("m", bench.now)
    bench.health.passed("m", bench.now, bench.now)
    bench.fail("m", 3)
    assert bench.cause("m") is None


def test_canary_that_was_sent_to_an_earlier_process_says_nothing_of_the_new_one() -> None:
    """Whether it is late, fails or passes: only a canary of the new process counts, and one is due at once."""
    bench = Bench("m")
    assert bench.hang("m")
    assert bench.due_within(INTERVAL_S) == ["m"]
    sent = bench.now
    bench.now += 10.0
    bench.health.renewed("m", bench.now)
    assert bench.due_within(INTERVAL_S) == ["m"]
    sent_anew = bench.now
    bench.now = sent + TIMEOUT_S
    assert not bench.health.late("m", TIMEOUT_S, sent, bench.now)
    assert not any(bench.health.failed("m", "the process died", sent, bench.now) for _ in range(10))
    bench.health.passed("m", sent, bench.now)
    assert bench.cause("m") is Cause.HANG
    bench.health.passed("m", sent_anew, bench.now)
    assert bench.cause("m") is None


def test_new_process_that_hangs_too_is_found_to_hang() -> None:
    """A canary of the new process shows it."""
    bench = Bench("m", "other")
    assert bench.hang("m")
    bench.health.renewed("m", bench.now)
    assert bench.hang("m")


def test_failures_of_the_process_before_do_not_count_against_the_new_one() -> None:
    """Three failures of the new process make it unavailable again."""
    bench = Bench("m", "other")
    assert not bench.fail("m", 2)
    bench.health.renewed("m", bench.now)
    assert not bench.fail("m", 2)
    assert bench.fail("m", 1)


def test_call_to_an_earlier_process_is_no_hang_of_the_new_one() -> None:
    """This is a model without a canary, for which clients' calls count."""
    bench = Bench("m", has_passed=False)
    bench.now += TIMEOUT_S
    bench.health.renewed("m", bench.now - 1.0)
    assert not bench.health.call_hung("m", TIMEOUT_S, TIMEOUT_S, bench.now)
    bench.now += TIMEOUT_S
    assert bench.health.call_hung("m", TIMEOUT_S, TIMEOUT_S, bench.now)
