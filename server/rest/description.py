"""GET /openapi.json: what is served here, by this gateway as it was started and with the engine that it has."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from server.core.caller import Role
from server.core.errors import BackendUnavailable, DeadlineExceeded
from server.core.relay import HttpCall, InferHead
from server.dataplane import DataPlane, Verb
from server.rest.errors import json_response
from server.rest.gate import caller_of
from server.rest.models import Refused, ServerMetadata
from server.rest.openapi import document, spellings
from server.rest.operations import OPERATIONS, Operation
from server.rest.routes import SLOT, Row, WireRoute

_ENGINE_PATIENCE_S = 2.0
_EXAMPLES = {"version": "1"}


class Description:
    """The endpoint. rows: all of the table of routes, this one too. open_to: what may be asked without a key."""

    def __init__(self, plane: DataPlane, rows: Sequence[Row], open_to: frozenset[Role] = frozenset(Role)) -> None:
        self._plane = plane
        self._rows = rows
        self._open_to = open_to

    async def __call__(self, request: Request) -> Response:
        """Asks the engine for its extensions; where it does not answer, all that rows serve is described."""
        operations = served(OPERATIONS, self._rows, await self._extensions(request))
        return json_response(document(operations, self._open_to))

    async def _extensions(self, request: Request) -> frozenset[str] | None:
        call = HttpCall("GET", b"/v2", (), b"")
        deadline = time.monotonic() + _ENGINE_PATIENCE_S
        try:
            answer = await self._plane.relay_http(
                Verb.READ, InferHead(""), call, caller=caller_of(request), deadline=deadline
            )
            told = msgspec.json.decode(answer.body, type=ServerMetadata).extensions
            return frozenset(told) - self._plane.blocked_extensions
        except (BackendUnavailable, DeadlineExceeded, msgspec.DecodeError):
            return None


def served(
    operations: Iterable[Operation], rows: Iterable[Row], extensions: frozenset[str] | None
) -> tuple[Operation, ...]:
    """Those that a row serves and the engine can do. extensions: the engine's, None where nobody knows them."""
    routes = [WireRoute(row) for row in rows]
    able = [op for op in operations if not op.extension or extensions is None or op.extension in extensions]
    found = ((operation, _row_of(operation, routes)) for operation in able)
    return tuple(
        replace(operation, summary=row.summary)
        for operation, row in found
        if row is not None and not isinstance(row.endpoint, Refused)
    )


def _row_of(operation: Operation, routes: Sequence[WireRoute]) -> Row | None:
    """The row that answers it: the first that matches, as the router has it."""
    path = SLOT.sub(lambda slot: _EXAMPLES.get(slot[1], "x"), spellings(operation.path)[-1])
    scope = {"type": "http", "method": operation.method, "raw_path": path.encode()}
    return next((route.row for route in routes if route.matches(scope)[0] is Match.FULL), None)
