"""POST …/add: adds the ONNX file in the body to the repository in PENSTOCK_HOME, and loads it."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.audit import CANCELLED
from penstock.gateway.model_adder import AddRequest, ModelAdder
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.rest import openapi
from penstock.gateway.rest.image_query import query_pairs
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.request import (
    RelayedResponse,
    check_model_size,
    declared_bytes,
    first_header,
    model_of,
    run_until_disconnect,
    single_header,
    store_body,
)
from penstock.gateway.rest.responses import ClientDisconnected, json_response
from penstock.gateway.rest.routes import HotRoute, Requires, caller_of
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import HttpCall
from penstock.protocol.errors import InferenceError, InvalidRequest, UnsupportedMedia
from penstock.protocol.http_body import NOT_ENCODED
from penstock.protocol.identity import Identity, Role
from penstock.protocol.model_addition import ModelAdded
from penstock.protocol.request_checks import quoted

PATH = "/v2/repository/models/{model}/add"
UPLOAD_HEADER = "x-penstock-upload"  # from a worker to the core: the key of the received file
FORWARD_TIMEOUT_S = 3600.0  # includes the wait for earlier additions
_REPLACE, _PARAMETER = "replace", "parameter"
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "layout": ("Output layout, such as yolov8. By default recognised.", {"type": "string"}),
    "input_size": ("The network's size in pixels, W or WxH. By default the file's.", {"type": "string"}),
    "labels": ("Class names: a;b;c. By default the file's.", {"type": "string"}),
    "color": (
        "Channel order: rgb, bgr or gray. The default of this and the next five depends on the model's family.",
        {},
    ),
    "mean": ("R,G,B in the network's colour order.", {"type": "string"}),
    "std": ("R,G,B. The input is (pixel × scale - mean) / std.", {"type": "string"}),
    "scale": ("Factor for pixel values, such as 0.00392 (1/255).", {"type": "number"}),
    "resize": ("How a picture is resized: letterbox, corner, squash, crop or keep.", {"type": "string"}),
    "padding": ("Pixel value of padding.", {"type": "number", "minimum": 0, "maximum": 255}),
    "conf": ("Score threshold. By default 0.25.", _SHARE),
    "iou": ("IoU threshold of NMS. By default 0.45.", _SHARE),
    "keypoint_names": ("Keypoint names of a pose network: nose;left_eye;…", {"type": "string"}),
    "skeleton": ("Keypoints that drawings join: 0-1;1-2.", {"type": "string"}),
    _PARAMETER: (
        "KEY=VALUE, any parameter of the card; may be repeated.",
        {"type": "array", "items": {"type": "string"}},
    ),
    _REPLACE: ("1: replace a model of that name that was added before.", {"enum": ["0", "1"]}),
}


@dataclass(frozen=True, slots=True)
class AddQuery:
    """flags: (name with underscores, value) of `penstock models add`."""

    flags: tuple[tuple[str, str], ...] = ()
    may_replace: bool = False


def add_query_of(query: bytes) -> AddQuery:
    """Parses the query. Raises InvalidRequest for an unknown or repeated parameter; the command checks the values."""
    flags, replace = [], "0"
    for name, text in query_pairs(query, QUERY, repeatable=_PARAMETER) if query else []:
        if not text or not text.isprintable():
            raise InvalidRequest(f"query parameter {name!r} is {quoted(text)}; give it a value, or leave it out")
        if name == _REPLACE:
            replace = text
        else:  # the command would read labels without `;` as the name of a file
            flags.append((name, f"{text};" if name == "labels" else text))
    if replace not in ("0", "1"):
        raise InvalidRequest(f"query parameter {_REPLACE!r} is {quoted(replace)}; it must be 0 or 1")
    return AddQuery(tuple(flags), replace == "1")


class AddModelEndpoint:
    """Runs in each worker, which receives the file and forwards the request, and in the core, which adds the model.

    adder: None in a worker. core: the worker's relay to the core. takes_workers: this is the core.
    """

    def __init__(
        self,
        limits: RestOptions,
        uploads: ModelUploads | None,
        adder: ModelAdder | None,
        core: CoreRelay | None = None,
        *,
        refused: Callable[[str, Identity, str], None],
        takes_workers: bool = False,
    ) -> None:
        """refused: called with the name, the client and the reason if the file is not received."""
        self._limits, self._uploads, self._adder, self._refused = limits, uploads, adder, refused
        self._core, self._takes_workers = core, takes_workers

    async def __call__(self, request: Request) -> Response:
        """Add a model from its ONNX file.

        The body is the ONNX file. A separate process inspects it, runs it on two pictures, and writes the model's
        folder; then the model is loaded. The response is sent when the model is ready. 400 names the error, or a
        query parameter to add; nothing has changed then.
        """
        query = add_query_of(request.scope["query_string"])
        name, uploads = unquote(model_of(request).model_name), self._uploads
        if uploads is None:
            raise InvalidRequest("models cannot be added to this gateway; put them into its repository")
        if self._takes_workers:
            key = first_header(request.scope, UPLOAD_HEADER.encode()).decode("latin-1")
            add_request = AddRequest(name, uploads.find(key, name), query.flags, query.may_replace, _origin(request))
            return await self._add(request, add_request)
        with ExitStack() as stack:
            try:
                file = await self._received(request, name, uploads, stack, may_replace=query.may_replace)
            except (InferenceError, ClientDisconnected) as error:
                outcome = error.reason if isinstance(error, InferenceError) else CANCELLED
                self._refused(name, caller_of(request), outcome)
                raise
            if self._core is not None:
                return await self._forward(request, self._core, uploads.key_of(file))
            return await self._add(request, AddRequest(name, file, query.flags, query.may_replace, _origin(request)))

    async def _received(
        self, request: Request, name: str, uploads: ModelUploads, stack: ExitStack, *, may_replace: bool
    ) -> Path:
        """The body as a file, which is removed when the stack is closed. Raises InferenceError, ClientDisconnected."""
        uploads.check(name, may_replace=may_replace)
        _check_body_kind(request)
        declared = declared_bytes(request)
        check_model_size(declared, self._limits)
        file = stack.enter_context(uploads.file(name, declared))
        try:
            size_bytes = await store_body(request, file, self._limits)
        except OSError as error:
            raise uploads.failure(error) from error
        if not size_bytes:
            raise InvalidRequest("the body is empty; send the ONNX file as the body")
        return file

    async def _add(self, request: Request, add_request: AddRequest) -> Response:
        """Adds and loads the model. A disconnect cancels the addition, but not a load that has begun."""
        if self._adder is None:
            raise RuntimeError("this process adds no models")
        async with self._adder.adding(add_request, caller_of(request)) as addition:
            await run_until_disconnect(request.scope, request.receive, addition.prepare())
            return json_response(await addition.load())

    async def _forward(self, request: Request, core: CoreRelay, key: str) -> Response:
        query: bytes = request.scope["query_string"]
        target: bytes = request.scope["raw_path"] + (b"?" + query if query else b"")
        call = HttpCall("POST", target, ((UPLOAD_HEADER.encode(), key.encode()),), b"")
        work = core.send(call, caller_of(request), deadline=time.monotonic() + FORWARD_TIMEOUT_S)
        return RelayedResponse(await run_until_disconnect(request.scope, request.receive, work))


def _origin(request: Request) -> str:
    return f"sent to the gateway by {caller_of(request).key_name or 'a client without a key'}"


def _check_body_kind(request: Request) -> None:
    """Raises InvalidRequest for a compressed body, UnsupportedMedia for a form."""
    encoding = single_header(request, "content-encoding").lower()
    if encoding not in NOT_ENCODED:
        raise InvalidRequest(f"the content-encoding is {quoted(encoding)}; send the ONNX file as it is")
    content_type = first_header(request.scope, b"content-type").decode("latin-1").strip().lower()
    if content_type.startswith("multipart/"):
        raise UnsupportedMedia("the body is a form; send the ONNX file itself as the body")


def add_router(endpoint: AddModelEndpoint) -> APIRouter:
    """The endpoint's route."""
    router = APIRouter(route_class=HotRoute, tags=["repository"], responses=openapi.ERRORS | openapi.RECEIVE_ERRORS)
    openapi.operation(
        router,
        "POST",
        PATH,
        name="addModel",
        role=Requires(Role.ADMIN),
        query=[openapi.parameter("query", name, text, **schema) for name, (text, schema) in QUERY.items()],
        body=openapi.body({openapi.BINARY: {}}),
        response_class=Response,
        responses={
            200: {"content": {openapi.JSON: {"schema": openapi.reference(ModelAdded)}}},
            **openapi.errors(415, 507),
        },
    )(endpoint.__call__)
    return router
