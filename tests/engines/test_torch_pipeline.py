"""Several batches of an instance in flight: order, bounds, faults and the end. A GPU is played; nothing needs torch."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock.engines.torch_serving.config import EngineSpec, engine_spec
from penstock.engines.torch_serving.instance import Instance, Outcome, Pipeline, TorchRequest

TIMEOUT_S = 20.0
A_WHILE_S = 0.2  # in which what may not happen would
STUCK, BROKEN = -1.0, -2.0  # a run that ends only when it is let; one that fails


class Rows(np.ndarray):  # type: ignore[type-arg]
    """What is asked of a tensor of torch's here."""

    def clone(self) -> "Rows":
        return self.copy()


def rows(*numbers: float, columns: int = 1) -> Rows:
    """One row a number."""
    return np.repeat(np.array(numbers, np.float32)[:, None], columns, axis=1).view(Rows)


class PlayedRun:
    """Answers in the slot's memory, as page-locked memory of a GPU's is."""

    def __init__(self, host: Rows, wait: threading.Event | None, *, is_broken: bool) -> None:
        self._host = host
        self._wait = wait
        self._is_broken = is_broken

    def outputs(self) -> tuple[Any, ...]:
        if self._wait is not None:
            assert self._wait.wait(TIMEOUT_S)
        if self._is_broken:
            raise RuntimeError("the run failed")
        return (self._host,)

    def memory(self) -> tuple[Any, ...]:
        return (self._host,)


class PlayedRunner:
    """Twice each number, by its slots in turn."""

    def __init__(self, slots: int = 2) -> None:
        self.hosts = [rows(*[0.0] * 8) for _ in range(slots)]
        self.begun: list[float] = []
        self.has_begun_more = threading.Event()
        self.let = threading.Event()

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PlayedRun:
        numbers = np.concatenate([part[:, :1] for part in columns[0]])
        if np.isnan(numbers).any():
            raise ValueError("no such run")
        host = self.hosts[len(self.begun) % len(self.hosts)]
        self.begun.append(float(numbers[0, 0]))
        if len(self.begun) > 1:
            self.has_begun_more.set()
        host[:rows] = numbers * 2
        is_stuck = self.begun[-1] == STUCK
        return PlayedRun(host[:rows], self.let if is_stuck else None, is_broken=self.begun[-1] == BROKEN)

    def picture_input(self, rows: int) -> Any:
        raise AssertionError

    def begin_pictures(self, rows: int) -> Any:
        raise AssertionError


class Desk:
    """Takes what is delivered: the doubled numbers of each request, or what went wrong."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Any]] = []
        self.reported: list[str] = []
        self.threads: set[str] = set()
        self.refused = ""
        self._changed = threading.Condition()

    def deliver(self, whose: str, outcomes: list[Outcome] | Exception) -> None:
        assert whose != self.refused, "this one cannot be sent"
        shown: Any = str(outcomes)
        if not isinstance(outcomes, Exception):
            shown = [outcome[0].ravel().tolist() for outcome in outcomes if isinstance(outcome, tuple)]
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.answers.append((whose, shown))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[str, Any]]:
        """The answers, when there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= count, TIMEOUT_S), self.answers
        return self.answers

    def report(self, error: Exception) -> None:
        self.reported.append(str(error))


def spec() -> EngineSpec:
    """Rows of any width, eight at most."""
    model = {
        "name": "doubled",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
        "parameters": {"batches-in-flight": {"string_value": "2"}},
    }
    return engine_spec(model, is_gpu=False)


@pytest.fixture
def runner() -> PlayedRunner:
    return PlayedRunner()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def pipeline_of(
    instance: Instance, desk: Desk, *, in_flight: int = 2, enter: Callable[[], object] = lambda: None
) -> Pipeline:
    """Delivers the outcomes themselves."""
    return Pipeline(instance, instance.finish, desk.deliver, report=desk.report, in_flight=in_flight, enter=enter)


@pytest.fixture
def pipeline(runner: PlayedRunner, desk: Desk) -> Iterator[Pipeline]:
    made = pipeline_of(Instance(spec(), runner), desk)
    yield made
    runner.let.set()
    made.close()


@contextmanager
def beside(pipeline: Pipeline, *numbers: float, columns: Sequence[int] = (1,)) -> Iterator[threading.Thread]:
    """A batch `beside` put by a thread of its own, as Triton's would wait."""
    asks = [TorchRequest((rows(*numbers, columns=width),)) for width in columns]
    putting = threading.Thread(target=pipeline.put, args=(asks, "beside"))
    putting.start()
    yield putting
    putting.join(TIMEOUT_S)
    assert not putting.is_alive()


def put(pipeline: Pipeline, whose: str, *numbers: float) -> None:
    """A batch of one request for each number."""
    pipeline.put([TorchRequest((rows(number),)) for number in numbers], whose)


def test_batches_are_answered_in_order_each_with_its_own(pipeline: Pipeline, runner: PlayedRunner, desk: Desk) -> None:
    """Each request gets its rows, by one thread that is not the asking one."""
    for number in range(50):
        put(pipeline, str(number), number, number + 0.5)
    assert desk.wait(50) == [(str(number), [[number * 2.0], [number * 2.0 + 1]]) for number in range(50)]
    assert desk.threads == {"answers"}


def test_second_batch_begins_beside_the_first_and_waits_for_its_answer(
    pipeline: Pipeline, runner: PlayedRunner, desk: Desk
) -> None:
    """put returns at once for the first; for the second it has begun, and returns when the first is answered."""
    put(pipeline, "first", STUCK)
    with beside(pipeline, 1.0) as putting:
        assert runner.has_begun_more.wait(TIMEOUT_S)
        putting.join(A_WHILE_S)
        assert putting.is_alive(), "a third would be begun in the first one's memory"
        assert desk.answers == []
        runner.let.set()
    assert desk.wait(2) == [("first", [[STUCK * 2]]), ("beside", [[2.0]])]


def test_more_batches_are_in_flight_if_the_instance_has_slots_for_them(desk: Desk) -> None:
    """With four, the fourth put is the first that waits, and each batch gets its own rows."""
    runner = PlayedRunner(slots=4)
    pipeline = pipeline_of(Instance(spec(), runner), desk, in_flight=4)
    for number in (STUCK, 1.0, 2.0):
        put(pipeline, str(number), number)
    assert desk.answers == []
    with beside(pipeline, 3.0) as putting:
        putting.join(A_WHILE_S)
        assert putting.is_alive(), "a fifth would be begun in the first one's memory"
        runner.let.set()
    answers = [("-1.0", [[STUCK * 2]]), ("1.0", [[2.0]]), ("2.0", [[4.0]]), ("beside", [[6.0]])]
    assert desk.wait(4) == answers
    pipeline.close()


def test_run_that_fails_is_its_own_batchs_answer(pipeline: Pipeline, desk: Desk) -> None:
    """The next is answered as if nothing had been."""
    put(pipeline, "broken", BROKEN)
    put(pipeline, "next", 3.0)
    assert desk.wait(2) == [("broken", "the run failed"), ("next", [[6.0]])]


def test_batch_that_cannot_begin_is_raised_and_harms_no_other(
    pipeline: Pipeline, runner: PlayedRunner, desk: Desk
) -> None:
    """put raises; the batch in flight and the one after get their answers, and nothing is delivered for it."""
    put(pipeline, "first", STUCK)
    with pytest.raises(ValueError, match="no such run"):
        put(pipeline, "bad", float("nan"))
    runner.let.set()
    put(pipeline, "next", 4.0)
    assert desk.wait(2) == [("first", [[STUCK * 2]]), ("next", [[8.0]])]


def test_delivery_that_fails_is_reported_and_the_next_batch_answered(pipeline: Pipeline, desk: Desk) -> None:
    """The thread of the answers outlives it."""
    desk.refused = "lost"
    put(pipeline, "lost", 1.0)
    put(pipeline, "next", 2.0)
    assert desk.wait(1) == [("next", [[4.0]])]
    assert len(desk.reported) == 1
    assert "this one cannot be sent" in desk.reported[0]


def test_requests_of_unlike_widths_leave_the_answers_in_flight_alone(
    pipeline: Pipeline, runner: PlayedRunner, desk: Desk
) -> None:
    """They take several runs, and so the memory of the batch before: none begins until that is answered."""
    put(pipeline, "first", STUCK)
    with beside(pipeline, 5.0, columns=(1, 2, 3)):
        assert not runner.has_begun_more.wait(A_WHILE_S)
        runner.let.set()
    assert desk.wait(2) == [("first", [[STUCK * 2]]), ("beside", [[10.0], [10.0], [10.0]])]


def test_outcomes_are_expected_where_they_will_be(runner: PlayedRunner) -> None:
    """Responses are made while the GPU computes: each request's rows are there when `finish` returns."""
    instance = Instance(spec(), runner)
    started = instance.begin([TorchRequest((rows(STUCK),)), TorchRequest((rows(3.0),))], lambda: None)
    expected = instance.expected(started)
    runner.hosts[0][:2] = 5.0  # the GPU writes now
    runner.let.set()
    instance.finish(started)
    assert [outcome[0].ravel().tolist() for outcome in expected if isinstance(outcome, tuple)] == [[5.0], [5.0]]
    unlike = instance.begin([TorchRequest((rows(1.0, columns=width),)) for width in (1, 2)], lambda: None)
    assert instance.expected(unlike) == instance.finish(unlike), "these were answered at once"


def test_requests_that_may_not_be_merged_run_one_by_one(runner: PlayedRunner) -> None:
    """Each request gets its own answer, from a run of its rows only."""
    instance = Instance(spec(), runner)
    instance.merge_nothing()
    answers = instance.answer([TorchRequest((rows(1.0, 2.0),)), TorchRequest((rows(3.0),))])
    assert [answer[0].tolist() for answer in answers if isinstance(answer, tuple)] == [[[2.0], [4.0]], [[6.0]]]
    assert len(runner.begun) == 2


def test_close_answers_what_is_in_flight_and_ends_the_thread(runner: PlayedRunner, desk: Desk) -> None:
    """No request is left without an answer when its model is unloaded, though the thread has not taken it up yet."""
    entered = threading.Event()
    instance = Instance(spec(), runner)
    pipeline = pipeline_of(instance, desk, enter=lambda: entered.wait(TIMEOUT_S))
    put(pipeline, "last", 1.0)
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    while pipeline._begun.qsize() < 2:
        time.sleep(0.001)
    entered.set()
    closing.join(TIMEOUT_S)
    assert desk.answers == [("last", [[2.0]])]
    assert not pipeline._thread.is_alive()


@pytest.mark.parametrize("number", [1.0, BROKEN])
def test_nothing_of_a_request_is_kept_when_it_is_answered(pipeline: Pipeline, desk: Desk, number: float) -> None:
    """Its tensor lies in Triton's shared memory, which else grew; so does its sender. Not even its fault keeps it."""
    tensor = rows(number)
    gc.disable()
    try:
        pipeline.put([TorchRequest((tensor,))], "first")
        gone = threading.Event()
        weakref.finalize(tensor, gone.set)
        del tensor
        desk.wait(1)
        assert gone.wait(TIMEOUT_S)
    finally:
        gc.enable()


def test_thread_of_the_answers_enters_before_it_waits_for_a_run(runner: PlayedRunner, desk: Desk) -> None:
    """CUDA's current device is each thread's own."""
    entered: list[str] = []
    enter = lambda: entered.append(threading.current_thread().name)  # noqa: E731
    pipeline = pipeline_of(Instance(spec(), runner), desk, enter=enter)
    put(pipeline, "first", 1.0)
    desk.wait(1)
    pipeline.close()
    assert entered == ["answers"]
