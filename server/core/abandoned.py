"""Calls whose client no longer waits while the engine works on them; noted on the error that ended the wait."""

from collections.abc import Callable

HELD_S = 60.0  # that an abandoned call is waited for; the usual execution_timeout_ms twice
_NOTE = "abandoned_call"


class Abandoned:
    """Such a call. It ends once: with the engine's answer, or where it is taken back.

    is_served: whether it ended with an answer that was good.
    """

    __slots__ = ("_hearers", "is_served")

    def __init__(self) -> None:
        self.is_served = False
        self._hearers: list[Callable[[], None]] | None = []

    def end(self, *, is_served: bool = False) -> None:
        """The engine works on it no more, or that cannot be known. Only the first call counts."""
        hearers, self._hearers = self._hearers, None
        if hearers is None:
            return
        self.is_served = is_served
        for hear in hearers:
            hear()

    def when_ended(self, hear: Callable[[], None]) -> None:
        """Have it heard once: now, where it has ended already."""
        if self._hearers is None:
            hear()
        else:
            self._hearers.append(hear)


def abandon(error: BaseException) -> Abandoned:
    """A call that this error ended the wait for; noted on the error."""
    call = Abandoned()
    vars(error)[_NOTE] = call
    return call


def abandoned(error: BaseException | None) -> Abandoned | None:
    """The call that was noted on the error, or on one that it came of; None where the engine has nothing of it."""
    while error is not None:
        call: Abandoned | None = vars(error).get(_NOTE)
        if call is not None:
            return call
        error = error.__cause__
    return None


def when_free(error: BaseException | None, hear: Callable[[], None]) -> None:
    """Have it heard once when the engine works no more on the call that ended so: now, where it answered."""
    call = abandoned(error)
    if call is None:
        hear()
    else:
        call.when_ended(hear)
