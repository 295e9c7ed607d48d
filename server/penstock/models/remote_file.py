"""A file at an http(s):// URL, from a byte offset, with timeouts and a minimum rate."""

import http
import http.client
import io
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, cast

from penstock.models.catalogue import DownloadInterrupted, PullFailed, WrongContent


@dataclass(slots=True)
class RateMonitor:
    """Measures the rate in windows of at least window_s seconds."""

    least_bytes_per_s: float
    window_s: float
    begin_s: float
    came_bytes: int = 0

    def is_too_slow(self, now_s: float, size_bytes: int) -> bool:
        """Counts size_bytes received at now_s. True if a window ended below the minimum rate."""
        self.came_bytes += size_bytes
        elapsed_s = now_s - self.begin_s
        if elapsed_s < self.window_s:
            return False
        is_too_slow = self.came_bytes < self.least_bytes_per_s * elapsed_s
        self.begin_s, self.came_bytes = now_s, 0
        return is_too_slow


SILENCE_TIMEOUT_S = 30.0  # to connect, for the response's header, and between bytes of the body
MIN_BYTES_PER_S, PACE_WINDOW_S = 1000, 60.0  # slower downloads are aborted; a file of 100 MB takes a day at this rate
_MOST_DIGITS = 18  # of a valid Content-Length
ADVICE_OTHER_SOURCE = "or fetch the file by other means and name it, or its folder, with --from"


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """An opened source. read(count) returns at most count bytes, empty at the end, and raises PullFailed."""

    read: Callable[[int], bytes]
    offset: int  # of the first byte; 0 if the server cannot resume
    size_bytes: int | None  # of the whole file; None if unknown
    is_web_page: bool = False  # the content type is HTML
    is_pointer: bool = False  # the file is a Git LFS pointer


@contextmanager
def open_url(url: str, offset: int) -> Iterator[OpenedSource]:
    """The file from the offset on, or from 0 without resume. Raises PullFailed, and WrongContent for a 416."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        opener = urllib.request.build_opener(_Http, _Https, _Redirects)  # with the environment's proxies
        response = opener.open(request, timeout=SILENCE_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(url, offset, error) from error
    except (http.client.HTTPException, OSError, ValueError, OverflowError) as error:
        raise _unreachable(url, error) from error
    with closing(cast(http.client.HTTPResponse, response)) as opened:
        begin = _first_byte(opened, offset)
        is_web_page = opened.headers.get_content_type() in ("text/html", "application/xhtml+xml")
        yield OpenedSource(_ResponseBody(url, opened).read, begin, _size_of(opened, begin), is_web_page)


class _Response(http.client.HTTPResponse):
    """Limits the total time of the response's header, because urllib's timeout is per read."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None):
        super().__init__(sock, debuglevel, method, url)
        self._socket = sock
        self._is_late = False

    def begin(self) -> None:
        alarm = threading.Timer(SILENCE_TIMEOUT_S, self._give_up)
        alarm.daemon = True
        alarm.start()
        try:
            super().begin()
        except (http.client.HTTPException, OSError, ValueError) as error:
            if self._is_late:
                raise TimeoutError from error
            raise
        finally:
            alarm.cancel()
        if self._is_late:  # a header cut in the middle of a line looks complete
            raise TimeoutError

    def _give_up(self) -> None:
        self._is_late = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _HttpConnection(http.client.HTTPConnection):
    response_class = _Response


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req, context=ssl.create_default_context())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Closes a redirect's body, which urllib would read to its end."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> http.client.HTTPResponse | None:
        fp.close()
        return cast("http.client.HTTPResponse | None", super().http_error_302(req, io.BytesIO(), code, msg, headers))

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _ResponseBody:
    """The body of a response. Converts errors to PullFailed."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self._url = url
        self._response = response
        self._pace = RateMonitor(MIN_BYTES_PER_S, PACE_WINDOW_S, begin_s=time.monotonic())

    def read(self, size: int) -> bytes:
        try:
            chunk = self._response.read1(size)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise DownloadInterrupted(
                f"{self._url} broke off ({_why(error)}): run the same command again, it goes on from there, "
                f"{ADVICE_OTHER_SOURCE}"
            ) from error
        if chunk and self._pace.is_too_slow(time.monotonic(), len(chunk)):
            raise PullFailed(
                f"{self._url} sends less than {MIN_BYTES_PER_S / 1000:g} kB/s: run the same command again later, it "
                f"goes on from there, {ADVICE_OTHER_SOURCE}"
            )
        return chunk


def _first_byte(response: http.client.HTTPResponse, requested: int) -> int:
    """Offset of the response's first byte: `requested` only for a 206 with that Content-Range, else 0."""
    content_range = response.headers.get("Content-Range", "")
    return requested if response.status == 206 and content_range.startswith(f"bytes {requested}-") else 0


def _size_of(response: http.client.HTTPResponse, begin: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    is_number = length.isascii() and length.isdecimal() and len(length) <= _MOST_DIGITS
    return begin + int(length) if is_number and not response.chunked else None


def _refused(url: str, offset: int, error: urllib.error.HTTPError) -> PullFailed:
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return WrongContent(f"{url} has no byte {offset}: it is another file than the one that was begun")
    retry_after = error.headers.get("Retry-After", "")
    if error.code == http.HTTPStatus.TOO_MANY_REQUESTS or error.code >= 500:
        when = f"in {retry_after} s" if retry_after.isdecimal() else "later"
        advice = f"run the same command again {when}"
    elif error.code in (401, 403, 407):
        advice = "it wants a login"
    else:
        advice = "check the address"
    return PullFailed(f"{url} answered {error.code} {error.reason}: {advice}, {ADVICE_OTHER_SOURCE}")


def _unreachable(url: str, error: Exception) -> PullFailed:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, ssl.SSLCertVerificationError):
        advice = "where a proxy signs with its own, name its CA file in SSL_CERT_FILE"
        return PullFailed(
            f"{url}: its certificate is not trusted ({reason.verify_message}): {advice}, {ADVICE_OTHER_SOURCE}"
        )
    if isinstance(reason, ssl.SSLError):
        return PullFailed(
            f"{url} does not speak TLS as it should ({reason.reason}): check the address, {ADVICE_OTHER_SOURCE}"
        )
    return PullFailed(
        f"{url} cannot be reached ({_why(error)}): check the address and the network, {ADVICE_OTHER_SOURCE}"
    )


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, TimeoutError):
        return f"nothing came for {SILENCE_TIMEOUT_S:g} s"
    return str(reason) or type(reason).__name__
