"""Options of the control API: address, keys, TLS, allowed hosts, audit log. Light: imported by the commands."""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.network import family_of, is_loopback, listen_hosts
from penstock.outbound import OutboundPolicy
from penstock.port_policy import BrowserPolicy
from penstock.protocol.identity import Identity, Role
from penstock.tls import CurrentTls
from penstock_video.errors import PipelineError
from penstock_video.interfaces import ChangeSaver, NoSaver

CERTIFICATE = "penstock.certificate"  # key in a scope: the connection's client certificate (DER)
REMOTE = "penstock.remote"  # key in a scope: address of a browser on another machine, for which a console calls
CLIENT = "penstock.client"  # key in a scope: name of the client's key
DENIED = "penstock.denied"  # key in a scope: why the client was refused, as in the gateway's audit log


class Access(Protocol):
    """Keys and roles of the clients; see penstock.gateway.auth.authenticator.Authenticator."""

    async def admit(self, credentials: Iterable[str], role: Role, *, certificate: str = "") -> Identity:
        """Raises Unauthenticated, PermissionDenied, QuotaExceeded, AccessUnavailable."""
        ...

    async def run(self) -> None:
        """Reloads the keys when they change, until cancelled."""
        ...


class AuditRecord(Protocol):
    """Writes a line; see penstock.gateway.audit.AuditLog."""

    def __call__(self, client: str, address: str, action: str, target: str, outcome: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """client_of: returns the name of a client certificate (DER) for the log."""

    record: AuditRecord
    client_of: Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class ApiParts:
    """access: None if every client has all roles. tls: None for plain HTTP. audit: None for no audit log. saver: makes
    the clients' changes."""

    access: Access | None = field(default=None, repr=False)
    tls: CurrentTls | None = field(default=None, repr=False)
    audit: Audit | None = field(default=None, repr=False)
    saver: ChangeSaver = field(default_factory=NoSaver, repr=False)


DEFAULT_PARTS = ApiParts()


class Audited:
    """The app, with an audit line after each request that belongs in the log."""

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            if scope["type"] == "http":
                self._note(scope, status)

    def _note(self, scope: Scope, status: int) -> None:
        method, path, denied = scope["method"], scope["path"], scope.get(DENIED, "")
        if not denied and method in ("GET", "HEAD", "OPTIONS"):
            return
        certificate: bytes = scope.get(CERTIFICATE, b"")
        client = scope.get(CLIENT) or (self._audit.client_of(certificate) if certificate else "")
        address = scope["client"][0] if scope.get("client") else ""
        if denied:
            self._audit.record(client, address, "access", f"{method} {path}", denied)
        else:
            self._audit.record(client, address, method.lower(), path, _outcome(status))


def _outcome(status: int) -> str:
    if not status:
        return "cancelled"
    if status < HTTPStatus.BAD_REQUEST:
        return "ok"
    return "refused" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"


KEY_VARIABLE = "PENSTOCK_VIDEO_API_KEY"  # of the environment: a key with all roles, for this API alone
_HOW_TO_CHANGE = f"its port: --api-port; its keys: --access-file or {KEY_VARIABLE}; without it: --no-api"


class ApiRefused(PipelineError):
    """The control API cannot be started. The text has the fix."""

    reason = "api_refused"

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} ({_HOW_TO_CHANGE})")


class ListenSettings(Protocol):
    """Settings of the API's address and for browsers."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...

    @property
    def cors_origins(self) -> tuple[str, ...]: ...

    @property
    def allowed_outbound(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Address and access rules of the control API.

    host, port: 127.0.0.1 serves this machine only; port 0 for a free one. access: of clients, who send a key as
    x-api-key, Bearer, or password of Basic; None if every client has all roles. Clients may add files and devices of
    this machine only if no other machine can connect. allowed_hosts, cors_origins: see BrowserPolicy.
    allowed_outbound: where sources of clients may connect, besides public hosts. max_viewers: of moving previews over
    all sources.

    call_timeout_s: for the pipeline's answer. client_timeout_s: for a request's head, its body, and each picture sent
    to a viewer. tls: None for plain HTTP. audit: None for no audit log. saver: makes the
    clients' changes.
    """

    host: str = "127.0.0.1"
    port: int = 8010
    access: Access | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_outbound: tuple[str, ...] = ()
    max_viewers: int = 16
    max_connections: int = 256
    max_body_bytes: int = 1024 * 1024
    call_timeout_s: float = 10.0
    client_timeout_s: float = 10.0
    tls: CurrentTls | None = field(default=None, repr=False)
    audit: Audit | None = field(default=None, repr=False)
    saver: ChangeSaver = field(default_factory=NoSaver, repr=False)
    browser_policy: BrowserPolicy = field(init=False, repr=False, compare=False)
    outbound: OutboundPolicy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            policy = BrowserPolicy(self.host, self.allowed_hosts, self.cors_origins)
            outbound = OutboundPolicy(self.allowed_outbound, is_from_api=True)
        except ValueError as error:
            raise ApiRefused(f"the control API: {error}") from None
        object.__setattr__(self, "browser_policy", policy)
        object.__setattr__(self, "outbound", outbound)
        if not self.is_local and self.access is None:
            raise ApiRefused(
                f"the control API on {self.host} would let any client open any address; give it API keys, "
                "or let it listen on 127.0.0.1"
            )

    @classmethod
    def of(cls, settings: "ListenSettings", parts: ApiParts = DEFAULT_PARTS) -> Self:
        """Raises ApiRefused."""
        return cls(
            settings.host,
            settings.port,
            parts.access,
            allowed_hosts=settings.allowed_hosts,
            cors_origins=settings.cors_origins,
            allowed_outbound=settings.allowed_outbound,
            tls=parts.tls,
            audit=parts.audit,
            saver=parts.saver,
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


_BACKLOG = 256
_SEND_BUFFER_BYTES = 256 * 1024  # what a viewer that stops reading keeps in the kernel


def listeners_of(options: ApiOptions) -> list[socket.socket]:
    """Listening sockets: for 127.0.0.1 also on ::1. Raises ApiRefused if the address cannot be used."""
    listeners: list[socket.socket] = []
    try:
        for host in listen_hosts(options.host):
            port = options.port or (listeners[0].getsockname()[1] if listeners else 0)
            listeners.append(_listener_at(host, port))
    except ApiRefused:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener_at(host: str, port: int) -> socket.socket:
    # With its protocol named, or asyncio leaves Nagle's algorithm on: each answer would take 40 ms.
    listener = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ApiRefused(
            f"the control API cannot listen on {host}, port {port} ({error.strerror}); choose another, or port 0"
        ) from error
    return listener


def check_address(options: ApiOptions) -> None:
    """Raises ApiRefused if the address cannot be bound now."""
    for listener in listeners_of(options):
        listener.close()
