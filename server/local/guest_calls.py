"""Inferences of guests: let in as a gRPC client's are, and counted beside them."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Protocol

from server.core.backend import Backend
from server.core.contract import check_counts, check_shape, checked_name
from server.core.errors import InferenceError, InvalidRequest
from server.core.infer import InferRequest, InferResponse
from server.core.tensor import Datatype
from server.local.guests import MAX_DEADLINE_S
from server.local.lent_slab import Lender
from server.local.messages import Ask
from server.logs import get_logger

PROTOCOL = "guest"  # in the metrics, where others have http and grpc
DEADLINE_SLACK_S = 0.02
_DONE, _LATE, _BUG = "OK", "DEADLINE_EXCEEDED", "INTERNAL"

log = get_logger("core")


class Plane(Protocol):
    """What lets an inference in; server.dataplane.DataPlane is one."""

    async def infer_tensors(
        self, request: InferRequest, alone: Backend, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        """The model's answer, or the engine's own refusal. Raises of the tree where there is none."""
        ...

    def model_label(self, model_name: str) -> str:
        """A bounded label."""
        ...


class Record(Protocol):
    """Counts them; server.metrics.Metrics is one."""

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """An inference was answered."""
        ...

    def rejected(self, reason: str) -> None:
        """The gateway refused or failed one itself. reason: an error class's stable word."""
        ...

    def cancelled(self, protocol: str) -> None:
        """Nobody waits for its answer."""
        ...


class GuestCalls:
    """One object for all guests of a core."""

    def __init__(
        self,
        plane: Plane,
        backend: Backend,
        record: Record,
        code_of: Callable[[InferenceError], str],
        lender: Lender | None = None,
    ) -> None:
        """backend: asked for what is in no batch. code_of: gRPC's word for an error. lender: of the slab, if any."""
        self._plane = plane
        self._backend = backend
        self._record = record
        self._code_of = code_of
        self._lender = lender

    async def infer(self, ask: Ask, *, borrower: Hashable, client: str) -> InferResponse:
        """The answer; counted, whatever becomes of it. Raises of the InferenceError tree.

        borrower: to whom the part of the slab was lent in which its tensors may lie. client: whom the queue is fair
        to: a guest is one, whatever it says of its own callers.
        """
        started = time.monotonic()
        name, deadline = ask.request.model_name, ask.request.deadline
        try:
            request = self._taken(ask.request, borrower, started)
            answer = await self._plane.infer_tensors(request, self._backend, client=client, priority=ask.priority)
        except asyncio.CancelledError:
            if deadline is None or time.monotonic() < deadline - DEADLINE_SLACK_S:
                self._record.cancelled(PROTOCOL)
            else:  # it gave up at its own deadline, a moment before we could say so
                self._count(name, _LATE, started)
            raise
        except InferenceError as error:
            self._reject(name, error, started)
            raise
        except Exception:  # a bug of ours, which the question's root logs: this counts it only
            self._count(name, _BUG, started)
            raise
        if isinstance(answer, InferenceError):
            self._count(name, self._code_of(answer), started)
            raise answer
        self._count(name, _DONE, started)
        return answer

    def refused(self, ask: Ask, error: InferenceError) -> None:
        """It was refused before it came here."""
        self._reject(ask.request.model_name, error, time.monotonic())

    def _taken(self, request: InferRequest, borrower: Hashable, now: float) -> InferRequest:
        """With every byte, and nothing of it that no client could ask. Raises InferenceError."""
        _check(request)
        deadline = request.deadline
        if deadline is not None:
            if math.isnan(deadline):
                raise InvalidRequest("the deadline is no number")
            deadline = deadline if deadline - now <= MAX_DEADLINE_S else None
        if request.metadata or deadline != request.deadline:
            request = replace(request, metadata=(), deadline=deadline)
        return request if self._lender is None else self._lender.in_full(request, borrower)

    def _reject(self, model_name: str, error: InferenceError, started: float) -> None:
        self._record.rejected(error.reason)
        log.debug("a guest's request is refused", reason=error.reason, error=error.message)
        self._count(model_name, self._code_of(error), started)

    def _count(self, model_name: str, code: str, started: float) -> None:
        self._record.request_done(
            model=self._plane.model_label(model_name),
            protocol=PROTOCOL,
            code=code,
            seconds=time.monotonic() - started,
        )


def _check(request: InferRequest) -> None:
    """Raises InvalidRequest for what the other transports let nobody ask: an engine may end over it, or think long."""
    checked_name(request.model_name)
    check_counts(len(request.inputs), request.outputs)
    for tensor in request.inputs:
        check_shape(tensor.name, tensor.shape)
        if tensor.place is not None and tensor.datatype is Datatype.BYTES:
            raise InvalidRequest(f"tensor {tensor.name!r} is BYTES, which are sent, and not named by their place")
