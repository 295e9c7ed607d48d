"""What a connection knows of the request that is being served on it, for who does not want to ask ASGI for it.

ASGI tells that a client is gone to a task that waits for it, and that a body is whole to one that receives it: a task
and a timer a request, which at ten thousand requests a second are a good part of the work.
"""

from collections.abc import Callable
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_PRESENCE = "penstock.presence"


class Presence:
    """Of one request, from its first byte to the end of its answer."""

    __slots__ = ("_cycle", "_leave")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Puts itself into the request's scope."""
        self._cycle = cycle
        self._leave: Callable[[], None] | None = None
        cast(Scope, cycle.scope)[_PRESENCE] = self

    @property
    def is_whole(self) -> bool:
        """Whether all of the body has come, though it may not have been received."""
        return not self._cycle.more_body

    @property
    def has_begun(self) -> bool:
        """Whether something of the answer was sent."""
        return self._cycle.response_started

    @property
    def is_gone(self) -> bool:
        """Whether the client is."""
        return self._cycle.disconnected

    def watch(self, leave: Callable[[], None]) -> None:
        """Tell when the client goes; the connection is read on for that."""
        self._cycle.flow.resume_reading()
        self._leave = leave

    def unwatch(self) -> None:
        """Tell nobody."""
        self._leave = None

    def lost(self) -> None:
        """The connection's word: the client is gone."""
        if self._leave is not None:
            self._leave()


def presence_of(scope: Scope) -> Presence | None:
    """None behind a server that is not ours."""
    found = scope.get(_PRESENCE)
    return found if isinstance(found, Presence) else None
