"""Health, models, repository, trace and log settings. All but health and /explain are relayed to the engine."""

from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest import schemas
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.openapi import ERRORS, JSON, RECEIVE_ERRORS, errors, json_body, operation, reference
from penstock.gateway.rest.request import (
    TIMEOUT_HEADER,
    RelayedResponse,
    call_of,
    deadline_of,
    model_of,
    read_body,
    run_scan,
    run_until_disconnect,
    with_client_errors,
)
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import MODEL, VERSION, HotRoute, Limits, Plane, Requires, caller_of
from penstock.protocol.batch_reports import ModelBatchReport
from penstock.protocol.call import HttpAnswer
from penstock.protocol.errors import retry_after_whole_s
from penstock.protocol.http_codec import check_repository_body, check_settings_body
from penstock.protocol.identity import Role, Verb

health = APIRouter(route_class=HotRoute, tags=["health"])


@operation(health, "GET", "/v2/health/live", role=None, response_model=schemas.Live)
async def live(_: Request) -> Response:
    """Whether the process lives.

    200 while the process runs, whatever the state of the engine.
    """
    return json_response({"live": True})


@operation(health, "GET", "/v2/health/ready", role=None, response_model=schemas.Ready, responses=errors(503))
async def ready(request: Request) -> Response:
    """Whether to send requests here.

    503 with the reason while the engine is not up, and from the start of this gateway's shutdown. If one of several
    GPUs is lost, the others serve, and `details` names it.
    """
    readiness = _plane_of(request).readiness()
    if readiness.is_ready:
        return json_response({"ready": True} | ({"details": list(details)} if (details := readiness.details) else {}))
    content = {"ready": False, "reason": readiness.reason, "error": f"not ready: {readiness.reason}"}
    return json_response(content, 503, {"Retry-After": str(retry_after_whole_s(1.0))})


models = APIRouter(route_class=HotRoute, tags=["models"], responses=ERRORS)
_READ: dict[str, Any] = {"role": Role.READ, "headers": (TIMEOUT_HEADER,)}


@operation(
    models,
    "GET",
    "/v2",
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(schemas.ServerMetadata)}}}},
    **_READ,
)
async def server_metadata(request: Request) -> Response:
    """Name, version and extensions.

    The engine's name and version, and the extensions that are served here.
    """
    return RelayedResponse(_without_extensions(_plane_of(request).blocked_extensions, await _read(request)))


@operation(models, "GET", "/v2/models/stats", response_model=schemas.ModelStatistics, **_READ)
async def all_statistics(request: Request) -> Response:
    """Statistics of all models.

    Of every version that is or was loaded.
    """
    return RelayedResponse(await _read(request))


@operation(models, "GET", MODEL, VERSION, response_model=schemas.ModelMetadata, **_READ)
async def model_metadata(request: Request) -> Response:
    """A model's metadata.

    Names, datatypes and shapes of its inputs and outputs.
    """
    return RelayedResponse(await _read(request))


@operation(
    models,
    "GET",
    f"{MODEL}/ready",
    f"{VERSION}/ready",
    role=Requires(Role.READ, or_role=Role.INFER),
    headers=(TIMEOUT_HEADER,),
    response_class=Response,
)
async def model_ready(request: Request) -> Response:
    """Whether a model is ready.

    200 without a body, or 400. The infer role is enough.
    """
    return RelayedResponse(await _read(request, Verb.READY))


@operation(models, "GET", f"{MODEL}/config", f"{VERSION}/config", response_model=schemas.ModelConfig, **_READ)
async def model_config(request: Request) -> Response:
    """A model's configuration.

    config.pbtxt, completed by the engine, with the reason if the gateway does not merge the model's requests.
    """
    return RelayedResponse(await _read(request, Verb.CONFIG))


@operation(models, "GET", f"{MODEL}/stats", f"{VERSION}/stats", response_model=schemas.ModelStatistics, **_READ)
async def model_statistics(request: Request) -> Response:
    """A model's statistics.

    Of its version, or of all its versions.
    """
    return RelayedResponse(await _read(request))


@operation(
    models,
    "GET",
    f"{MODEL}/explain",
    role=Role.READ,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(ModelBatchReport)}}}},
)
async def explain_model(request: Request) -> Response:
    """How its batches are formed.

    Who forms its batches, and how; how many there were of each size, why they closed, how long the engine takes; and
    a config.pbtxt with which Triton would form them. Of a model whose batches the gateway does not form, by the
    engine's own statistics.
    """
    work = _plane_of(request).explain_model(unquote(model_of(request).model_name), caller_of(request))
    return json_response(await run_until_disconnect(request.scope, request.receive, work))


repository = APIRouter(tags=["repository"], responses=ERRORS | RECEIVE_ERRORS)


@operation(
    repository,
    "POST",
    "/v2/repository/index",
    "/v2/repository/{repository}/index",
    body=json_body(schemas.IndexRequest, required=False),
    response_model=list[schemas.IndexEntry],
    **_READ,
)
async def repository_index(request: Request, limits: Limits) -> Response:
    """The models of the repository.

    Every model of the repository, with the state of its versions and, where one is not ready, the reason.
    """
    body = await _repository_body(request, limits)
    return RelayedResponse(with_client_errors(await _read(request, Verb.INDEX, body)))


@operation(
    repository,
    "POST",
    "/v2/repository/models/{model}/load",
    hidden=("/v2/repository/{repository}/models/{model}/load",),  # Triton 2.51 says 501
    role=Role.ADMIN,
    headers=(TIMEOUT_HEADER,),
    body=json_body(schemas.LoadRequest, required=False),
    response_class=Response,
)
async def load_model(request: Request, plane: Plane, limits: Limits) -> Response:
    """Load or reload a model.

    Loads a model, or loads it anew; answers when it serves. 400 with the reason where it cannot be loaded.
    """
    return await _change(Verb.LOAD, request, plane, await _repository_body(request, limits))


@operation(
    repository,
    "POST",
    "/v2/repository/models/{model}/unload",
    hidden=("/v2/repository/{repository}/models/{model}/unload",),  # Triton 2.51 says 501
    role=Role.ADMIN,
    headers=(TIMEOUT_HEADER,),
    body=json_body(schemas.UnloadRequest, required=False),
    response_class=Response,
)
async def unload_model(request: Request, plane: Plane, limits: Limits) -> Response:
    """Unload a model.

    Answers at once; running requests of the model end first.
    """
    return await _change(Verb.UNLOAD, request, plane, await _repository_body(request, limits))


settings = APIRouter(tags=["trace and log settings"], responses=ERRORS)


async def read_settings(request: Request) -> Response:
    """The settings that hold."""
    return RelayedResponse(await _read(request))


async def change_settings(request: Request, plane: Plane, limits: Limits) -> Response:
    """Changes what is given; answers with the settings that hold then. Where the engine writes its files is set where
    it is started.
    """
    body = await read_body(request, limits)
    await run_scan(len(body), check_settings_body, body, limits.max_json_depth)
    return await _change(Verb.CONFIGURE, request, plane, body)


for _path, _name, _summary in (
    ("/v2/models/{model}/trace/setting", "modelTraceSetting", "A model's trace settings."),
    ("/v2/trace/setting", "traceSetting", "The trace settings."),
    ("/v2/logging", "logSettings", "The log settings."),
):
    _is_log = _name == "logSettings"
    _common: dict[str, Any] = {
        "summary": _summary,
        "extension": "logging" if _is_log else "trace",
        "response_model": schemas.LogSettings if _is_log else schemas.TraceSetting,
    }
    operation(settings, "GET", _path, name=_name, role=Role.READ, **_common)(read_settings)
    operation(
        settings,
        "POST",
        _path,
        name=f"change{_name[0].upper()}{_name[1:]}",
        role=Role.ADMIN,
        body=json_body(schemas.LogChange if _is_log else schemas.TraceChange),
        responses=RECEIVE_ERRORS,
        **_common,
    )(change_settings)


def _plane_of(request: Request) -> DataPlane:
    plane: DataPlane = request.app.state.plane
    return plane


async def _read(request: Request, verb: Verb = Verb.READ, body: bytes = b"") -> HttpAnswer:
    """The engine's answer. A GET's body, which the engine would not look at, is left unread."""
    model, call, deadline = model_of(request), call_of(request, body), deadline_of(request)
    model = replace(model, model_name=unquote(model.model_name))
    work = _plane_of(request).relay(verb, model, call, caller=caller_of(request), deadline=deadline)
    return await run_until_disconnect(request.scope, request.receive, work)


async def _change(verb: Verb, request: Request, plane: DataPlane, body: bytes) -> Response:
    """Runs to its end though the client may be gone: the engine would not stop, and we must know the outcome."""
    model, call, deadline = model_of(request), call_of(request, body), deadline_of(request)
    answer = await plane.relay(verb, model, call, caller=caller_of(request), deadline=deadline)
    return RelayedResponse(with_client_errors(answer))


async def _repository_body(request: Request, limits: RestOptions) -> bytes:
    body = await read_body(request, limits)
    await run_scan(len(body), check_repository_body, body, limits.max_json_depth)
    return body


def _without_extensions(blocked: frozenset[str], answer: HttpAnswer) -> HttpAnswer:
    """Server metadata that does not tell of these extensions."""
    if answer.status != 200:
        return answer
    metadata = msgspec.json.decode(answer.body, type=schemas.ServerMetadata)
    metadata.extensions = [name for name in metadata.extensions if name not in blocked]
    return HttpAnswer(answer.status, answer.headers, msgspec.json.encode(metadata))
