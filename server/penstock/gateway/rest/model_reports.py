"""GET /v1/models: state, card, batches and traffic of models. DELETE removes a model that was added; …/check checks."""

from functools import partial
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.model_adder import ModelAdder
from penstock.gateway.model_check import ModelChecker
from penstock.gateway.request_counts import RequestHistory
from penstock.gateway.rest.image_query import query_pairs
from penstock.gateway.rest.load import credential_of
from penstock.gateway.rest.openapi import ERRORS, JSON, errors, operation, parameter, reference
from penstock.gateway.rest.request import run_until_disconnect
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import HotRoute, caller_of
from penstock.gateway.system.model_reports import ModelReports
from penstock.protocol.errors import InvalidRequest, ModelNotFound, NotSupported
from penstock.protocol.identity import Role
from penstock.protocol.model_reports import ModelCheck, ModelReport, ModelsReport
from penstock.protocol.request_checks import quoted

router = APIRouter(route_class=HotRoute, tags=["models"], responses=ERRORS)
checks = APIRouter(route_class=HotRoute, tags=["models"], responses=ERRORS)  # a worker also sends the client's key
MODELS, MODEL = "/v1/models", "/v1/models/{model}"
_OVER_S = parameter(
    "query",
    "over_s",
    "Seconds over which rates and latencies are computed. By default 60.",
    type="integer",
    minimum=1,
    maximum=int(RequestHistory.WINDOW_S),
)


@operation(
    router,
    "GET",
    MODELS,
    role=Role.READ,
    query=(_OVER_S,),
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(ModelsReport)}}}},
)
async def model_reports(request: Request) -> Response:
    """All models.

    State, card, batches, queue, latency and rate of each model; at most 1000 models.
    """
    return json_response(
        await run_until_disconnect(request.scope, request.receive, _reports(request).all(_over_s(request)))
    )


@operation(
    router,
    "GET",
    MODEL,
    role=Role.READ,
    query=(_OVER_S,),
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(ModelReport)}}}},
)
async def model_report(request: Request) -> Response:
    """One model.

    The same fields as in the list, with up to 2000 labels.
    """
    work = _reports(request).one(_name(request), _over_s(request))
    return json_response(await run_until_disconnect(request.scope, request.receive, work))


@operation(router, "DELETE", MODEL, role=Role.ADMIN, response_class=Response, status_code=204)
async def remove_model(request: Request) -> Response:
    """Remove a model.

    Unloads a model that was added or pulled, and removes its folder. 404 for other models.
    """
    adder: ModelAdder | None = request.app.state.services.adder
    name = _name(request)
    if adder is None or not adder.uploads.has_added(name):
        raise ModelNotFound(f"no model {quoted(name)} was added or pulled; only such models can be removed")
    await request.app.state.plane.remove_model(name, caller_of(request), partial(adder.uploads.remove, name))
    return Response(status_code=204)


@operation(
    checks,
    "POST",
    f"{MODEL}/check",
    role=Role.ADMIN,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(ModelCheck)}}}, **errors(409, 507)},
)
async def check_model(request: Request) -> Response:
    """Check a model's answers.

    As `penstock models check`: a process sends a known input through this gateway with the client's key, which also
    needs the roles infer and read. It compares the answer with golden.json, and with ONNX Runtime on the file. One at a
    time.
    """
    name = _name(request)
    await _reports(request).one(name)  # 404 for an unknown one
    checker: ModelChecker | None = request.app.state.services.checker
    if checker is None:
        raise NotSupported("this gateway checks no models; run `penstock models check` on its machine")
    work = checker.check(name, caller_of(request), credential_of(request))
    return json_response(await run_until_disconnect(request.scope, request.receive, work))


def _reports(request: Request) -> ModelReports:
    reports: ModelReports = request.app.state.services.models
    return reports


def _name(request: Request) -> str:
    return unquote(request.path_params["model"])


def _over_s(request: Request) -> int:
    query, longest = request.scope["query_string"], int(RequestHistory.WINDOW_S)
    text = dict(query_pairs(query, ("over_s",)) if query else ()).get("over_s", str(longest))
    if not (text.isascii() and text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= longest):
        raise InvalidRequest(f"over_s is {quoted(text)}; it must be a number of seconds from 1 to {longest}")
    return int(text)
