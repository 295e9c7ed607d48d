"""One instance of a model: requests in, answers out; each request fails alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .batch import Group, groups
from .config import EngineSpec
from .errors import RequestError
from .interfaces import Pending, Runner
from .nvtx import stage


class Reader(Protocol):
    """Encoded pictures to a network's input: pictures.PictureReader."""

    def prepare(self, encoded: list[bytes], out: Any) -> list[str | None]:
        """Fill out, (len(encoded), C, H, W); of each picture what is wrong with it, None where nothing is."""


@dataclass(frozen=True)
class Ask:
    """One request. tensors: its inputs in the spec's order; where the engine reads pictures, these, one a row."""

    tensors: tuple[Any, ...] = ()
    pictures: tuple[bytes, ...] = ()


Outcome = tuple[Any, ...] | RequestError  # the outputs' rows in host memory, in the spec's order


@dataclass(frozen=True)
class _Run:
    group: Group
    pending: Pending
    refused: dict[int, RequestError]


@dataclass(frozen=True)
class Begun:
    """A batch of requests that was begun. asks: kept, for the GPU may still read their tensors.

    answered: those that could not run beside others, and are answered already.
    """

    asks: Sequence[Ask]
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

    def answer(self, asks: Sequence[Ask]) -> list[Outcome]:
        """One outcome a request, in order. Host memory that the next call overwrites."""
        return self._answer(asks, self._groups(asks))

    def begin(self, asks: Sequence[Ask], wait_until_alone: Callable[[], object]) -> Begun:
        """Start a batch. Requests that cannot share a run are answered one group after another, before it returns.

        wait_until_alone: returns when every batch before is answered; the groups' runs would overwrite its answers.
        """
        runs = self._groups(asks)
        if len(runs) == 1:
            return Begun(asks, self._begin(asks, runs[0]), [])
        wait_until_alone()
        return Begun(asks, None, self._answer(asks, runs))

    def finish(self, begun: Begun) -> list[Outcome]:
        """As `answer`, of the oldest batch that is not finished; memory that the next but one `begin` overwrites."""
        if begun.run is None:
            return begun.answered
        answers = _finish(begun.run)
        return [answers[place] for place in range(len(begun.asks))]

    def _answer(self, asks: Sequence[Ask], runs: Sequence[Group]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for group in runs:
            answers = _finish(self._begin(asks, group))
            outcomes.update(answers if len(runs) == 1 else _kept(answers))
        return [outcomes[place] for place in range(len(asks))]

    def _groups(self, asks: Sequence[Ask]) -> list[Group]:
        if self._reader is not None:
            shapes: list[tuple[tuple[int, ...], ...]] = [((len(ask.pictures),),) for ask in asks]
        else:
            shapes = [tuple(tuple(tensor.shape) for tensor in ask.tensors) for ask in asks]
        if not self._merges and self._spec.max_batch_size:
            return [Group((place,), (shape[0][0],)) for place, shape in enumerate(shapes)]
        return groups(shapes, self._spec.max_batch_size)

    def _begin(self, asks: Sequence[Ask], group: Group) -> _Run:
        members = [asks[place] for place in group.places]
        if self._reader is None:
            columns = [[ask.tensors[number] for ask in members] for number in range(len(self._spec.inputs))]
            with stage("infer"):
                return _Run(group, self._runner.begin(columns, group.row_count), {})
        encoded = [picture for ask in members for picture in ask.pictures]
        with stage("decode"):
            said = self._reader.prepare(encoded, self._runner.picture_input(group.row_count))
        with stage("infer"):
            return _Run(group, self._runner.begin_pictures(group.row_count), _refusals(group, said))


def _kept(answers: dict[int, Outcome]) -> dict[int, Outcome]:
    """In memory of their own: the next run overwrites what they lie in."""
    return {
        place: answer if isinstance(answer, RequestError) else tuple(rows.clone() for rows in answer)
        for place, answer in answers.items()
    }


def _refusals(group: Group, said: Sequence[str | None]) -> dict[int, RequestError]:
    """Of each request with bad pictures, what is wrong with them."""
    refused: dict[int, RequestError] = {}
    begin = 0
    for place, rows in zip(group.places, group.rows, strict=True):
        wrong = {row: sentence for row, sentence in enumerate(said[begin : begin + rows]) if sentence is not None}
        if wrong:
            refused[place] = RequestError(_named(wrong, rows) if rows > 1 else wrong[0])
        begin += rows
    return refused


def _named(wrong: dict[int, str], rows: int) -> str:
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
