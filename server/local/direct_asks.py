"""Fronts' inferences in the core's own queues, each without a task: thousands come in a second."""

import asyncio
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

    def owns(self, model_name: str) -> bool:
        """Whether requests for that model are to come here."""
        ...

    def enter(self, request: InferRequest, *, client: str, priority: int = 0) -> Waiting:
        """The request in its queue. Raises of the InferenceError tree."""
        ...


def enter(queues: Queues, lender: Lender | None, line: BatchLine[UP], ask: Ask, kept: "dict[int, DirectAsk]") -> None:
    """It waits in its queue from now on, and its answer goes over the line; so does a refusal, at once.

    lender: of the slab, where its tensors may lie. kept: where it is to be found by its number until it has ended.
    """
    try:
        request = ask.request if lender is None else lender.in_full(ask.request, line)
        waiting = queues.enter(request, client=ask.client, priority=ask.priority)
    except InferenceError as error:
        line.send(failed(ask.number, error))
        return
    kept[ask.number] = DirectAsk(line, ask.number, waiting, kept)


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
        if answer.cancelled():
            self._line.send(failed(self._number, InferenceError("internal error")))
            return
        error = answer.exception()
        if error is None:
            self._line.send(Answer(self._number, answer.result()))
        elif isinstance(error, InferenceError):
            self._line.send(failed(self._number, error))
        else:  # a bug of ours: logged here, and the front learns no more
            log.error("a front's question failed unexpectedly", exc_info=error)
            self._line.send(failed(self._number, InferenceError("internal error")))
