"""What pictures and REST tensors share: prepared bytes over locust's own fast session."""

import itertools
import re
import time
from collections.abc import Callable, Sequence

from locust.contrib.fasthttp import FAILURE_EXCEPTIONS

from loadtest.clients.http_port import HttpRequest
from loadtest.clients.replies import is_good, reason_of, short
from loadtest.users.terms import HttpAnswer, Line, Outcome

# A server that compresses spends more on it than on inference.
PLAIN = {"Accept-Encoding": "identity"}


class HttpAsker:
    """Posts requests in turn; each user begins with another."""

    def __init__(
        self,
        line: Line,
        *,
        requests: Sequence[HttpRequest],
        complaint: Callable[[bytes], str],
        turn: "itertools.count[int]",
    ) -> None:
        """complaint: what is wrong with the body of a good status, else empty. turn: counts the users."""
        first = next(turn) % len(requests)
        self._requests = itertools.cycle((*requests[first:], *requests[:first]))
        self._complaint = complaint
        self._line = line
        self._headers = {**PLAIN, **dict(line.endpoint.headers)}

    def send(self, name: str) -> None:
        """One POST, one answer."""
        request = next(self._requests)
        began_s = time.perf_counter()
        headers = {**request.headers, **self._headers}
        answer = self._line.session.post(str(request.url), data=request.body, headers=headers)
        took_s = time.perf_counter() - began_s
        try:
            body = answer.content or b""
            failure = self._failure_of(answer, body)
        except FAILURE_EXCEPTIONS as error:
            body, failure = b"", without_figures(short(f"the answer broke off: {error}"))
        is_latency = not failure or took_s >= self._line.timeout_s
        self._line.tell(Outcome("POST", name, took_s * 1000 if is_latency else None, len(body), failure))

    def close(self) -> None:
        """Nothing to do: the session is the user's."""

    def _failure_of(self, answer: HttpAnswer, body: bytes) -> str:
        if not answer.status_code:
            return without_figures(short(f"no answer: {getattr(answer, 'error', 'the connection ended')}"))
        if not is_good(answer.status_code):
            return f"{answer.status_code}: {without_figures(reason_of(body))}"
        return self._complaint(body)


def without_figures(reason: str) -> str:
    """The text with # for every number, so that one reason is one row of locust's statistics."""
    return re.sub(r"\d+(\.\d+)?", "#", reason)
