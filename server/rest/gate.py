"""Who asks over HTTP, and whether they may."""

from collections.abc import Iterator
from dataclasses import replace

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from server.access.credentials import CREDENTIAL_NAMES, credentials_of
from server.access.door import CERTIFICATE_PREFIX, Door
from server.access.quotas import Quotas
from server.core.caller import NOBODY, Caller, Role
from server.core.conveyance import CALLER_HEADER, caller_heard

_CALLER = "penstock.caller"
CLIENT_CERTIFICATE = "penstock.client_certificate"  # of a scope: the subject of the connection's client certificate
_CREDENTIAL_NAMES = frozenset(name.encode() for name in CREDENTIAL_NAMES)
_TOLD = CALLER_HEADER.encode()


class Gate:
    """Lets requests in by the headers `Authorization: Bearer …` and `x-api-key: …`, which end here.

    Neither goes on to the engine, whatever it held: a key that is not ours may be one that was meant for us.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def admit(self, scope: Scope, role: Role | None, *, or_role: Role | None = None) -> None:
        """Before anything of the body is read. role: what is needed, None for nothing. Raises what the door does.

        or_role: what does as well.
        """
        credentials = list(_credentials(scope)) if role is not None else []
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _CREDENTIAL_NAMES]
        if role is None:
            return
        certificate = scope.get(CLIENT_CERTIFICATE, "")
        caller = await self._door.admit(credentials, role, or_role=or_role, certificate=certificate)
        scope[_CALLER] = replace(caller, address=_address(scope))

    def incoming(self, scope: Scope, receive: Receive) -> "Incoming":
        """The body of a request that was let in."""
        return Incoming(self._door.quotas, scope.get(_CALLER, NOBODY), receive)


class FrontGate:
    """Of a core: its clients are the fronts alone, which have let the callers in, and say who they are."""

    async def admit(self, scope: Scope, role: Role | None, *, or_role: Role | None = None) -> None:
        """Believes the front."""
        told = next((value for name, value in scope["headers"] if name == _TOLD), None)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != _TOLD]
        if told is not None:
            scope[_CALLER] = caller_heard(told.decode())

    def incoming(self, scope: Scope, receive: Receive) -> "Incoming":
        """The body, which the front has counted."""
        return Incoming(None, NOBODY, receive)


class Incoming:
    """A body on its way: while more of it is to come, what came counts against its caller's share.

    quotas: None where nobody keeps them here.
    """

    def __init__(self, quotas: Quotas | None, caller: Caller, receive: Receive) -> None:
        self._quotas = quotas
        self._caller = caller
        self._receive = receive
        self._size_bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises QuotaExceeded where the caller has too many bytes on their way already."""
        message = await self._receive()
        if self._quotas is None:
            return message
        if message.get("more_body", False):
            size_bytes = len(message["body"])
            self._quotas.receive(self._caller, size_bytes, before=self._size_bytes)
            self._size_bytes += size_bytes
        else:
            self.give_back()
        return message

    def give_back(self) -> None:
        """The body is whole, or nobody waits for it any more."""
        if self._size_bytes and self._quotas is not None:
            self._quotas.received(self._caller, self._size_bytes)
            self._size_bytes = 0


def caller_of(request: Request) -> Caller:
    """Whoever sent the request."""
    caller: Caller | None = request.scope.get(_CALLER)
    if caller is not None:
        return caller
    certificate = request.scope.get(CLIENT_CERTIFICATE, "")
    return Caller(CERTIFICATE_PREFIX + certificate if certificate else "", address=_address(request.scope))


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _credentials(scope: Scope) -> Iterator[str]:
    return credentials_of(
        (name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _CREDENTIAL_NAMES
    )
