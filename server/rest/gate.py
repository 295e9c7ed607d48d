"""Who asks over HTTP, and whether they may."""

from collections.abc import Iterator
from dataclasses import replace

from starlette.requests import Request
from starlette.types import Scope

from server.access.credentials import CREDENTIAL_NAMES, credentials_of
from server.access.door import Door
from server.core.caller import Caller, Role

_CALLER = "penstock.caller"
_CREDENTIAL_NAMES = frozenset(name.encode() for name in CREDENTIAL_NAMES)


class Gate:
    """Lets requests in by the headers `Authorization: Bearer …` and `x-api-key: …`, which end here.

    Neither goes on to the engine, whatever it held: a key that is not ours may be one that was meant for us.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def admit(self, scope: Scope, role: Role | None) -> None:
        """Before anything of the body is read. role: what is needed, None for nothing. Raises what the door does."""
        credentials = list(_credentials(scope)) if role is not None else []
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _CREDENTIAL_NAMES]
        if role is None:
            return
        caller = await self._door.admit(credentials, role)
        scope[_CALLER] = replace(caller, address=_address(scope))


def caller_of(request: Request) -> Caller:
    """Whoever sent the request."""
    caller: Caller | None = request.scope.get(_CALLER)
    return caller if caller is not None else Caller(address=_address(request.scope))


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _credentials(scope: Scope) -> Iterator[str]:
    return credentials_of(
        (name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _CREDENTIAL_NAMES
    )
