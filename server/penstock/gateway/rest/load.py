"""/v1/load: starts, monitors, stops and compares load tests, and returns their reports."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.load.service import LoadTests
from penstock.gateway.rest import openapi
from penstock.gateway.rest.image_query import query_pairs
from penstock.gateway.rest.openapi import ERRORS, JSON, RECEIVE_ERRORS, errors, operation, parameter, reference
from penstock.gateway.rest.request import first_header, read_body
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import CREDENTIAL, HotRoute, caller_of
from penstock.gateway.rest.streaming import HttpForwarder
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.identity import Role
from penstock.protocol.load_reports import (
    LoadComparison,
    LoadRun,
    LoadRunProgress,
    LoadRunRequest,
    LoadRuns,
    LoadScenarios,
)
from penstock.protocol.request_checks import quoted

KEY_HEADER = b"x-penstock-load-key"  # the client's API key, sent by a worker to the core
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'; sandbox"
)
MAX_POSITION = 1 << 40
_RUN = "/v1/load/runs/{run}"
_REQUEST = msgspec.json.Decoder(LoadRunRequest)

router = APIRouter(route_class=HotRoute, tags=["load"], responses=ERRORS)


def _returns(model: type, status: int = 200) -> dict[str, Any]:
    return {
        "role": Role.ADMIN,
        "response_class": Response,
        "responses": {status: {"content": {JSON: {"schema": reference(model)}}}},
    }


@operation(router, "GET", "/v1/load/scenarios", **_returns(LoadScenarios))
async def load_scenarios(request: Request) -> Response:
    """Scenarios and targets of load tests.

    501 if load tests are not installed.
    """
    return json_response(await _tests(request).scenarios())


@operation(router, "GET", "/v1/load/runs", **_returns(LoadRuns))
async def load_runs(request: Request) -> Response:
    """Load test runs.

    Newest first, with the metrics and the commit of each. The newest 50 runs are stored.
    """
    return json_response(await _tests(request).runs())


@operation(
    router,
    "POST",
    "/v1/load/runs",
    role=Role.ADMIN,
    status_code=201,
    response_class=Response,
    body=openapi.json_body(LoadRunRequest),
    responses=RECEIVE_ERRORS
    | errors(409, 507)
    | {201: {"description": "The run has started.", "content": {JSON: {"schema": reference(LoadRun)}}}},
)
async def start_load_run(request: Request) -> Response:
    """Start a load test.

    One load test runs at a time; 409 while one is running. It runs in its own process with a lower priority.
    """
    tests, body = _tests(request), await read_body(request, request.app.state.limits)
    try:
        wanted = _REQUEST.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not a load test run: {error}") from error
    return json_response(await tests.start(wanted, caller_of(request), credential_of(request)), 201)


@operation(
    router,
    "GET",
    _RUN,
    query=(parameter("query", "after", "`next` of an earlier response.", type="integer", minimum=0),),
    **_returns(LoadRunProgress),
)
async def load_run(request: Request) -> Response:
    """A run and its progress.

    During the run, `progress` has a row of latencies and rates about every second.
    """
    text = _query(request, "after") or "0"
    if not (text.isascii() and text.isdecimal()) or int(text) > MAX_POSITION:
        raise InvalidRequest(f"query parameter 'after' is {quoted(text)}; use `next` of an earlier response")
    return json_response(await _tests(request).run(_id(request), int(text)))


@operation(router, "DELETE", _RUN, **_returns(LoadRun))
async def stop_load_run(request: Request) -> Response:
    """Stop a run.

    Returns within 20 s, when the report of the measurements so far is written.
    """
    return json_response(await _tests(request).stop(_id(request), caller_of(request)))


@operation(
    router,
    "GET",
    f"{_RUN}/report",
    role=Role.ADMIN,
    response_class=Response,
    responses={200: {"content": {"text/html": {}}}},
)
async def load_report(request: Request) -> Response:
    """A run's report as HTML.

    The page has no scripts and loads no external resources.
    """
    page = await _tests(request).report(_id(request))
    headers = {"Content-Security-Policy": REPORT_POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


@operation(
    router,
    "GET",
    f"{_RUN}/result",
    role=Role.ADMIN,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}},
)
async def load_result(request: Request) -> Response:
    """The result of a run as JSON.

    The file `run.json` that `penstock load run` writes.
    """
    return Response(await _tests(request).result(_id(request)), media_type=JSON)


@operation(
    router,
    "GET",
    f"{_RUN}/comparison",
    query=(parameter("query", "with", "ID of the run to compare with.", type="string"),),
    **_returns(LoadComparison),
)
async def compare_load_runs(request: Request) -> Response:
    """Compare two runs.

    `a` is the run in the path, `b` the other. Ratios have 95 % confidence intervals if both runs stored their requests.
    """
    other = _query(request, "with")
    if not other:
        raise InvalidRequest("query parameter 'with' is missing; give the ID of the run to compare with")
    return json_response(await _tests(request).comparison(_id(request), other))


def with_client_key(forwarder: HttpForwarder) -> HttpForwarder:
    """A worker's forwarder that also sends the client's API key to the core, which passes it to a process."""
    return _KeyForwarder(forwarder)


class _KeyForwarder(HttpForwarder):
    def __init__(self, forwarder: HttpForwarder) -> None:
        self._forwarder = forwarder

    async def __call__(self, request: Request) -> Response:
        scope = request.scope
        headers = [pair for pair in scope["headers"] if pair[0] != KEY_HEADER]
        scope["headers"] = [*headers, (KEY_HEADER, scope.get(CREDENTIAL, "").encode("latin-1"))]
        return await self._forwarder(request)


def credential_of(request: Request) -> str:
    """The client's API key or token; "" for none. The core gets it from the worker that authenticated the client."""
    if request.app.state.takes_workers:
        return first_header(request.scope, KEY_HEADER).decode("latin-1")
    credential: str = request.scope.get(CREDENTIAL, "")
    return credential


def _tests(request: Request) -> LoadTests:
    tests: LoadTests | None = request.app.state.services.load
    if tests is None:
        raise NotSupported("this gateway runs no load tests; start it with `penstock up`")
    return tests


def _query(request: Request, name: str) -> str:
    """The query parameter, or "". Raises InvalidRequest for any other parameter."""
    query: bytes = request.scope["query_string"]
    return dict(query_pairs(query, (name,))).get(name, "") if query else ""


def _id(request: Request) -> str:
    run: str = request.path_params["run"]
    return run
