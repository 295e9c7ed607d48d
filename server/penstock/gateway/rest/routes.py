"""Authentication of a request before its body is read, the routes' paths, and CORS for --cors-origin."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.auth.api_keys import CREDENTIAL_NAMES, credentials_of
from penstock.gateway.auth.authenticator import CERTIFICATE_PREFIX, Authenticator
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest.limits import RestOptions
from penstock.port_policy import BrowserPolicy
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import ALL_ROLES, IDENTITY_HEADER, Identity, Needed, Role, decode_identity

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


CALLER = "penstock.caller"  # key in a scope: who is admitted
CREDENTIAL = (
    "penstock.credential"  # key in a scope: the key or token of an admitted client, for its load tests and checks only
)
QUOTAS = "penstock.quotas"  # key in a scope: the RateLimiter that counts the body of an admitted request
CLIENT_CERTIFICATE = "penstock.client_certificate"  # key in a scope: the subject of the connection's client certificate
_CREDENTIAL_NAMES = frozenset(name.encode() for name in CREDENTIAL_NAMES)
_FORWARDED_CALLER = IDENTITY_HEADER.encode()
_ApiKey = Annotated[str | None, Security(APIKeyHeader(name="x-api-key", scheme_name="ApiKey", auto_error=False))]
_Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Security(HTTPBearer(scheme_name="Bearer", description="An API key, or a token.", auto_error=False)),
]


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
        self, scope: Scope, role: Needed | None, *, or_role: Role | None = None, takes_any_type: bool = False
    ) -> None:
        """Checks a request before its body is read. role: the role needed, None for health. or_role: an alternative.

        takes_any_type: whether the endpoint reads bodies other than JSON. Raises what the door and the policy raise.
        """
        headers = scope["headers"]
        has_key = bool(scope.get(CLIENT_CERTIFICATE, ""))
        if self._door is not None:
            scope["headers"] = [pair for pair in headers if pair[0] not in _CREDENTIAL_NAMES]
            scope[QUOTAS] = self._door.quotas
            if role is not None:
                scope[CALLER] = caller = await self._admitted(self._door, scope, _credentials(headers), (role, or_role))
                scope[CREDENTIAL] = next(_credentials(headers), "")
                has_key = bool(caller.key_name)
        if self._policy is not None:
            if self._door is None and role is not None:
                self._policy.check_without_keys(headers)
            self._policy.check(
                scope["method"],
                headers,
                local_address=local_address(scope),
                is_trusted=has_key or role is None,
                takes_any_type=takes_any_type,
            )

    async def _admitted(
        self, door: Authenticator, scope: Scope, credentials: Iterator[str], roles: tuple[Needed, Role | None]
    ) -> Identity:
        """The client. roles: the role needed, and an alternative. Raises what the door raises."""
        (role, or_role), certificate, address = roles, scope.get(CLIENT_CERTIFICATE, ""), _address(scope)
        try:
            caller = await door.admit(
                credentials, role, or_role=or_role, certificate=certificate, needs_key=self._needs_key
            )
            return replace(caller, address=address)
        except InferenceError as error:
            door.note_refused(error, address, f"{scope['method']} {scope['path']}", certificate=certificate)
            raise


@dataclass(frozen=True)
class ForwardedIdentity:
    """Reads the identity of a core's clients from a header: workers, its only clients, have authenticated them.

    open_to: roles of a client without a key.
    """

    open_to: frozenset[Role] = ALL_ROLES
    cors_origins: ClassVar[tuple[str, ...]] = ()

    async def admit(
        self, scope: Scope, role: Needed | None, *, or_role: Role | None = None, takes_any_type: bool = False
    ) -> None:
        """Trusts the worker."""
        forwarded = next((value for name, value in scope["headers"] if name == _FORWARDED_CALLER), None)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != _FORWARDED_CALLER]
        if forwarded is not None:
            scope[CALLER] = decode_identity(forwarded.decode())


def caller_of(request: Request) -> Identity:
    """The caller of the request."""
    caller: Identity | None = request.scope.get(CALLER)
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


class _Version(Convertor[str]):
    """A version's number as the path has it: "01" stays "01"."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("version", _Version())
MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version:version}"
INFERENCE = "inference"  # the tag of the routes whose requests are counted and timed


@dataclass(frozen=True)
class Requires:
    """Dependency: the role that a client needs, or an alternative; None if the request is not checked.

    takes_any_type: the endpoint reads not only JSON. FastAPI runs dependencies before the endpoint reads the body.
    """

    role: Needed | None
    or_role: Role | None = None
    takes_any_type: bool = False

    async def __call__(self, request: Request, _: _ApiKey = None, __: _Bearer = None) -> None:
        await self.check(request.scope)

    async def check(self, scope: Scope) -> None:
        """Raises what the gate raises."""
        gate: RequestAuthentication | ForwardedIdentity | None = scope["app"].state.gate
        if gate is not None:
            await gate.admit(scope, self.role, or_role=self.or_role, takes_any_type=self.takes_any_type)


class HotRoute(APIRoute):
    """A plain Starlette endpoint that FastAPI documents, at a third of a FastAPI endpoint's CPU.

    Of its dependencies, only Requires is run.
    """

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        (requires,) = (each.dependency for each in self.dependencies if isinstance(each.dependency, Requires))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await requires.check(scope)
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)

        self.app = app


async def _plane_of(request: Request) -> DataPlane:
    plane: DataPlane = request.app.state.plane
    return plane


async def _limits_of(request: Request) -> RestOptions:
    limits: RestOptions = request.app.state.limits
    return limits


Plane = Annotated[DataPlane, Depends(_plane_of)]
Limits = Annotated[RestOptions, Depends(_limits_of)]
