"""The deadline of a block of code, for every request that it sends."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.protocol.errors import InvalidRequest

_DEADLINE: ContextVar[float] = ContextVar("penstock_deadline", default=math.inf)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Requests in the block end within so many seconds, counted from here. A nested block can only end earlier.

    Raises InvalidRequest for a number that is not positive.
    """
    if not seconds > 0:
        raise InvalidRequest(f"a deadline of {seconds} s cannot be met: give a positive number of seconds")
    token = _DEADLINE.set(min(_DEADLINE.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def current_deadline() -> float:
    """Monotonic seconds; infinity outside of all blocks."""
    return _DEADLINE.get()
