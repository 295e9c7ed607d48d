"""Routes over the path as it stands on the wire: neither decoded, nor merged, nor redirected."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import URLPath
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Scope, Send

from server.core.caller import Role
from server.rest.gate import FrontGate, Gate

Endpoint = Callable[[Request], Awaitable[Response]]

SLOT = re.compile(r"\{(\w+)\}")
OPTIONAL = re.compile(r"\[([^]]*)\]")
_SEGMENT, _NUMBER = "[^/]+", "[0-9]+"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of routes.

    path: a template; {name} is one segment ({version} a number), and what stands in [] may be left out.
    is_inference: counted and timed as an inference request.
    is_open: no key is needed. role: the role required, if the row does not determine it itself (see role_needed).
    or_role: an alternative. takes_any_type: whether it reads bodies other than JSON.
    """

    methods: tuple[str, ...]
    path: str
    endpoint: Endpoint
    summary: str
    is_inference: bool = False
    is_open: bool = False
    role: Role | None = None
    or_role: Role | None = None
    takes_any_type: bool = False


def role_needed(row: Row, method: str) -> Role | None:
    """What a caller must have to ask it; None for nothing. What nobody thought of needs the highest role."""
    if row.is_open:
        return None
    if row.role is not None:
        return row.role
    if row.is_inference:
        return Role.INFER
    return Role.READ if method == "GET" else Role.ADMIN


class WireRoute(BaseRoute):
    """A row as a route. Its methods are exact: GET does not imply HEAD, as with Triton.

    gate: lets callers in before a byte of the body is read; None where everybody may do everything.
    """

    def __init__(self, row: Row, gate: Gate | FrontGate | None = None) -> None:
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
    optional = OPTIONAL.sub(r"(?:\1)?", template)
    text = SLOT.sub(lambda slot: f"(?P<{slot[1]}>{_NUMBER if slot[1] == 'version' else _SEGMENT})", optional)
    return re.compile(text.encode())
