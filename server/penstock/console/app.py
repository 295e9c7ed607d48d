"""The console's HTTP application: its files, sessions, and calls forwarded to the gateway and the video program."""

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
from penstock.logs import get_logger
from penstock.port_policy import BrowserPolicy
from penstock.protocol.errors import HostNotAllowed, OriginNotAllowed, UnsupportedMedia

GATEWAY, VIDEO = "/gateway", "/video"  # the first segment of a forwarded path
MAX_SESSION_BODY_BYTES = 16 << 10
_STATUS = {HostNotAllowed: 421, OriginNotAllowed: 403, UnsupportedMedia: 415}
_BODIES_OF_ANY_TYPE = ("/image", "/infer", "/add")  # endings of paths whose body is not JSON
log = get_logger("console")


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    api_key: str


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """What the application serves. has_tls: cookies are then sent over TLS only. clock: monotonic seconds.
    session_body_s: until the body of a login has arrived.

    needs_key: calls are forwarded only with the key of a session. For a console whose own client certificate has roles:
    a browser must not get them.
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


class ConsoleApp:
    """ASGI application. Every path that is not a file, a session or a forwarded call answers the index page."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._folders = {path.rpartition("/")[0] for path in parts.files}
        # With the prefix a browser takes the cookie from this host and over TLS only, not from a sibling domain.
        self._cookie = f"__Host-{COOKIE}" if parts.has_tls else COOKIE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except (HostNotAllowed, OriginNotAllowed, UnsupportedMedia) as refusal:
            response = error_response(_STATUS[type(refusal)], str(refusal))
        except ClientDisconnect:
            return
        except Exception:
            log.exception("request failed", method=scope["method"], path=scope["path"][:200])
            response = error_response(500, "the console failed; its log says why")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
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
                    return error_response(401, "this console forwards calls only with an API key; enter one")
                target = path.removeprefix(prefix) + (f"?{query}" if query else "")
                return await self._parts.proxy.forward(request, upstream, target, api_key)
        if path == "/session":
            return await self._session(request)
        if request.method not in ("GET", "HEAD"):
            return error_response(405, f"{request.method} is not served at {path[:200]!r}")
        if path == "/health/live":
            return Response(b'{"live": true}', 200, SECURITY_HEADERS, "application/json")
        if path == "/addresses":
            addresses = {"gateway": self._parts.gateway.url}  # for requests that a page shows to copy
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
        """POST begins a session with a key, after the gateway has accepted it; DELETE ends it."""
        sessions, token = self._parts.sessions, request.cookies.get(self._cookie, "")
        if request.method == "DELETE":
            sessions.end(token)
            return self._with_cookie(Response(status_code=204), "", 0)
        if request.method != "POST":
            return error_response(405, f"{request.method} is not served at '/session'; POST and DELETE are")
        body = bytearray()
        try:
            async with asyncio.timeout(self._parts.session_body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_SESSION_BODY_BYTES:
                        return error_response(413, f"the body is longer than {MAX_SESSION_BODY_BYTES} bytes")
        except TimeoutError:
            return error_response(408, f"the body did not arrive within {self._parts.session_body_s:g} s")
        try:
            api_key = msgspec.json.decode(bytes(body), type=_Key).api_key.strip()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return error_response(400, 'the body is not {"api_key": "…"}')
        if not api_key or not api_key.isascii() or not api_key.isprintable():
            return error_response(400, "the key is empty or has characters that a header cannot carry; enter the key")
        refusal = await self._refusal_of(request, api_key)
        if refusal is not None:
            return refusal
        sessions.end(token)
        begun = sessions.begin(api_key, self._parts.clock())
        return self._with_cookie(Response(status_code=204), begun, int(IDLE_S))

    async def _refusal_of(self, request: Request, api_key: str) -> Response | None:
        """The gateway's answer if it does not accept the key."""
        bare = Request({**request.scope, "method": "GET", "headers": []})
        answer = await self._parts.proxy.forward(bare, self._parts.gateway, "/v1/identity", api_key)
        if answer.status_code != 200:
            address = request.client.host if request.client is not None else ""
            log.warning("login refused", address=address, status=answer.status_code)
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
