"""POST …/image: encoded images as the body or as multipart/form-data, answered with labelled results in source
pixels.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from fastapi import APIRouter
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.batching.explanation import explain_batched, is_requested
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.metrics import STAGES
from penstock.gateway.rest import openapi
from penstock.gateway.rest.image_query import QUERY_PARAMETERS, query_of
from penstock.gateway.rest.image_results import result_json
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.request import (
    TIMEOUT_HEADER,
    deadline_of,
    decompressed,
    first_header,
    model_of,
    read_body,
    run_until_disconnect,
    single_header,
)
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import INFERENCE, MODEL, VERSION, HotRoute, Requires, caller_of
from penstock.protocol.batch_reports import EXPLAIN_HEADER, RequestExplanation
from penstock.protocol.call import InferHead
from penstock.protocol.errors import InvalidRequest, UnsupportedMedia
from penstock.protocol.http_body import NOT_ENCODED
from penstock.protocol.identity import Role
from penstock.protocol.image_answer import ImageAnswer, ImageResult
from penstock.protocol.inference import Timings
from penstock.vision.results import ImageRequest, ImageResponse

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file. content_type: of its part, empty if the part has a filename only; content: its bytes."""

    name: str
    content_type: str
    content: bytes


def parse_files(body: bytes, content_type: str, max_parts: int) -> list[FilePart]:
    """The files in their order, at least one. Raises InvalidRequest for a malformed body."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidRequest("multipart/form-data without a boundary in its content-type")
    collected = _PartCollector(max_parts)
    try:
        parser = MultipartParser(boundary, collected.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"malformed multipart body: {error}") from error
    if not collected.is_ended:
        raise InvalidRequest("malformed multipart body: its last boundary is missing")
    if not collected.parts:
        raise InvalidRequest("the multipart body has no parts; send one file at least")
    return [part.as_file(number) for number, part in enumerate(collected.parts, start=1)]


@dataclass(slots=True)
class _PartBuffer:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    def as_file(self, number: int) -> FilePart:
        options = parse_options_header(self.headers.get(b"content-disposition"))[1]
        name = options.get(b"name", b"").decode("utf-8", "replace")
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        if b"filename" not in options and not content_type:
            raise InvalidRequest(
                f"part {number} ({name[:80]!r}) of the multipart body is a form field: it has neither a filename nor a "
                "content-type; send files only"
            )
        return FilePart(name, content_type, b"".join(self.chunks))


class _PartCollector:
    """The parser's callbacks."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[_PartBuffer] = []
        self.is_ended = False
        self._max_parts = max_parts
        self._field = b""
        self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == self._max_parts:
            raise InvalidRequest(f"the multipart body has more than {self._max_parts} parts, the limit; send fewer")
        self.parts.append(_PartBuffer())

    def _header_field(self, text: bytes, start: int, end: int) -> None:
        self._field += text[start:end]

    def _header_value(self, text: bytes, start: int, end: int) -> None:
        self._value += text[start:end]

    def _header_end(self) -> None:
        self.parts[-1].headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _data(self, text: bytes, start: int, end: int) -> None:
        self.parts[-1].chunks.append(text[start:end])

    def _end(self) -> None:
        self.is_ended = True


_MULTIPART = "multipart/form-data"
# What clients say that do not know; the last is curl's word for any --data-binary. The image's first bytes decide.
_UNDECLARED_TYPES = frozenset(("", "application/octet-stream", "application/x-www-form-urlencoded"))
_THREAD_FROM_BYTES = 1 << 20


class ImageEndpoint:
    """One image as the body, or several as multipart/form-data."""

    def __init__(self, plane: DataPlane, limits: RestOptions) -> None:
        self._plane = plane
        self._limits = limits

    async def __call__(self, request: Request) -> Response:
        """Infer from encoded images.

        An encoded image as the body, or several as the parts of a form. The first bytes of an image decide its format.
        """
        query = query_of(request.scope["query_string"])
        model = model_of(request)
        images = await self._images(request)
        if query.is_drawn and len(images) > 1:
            raise InvalidRequest(f"draw=1 with {len(images)} pictures; send one picture, or leave draw out")
        request_id = single_header(request, "x-request-id")
        image_request = ImageRequest(
            model.model_name,
            model.model_version,
            images,
            deadline_of(request),
            request_id,
            result_options=query.result_options,
            is_drawn=query.is_drawn,
            write=partial(result_json, masks=query.masks),
        )
        response = await run_until_disconnect(
            request.scope, request.receive, self._plane.infer_images(image_request, caller_of(request))
        )
        if query.is_drawn:
            return Response(response.drawing, media_type="image/jpeg")
        answer = answer_of(response, request_id)
        answer.explain = explain_images(self._plane, request, response)
        return json_response(answer)

    async def _images(self, request: Request) -> tuple[bytes, ...]:
        body = await read_body(request, self._limits)
        encoding = single_header(request, "content-encoding").lower()
        if encoding not in NOT_ENCODED:
            body = await decompressed(body, encoding, self._limits.max_body_bytes)
        content_type = first_header(request.scope, b"content-type").decode("latin-1")
        if len(body) >= _THREAD_FROM_BYTES and _media_type(content_type) == _MULTIPART:
            return await asyncio.to_thread(images_of, body, content_type, self._limits)  # 64 MiB take seconds
        return images_of(body, content_type, self._limits)


def explain_images(plane: DataPlane, request: Request, response: ImageResponse) -> list[RequestExplanation]:
    """Explanations for an image request: one per image that the gateway batched, else one that names the batch owner.

    Empty if the client did not request them.
    """
    if not is_requested(request.headers.get(EXPLAIN_HEADER, "")):
        return []
    explained = [explain_batched(explanation) for explanation in response.explanations]
    return explained or [plane.not_formed(InferHead(response.model_name, response.model_version))]


def images_of(body: bytes, content_type: str, limits: RestOptions) -> tuple[bytes, ...]:
    """The encoded images of a body, at least one. Raises InvalidRequest and UnsupportedMedia."""
    if _media_type(content_type) != _MULTIPART:
        _refuse_other_media(content_type, "the content-type")
        if not body:
            raise InvalidRequest("the body is empty; send an image")
        return (body,)
    files = parse_files(body, content_type, limits.max_parts)
    for number, file in enumerate(files, start=1):
        _refuse_other_media(file.content_type, f"the content-type of part {number}")
    return tuple(file.content for file in files)


def answer_of(response: ImageResponse, request_id: str = "") -> ImageAnswer:
    """The response body."""
    return ImageAnswer(
        response.model_name,
        response.model_version,
        cast("list[ImageResult]", list(response.results)),  # request.write is result_json
        _milliseconds(response.timings, response.total_s),
        response.timings.batch_size,
        request_id,
    )


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _refuse_other_media(content_type: str, where: str) -> None:
    media_type = _media_type(content_type)
    if media_type not in _UNDECLARED_TYPES and not media_type.startswith("image/"):
        raise UnsupportedMedia(
            f"{where} is {media_type[:80]!r}; send image/jpeg, image/png, image/webp or multipart/form-data of these"
        )


def _milliseconds(timings: Timings, total_s: float) -> dict[str, float]:
    stages = {name: getattr(timings, name) for name in STAGES} | {"total": total_s}
    return {name: round(seconds * 1000, 3) for name, seconds in stages.items()}


_FILE = {"type": "string", "format": "binary", "contentMediaType": "image/*"}
_FORM = {
    "type": "object",
    "properties": {"image": {"type": "array", "items": _FILE, "minItems": 1}},
    "required": ["image"],
}


def image_router(plane: DataPlane, limits: RestOptions) -> APIRouter:
    """The endpoint's routes."""
    router = APIRouter(route_class=HotRoute, tags=[INFERENCE], responses=openapi.ERRORS | openapi.RECEIVE_ERRORS)
    media: dict[str, openapi.Json] = {each: {} for each in ("image/jpeg", "image/png", "image/webp", openapi.BINARY)}
    answer = {"content": {openapi.JSON: {"schema": openapi.reference(ImageAnswer)}, "image/jpeg": {}}}
    openapi.operation(
        router,
        "POST",
        f"{MODEL}/image",
        f"{VERSION}/image",
        name="inferImage",
        role=Requires(Role.INFER, takes_any_type=True),
        headers=(TIMEOUT_HEADER, openapi.REQUEST_ID, openapi.ENCODING, EXPLAIN_HEADER),
        query=[openapi.parameter("query", name, one.text, **one.schema) for name, one in QUERY_PARAMETERS.items()],
        body=openapi.body(media | {_MULTIPART: {"schema": _FORM}}),
        response_class=Response,
        responses={200: answer, **openapi.errors(415)},
    )(ImageEndpoint(plane, limits).__call__)
    return router
