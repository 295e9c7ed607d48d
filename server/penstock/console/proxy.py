"""Forwards a browser's calls to the REST APIs of the gateway and the video program, with the session's API key."""

import asyncio
import json
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from penstock.gateway.rest.served_request import SERVED_REQUEST, ServedRequest
from penstock.port_policy import CLIENT_ADDRESS_HEADER
from penstock.protocol.batch_reports import EXPLAIN_HEADER

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0  # between two reads; adding a model responds only after its trial inference
MAX_CALLS = 256  # concurrent calls per API, of all browsers
MAX_CALLS_OF_ADDRESS = 128  # concurrent calls per API and client address
CHUNK_BYTES = 256 << 10
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
_SENT_ON = frozenset(
    ("accept", "content-type", "content-length", "if-none-match", "range", "x-request-timeout-ms", EXPLAIN_HEADER)
)
_RETURNED_PREFIX = "x-penstock-"
_RETURNED = (
    *("content-type", "content-length", "content-encoding", "content-disposition", "content-range", "accept-ranges"),
    *("cache-control", "etag", "last-modified", "retry-after", "location"),
)
# Documents from an API, such as a load report, cannot run scripts or send requests.
ANSWER_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'; sandbox",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
SERVED_PATH = re.compile(r"/(?:v1|v2)/|/(?:v2|openapi\.json|health/live|health/ready)\Z")
_DOT_SEGMENT = re.compile(r"[/\\]\.{1,2}(?:[/\\]|\Z)")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A REST API that the console forwards to.

    name: for messages. tls: returns the TLS context for https; None for the system's CAs.
    """

    name: str
    url: str
    start_hint: str
    tls: Callable[[], ssl.SSLContext] | None = None


def error_response(status: int, text: str) -> Response:
    """An error response in the JSON format of both APIs."""
    body = json.dumps({"error": text}).encode()
    return Response(body, status, {**ANSWER_HEADERS, "cache-control": "no-store"}, "application/json")


def is_served(path: str) -> bool:
    """Whether the console forwards calls to this API path. path: raw, neither decoded nor normalised."""
    return SERVED_PATH.match(path) is not None and _DOT_SEGMENT.search(unquote(path)) is None


class Proxy:
    """Forwards calls. Request and response bodies are streamed. No retries; redirects are not followed."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._calls: Counter[str] = Counter()  # by API name
        self._calls_of_address: Counter[tuple[str, str]] = Counter()  # by API name and client address

    @property
    def call_count(self) -> int:
        """Calls in progress."""
        return self._calls.total()

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: Request, upstream: Upstream, path: str, api_key: str) -> Response:
        """The API's response. path: raw, with the query string. api_key: empty for none.

        Raises ClientDisconnect.
        """
        if not is_served(path.partition("?")[0]):
            return error_response(404, f"the console does not forward {path[:200]!r}")
        if request.method not in METHODS:
            return error_response(405, f"{request.method} is not allowed; allowed: {', '.join(METHODS)}")
        address = request.client.host if request.client is not None else ""
        if rejection := self._begin(upstream.name, address):
            return rejection
        answer: aiohttp.ClientResponse | None = None
        try:
            answer = await _until_disconnect(request, self._send(request, upstream, path, (api_key, address)))
        except (TimeoutError, aiohttp.ClientError, ssl.SSLError) as error:
            return _bad_gateway(upstream, error)
        finally:
            if answer is None:
                self._end(upstream.name, address)
        return Forwarded(answer, lambda: self._end(upstream.name, address))

    def _begin(self, api: str, address: str) -> Response | None:
        """Counts the call. At a limit the call is not counted, and an error response is returned."""
        count, of_address = self._calls[api], self._calls_of_address[api, address]
        if count >= MAX_CALLS:
            text = f"{count} calls to the {api} in progress in the console (limit {MAX_CALLS}); retry later"
            return error_response(503, text)
        if of_address >= MAX_CALLS_OF_ADDRESS:
            text = f"{of_address} calls from {address} in progress (limit {MAX_CALLS_OF_ADDRESS}); retry later"
            return error_response(503, text)
        self._calls[api] += 1
        self._calls_of_address[api, address] += 1
        return None

    def _end(self, api: str, address: str) -> None:
        self._calls[api] -= 1
        self._calls_of_address[api, address] -= 1
        if not self._calls_of_address[api, address]:
            del self._calls_of_address[api, address]

    async def _send(
        self, request: Request, upstream: Upstream, path: str, client: tuple[str, str]
    ) -> aiohttp.ClientResponse:
        """client: its API key and address."""
        api_key, address = client
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0),  # `_begin` enforces the limit
                read_bufsize=CHUNK_BYTES,
            )
        headers = {name: value for name, value in request.headers.items() if name in _SENT_ON}
        headers.setdefault("accept-encoding", "identity")
        headers[CLIENT_ADDRESS_HEADER] = address
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


class Forwarded(StreamingResponse):
    """Streams an API's response to the browser. ended: called once the API's connection is closed."""

    def __init__(self, answer: aiohttp.ClientResponse, ended: Callable[[], None]) -> None:
        headers = {name: value for name, value in answer.headers.items() if _is_returned(name.lower())}
        super().__init__(self._content(answer), answer.status, {**headers, **ANSWER_HEADERS})
        self._answer, self._ended = answer, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in `_content`: the generator never starts if the browser has disconnected
            self.close()

    def close(self) -> None:
        """Closes the connection to the API."""
        self._answer.close()
        self._ended()

    async def _content(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError):
            raise asyncio.CancelledError from None  # closes the browser's connection, as the response is incomplete


async def _until_disconnect(
    request: Request, call: Coroutine[Any, Any, aiohttp.ClientResponse]
) -> aiohttp.ClientResponse:
    """The result of `call`. If the browser disconnects, cancels the call and raises ClientDisconnect.

    Without this, calls to an API that hangs would stay in progress after their browsers have disconnected.
    """
    served: ServedRequest = request.scope[SERVED_REQUEST]
    task = asyncio.ensure_future(call)

    def cancel() -> None:
        task.cancel()

    served.watch(cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if served.is_disconnected and task.cancelled():
            raise ClientDisconnect from None
        raise
    finally:
        served.unwatch()


def _is_returned(name: str) -> bool:
    return name in _RETURNED or name.startswith(_RETURNED_PREFIX)


def _bad_gateway(upstream: Upstream, error: Exception) -> Response:
    reason = "timed out" if isinstance(error, TimeoutError) else "cannot connect"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        reason = "its TLS certificate is not trusted, or it requires a client certificate"
    text = f"no response from the {upstream.name} at {upstream.url}: {reason}; {upstream.start_hint}"
    return error_response(502, text)
