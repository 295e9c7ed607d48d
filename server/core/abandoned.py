"""Calls that the engine still works on after the client stopped waiting; attached to the error that ended the wait."""

from collections.abc import Callable

HELD_S = 60.0  # maximum wait for an abandoned call: twice the default execution_timeout_s
_NOTE = "abandoned_call"


class Abandoned:
    """An abandoned call. It ends once: with the engine's answer, or when it is cancelled at the engine.

    is_served: whether it ended with a successful answer.
    """

    __slots__ = ("_hearers", "is_served")

    def __init__(self) -> None:
        self.is_served = False
        self._hearers: list[Callable[[], None]] | None = []

    def end(self, *, is_served: bool = False) -> None:
        """The engine no longer works on it, or its state is unknown. Only the first call of this method counts."""
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


def abandon(error: BaseException) -> Abandoned:
    """A new abandoned call, attached to the error that ended the wait for it."""
    call = Abandoned()
    vars(error)[_NOTE] = call
    return call


def abandoned(error: BaseException | None) -> Abandoned | None:
    """The call attached to the error or one of its causes; None if the engine does not work on it."""
    while error is not None:
        call: Abandoned | None = vars(error).get(_NOTE)
        if call is not None:
            return call
        error = error.__cause__
    return None


def when_free(error: BaseException | None, hear: Callable[[], None]) -> None:
    """Calls `hear` once when the engine has finished the call that ended with this error; at once if it answered."""
    call = abandoned(error)
    if call is None:
        hear()
    else:
        call.when_ended(hear)
