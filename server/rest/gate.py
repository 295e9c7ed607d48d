"""Who asks over HTTP, and whether they may."""

from collections.abc import Iterator
from dataclasses import replace

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from server.access.credentials import CREDENTIAL_NAMES, credentials_of
from server.access.door import CERTIFICATE_PREFIX, Door
from server.access.quotas import Quotas
from server.core.browser_policy import BrowserPolicy
from server.core.caller import EVERY_ROLE, NOBODY, Caller, Role
from server.core.conveyance import CALLER_HEADER, caller_heard
from server.core.errors import InferenceError

_CALLER = "penstock.caller"
CLIENT_CERTIFICATE = "penstock.client_certificate"  # key in a scope: the subject of the connection's client certificate
_CREDENTIAL_NAMES = frozenset(name.encode() for name in CREDENTIAL_NAMES)
_TOLD = CALLER_HEADER.encode()


class Gate:
    """Lets requests in by the headers `Authorization: Bearer …` and `x-api-key: …`, which end here.

    Neither goes on to the engine, whatever it held: a key that is not ours may be one that was meant for us.
    """

    def __init__(self, door: Door | None, policy: BrowserPolicy | None = None, *, needs_key: bool = False) -> None:
        """door: checks keys; None if clients need no key. policy: checks requests of browsers; None for no checks.

        needs_key: refuses anonymous clients even if they have the role.
        """
        self._door = door
        self._policy = policy
        self._needs_key = needs_key

    @property
    def open_to(self) -> frozenset[Role]:
        """Roles of a client without a key."""
        return self._door.open_to if self._door is not None else EVERY_ROLE

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
        self, door: Door, scope: Scope, credentials: Iterator[str], roles: tuple[Role, Role | None]
    ) -> Caller:
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
        return Incoming(self._door.quotas, scope.get(_CALLER, NOBODY), receive) if self._door is not None else None


class FrontGate:
    """Of a core: its clients are the fronts alone, which have let the callers in, and say who they are."""

    open_to = EVERY_ROLE
    cors_origins: tuple[str, ...] = ()

    async def admit(
        self, scope: Scope, role: Role | None, *, or_role: Role | None = None, takes_any_type: bool = False
    ) -> None:
        """Believes the front."""
        told = next((value for name, value in scope["headers"] if name == _TOLD), None)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != _TOLD]
        if told is not None:
            scope[_CALLER] = caller_heard(told.decode())

    def incoming(self, scope: Scope, receive: Receive) -> "Incoming | None":
        """None: the front has counted the body."""
        return None


class Incoming:
    """A body that is being received: until it is complete, its received bytes count against its client's share."""

    def __init__(self, quotas: Quotas, caller: Caller, receive: Receive) -> None:
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
        """The body is whole, or nobody waits for it any more."""
        if self._size_bytes:
            self._quotas.received(self._caller, self._size_bytes)
            self._size_bytes = 0


def caller_of(request: Request) -> Caller:
    """Whoever sent the request."""
    caller: Caller | None = request.scope.get(_CALLER)
    if caller is not None:
        return caller
    certificate = request.scope.get(CLIENT_CERTIFICATE, "")
    return Caller(CERTIFICATE_PREFIX + certificate if certificate else "", address=_address(request.scope))


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
