"""Facts attached to the exception that ends a call: work abandoned at the engine, and the stage of a cancellation."""

from collections.abc import Callable
from enum import StrEnum

MAX_ABANDONED_S = 60.0  # maximum wait for an abandoned call: twice the default execution_timeout_s
_ABANDONED_ATTRIBUTE = "abandoned_call"


class ClientLeft(Exception):
    """The client closed its connection before its request was done."""


class AbandonedCall:
    """A call that the engine may still run. It ends once. is_served: with a successful response."""

    __slots__ = ("_hearers", "is_served")

    def __init__(self) -> None:
        self.is_served = False
        self._hearers: list[Callable[[], None]] | None = []

    def end(self, *, is_served: bool = False) -> None:
        """Records that the engine finished it, or its state is unknown. Later calls of this method do nothing."""
        hearers, self._hearers = self._hearers, None
        if hearers is None:
            return
        self.is_served = is_served
        for hear in hearers:
            hear()

    def when_ended(self, hear: Callable[[], None]) -> None:
        """Calls `hear` once when it has ended; at once if it has ended already."""
        if self._hearers is None:
            hear()
        else:
            self._hearers.append(hear)


def mark_abandoned(error: BaseException) -> AbandonedCall:
    """A new abandoned call, attached to the error that ended the wait for it."""
    call = AbandonedCall()
    vars(error)[_ABANDONED_ATTRIBUTE] = call
    return call


def abandoned_call_of(error: BaseException | None) -> AbandonedCall | None:
    """The call attached to the error or one of its causes, or None."""
    while error is not None:
        call: AbandonedCall | None = vars(error).get(_ABANDONED_ATTRIBUTE)
        if call is not None:
            return call
        error = error.__cause__
    return None


def when_engine_done(error: BaseException | None, hear: Callable[[], None]) -> None:
    """Calls `hear` once when the engine has finished the call that ended with this error; at once if it answered."""
    call = abandoned_call_of(error)
    if call is None:
        hear()
    else:
        call.when_ended(hear)


_STAGE_ATTRIBUTE = "left_at"


class CancelStage(StrEnum):
    """Where a request was cancelled. BATCH: it ran, or runs on for other members. ENGINE: it ran alone."""

    DECODE = "decode"
    QUEUE = "queue"
    BATCH = "batch"
    ENGINE = "engine"
    STREAM = "stream"


class PendingStage:
    """The stage of a call that another process knows. Its creator must call `tell`."""

    def __init__(self) -> None:
        self._where: CancelStage | None = None
        self._hear: Callable[[CancelStage], None] = lambda _: None

    def tell(self, where: CancelStage) -> None:
        """Sets the stage; only the first call counts."""
        if self._where is None:
            self._where = where
            self._hear(where)

    def when_resolved(self, hear: Callable[[CancelStage], None]) -> None:
        """Calls `hear` once with the stage; at once if it is known already."""
        if self._where is None:
            self._hear = hear
        else:
            hear(self._where)


def note_cancel_stage(cancelled: BaseException, where: CancelStage | PendingStage) -> None:
    """Attaches the stage to the CancelledError, unless it has one."""
    vars(cancelled).setdefault(_STAGE_ATTRIBUTE, where)


def cancel_stage_of(cancelled: BaseException) -> CancelStage | PendingStage | None:
    """The stage attached to the error, or None."""
    where: CancelStage | PendingStage | None = vars(cancelled).get(_STAGE_ATTRIBUTE)
    return where


def when_stage_known(cancelled: BaseException, otherwise: CancelStage, hear: Callable[[CancelStage], None]) -> None:
    """Calls `hear` once with the stage, now or later. otherwise: the stage if none was attached."""
    where = cancel_stage_of(cancelled) or otherwise
    if isinstance(where, PendingStage):
        where.when_resolved(hear)
    else:
        hear(where)
