"""One deadline for a request."""

import re
import time

from starlette.requests import Request

from server.core.errors import DeadlineExceeded, InvalidRequest
from server.rest.body import header_if_given

HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_S = 3600.0
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?", re.ASCII)


def deadline_of(request: Request, timeout_us: int | None = None) -> float | None:
    """Monotonic seconds, counted from now (the body's last byte); None where the client set none.

    timeout_us: the v2 parameter `timeout`, 0 for none. The earlier of header and parameter holds, an hour at most.
    Raises InvalidRequest for a header that is no number, DeadlineExceeded for one that is not positive.
    """
    timeouts_s = [] if not timeout_us else [timeout_us / 1e6]
    given = header_if_given(request, HEADER)
    if given is not None:
        timeouts_s.append(_header_s(given))
    return time.monotonic() + min(*timeouts_s, MAX_TIMEOUT_S) if timeouts_s else None


def _header_s(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{HEADER} is {text[:80]!r}; it must be a number of milliseconds")
    timeout_s = float(text) / 1000
    if timeout_s <= 0:
        raise DeadlineExceeded(f"{HEADER} is {text[:80]}: no time is left; allow more")
    return timeout_s
