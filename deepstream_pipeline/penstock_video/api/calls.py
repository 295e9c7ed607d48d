"""Calls of the pipeline's blocking methods from the API's event loop, and error responses."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.responses import JSONResponse

from penstock_video import errors

RETRY_AFTER_S = 1

_STATUS_OF: tuple[tuple[type[errors.PipelineError], int], ...] = (
    (errors.UnknownSource, 404),
    (errors.SourceExists, 409),
    (errors.NotSetUp, 409),
    (errors.SourceNotOpen, 409),
    (errors.SourceNotRecordable, 415),
    (errors.RuleRefused, 400),
    (errors.SourceNotAllowed, 400),
    (errors.TooManySources, 429),
    (errors.SinkFailed, 503),  # also of the event store
    (errors.SourceStuck, 503),
    (errors.ChangeNotSaved, 409),
    (errors.SourceUnavailable, 502),
    (errors.DecodeError, 415),
)


class Refusal(Exception):
    """A request is not served. text: the fault, the value and the fix; the client gets it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def status_of(error: errors.PipelineError) -> int:
    """The HTTP status of a pipeline error; 500 for an unexpected one."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)


def error_response(status: int, text: str, *, is_last: bool = False) -> JSONResponse:
    """The error response. is_last: the connection closes after it."""
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if is_last:
        headers["connection"] = "close"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = 'Basic realm="penstock video", charset="UTF-8"'
    return JSONResponse({"error": text}, status_code=status, headers=headers)


T = TypeVar("T")


class Calls:
    """A limited number of concurrent calls from one event loop. timeout_s: of each call."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit, self._timeout_s = limit, timeout_s
        self._running = 0
        self._waiting: set[asyncio.Future[Any]] = set()  # whatever the calls return
        self._is_closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result or exception. Raises Refusal (503) on timeout, or if too many calls are running."""
        if self._is_closed:
            raise Refusal(503, "the program is ending")
        if self._running >= self._limit:
            raise Refusal(503, f"{self._running} calls of the pipeline are running (limit {self._limit}); retry")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._running += 1
        self._waiting.add(answer)
        threading.Thread(target=self._work, args=(loop, call, answer), name="api-call", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise Refusal(503, f"the pipeline did not answer within {self._timeout_s:g} s; retry") from None
        finally:
            self._waiting.discard(answer)

    def close(self) -> None:
        """Answers waiting clients and refuses new calls."""
        self._is_closed = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(Refusal(503, "the program is ending"))

    def _work(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], answer: asyncio.Future[T]) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(answer.set_result, call())
        except Exception as error:  # noqa: BLE001  # a thread's root: the client gets the error
            settle = partial(answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(self._settle, answer, settle)
        except RuntimeError:  # the loop ended meanwhile, and with it who asked
            return

    def _settle(self, answer: asyncio.Future[T], settle: Callable[[], None]) -> None:
        self._running -= 1
        if not answer.done():
            settle()
