"""Routes over the path as received (not decoded, merged or redirected), with authentication before the body is read.

Also the CORS middleware for --cors-origin.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from starlette.datastructures import URLPath
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.api_keys import CREDENTIAL_NAMES, credentials_of
from penstock.gateway.auth.authenticator import CERTIFICATE_PREFIX, Authenticator
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.port_policy import BrowserPolicy
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import ALL_ROLES, ANONYMOUS, IDENTITY_HEADER, Identity, Role, decode_identity

_EXPOSED = ("Retry-After", "Inference-Header-Content-Length", "Content-Length")


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The app with CORS for these origins: it answers preflights, and pages of the origins can read responses.

    Cookies and Basic credentials are not allowed: pages send a key as a header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=_EXPOSED,
    )


_CALLER = "penstock.caller"
CLIENT_CERTIFICATE = "penstock.client_certificate"  # key in a scope: the subject of the connection's client certificate
_CREDENTIAL_NAMES = frozenset(name.encode() for name in CREDENTIAL_NAMES)
_FORWARDED_CALLER = IDENTITY_HEADER.encode()


class RequestAuthentication:
    """Lets requests in by the headers `Authorization: Bearer …` and `x-api-key: …`, which end here.

    Neither goes on to the engine, whatever it held: a key that is not ours may be one that was meant for us.
    """

    def __init__(
        self, door: Authenticator | None, policy: BrowserPolicy | None = None, *, needs_key: bool = False
    ) -> None:
        """door: checks keys; None if clients need no key. policy: checks requests of browsers; None for no checks.

        needs_key: refuses anonymous clients even if they have the role.
        """
        self._door = door
        self._policy = policy
        self._needs_key = needs_key

    @property
    def open_to(self) -> frozenset[Role]:
        """Roles of a client without a key."""
        return self._door.open_to if self._door is not None else ALL_ROLES

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Origins of the pages that may read answers."""
        return self._policy.cors_origins if self._policy is not None else ()

    async def admit(
        self, scope: Scope, role: Role | None, *, or_role: Role | None = None, takes_any_type: bool = False
    ) -> None:
        """Checks a request before its body is read. role: the role needed, None for health. or_role: an alternative.

        takes_any_type: whether the endpoint reads bodies other than JSON. Raises what the door and the policy raise.
        """
        headers = scope["headers"]
        has_key = bool(scope.get(CLIENT_CERTIFICATE, ""))
        if self._door is not None:
            scope["headers"] = [pair for pair in headers if pair[0] not in _CREDENTIAL_NAMES]
            if role is not None:
                caller = await self._admitted(self._door, scope, _credentials(headers), (role, or_role))
                scope[_CALLER] = replace(caller, address=_address(scope))
                has_key = bool(caller.key_name)
        if self._policy is not None:
            self._policy.check(
                scope["method"],
                headers,
                local_address=local_address(scope),
                is_trusted=has_key or role is None,
                takes_any_type=takes_any_type,
            )

    async def _admitted(
        self, door: Authenticator, scope: Scope, credentials: Iterator[str], roles: tuple[Role, Role | None]
    ) -> Identity:
        """The client. roles: the role needed, and an alternative. Raises what the door raises."""
        (role, or_role), certificate = roles, scope.get(CLIENT_CERTIFICATE, "")
        try:
            return await door.admit(
                credentials, role, or_role=or_role, certificate=certificate, needs_key=self._needs_key
            )
        except InferenceError as error:
            target = f"{scope['method']} {scope['path']}"
            door.note_refused(error, _address(scope), target, certificate=certificate)
            raise

    def incoming(self, scope: Scope, receive: Receive) -> "Incoming | None":
        """The body of an admitted request; None if bodies are not counted."""
        return Incoming(self._door.quotas, scope.get(_CALLER, ANONYMOUS), receive) if self._door is not None else None


class ForwardedIdentity:
    """Of a core: its clients are the fronts alone, which have let the callers in, and say who they are."""

    open_to = ALL_ROLES
    cors_origins: tuple[str, ...] = ()

    async def admit(
        self, scope: Scope, role: Role | None, *, or_role: Role | None = None, takes_any_type: bool = False
    ) -> None:
        """Believes the front."""
        forwarded = next((value for name, value in scope["headers"] if name == _FORWARDED_CALLER), None)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != _FORWARDED_CALLER]
        if forwarded is not None:
            scope[_CALLER] = decode_identity(forwarded.decode())

    def incoming(self, scope: Scope, receive: Receive) -> "Incoming | None":
        """None: the front has counted the body."""
        return None


class Incoming:
    """A body that is being received: until it is complete, its received bytes count against its client's share."""

    def __init__(self, quotas: RateLimiter, caller: Identity, receive: Receive) -> None:
        self._quotas = quotas
        self._caller = caller
        self._receive = receive
        self._size_bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises QuotaExceeded where the caller has too many bytes on their way already."""
        message = await self._receive()
        if message.get("more_body", False):
            size_bytes = len(message["body"])
            self._quotas.receive(self._caller, size_bytes, before=self._size_bytes)
            self._size_bytes += size_bytes
        else:
            self.give_back()
        return message

    def give_back(self) -> None:
        """The body is complete, or no longer needed."""
        if self._size_bytes:
            self._quotas.received(self._caller, self._size_bytes)
            self._size_bytes = 0


def caller_of(request: Request) -> Identity:
    """The caller of the request."""
    caller: Identity | None = request.scope.get(_CALLER)
    if caller is not None:
        return caller
    certificate = request.scope.get(CLIENT_CERTIFICATE, "")
    return Identity(CERTIFICATE_PREFIX + certificate if certificate else "", address=_address(request.scope))


def local_address(scope: Scope) -> str:
    """The address of this machine that the client connected to; empty over a Unix socket."""
    server = scope.get("server")
    return str(server[0]) if server and server[1] is not None else ""


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _credentials(headers: list[tuple[bytes, bytes]]) -> Iterator[str]:
    return credentials_of(
        (name.decode(), value.decode("latin-1")) for name, value in headers if name in _CREDENTIAL_NAMES
    )


RouteEndpoint = Callable[[Request], Awaitable[Response]]

PATH_PARAMETER = re.compile(r"\{(\w+)\}")
OPTIONAL_PART = re.compile(r"\[([^]]*)\]")
_SEGMENT, _NUMBER = "[^/]+", "[0-9]+"


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One line of the table of routes.

    path: a template; {name} is one segment ({version} a number), and what stands in [] may be left out.
    is_inference: counted and timed as an inference request.
    is_open: no key is needed. role: the role required, if the row does not determine it itself (see role_needed).
    or_role: an alternative. takes_any_type: whether it reads bodies other than JSON.
    """

    methods: tuple[str, ...]
    path: str
    endpoint: RouteEndpoint
    summary: str
    is_inference: bool = False
    is_open: bool = False
    role: Role | None = None
    or_role: Role | None = None
    takes_any_type: bool = False


def role_needed(row: RouteSpec, method: str) -> Role | None:
    """Role required for the method, or None. Unlisted methods require the highest role."""
    if row.is_open:
        return None
    if row.role is not None:
        return row.role
    if row.is_inference:
        return Role.INFER
    return Role.READ if method == "GET" else Role.ADMIN


class RawPathRoute(BaseRoute):
    """A row as a route. Its methods are exact: GET does not imply HEAD, as with Triton.

    gate: authenticates before a byte of the body is read; None allows every request.
    """

    def __init__(self, row: RouteSpec, gate: RequestAuthentication | ForwardedIdentity | None = None) -> None:
        self.row = row
        self._roles = {method: role_needed(row, method) for method in row.methods}
        self._gate = gate
        self._pattern = _pattern_of(row.path)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self._pattern.fullmatch(scope["raw_path"]) if scope["type"] == "http" else None
        if found is None:
            return Match.NONE, {}
        values = {name: value.decode("latin-1") for name, value in found.groupdict(b"").items()}
        match = Match.FULL if scope["method"] in self.row.methods else Match.PARTIAL
        return match, {"route": self, "path_params": values}

    def url_path_for(self, name: str, /, **path_params: object) -> URLPath:
        raise NoMatchFound(name, dict(path_params))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self.row.methods:
            raise HTTPException(405, headers={"Allow": ", ".join(self.row.methods)})
        if self._gate is None:
            await self._answer(scope, receive, send)
            return
        row, role = self.row, self._roles[scope["method"]]
        await self._gate.admit(scope, role, or_role=row.or_role, takes_any_type=row.takes_any_type)
        incoming = self._gate.incoming(scope, receive)
        if incoming is None:
            await self._answer(scope, receive, send)
            return
        try:
            await self._answer(scope, incoming.receive, send)
        finally:
            incoming.give_back()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.row.endpoint(Request(scope, receive))
        await response(scope, receive, send)


def _pattern_of(template: str) -> re.Pattern[bytes]:
    optional = OPTIONAL_PART.sub(r"(?:\1)?", template)
    text = PATH_PARAMETER.sub(lambda slot: f"(?P<{slot[1]}>{_NUMBER if slot[1] == 'version' else _SEGMENT})", optional)
    return re.compile(text.encode())
