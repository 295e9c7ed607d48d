"""The console's ASGI application: serves its files, manages sessions, and forwards calls to the REST APIs."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.console.pages import INDEX, SECURITY_HEADERS, StaticFile
from penstock.console.proxy import Forwarded, Proxy, Upstream, error_response
from penstock.console.sessions import COOKIE, IDLE_S, Sessions
from penstock.gateway.rest.served_request import SERVED_REQUEST, ServedRequest
from penstock.logs import get_logger
from penstock.port_policy import BrowserPolicy
from penstock.protocol.errors import HostNotAllowed, OriginNotAllowed, UnsupportedMedia

GATEWAY, VIDEO = "/gateway", "/video"  # the first segment of a forwarded path
MAX_SESSION_BODY_BYTES = 16 << 10
_STATUS = {HostNotAllowed: 421, OriginNotAllowed: 403, UnsupportedMedia: 415}
_BODIES_OF_ANY_TYPE = ("/image", "/infer", "/add")  # suffixes of paths whose body need not be JSON
log = get_logger("console")


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    api_key: str


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """Dependencies and options of the application.

    has_tls: the session cookie gets the Secure attribute. needs_key: calls are forwarded only with a session's API key;
    set if the console has a client certificate, whose roles a browser must not get. clock: monotonic seconds.
    session_body_s: timeout for the body of a login request. program: how a shell calls penstock.
    """

    gateway: Upstream
    video: Upstream
    files: Mapping[str, StaticFile]
    policy: BrowserPolicy
    has_tls: bool = False
    needs_key: bool = False
    sessions: Sessions = field(default_factory=Sessions)
    proxy: Proxy = field(default_factory=Proxy)
    clock: Callable[[], float] = time.monotonic
    session_body_s: float = 10.0
    program: str = "penstock"


class ConsoleApp:
    """ASGI application. Paths of pages, such as /streams/gate, return index.html; the browser renders the page."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._folders = {path.rpartition("/")[0] for path in parts.files}
        # Browsers accept a `__Host-` cookie only over TLS and from this host, not from a sibling domain.
        self._cookie = f"__Host-{COOKIE}" if parts.has_tls else COOKIE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._respond(request)
        except (HostNotAllowed, OriginNotAllowed, UnsupportedMedia) as error:
            response = error_response(_STATUS[type(error)], str(error))
        except ClientDisconnect:
            return
        except Exception:
            log.exception("request failed", method=scope["method"], path=scope["path"][:200])
            response = error_response(500, "internal error in the console; `penstock logs` shows the cause")
        served: ServedRequest = scope[SERVED_REQUEST]
        if not served.has_whole_body:  # a refusal: on an open connection the rest, however long, would be read
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        path = request.scope["raw_path"].decode("latin-1")
        api_key = self._parts.sessions.key_of(request.cookies.get(self._cookie, ""), self._parts.clock())
        self._parts.policy.check(
            request.method,
            request.scope["headers"],
            local_address=str((request.scope.get("server") or ("",))[0]),
            is_trusted=bool(api_key) or path == "/health/live",
            takes_any_type=path.endswith(_BODIES_OF_ANY_TYPE),
        )
        query = request.scope["query_string"].decode("latin-1")
        for prefix, upstream in ((GATEWAY, self._parts.gateway), (VIDEO, self._parts.video)):
            if path.startswith(f"{prefix}/"):
                if self._parts.needs_key and not api_key:
                    return error_response(401, "this console requires an API key; log in with one")
                target = path.removeprefix(prefix) + (f"?{query}" if query else "")
                return await self._parts.proxy.forward(request, upstream, target, api_key)
        if path == "/session":
            return await self._session(request)
        if request.method not in ("GET", "HEAD"):
            return error_response(405, f"{request.method} is not allowed at {path[:200]!r}; allowed: GET, HEAD")
        if path == "/health/live":
            return Response(b'{"live": true}', 200, SECURITY_HEADERS, "application/json")
        if path == "/addresses":
            # for requests and commands that a page shows to copy
            addresses = {"gateway": self._parts.gateway.url, "program": self._parts.program}
            return Response(msgspec.json.encode(addresses), 200, SECURITY_HEADERS, "application/json")
        return self._file(request, path.lstrip("/"))

    def _file(self, request: Request, path: str) -> Response:
        found = self._parts.files.get(path)
        folder, _, name = path.rpartition("/")
        if found is None and "." in name and folder in self._folders:  # elsewhere it is the name of a model or camera
            return error_response(404, f"the console has no file {path[:200]!r}")
        served = found or self._parts.files[INDEX]
        headers = {**SECURITY_HEADERS, "etag": served.etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == served.etag:
            return Response(status_code=304, headers=headers)
        return Response(served.content, 200, headers, served.media_type)

    async def _session(self, request: Request) -> Response:
        """POST starts a session if the gateway accepts the API key. DELETE ends the session."""
        sessions, token = self._parts.sessions, request.cookies.get(self._cookie, "")
        if request.method == "DELETE":
            sessions.end(token)
            return self._with_cookie(Response(status_code=204), "", 0)
        if request.method != "POST":
            return error_response(405, f"{request.method} is not allowed at '/session'; allowed: POST, DELETE")
        body = bytearray()
        try:
            async with asyncio.timeout(self._parts.session_body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_SESSION_BODY_BYTES:
                        return error_response(413, f"the body exceeds {MAX_SESSION_BODY_BYTES} bytes")
        except TimeoutError:
            return error_response(408, f"the body did not arrive within {self._parts.session_body_s:g} s")
        try:
            api_key = msgspec.json.decode(bytes(body), type=_Key).api_key.strip()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return error_response(400, 'the body must be JSON: {"api_key": "…"}')
        if not api_key or not api_key.isascii() or not api_key.isprintable():
            return error_response(400, "the API key is empty or not printable ASCII; enter it as it was issued")
        rejection = await self._rejection(request, api_key)
        if rejection is not None:
            return rejection
        sessions.end(token)
        new_token = sessions.begin(api_key, self._parts.clock())
        return self._with_cookie(Response(status_code=204), new_token, int(IDLE_S))

    async def _rejection(self, request: Request, api_key: str) -> Response | None:
        """The gateway's error response if it rejects the API key, else None."""
        bare = Request({**request.scope, "method": "GET", "headers": []})
        answer = await self._parts.proxy.forward(bare, self._parts.gateway, "/v1/identity", api_key)
        if answer.status_code != 200:
            address = request.client.host if request.client is not None else ""
            log.warning("login rejected", address=address, status=answer.status_code)
            return answer
        if isinstance(answer, Forwarded):
            answer.close()
        return None

    def _with_cookie(self, response: Response, token: str, max_age_s: int) -> Response:
        response.set_cookie(
            self._cookie, token, max_age=max_age_s, httponly=True, samesite="strict", secure=self._parts.has_tls
        )
        response.headers["cache-control"] = "no-store"
        return response
