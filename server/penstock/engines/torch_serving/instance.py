"""One model instance: groups requests into runs, and answers each. Pipeline has several batches in flight.

With PENSTOCK_NVTX=1 (`penstock up --profile`), decode, infer and output are NVTX ranges. Imports torch only then,
because completing a model's configuration must be fast.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from .config import EngineSpec
from .parameters import TorchRequestError

VARIABLE = "PENSTOCK_NVTX"
_NOTHING = nullcontext()

Stage = Callable[[str], AbstractContextManager[None]]


def stages(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> Stage:
    """Marks stages as NVTX ranges if PENSTOCK_NVTX=1 and torch supports it."""
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
    """Requests of one run. places: their indices; rows: the number of rows of each."""

    places: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def row_count(self) -> int:
        return sum(self.rows)


def group_requests(shapes: Sequence[tuple[Shape, ...]], most_rows: int) -> list[RunGroup]:
    """Groups of requests with the same row shapes and at most most_rows rows. most_rows: 0 without batching."""
    if not most_rows:
        return [RunGroup((place,), (1,)) for place in range(len(shapes))]
    groups: list[list[int]] = []
    open_groups: dict[tuple[Shape, ...], tuple[list[int], int]] = {}  # the last group of a shape, and its rows so far
    for place, shape in enumerate(shapes):
        kind, rows = tuple(one[1:] for one in shape), shape[0][0]
        members, row_count = open_groups.get(kind, ([], 0))
        if members and row_count + rows > most_rows:
            members, row_count = [], 0
        if not members:
            groups.append(members)
        members.append(place)
        open_groups[kind] = members, row_count + rows
    return [RunGroup(tuple(places), tuple(shapes[place][0][0] for place in places)) for places in groups]


class PendingRun(Protocol):
    """A started run."""

    def outputs(self) -> tuple[Any, ...]:
        """Waits for the outputs in host memory. Read them before `slots` more runs start, which overwrite them."""

    def memory(self) -> tuple[Any, ...]:
        """Where the outputs will be, without waiting."""


class Runner(Protocol):
    """Runs one program. Use it only in the thread that created it."""

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PendingRun:
        """Starts a run. columns: the requests' tensors by input, in host or device memory. rows: in total."""


class PictureRunner(Runner, Protocol):
    """Also runs pictures that a Reader has written."""

    def picture_input(self, rows: int) -> Any:
        """The input of the next run's pictures: (rows, C, H, W), in the network's type and memory format."""

    def begin_pictures(self, rows: int) -> PendingRun:
        """Starts a run on picture_input."""


class Reader(Protocol):
    """Converts encoded pictures to a network's input; see pictures.PictureReader."""

    def prepare(self, encoded: list[bytes], out: Any) -> list[str | None]:
        """Fills out, (len(encoded), C, H, W). Returns an error or None for each picture."""


@dataclass(frozen=True)
class PictureInput:
    """How encoded pictures become a run."""

    reader: Reader
    runner: PictureRunner


@dataclass(frozen=True)
class TorchRequest:
    """tensors: the inputs in the spec's order. pictures: one per row, if the engine decodes pictures."""

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
    """A batch in flight. answered: the outcomes if the requests could not share a run."""

    requests: Sequence[TorchRequest]  # referenced, because the GPU may still read their tensors
    run: _Run | None
    answered: list[Outcome]


class Instance:
    """Call `begin` in the thread that created it; `finish` in any thread, one at a time, in order."""

    def __init__(self, spec: EngineSpec, runner: Runner, pictures: PictureInput | None = None) -> None:
        """pictures: if requests have encoded pictures; its runner is used for them."""
        self._spec = spec
        self._runner = runner
        self._pictures = pictures
        self._merges = True

    def merge_nothing(self) -> None:
        """From now on, each request runs alone."""
        self._merges = False

    def answer(self, requests: Sequence[TorchRequest]) -> list[Outcome]:
        """One outcome per request, in order, in host memory that the next call overwrites."""
        return self._answer(requests, self._groups(requests))

    def begin(self, requests: Sequence[TorchRequest], wait_until_alone: Callable[[], object]) -> StartedBatch:
        """Starts a batch. Requests that cannot share a run are answered at once, after wait_until_alone()."""
        runs = self._groups(requests)
        if len(runs) == 1:
            return StartedBatch(requests, self._begin(requests, runs[0]), [])
        wait_until_alone()
        return StartedBatch(requests, None, self._answer(requests, runs))

    def finish(self, started: StartedBatch) -> list[Outcome]:
        """As `answer`, for the oldest unfinished batch. `begin` overwrites the memory after `slots` more batches."""
        if started.run is None:
            return started.answered
        answers = _finish(started.run)
        return [answers[place] for place in range(len(started.requests))]

    def expected(self, started: StartedBatch) -> list[Outcome]:
        """The outcomes of `finish`, before they are computed: the memory has its values when `finish` returns."""
        if started.run is None:
            return started.answered
        answers = _split(started.run, started.run.pending.memory())
        return [answers[place] for place in range(len(started.requests))]

    def _answer(self, requests: Sequence[TorchRequest], runs: Sequence[RunGroup]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for group in runs:
            answers = _finish(self._begin(requests, group))
            outcomes.update(answers if len(runs) == 1 else _copied(answers))
        return [outcomes[place] for place in range(len(requests))]

    def _groups(self, requests: Sequence[TorchRequest]) -> list[RunGroup]:
        if self._pictures is not None:
            shapes: list[tuple[tuple[int, ...], ...]] = [((len(request.pictures),),) for request in requests]
        else:
            shapes = [tuple(tuple(tensor.shape) for tensor in request.tensors) for request in requests]
        if not self._merges and self._spec.max_batch_size:
            return [RunGroup((place,), (shape[0][0],)) for place, shape in enumerate(shapes)]
        return group_requests(shapes, self._spec.max_batch_size)

    def _begin(self, requests: Sequence[TorchRequest], group: RunGroup) -> _Run:
        members = [requests[place] for place in group.places]
        if self._pictures is None:
            columns = [[request.tensors[number] for request in members] for number in range(len(self._spec.inputs))]
            with stage("infer"):
                return _Run(group, self._runner.begin(columns, group.row_count), {})
        encoded = [picture for request in members for picture in request.pictures]
        with stage("decode"):
            errors = self._pictures.reader.prepare(encoded, self._pictures.runner.picture_input(group.row_count))
        with stage("infer"):
            pending = self._pictures.runner.begin_pictures(group.row_count)
            return _Run(group, pending, _picture_errors(group, errors))


def _copied(answers: dict[int, Outcome]) -> dict[int, Outcome]:
    return {
        place: answer if isinstance(answer, TorchRequestError) else tuple(_copy(rows) for rows in answer)
        for place, answer in answers.items()
    }


def _copy(rows: Any) -> Any:
    """Of a tensor of torch or an array of numpy."""
    return rows.clone() if hasattr(rows, "clone") else rows.copy()


def _picture_errors(group: RunGroup, errors: Sequence[str | None]) -> dict[int, TorchRequestError]:
    refused: dict[int, TorchRequestError] = {}
    begin = 0
    for place, rows in zip(group.places, group.rows, strict=True):
        wrong = {row: sentence for row, sentence in enumerate(errors[begin : begin + rows]) if sentence is not None}
        if wrong:
            refused[place] = TorchRequestError(_error_text(wrong, rows) if rows > 1 else wrong[0])
        begin += rows
    return refused


def _error_text(wrong: dict[int, str], rows: int) -> str:
    """Errors with their rows: the gateway gives each client its own error and repeats the request for the others."""
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
    return _split(run, outputs)


def _split(run: _Run, outputs: tuple[Any, ...]) -> dict[int, Outcome]:
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


_CLOSE_TIMEOUT_S = 10.0  # for batches in flight when the model is unloaded

Finish = Callable[[StartedBatch], Any]  # waits for the oldest batch in flight
Deliver = Callable[[Any, Any], None]  # (the argument of `put`, what finish returned or raised)


class Pipeline:
    """Call `put` in the thread that created the instance. The callbacks run in the pipeline's thread."""

    def __init__(
        self,
        instance: Instance,
        finish: Finish,
        deliver: Deliver,  # gets each batch, in order
        *,
        report: Callable[[Exception], object],  # gets errors of deliver
        in_flight: int,  # batches at most; the runner has as many slots
        enter: Callable[[], object] = lambda: None,  # called once, first
    ) -> None:
        self._instance = instance
        self._finish = finish
        self._deliver = deliver
        self._report = report
        self._in_flight = in_flight
        self._enter = enter
        self._begun: SimpleQueue[tuple[StartedBatch, Any] | None] = SimpleQueue()  # None: end
        self._answered: SimpleQueue[None] = SimpleQueue()  # one item per batch
        self._unanswered = 0  # as counted by the thread that calls put
        self._thread = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, requests: Sequence[TorchRequest], whose: Any) -> None:
        """Starts a batch; returns when one more may be started. Raises as `Instance.begin`."""
        started = self._instance.begin(requests, self._wait_until_all_are_answered)
        self._begun.put((started, whose))
        self._unanswered += 1
        self._wait(self._in_flight - 1)

    def close(self) -> None:
        """Answers batches in flight, then ends the thread."""
        self._begun.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _wait_until_all_are_answered(self) -> None:
        self._wait(0)

    def _wait(self, most: int) -> None:
        while self._unanswered > most:
            self._answered.get()
            self._unanswered -= 1

    def _answer_all(self) -> None:
        self._enter()
        while (batch := self._begun.get()) is not None:
            self._answer(*batch)
            del batch  # releases the requests' tensors
            self._answered.put(None)

    def _answer(self, started: StartedBatch, whose: Any) -> None:
        try:
            self._deliver(whose, self._finished(started))
        except Exception as error:  # noqa: BLE001  thread root, so that later batches are answered
            self._report(error)

    def _finished(self, started: StartedBatch) -> Any:
        try:
            return self._finish(started)
        except Exception as error:  # noqa: BLE001  it becomes the batch's outcome
            return error  # not assigned: the traceback would form a cycle with this frame and its tensors
