"""Requests in flight on one stream: matches responses to requests, and says when a rejection is due. Sans-IO."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protocol.errors import InferenceError
from penstock.protocol.grpc_codec import StreamAnswer


@dataclass(slots=True, eq=False)
class Sent:
    """A request that the engine has.

    leave: releases its slot; gets the error if the engine has not answered, else None.
    is_decoupled: its answers come whenever they come; others' come in the requests' order.
    hides_empty_final: the gateway requested the empty final response, the client did not.
    """

    model_name: str
    request_id: str
    started: float
    leave: Callable[[BaseException | None], None]
    is_decoupled: bool = False
    hides_empty_final: bool = False
    is_done: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that the engine never sees."""

    model_name: str
    request_id: str
    started: float
    error: InferenceError


@dataclass(slots=True)
class StreamLedger:
    """The requests of one stream that are not answered, at most `window` of them.

    Answers are matched by id, equal ids in the order of their requests. A refusal keeps its place in that order: it is
    due when what came before it is answered, decoupled requests apart, as Triton itself does it.
    """

    window: int
    _by_id: dict[str, deque[Sent]] = field(default_factory=dict)
    _in_order: deque[Sent | Rejected] = field(default_factory=deque)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        """Whether one more may come."""
        return self._count < self.window

    def send(self, request: Sent) -> None:
        """The engine is about to get it."""
        self._count += 1
        self._by_id.setdefault(request.request_id, deque()).append(request)
        if not request.is_decoupled:
            self._in_order.append(request)

    def refuse(self, request: Rejected) -> None:
        """The engine will not get it; `due` says when to tell."""
        self._count += 1
        self._in_order.append(request)

    def answered(self, answer: StreamAnswer) -> Sent | None:
        """The request of this answer, or None. The last answer removes the request from the ledger."""
        request = self.find(answer)
        if request is None:
            return None
        request.has_failed |= bool(answer.error)
        if answer.is_last:
            self._remove(request)
        else:
            request.is_decoupled = True
        return request

    def due(self) -> list[Rejected]:
        """The refusals whose turn it is; they leave the ledger."""
        found: list[Rejected] = []
        while self._in_order:
            first = self._in_order[0]
            if isinstance(first, Rejected):
                found.append(first)
                self._count -= 1
            elif not (first.is_done or first.is_decoupled):
                break
            self._in_order.popleft()
        return found

    def abandon(self) -> list[Sent]:
        """Everything that the engine will not answer any more, in no order; the ledger is empty then."""
        left = [request for requests in self._by_id.values() for request in requests]
        self._by_id.clear()
        self._in_order.clear()
        self._count = 0
        return left

    def find(self, answer: StreamAnswer) -> Sent | None:
        """Whose answer it is, while its request is not done."""
        requests = self._by_id.get(answer.request_id)
        if not requests:
            return None
        if not answer.model_name:
            return requests[0]
        return next((request for request in requests if request.model_name == answer.model_name), requests[0])

    def _remove(self, request: Sent) -> None:
        requests = self._by_id[request.request_id]
        requests.remove(request)
        if not requests:
            del self._by_id[request.request_id]
        request.is_done = True
        self._count -= 1
