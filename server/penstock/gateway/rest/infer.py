"""POST …/infer: reads the request's head and relays its bytes unchanged.

Encoded images in the model's image input are decoded and replaced by their tensor.
"""

import base64
import binascii
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.engines.torch_serving.picture_header import sniff
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.engine_slots import SlotQueue
from penstock.gateway.rest import openapi
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.request import (
    TIMEOUT_HEADER,
    RelayedResponse,
    call_of,
    deadline_of,
    decompressed,
    header_if_given,
    model_of,
    read_body,
    run_scan,
    run_until_disconnect,
    single_header,
    with_client_errors,
)
from penstock.gateway.rest.routes import INFERENCE, MODEL, VERSION, HotRoute, caller_of
from penstock.gateway.rest.schemas import InferenceRequest, InferenceResponse
from penstock.protocol.batch_reports import EXPLAIN_HEADER
from penstock.protocol.call import HttpAnswer, HttpCall, HttpHeaders, InferHead
from penstock.protocol.errors import InvalidRequest, TooLarge
from penstock.protocol.http_body import HEADER_LENGTH, NOT_ENCODED, header_length_of
from penstock.protocol.http_codec import read_head
from penstock.protocol.identity import Role, Verb
from penstock.protocol.inference import Tensor
from penstock.protocol.json_outline import Members, decode_json
from penstock.protocol.request_checks import (
    EncodedCall,
    ImageInput,
    check_image_shape,
    check_images,
    images_in,
    refuse_shared_images,
)

_REPLACED_HEADERS = (b"content-encoding", b"inference-header-content-length")
_SIZE, _REGION = "binary_data_size", "shared_memory_region"


class _Base64(msgspec.Struct):
    b64: str


_Element = str | _Base64
_DATA = msgspec.json.Decoder(list[_Element | list[_Element]])
_OBJECT = msgspec.json.Decoder(Members)
_OBJECTS = msgspec.json.Decoder(list[Members])
_SHAPE = msgspec.json.Decoder(tuple[int, ...])


def encoded_call(
    head: InferHead, call: HttpCall, plain: bytes, header_length: int | None, place: ImageInput
) -> EncodedCall[HttpAnswer] | None:
    """The call with the images that it sends in the place of that input; None if it sends none.

    plain: the body, decompressed and scanned. header_length: of its JSON, None for all of it. The images stand in the
    binary data, or in `data` as base64 (a string, or {"b64": "…"}); a raw binary request is one image.
    Raises InvalidRequest for an input that says that it is such, and is none.
    """
    if not plain or header_length == 0:
        return _raw_call(head, call, plain, place)
    if head.bytes_inputs != (place.name,):
        return None
    length = len(plain) if header_length is None else header_length
    top = decode_json(_OBJECT, plain[:length], "")
    entries = decode_json(_OBJECTS, top["inputs"], "inputs")
    if len(entries) != 1:
        return None  # the engine rejects inputs that the model does not have
    images = _images(entries[0], place.name, memoryview(plain)[length:])
    return EncodedCall(head, images, lambda tensors: _with_tensors(call, top, entries[0], tensors), place.row_bytes)


def is_raw_image(plain: bytes, place: ImageInput) -> bool:
    """Whether a raw binary body is an encoded image, and not, by its size, the tensor itself."""
    return place.is_encoded or (len(plain) != place.row_bytes and sniff(plain) is not None)


def _raw_call(head: InferHead, call: HttpCall, plain: bytes, place: ImageInput) -> EncodedCall[HttpAnswer] | None:
    if not is_raw_image(plain, place):
        return None
    # A raw binary request is answered in binary.
    top: Members = {"parameters": msgspec.Raw(b'{"binary_data_output":true}'), "inputs": msgspec.Raw(b"[]")}
    entry: Members = {"name": msgspec.Raw(msgspec.json.encode(place.name))}
    return EncodedCall(head, (plain,), lambda tensors: _with_tensors(call, top, entry, tensors), place.row_bytes)


def _images(entry: Members, name: str, binary: memoryview) -> tuple[bytes, ...]:
    parameters = _parameters(entry)
    if _REGION in parameters:
        refuse_shared_images(name)
    shape = decode_json(_SHAPE, entry["shape"], f"input {name!r}: shape")
    if _SIZE in parameters:
        return images_in(name, shape, binary)
    check_image_shape(name, shape)
    return _from_base64(name, shape, decode_json(_DATA, entry["data"], f"input {name!r}: data"))


def _from_base64(name: str, shape: tuple[int, ...], data: list[_Element | list[_Element]]) -> tuple[bytes, ...]:
    elements = [element for item in data for element in (item if isinstance(item, list) else [item])]
    check_images(name, shape, len(elements))
    texts = (element.b64 if isinstance(element, _Base64) else element for element in elements)
    return tuple(_decoded(text, f"input {name!r}: element {number}") for number, text in enumerate(texts, start=1))


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f'{where} is no base64 ({error}); give an image\'s bytes as base64 or {{"b64": "…"}}, or as binary data'
        ) from error


def _with_tensors(call: HttpCall, top: Members, entry: Members, tensors: Sequence[Tensor]) -> HttpCall:
    """The members in their order and unchanged, except the description of the images, and with further inputs."""
    tensor, *others = tensors
    described = entry | _described(tensor, _parameters(entry))
    described.pop("data", None)
    further = [{"name": _raw(other.name)} | _described(other, {}) for other in others]
    header = msgspec.json.encode(top | {"inputs": _raw([described, *further])})
    headers: HttpHeaders = tuple(pair for pair in call.headers if pair[0] not in _REPLACED_HEADERS)
    headers += ((b"inference-header-content-length", b"%d" % len(header)),)
    return HttpCall(call.method, call.target, headers, b"".join((header, *[one.data for one in tensors])))


def _described(tensor: Tensor, parameters: Members) -> Members:
    return {
        "shape": _raw(tensor.shape),
        "datatype": _raw(tensor.datatype.value),
        "parameters": _raw(parameters | {_SIZE: _raw(tensor.data.nbytes)}),
    }


def _parameters(entry: Members) -> Members:
    return decode_json(_OBJECT, entry["parameters"], "parameters") if "parameters" in entry else {}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


INFLATED_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))  # large bodies; each takes a core for up to 0.5 s
SMALL_BYTES = 1 << 20  # decompressed; takes 4 ms at most


class InferEndpoint:
    """Relays tensors unchanged. Rejects requests that are malformed or would crash the engine."""

    def __init__(self, plane: DataPlane, limits: RestOptions) -> None:
        self._plane = plane
        self._limits = limits
        self._inflating = SlotQueue(INFLATED_AT_ONCE)

    async def __call__(self, request: Request) -> Response:
        """Infer from tensors.

        JSON, or JSON and after it the tensors that have a `binary_data_size`, in the inputs' order; the header
        Inference-Header-Content-Length then says how long the JSON is. 0 there: the whole body is the model's one
        input. Triton's classification, sequence and parameter extensions are passed on.
        """
        body = await read_body(request, self._limits)
        encoding = single_header(request, "content-encoding").lower()
        if encoding in NOT_ENCODED:
            work = await self._scanned(request, body, body)
        else:
            work = self._compressed(request, body, encoding)
        return RelayedResponse(with_client_errors(await run_until_disconnect(request.scope, request.receive, work)))

    async def _compressed(self, request: Request, body: bytes, encoding: str) -> HttpAnswer:
        """The answer to a compressed call."""
        work = await self._inflated(request, body, encoding)
        return await work

    async def _inflated(self, request: Request, body: bytes, encoding: str) -> Coroutine[Any, Any, HttpAnswer]:
        """The call to the plane. Clients take turns with large bodies: 64 KiB of gzip can hold 64 MiB of text.

        The decompressed body lives until it is scanned.
        """
        try:
            plain = await decompressed(body, encoding, min(SMALL_BYTES, self._limits.max_body_bytes))
        except TooLarge:
            if self._limits.max_body_bytes <= SMALL_BYTES:
                raise
        else:
            return await self._scanned(request, body, plain)
        until = deadline_of(request) or time.monotonic() + self._limits.body_timeout_s
        await self._inflating.enter(caller_of(request).client, 1, until, "the large compressed bodies before it")
        try:
            plain = await decompressed(body, encoding, self._limits.max_body_bytes)
            return await self._scanned(request, body, plain)
        finally:
            self._inflating.leave(1)

    async def _scanned(self, request: Request, body: bytes, plain: bytes) -> Coroutine[Any, Any, HttpAnswer]:
        """The call to the data plane: unchanged, or with its encoded images."""
        length = header_length_of(header_if_given(request, HEADER_LENGTH))
        size_bytes, depth = len(plain) if length is None else length, self._limits.max_json_depth
        head = await run_scan(size_bytes, read_head, plain, length, model_of(request), depth)
        deadline = deadline_of(request, head.timeout_us)
        call: HttpCall | EncodedCall[HttpAnswer] = call_of(request, body)
        place = self._plane.image_input(head.model_name) if head.bytes_inputs or head.is_raw else None
        if place is not None:
            call = await run_scan(len(plain), encoded_call, head, call_of(request, body), plain, length, place) or call
        return self._plane.relay(Verb.INFER, head, call, caller=caller_of(request), deadline=deadline)


def infer_router(plane: DataPlane, limits: RestOptions) -> APIRouter:
    """The endpoint's routes."""
    router = APIRouter(route_class=HotRoute, tags=[INFERENCE], responses=openapi.ERRORS | openapi.RECEIVE_ERRORS)
    length = {"description": "Bytes of JSON before the tensors.", "schema": {"type": "integer", "minimum": 0}}
    openapi.operation(
        router,
        "POST",
        f"{MODEL}/infer",
        f"{VERSION}/infer",
        name="infer",
        role=Role.INFER,
        headers=(TIMEOUT_HEADER, openapi.JSON_LENGTH, openapi.ENCODING, EXPLAIN_HEADER),
        body=openapi.body({openapi.JSON: {"schema": openapi.reference(InferenceRequest)}, openapi.BINARY: {}}),
        response_model=InferenceResponse,
        responses={200: {"content": {openapi.BINARY: {}}, "headers": {openapi.JSON_LENGTH: length}}},
    )(InferEndpoint(plane, limits).__call__)
    return router
