"""Receives the model file of a request: its body or an earlier upload. Workers forward the request to the core."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.request import (
    RelayedResponse,
    check_model_size,
    declared_bytes,
    first_header,
    run_until_disconnect,
    single_header,
    store_body,
)
from penstock.gateway.rest.routes import caller_of
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import HttpCall
from penstock.protocol.errors import InvalidRequest, UnsupportedMedia
from penstock.protocol.http_body import NOT_ENCODED
from penstock.protocol.request_checks import quoted

UPLOAD_HEADER = "x-penstock-upload"  # key of the received file, sent by a worker to the core
FORWARD_TIMEOUT_S = 3600.0  # includes waiting for earlier additions
FILE_NAME = "upload"  # for a file whose model has no name yet


class ModelFiles:
    """Receives model files in one process.

    uploads: None if models cannot be added. core: relay to the core, in a worker. takes_workers: true in the core.
    """

    def __init__(
        self,
        limits: RestOptions,
        uploads: ModelUploads | None,
        core: CoreRelay | None = None,
        *,
        takes_workers: bool = False,
    ) -> None:
        self._limits, self._uploads, self._core, self._takes_workers = limits, uploads, core, takes_workers

    def required_uploads(self) -> ModelUploads:
        """Raises InvalidRequest if no models can be added."""
        if self._uploads is None:
            raise InvalidRequest("models cannot be added to this gateway; copy them into its model repository")
        return self._uploads

    async def receive(self, request: Request, name: str, token: str, stack: ExitStack) -> Path | None:
        """The request's file. In a worker, None for a token: the core has that file.

        stack: removes a received file when it is closed. Raises InferenceError, ClientDisconnected.
        """
        uploads = self.required_uploads()
        if token:
            return None if self._core is not None else _linked(uploads, name, uploads.stored(token), stack)
        if self._takes_workers:
            return uploads.find(first_header(request.scope, UPLOAD_HEADER.encode()).decode("latin-1"), name)
        uploads.require()
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

    async def forward(self, request: Request, file: Path | None) -> Response:
        """The core's response."""
        if self._core is None:
            raise RuntimeError("this process has no core")
        query: bytes = request.scope["query_string"]
        target: bytes = request.scope["raw_path"] + (b"?" + query if query else b"")
        key = self.required_uploads().key_of(file).encode() if file is not None else b""
        call = HttpCall("POST", target, ((UPLOAD_HEADER.encode(), key),) if key else (), b"")
        work = self._core.send(call, caller_of(request), deadline=time.monotonic() + FORWARD_TIMEOUT_S)
        return RelayedResponse(await run_until_disconnect(request.scope, request.receive, work))


def _linked(uploads: ModelUploads, name: str, stored: Path, stack: ExitStack) -> Path:
    """A hard link to a stored file, as the stored file may be removed meanwhile. Raises InferenceError."""
    try:
        file = stack.enter_context(uploads.file(name))
        os.link(stored, file)
    except OSError as error:
        raise uploads.failure(error) from error
    return file


def required(file: Path | None) -> Path:
    """The file. Raises RuntimeError for None, which does not occur in a process that adds models."""
    if file is None:
        raise RuntimeError("this process has no file")
    return file


def _check_body_kind(request: Request) -> None:
    """Raises InvalidRequest for a compressed body, UnsupportedMedia for a form."""
    encoding = single_header(request, "content-encoding").lower()
    if encoding not in NOT_ENCODED:
        raise InvalidRequest(f"the content-encoding is {quoted(encoding)}; send the ONNX file uncompressed")
    content_type = first_header(request.scope, b"content-type").decode("latin-1").strip().lower()
    if content_type.startswith("multipart/"):
        raise UnsupportedMedia("the body is a form; send the ONNX file itself as the body")
