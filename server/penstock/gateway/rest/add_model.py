"""POST …/add: adds the ONNX file in the body to the repository in PENSTOCK_HOME, and loads it; …/inspect shows it."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.audit import CANCELLED
from penstock.gateway.model_adder import AddRequest, ModelAdder
from penstock.gateway.model_uploads import STORED_S
from penstock.gateway.rest import openapi
from penstock.gateway.rest.image_query import query_pairs
from penstock.gateway.rest.model_files import FILE_NAME, ModelFiles, required
from penstock.gateway.rest.request import model_of, run_until_disconnect
from penstock.gateway.rest.responses import ClientDisconnected, json_response
from penstock.gateway.rest.routes import HotRoute, Requires, caller_of
from penstock.protocol.errors import InferenceError, InvalidRequest
from penstock.protocol.identity import Identity, Role
from penstock.protocol.model_addition import InspectedModel, ModelAdded
from penstock.protocol.request_checks import quoted

PATH = "/v2/repository/models/{model}/add"
INSPECT_PATH = "/v1/inspect"
_REPLACE, _PARAMETER, _UPLOAD = "replace", "parameter", "upload"
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
    "on": ("Run it there. By default the GPU if it is faster and gives the same answers.", {"enum": ["cpu", "gpu"]}),
    "precision": (
        "On a GPU. By default fp16 if it is faster and gives the same answers.",
        {"enum": ["fp32", "tf32", "fp16"]},
    ),
    _REPLACE: ("1: replace a model of that name that was added before.", {"enum": ["0", "1"]}),
    _UPLOAD: ("`upload` of a POST /v1/inspect response: adds that file; send no body.", {"type": "string"}),
}
_ONLY_TO_ADD = (_REPLACE, "on", "precision")
INSPECT_QUERY = {name: described for name, described in QUERY.items() if name not in _ONLY_TO_ADD}


@dataclass(frozen=True, slots=True)
class AddQuery:
    """flags: (name with underscores, value) of `penstock models add`. upload: token of an inspected file, or empty."""

    flags: tuple[tuple[str, str], ...] = ()
    may_replace: bool = False
    upload: str = ""


def inspect_query_of(query: bytes) -> AddQuery:
    """As add_query_of, without the parameters that only adding has."""
    return add_query_of(query, INSPECT_QUERY)


def add_query_of(query: bytes, allowed: Collection[str] = QUERY) -> AddQuery:
    """Parses the query. Raises InvalidRequest for an unknown or repeated parameter; the command checks the values."""
    flags, replaces, upload = [], "0", ""
    for name, text in query_pairs(query, allowed, repeatable=_PARAMETER) if query else []:
        if not text or not text.isprintable():
            raise InvalidRequest(f"query parameter {name!r} is {quoted(text)}; give it a value, or leave it out")
        if name == _REPLACE:
            replaces = text
        elif name == _UPLOAD:
            upload = text
        else:  # the command would read labels without `;` as the name of a file
            flags.append((name, f"{text};" if name == "labels" else text))
    if replaces not in ("0", "1"):
        raise InvalidRequest(f"query parameter {_REPLACE!r} is {quoted(replaces)}; it must be 0 or 1")
    return AddQuery(tuple(flags), replaces == "1", upload)


class AddModelEndpoint:
    """Runs in each worker, which receives the file and forwards the request, and in the core, which adds the model."""

    def __init__(
        self, files: ModelFiles, adder: ModelAdder | None, refused: Callable[[str, Identity, str], None]
    ) -> None:
        """adder: None in a worker. refused: called with name, client and reason if the file is rejected."""
        self._files, self._adder, self._refused = files, adder, refused

    async def __call__(self, request: Request) -> Response:
        """Add a model from its ONNX file.

        The body is the ONNX file; with `upload`, send no body. A separate process inspects the file, runs it on two
        images and writes the model's folder. Then the model is loaded. The response is sent when the model is ready.
        400 names the error, or the query parameter to add; no model has changed then.
        """
        query = add_query_of(request.scope["query_string"])
        name, uploads = unquote(model_of(request).model_name), self._files.required_uploads()
        with ExitStack() as stack:
            try:
                uploads.check(name, may_replace=query.may_replace)
                file = await self._files.receive(request, name, query.upload, stack)
            except (InferenceError, ClientDisconnected) as error:
                outcome = error.reason if isinstance(error, InferenceError) else CANCELLED
                self._refused(name, caller_of(request), outcome)
                raise
            if self._adder is None:
                return await self._files.forward(request, file)
            add_request = AddRequest(name, required(file), query.flags, query.may_replace, _origin(request))
            async with self._adder.adding(add_request, caller_of(request)) as addition:
                # A disconnect cancels the addition, but not a load that has started.
                await run_until_disconnect(request.scope, request.receive, addition.prepare())
                response = json_response(await addition.load())
        uploads.forget(query.upload)
        return response


class InspectModelEndpoint:
    """POST /v1/inspect: as AddModelEndpoint, without adding the model."""

    def __init__(self, files: ModelFiles, adder: ModelAdder | None) -> None:
        """adder: None in a worker."""
        self._files, self._adder = files, adder

    async def __call__(self, request: Request) -> Response:
        """Inspect a model file.

        The body is the ONNX file; with `upload`, send no body. Returns what `penstock models inspect` finds, and a
        token for adding the file without sending it again. 400 if the file cannot be read.
        """
        query, uploads = inspect_query_of(request.scope["query_string"]), self._files.required_uploads()
        with ExitStack() as stack:
            file = await self._files.receive(request, FILE_NAME, query.upload, stack)
            if self._adder is None:
                return await self._files.forward(request, file)
            work = self._adder.inspect(required(file), query.flags)
            found = await run_until_disconnect(request.scope, request.receive, work)
            try:
                token = query.upload or uploads.store(required(file))
            except OSError as error:
                raise uploads.failure(error) from error
        return json_response(replace(found, upload=token, expires_s=STORED_S))


def _origin(request: Request) -> str:
    return f"sent to the gateway by {caller_of(request).key_name or 'a client without a key'}"


def add_router(files: ModelFiles, adder: ModelAdder | None, refused: Callable[[str, Identity, str], None]) -> APIRouter:
    """The routes of both endpoints."""
    router = APIRouter(route_class=HotRoute, responses=openapi.ERRORS | openapi.RECEIVE_ERRORS)
    for path, name, tag, answer, endpoint, query in (
        (PATH, "addModel", "repository", ModelAdded, AddModelEndpoint(files, adder, refused).__call__, QUERY),
        (
            INSPECT_PATH,
            "inspectModel",
            "models",
            InspectedModel,
            InspectModelEndpoint(files, adder).__call__,
            INSPECT_QUERY,
        ),
    ):
        openapi.operation(
            router,
            "POST",
            path,
            name=name,
            tags=[tag],
            role=Requires(Role.ADMIN),
            query=[openapi.parameter("query", key, text, **schema) for key, (text, schema) in query.items()],
            body=openapi.body({openapi.BINARY: {}}, required=False),
            response_class=Response,
            responses={
                200: {"content": {openapi.JSON: {"schema": openapi.reference(answer)}}},
                **openapi.errors(415, 507),
            },
        )(endpoint)
    return router
