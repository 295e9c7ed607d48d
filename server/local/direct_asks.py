"""Fronts' inferences in the core's own queues, each without a task: thousands come in a second."""

import asyncio
from types import TracebackType
from typing import Protocol

from server.core.errors import InferenceError
from server.core.infer import InferRequest, InferResponse
from server.core.leaving import LeftAt
from server.local.batch_line import BatchLine
from server.local.lent_slab import Lender
from server.local.messages import UP, Answer, Ask, Left, failed
from server.logs import get_logger

log = get_logger("core")


class Waiting(Protocol):
    """A request that waits for its batch, or is in one. answer: set once; cancelled where it was given up."""

    answer: "asyncio.Future[InferResponse]"

    def leave(self) -> LeftAt:
        """Nobody waits for it any longer. Where it was."""
        ...


class Queues(Protocol):
    """Forms batches; server.batching.batcher.BatcherPool is one."""

    def enter(self, request: InferRequest, *, client: str, priority: int = 0) -> Waiting | None:
        """The request in its queue; None where it has none here. Raises of the InferenceError tree."""
        ...


def enter(queues: Queues, lender: Lender | None, line: BatchLine[UP], ask: Ask, kept: "dict[int, DirectAsk]") -> bool:
    """It waits in its queue from now on, and its answer goes over the line; so does a refusal, at once.

    False where it has no queue here, and nothing is told.
    lender: of the slab, where its tensors may lie. kept: where it is to be found by its number until it has ended.
    """
    with FailuresTold(line, ask.number):
        request = ask.request if lender is None else lender.in_full(ask.request, line)
        waiting = queues.enter(request, client=ask.client, priority=ask.priority)
        if waiting is None:
            return False
        kept[ask.number] = DirectAsk(line, ask.number, waiting, kept)
    return True


class FailuresTold:
    """A context: what fails of a front's question goes over the line as itself; the line is everybody's, and stays.

    A bug of ours is logged here, and the front learns no more. A class, which costs a fifth of a `contextmanager`.
    """

    __slots__ = ("_line", "_number")

    def __init__(self, line: BatchLine[UP], number: int) -> None:
        self._line = line
        self._number = number

    def __enter__(self) -> None:
        """Nothing is to be had of it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, InferenceError):
            log.error("a front's question failed unexpectedly", exc_info=error)
            error = InferenceError("internal error")
        self._line.send(failed(self._number, error))
        return True


class DirectAsk:
    """One inference of a front that is answered over its line; `cancel` gives it up, as a task's would."""

    __slots__ = ("_kept", "_line", "_number", "_waiting")

    def __init__(self, line: BatchLine[UP], number: int, waiting: Waiting, kept: "dict[int, DirectAsk]") -> None:
        self._line, self._number, self._waiting, self._kept = line, number, waiting, kept
        waiting.answer.add_done_callback(self._told)

    def cancel(self) -> None:
        """Nobody waits for it: the front hears where it was."""
        if self._kept.pop(self._number, None) is not None:
            self._line.send(Left(self._number, self._waiting.leave()))

    def _told(self, answer: "asyncio.Future[InferResponse]") -> None:
        if self._kept.pop(self._number, None) is None:
            return  # it was given up
        with FailuresTold(self._line, self._number):
            if answer.cancelled():
                raise InferenceError("internal error")
            self._line.send(Answer(self._number, answer.result()))
