"""A deadline for all requests in a block of code."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.protocol.errors import InvalidRequest

_DEADLINE: ContextVar[float] = ContextVar("penstock_deadline", default=math.inf)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Sets a deadline, in seconds from now, for requests in the block. A nested block can only shorten it.

    Raises InvalidRequest if `seconds` is not positive.
    """
    if not seconds > 0:
        raise InvalidRequest(f"invalid deadline of {seconds} s: give a positive number of seconds")
    token = _DEADLINE.set(min(_DEADLINE.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def current_deadline() -> float:
    """The deadline in monotonic seconds; infinity if none is set."""
    return _DEADLINE.get()
