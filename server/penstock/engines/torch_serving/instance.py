"""One model instance: groups requests into runs, and answers each. Pipeline keeps two batches in flight.

With PENSTOCK_NVTX=1 (`penstock up --profile`) decode, infer and output are NVTX ranges in a profiler's timeline.
Imports torch only then: the process that completes a model's configuration must start fast.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from .config import EngineSpec, TorchRequestError

VARIABLE = "PENSTOCK_NVTX"
_NOTHING = nullcontext()

Stage = Callable[[str], AbstractContextManager[None]]


def stages(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> Stage:
    """How a stage is marked here: in the profiler's timeline where that is asked for and torch can, else not at all."""
    if environment.get(VARIABLE) != "1":
        return _unmarked
    try:
        import torch

        torch.cuda.nvtx.range_push("penstock")
        torch.cuda.nvtx.range_pop()
    except (ImportError, RuntimeError, AttributeError):  # a torch without CUDA has no NVTX
        return _unmarked

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    return marked


def _unmarked(name: str) -> AbstractContextManager[None]:
    del name
    return _NOTHING


stage: Stage = stages()


Shape = tuple[int, ...]


@dataclass(frozen=True)
class RunGroup:
    """Requests of one run. places: of the requests, in their order; rows: how many each has."""

    places: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def row_count(self) -> int:
        return sum(self.rows)


def group_requests(shapes: Sequence[tuple[Shape, ...]], most_rows: int) -> list[RunGroup]:
    """Runs that answer all requests: those of a group agree in every dimension but the first and are most_rows at most.

    shapes: of each request the shapes of its inputs, with the batch dimension. most_rows: 0 for a model without a
    batch dimension, whose requests each run alone and count as one row.
    """
    if not most_rows:
        return [RunGroup((place,), (1,)) for place in range(len(shapes))]
    open_groups: dict[tuple[Shape, ...], list[list[int]]] = {}
    for place, shape in enumerate(shapes):
        alike = open_groups.setdefault(tuple(one[1:] for one in shape), [[]])
        if alike[-1] and sum(shapes[other][0][0] for other in alike[-1]) + shape[0][0] > most_rows:
            alike.append([])
        alike[-1].append(place)
    members = [places for alike in open_groups.values() for places in alike]
    return [RunGroup(tuple(places), tuple(shapes[place][0][0] for place in places)) for places in members]


class PendingRun(Protocol):
    """A run that was asked for."""

    def outputs(self) -> tuple[Any, ...]:
        """The outputs in the host's memory, one row a row of input, in the wire's types; waits for them.

        They are overwritten by a later run: what reads them must be done before `slots` more are begun.
        """


class Runner(Protocol):
    """Runs one program. Not thread-safe: its thread is the one that made it."""

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PendingRun:
        """Start a run. columns: of each input the requests' tensors, in host or device memory, rows of them in all."""

    def picture_input(self, rows: int) -> Any:
        """Where the pictures of the next run go: (rows, C, H, W), of the network's type and memory format."""

    def begin_pictures(self, rows: int) -> PendingRun:
        """Start a run on what lies in picture_input."""


class Reader(Protocol):
    """Encoded pictures to a network's input: pictures.PictureReader."""

    def prepare(self, encoded: list[bytes], out: Any) -> list[str | None]:
        """Fills out, (len(encoded), C, H, W). Returns an error, or None, for each picture."""


@dataclass(frozen=True)
class TorchRequest:
    """One request. tensors: its inputs in the spec's order; where the engine reads pictures, these, one a row."""

    tensors: tuple[Any, ...] = ()
    pictures: tuple[bytes, ...] = ()


Outcome = tuple[Any, ...] | TorchRequestError  # the outputs' rows in host memory, in the spec's order


@dataclass(frozen=True)
class _Run:
    group: RunGroup
    pending: PendingRun
    refused: dict[int, TorchRequestError]


@dataclass(frozen=True)
class StartedBatch:
    """A batch of requests that was begun. asks: kept, for the GPU may still read their tensors.

    answered: those that could not run beside others, and are answered already.
    """

    asks: Sequence[TorchRequest]
    run: _Run | None
    answered: list[Outcome]


class Instance:
    """Not thread-safe: `begin` by the thread that made it, `finish` by any one at a time, in order."""

    def __init__(self, spec: EngineSpec, runner: Runner, reader: Reader | None = None) -> None:
        self._spec = spec
        self._runner = runner
        self._reader = reader
        self._merges = True

    def merge_nothing(self) -> None:
        """From now on, each request runs alone, also if the model has a batch dimension."""
        self._merges = False

    def answer(self, asks: Sequence[TorchRequest]) -> list[Outcome]:
        """One outcome a request, in order. Host memory that the next call overwrites."""
        return self._answer(asks, self._groups(asks))

    def begin(self, asks: Sequence[TorchRequest], wait_until_alone: Callable[[], object]) -> StartedBatch:
        """Start a batch. Requests that cannot share a run are answered one group after another, before it returns.

        wait_until_alone: returns when every batch before is answered; the groups' runs would overwrite its answers.
        """
        runs = self._groups(asks)
        if len(runs) == 1:
            return StartedBatch(asks, self._begin(asks, runs[0]), [])
        wait_until_alone()
        return StartedBatch(asks, None, self._answer(asks, runs))

    def finish(self, begun: StartedBatch) -> list[Outcome]:
        """As `answer`, of the oldest batch that is not finished; memory that the next but one `begin` overwrites."""
        if begun.run is None:
            return begun.answered
        answers = _finish(begun.run)
        return [answers[place] for place in range(len(begun.asks))]

    def _answer(self, asks: Sequence[TorchRequest], runs: Sequence[RunGroup]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for group in runs:
            answers = _finish(self._begin(asks, group))
            outcomes.update(answers if len(runs) == 1 else _copied(answers))
        return [outcomes[place] for place in range(len(asks))]

    def _groups(self, asks: Sequence[TorchRequest]) -> list[RunGroup]:
        if self._reader is not None:
            shapes: list[tuple[tuple[int, ...], ...]] = [((len(ask.pictures),),) for ask in asks]
        else:
            shapes = [tuple(tuple(tensor.shape) for tensor in ask.tensors) for ask in asks]
        if not self._merges and self._spec.max_batch_size:
            return [RunGroup((place,), (shape[0][0],)) for place, shape in enumerate(shapes)]
        return group_requests(shapes, self._spec.max_batch_size)

    def _begin(self, asks: Sequence[TorchRequest], group: RunGroup) -> _Run:
        members = [asks[place] for place in group.places]
        if self._reader is None:
            columns = [[ask.tensors[number] for ask in members] for number in range(len(self._spec.inputs))]
            with stage("infer"):
                return _Run(group, self._runner.begin(columns, group.row_count), {})
        encoded = [picture for ask in members for picture in ask.pictures]
        with stage("decode"):
            said = self._reader.prepare(encoded, self._runner.picture_input(group.row_count))
        with stage("infer"):
            return _Run(group, self._runner.begin_pictures(group.row_count), _picture_errors(group, said))


def _copied(answers: dict[int, Outcome]) -> dict[int, Outcome]:
    """In memory of their own: the next run overwrites what they lie in."""
    return {
        place: answer if isinstance(answer, TorchRequestError) else tuple(rows.clone() for rows in answer)
        for place, answer in answers.items()
    }


def _picture_errors(group: RunGroup, said: Sequence[str | None]) -> dict[int, TorchRequestError]:
    """Of each request with bad pictures, what is wrong with them."""
    refused: dict[int, TorchRequestError] = {}
    begin = 0
    for place, rows in zip(group.places, group.rows, strict=True):
        wrong = {row: sentence for row, sentence in enumerate(said[begin : begin + rows]) if sentence is not None}
        if wrong:
            refused[place] = TorchRequestError(_error_text(wrong, rows) if rows > 1 else wrong[0])
        begin += rows
    return refused


def _error_text(wrong: dict[int, str], rows: int) -> str:
    """Sentences behind the rows that they are of: the gateway, whose request has the pictures of many clients, tells
    each its own, and asks again for the others only.
    """
    by_sentence: dict[str, list[str]] = {}
    for row, sentence in wrong.items():
        by_sentence.setdefault(sentence, []).append(str(row))
    return "; ".join(
        f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {rows}: {sentence}"
        for sentence, numbers in by_sentence.items()
    )


def _finish(run: _Run) -> dict[int, Outcome]:
    with stage("output"):
        outputs = run.pending.outputs()
    if len(run.group.places) == 1:
        place = run.group.places[0]
        return {place: run.refused.get(place, outputs)}
    answers: dict[int, Outcome] = {}
    begin = 0
    for place, rows in zip(run.group.places, run.group.rows, strict=True):
        rows_of_it = tuple(output[begin : begin + rows] for output in outputs)
        answers[place] = run.refused.get(place, rows_of_it)
        begin += rows
    return answers


MAX_IN_FLIGHT = 2
_CLOSE_TIMEOUT_S = 10.0  # for what is in flight when the model is unloaded

# (what `put` was given for the batch, one outcome a request in order, or what went wrong with all of them)
Deliver = Callable[[Any, "list[Outcome] | Exception"], None]


class Pipeline:
    """`put` by the thread that made the instance; the rest is called by a thread of the pipeline's own.

    deliver: batch for batch, in order; report: what deliver raised; enter: once, before all else.
    """

    def __init__(
        self,
        instance: Instance,
        deliver: Deliver,
        *,
        report: Callable[[Exception], object],
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        self._instance = instance
        self._deliver = deliver
        self._report = report
        self._enter = enter
        self._begun: SimpleQueue[tuple[StartedBatch, Any] | None] = SimpleQueue()  # None: that was all
        self._answered: SimpleQueue[None] = SimpleQueue()  # one item for each batch
        self._unanswered = 0  # as counted by the thread that puts
        self._thread = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, asks: Sequence[TorchRequest], whose: Any) -> None:
        """Begin a batch, and return when it is the only one that is not answered yet. Raises what begins it raises."""
        begun = self._instance.begin(asks, self._wait_until_all_are_answered)
        self._begun.put((begun, whose))
        self._unanswered += 1
        self._wait(MAX_IN_FLIGHT - 1)

    def close(self) -> None:
        """Answer what is in flight, and end."""
        self._begun.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _wait_until_all_are_answered(self) -> None:
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Until no more than so many batches are not answered."""
        while self._unanswered > most:
            self._answered.get()
            self._unanswered -= 1

    def _answer_all(self) -> None:
        self._enter()
        while (batch := self._begun.get()) is not None:
            self._answer(*batch)
            del batch  # tensors of requests, which else stayed until the next one
            self._answered.put(None)

    def _answer(self, begun: StartedBatch, whose: Any) -> None:
        try:
            self._deliver(whose, self._finished(begun))
        except Exception as error:  # noqa: BLE001  the thread's root: without it no batch were answered any more
            self._report(error)

    def _finished(self, begun: StartedBatch) -> list[Outcome] | Exception:
        try:
            return self._instance.finish(begun)
        except Exception as error:  # noqa: BLE001  a batch's failure is its own requests' answer
            return error  # kept in no variable here: its traceback would keep this frame, and the tensors, in a circle
