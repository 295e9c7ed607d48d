"""HTTP to a target: one session, kept connections, requests prepared beforehand, and never an exception to a sender."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import aiohttp.payload
from yarl import URL

from loadtest.clients.client import Answer, Endpoint
from loadtest.clients.replies import http_refusal, is_good, short
from loadtest.results import Status

# Shorter than the 5 s after which uvicorn and its like close an idle connection: none is used while it is closed.
KEEP_ALIVE_S = 4.0
# The generator has run out of something: descriptors, ports, memory. The server was never asked.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))

MOST_BYTES = 256 << 20  # of an answer, as of a tensor that is asked: many at once must fit into the generator's memory

Judge = Callable[["HttpReply"], Answer]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One POST, ready to be sent again and again."""

    url: URL
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A 2xx, read to its end. sent_bytes: the request's body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_bytes: int

    def good(self) -> Answer:
        """An OK of which nothing more is known."""
        return Answer(Status.OK, str(self.status), "", self.sent_bytes, len(self.body))

    def bad(self, why: str) -> Answer:
        """A 2xx whose content is wrong."""
        return Answer(Status.FAILED, str(self.status), short(why), self.sent_bytes, len(self.body))


class _TooLarge(aiohttp.ClientError):
    """An answer that is not read to its end. One sentence."""


class _Body(aiohttp.payload.BytesPayload):
    """Bytes of any size, sent as they are: aiohttp's own warns above 1 MiB that to send them takes a moment."""

    def __init__(self, content: bytes) -> None:
        aiohttp.payload.Payload.__init__(self, content, content_type="application/octet-stream")
        self._size = len(content)


class HttpPort:
    """Opens as many connections as there are requests at once. Made inside the event loop that uses it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(timeout_s, sock_connect=None, ceil_threshold=float("inf")),
            headers=[
                ("Accept-Encoding", "identity"),
                *endpoint.headers,
            ],  # to compress costs a server more than to infer
            skip_auto_headers=("User-Agent", "Accept"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def post(self, request: HttpRequest, judge: Judge) -> Answer:
        """What became of the request; judge says it of a 2xx."""
        sent_bytes = len(request.body)
        try:
            async with self._session.post(
                request.url, data=_Body(request.body), headers=request.headers, allow_redirects=False
            ) as answer:
                body = await _whole(answer)
        except TimeoutError:
            return Answer(Status.TIMEOUT, "", f"no answer within {self._timeout_s:g} s", sent_bytes)
        except aiohttp.ClientError as error:
            return _broken(error, sent_bytes)
        except RuntimeError as error:  # aiohttp's word for a session that is closed
            return Answer(Status.FAILED, "", short(str(error)), sent_bytes)
        if not is_good(answer.status):
            return http_refusal(answer.status, body, sent_bytes, location=answer.headers.get("Location", ""))
        return judge(HttpReply(answer.status, answer.headers, body, sent_bytes))

    async def call(
        self, method: str, url: URL, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of a question beside the load. Raises aiohttp.ClientError and TimeoutError."""
        async with self._session.request(
            method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            return answer.status, await _whole(answer)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._session.close()


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """The body. Raises _TooLarge, whereupon the connection is closed."""
    chunks, size_bytes = [], 0
    while chunk := await answer.content.readany():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > MOST_BYTES:
            answer.close()
            raise _TooLarge(f"the answer is larger than {MOST_BYTES:,} bytes, and the rest was not read")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _broken(error: aiohttp.ClientError, sent_bytes: int) -> Answer:
    is_ours = isinstance(error, OSError) and error.errno in _OURS
    why = short(str(error) or type(error).__name__)
    return Answer(Status.NOT_SENT if is_ours else Status.FAILED, "", why, 0 if is_ours else sent_bytes)
