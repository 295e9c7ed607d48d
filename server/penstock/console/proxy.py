"""Forwards a browser's calls to the REST APIs of the gateway and the video program, with the session's API key."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0  # between two reads: adding a model answers when its trial is done
MAX_CALLS = 256  # at once, over all browsers
CHUNK_BYTES = 256 << 10
_SENT_ON = ("accept", "content-type", "content-length", "if-none-match", "range", "x-request-timeout-ms")
_SENT_ON_PREFIX = "x-penstock-"
_RETURNED = (
    *("content-type", "content-length", "content-encoding", "content-disposition", "content-range", "accept-ranges"),
    *("cache-control", "etag", "last-modified", "retry-after", "location"),
)
# A document that an API sends (a report) runs no script, and calls nothing.
ANSWER_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'; sandbox",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_IDENTITY_HEADER = "x-penstock-caller"  # names a caller between the gateway's own processes
SERVED_PATH = re.compile(r"/(?:v1|v2)/|/(?:v2|openapi\.json|health/live|health/ready)\Z")
_DOT_SEGMENT = re.compile(r"/(?:\.|%2e){1,2}(?:/|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Upstream:
    """An API behind the console. name: for messages. tls: returns the context for https; None for the system's CAs."""

    name: str
    url: str
    start_hint: str
    tls: Callable[[], ssl.SSLContext] | None = None


def error_response(status: int, text: str) -> Response:
    """An error in the form that both APIs use."""
    body = json.dumps({"error": text}).encode()
    return Response(body, status, {**ANSWER_HEADERS, "cache-control": "no-store"}, "application/json")


def is_served(path: str) -> bool:
    """Whether the console forwards a path of an API. path: as received, neither decoded nor normalised."""
    return SERVED_PATH.match(path) is not None and _DOT_SEGMENT.search(path) is None


class Proxy:
    """Forwards calls. Bodies and answers are streamed; nothing is retried, redirects are not followed."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._calls = 0

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: Request, upstream: Upstream, path: str, api_key: str) -> Response:
        """The API's answer. path: with its query, as received. api_key: empty for none."""
        if not is_served(path.partition("?")[0]):
            return error_response(404, f"the console does not forward {path[:200]!r}")
        if self._calls >= MAX_CALLS:
            return error_response(503, f"{self._calls} calls run through the console (limit {MAX_CALLS}); retry")
        self._calls += 1
        answer: aiohttp.ClientResponse | None = None
        try:
            answer = await self._ask(request, upstream, path, api_key)
        except (TimeoutError, aiohttp.ClientError, ssl.SSLError) as error:
            return _unanswered(upstream, error)
        except ClientDisconnect:
            return error_response(400, "the browser closed the connection")
        finally:
            if answer is None:
                self._calls -= 1
        headers = {name: value for name, value in answer.headers.items() if _is_returned(name.lower())}
        return StreamingResponse(self._content(answer), answer.status, {**headers, **ANSWER_HEADERS})

    async def _ask(self, request: Request, upstream: Upstream, path: str, api_key: str) -> aiohttp.ClientResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=MAX_CALLS),
                read_bufsize=CHUNK_BYTES,
            )
        headers = {name: value for name, value in request.headers.items() if _is_sent_on(name)}
        headers.setdefault("accept-encoding", "identity")
        if api_key:
            headers["x-api-key"] = api_key
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        return await self._session.request(
            request.method,
            URL(upstream.url + path, encoded=True),
            headers=headers,
            data=request.stream() if has_body else None,
            allow_redirects=False,
            ssl=upstream.tls() if upstream.tls is not None else True,
        )

    async def _content(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError):
            raise asyncio.CancelledError from None  # cuts the browser's connection: the answer is not complete
        finally:
            self._calls -= 1
            answer.close()


def _is_sent_on(name: str) -> bool:
    return name in _SENT_ON or (name.startswith(_SENT_ON_PREFIX) and name != _IDENTITY_HEADER)


def _is_returned(name: str) -> bool:
    return name in _RETURNED or name.startswith(_SENT_ON_PREFIX)


def _unanswered(upstream: Upstream, error: Exception) -> Response:
    why = "it did not answer in time" if isinstance(error, TimeoutError) else "it cannot be reached"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        why = "its TLS certificate is not trusted here, or it requires a client certificate"
    return error_response(502, f"no answer from the {upstream.name} at {upstream.url}: {why}; {upstream.start_hint}")
