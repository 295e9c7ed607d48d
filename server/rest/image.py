"""POST …/image: encoded images in, labelled results in source pixels out."""

import asyncio
from urllib.parse import parse_qsl

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from server.batching.explanation import Explained
from server.core.compression import NOT_ENCODED
from server.core.errors import InvalidRequest, UnsupportedMedia
from server.core.infer import Timings
from server.core.result import Classes, Detections, VisionResult
from server.dataplane import DataPlane, ImageRequest, ImageResponse
from server.rest.body import decompressed, first_header, read_body, single_header
from server.rest.calls import model_of
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.errors import json_response
from server.rest.explain import told_of_images
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.parts import files_of

_MULTIPART = "multipart/form-data"
# What clients say that do not know; the last is curl's word for any --data-binary. The image's first bytes decide.
_UNSAID = frozenset(("", "application/octet-stream", "application/x-www-form-urlencoded"))
_THREAD_FROM_BYTES = 1 << 20
_SCORE_DECIMALS = 6
_PIXEL_DECIMALS = 3


class LabelledClass(msgspec.Struct):
    """score: in [0, 1]."""

    class_id: int
    label: str
    score: float


class LabelledBox(msgspec.Struct):
    """xyxy: corners in source pixels. score: in [0, 1]."""

    xyxy: list[float]
    class_id: int
    label: str
    score: float


class ClassesResult(msgspec.Struct):
    """Of a classifier, for one image: the likeliest first."""

    classes: list[LabelledClass]


class DetectionsResult(msgspec.Struct):
    """Of a detector, for one image: scores fall."""

    detections: list[LabelledBox]


class ImageAnswer(msgspec.Struct, omit_defaults=True):
    """The body of an answer. timings_ms: milliseconds by stage. id: the request's x-request-id.

    explain: of the batch of each image, where that was asked for.
    """

    model_name: str
    model_version: str
    results: list[ClassesResult | DetectionsResult]
    timings_ms: dict[str, float]
    batch_size: int
    id: str = ""
    explain: list[Explained] = msgspec.field(default_factory=list)


class ImageEndpoint:
    """One image as the body, or several as multipart/form-data."""

    def __init__(self, plane: DataPlane, limits: RestLimits) -> None:
        self._plane = plane
        self._limits = limits

    async def __call__(self, request: Request) -> Response:
        refuse_unknown_parameters(request.scope["query_string"])
        model = model_of(request)
        body = await read_body(request, self._limits)
        encoding = single_header(request, "content-encoding").lower()
        if encoding not in NOT_ENCODED:
            body = await decompressed(body, encoding, self._limits.max_body_bytes)
        content_type = first_header(request.scope, b"content-type").decode("latin-1")
        if len(body) >= _THREAD_FROM_BYTES and _media_type(content_type) == _MULTIPART:
            images = await asyncio.to_thread(images_of, body, content_type, self._limits)  # 64 MiB take seconds
        else:
            images = images_of(body, content_type, self._limits)
        request_id = single_header(request, "x-request-id")
        asked = ImageRequest(model.model_name, model.model_version, images, deadline_of(request), request_id)
        response = await run_until_disconnect(
            request.scope, request.receive, self._plane.infer_images(asked, caller_of(request))
        )
        answer = answer_of(response, request_id)
        answer.explain = told_of_images(self._plane, request, response)
        return json_response(answer)


def refuse_unknown_parameters(query: bytes) -> None:
    """Raises InvalidRequest with the names of the query parameters: the endpoint has none yet."""
    if query:
        names = ", ".join(repr(name[:80]) for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)[:8])
        raise InvalidRequest(
            f"unknown query parameter {names or repr(query[:80].decode('latin-1'))}; remove it from the URL"
        )


def images_of(body: bytes, content_type: str, limits: RestLimits) -> tuple[bytes, ...]:
    """The encoded images of a body, one at least. Raises InvalidRequest and UnsupportedMedia."""
    if _media_type(content_type) != _MULTIPART:
        _refuse_other_media(content_type, "the content-type")
        if not body:
            raise InvalidRequest("the body is empty; send an image")
        return (body,)
    files = files_of(body, content_type, limits.max_parts)
    for number, file in enumerate(files, start=1):
        _refuse_other_media(file.content_type, f"the content-type of part {number}")
    return tuple(file.content for file in files)


def answer_of(response: ImageResponse, request_id: str = "") -> ImageAnswer:
    """The answer as DESIGN has it: numbers rounded, labels by class_id."""
    return ImageAnswer(
        response.model_name,
        response.model_version,
        [_labelled(result, response.labels) for result in response.results],
        _milliseconds(response.timings, response.total_s),
        response.timings.batch_size,
        request_id,
    )


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _refuse_other_media(content_type: str, where: str) -> None:
    media_type = _media_type(content_type)
    if media_type not in _UNSAID and not media_type.startswith("image/"):
        raise UnsupportedMedia(
            f"{where} is {media_type[:80]!r}; send image/jpeg, image/png, image/webp or multipart/form-data of these"
        )


def _labelled(result: VisionResult, labels: tuple[str, ...]) -> ClassesResult | DetectionsResult:
    ids = result.class_id.tolist()
    names = [_label(class_id, labels) for class_id in ids]
    scores = _rounded(result.score, _SCORE_DECIMALS)
    if isinstance(result, Classes):
        return ClassesResult([LabelledClass(*row) for row in zip(ids, names, scores, strict=True)])
    return DetectionsResult([LabelledBox(*row) for row in zip(_boxes(result), ids, names, scores, strict=True)])


def _boxes(result: Detections) -> list[list[float]]:
    boxes: list[list[float]] = result.xyxy.astype(np.float64).round(_PIXEL_DECIMALS).tolist()
    return boxes


def _rounded(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], decimals: int) -> list[float]:
    rounded: list[float] = values.astype(np.float64).round(decimals).tolist()
    return rounded


def _label(class_id: int, labels: tuple[str, ...]) -> str:
    known = labels[class_id] if 0 <= class_id < len(labels) else ""
    return known or str(class_id)


def _milliseconds(timings: Timings, total_s: float) -> dict[str, float]:
    return {
        "decode": round(timings.decode * 1000, 3),
        "preprocess": round(timings.preprocess * 1000, 3),
        "queue": round(timings.queue * 1000, 3),
        "infer": round(timings.infer * 1000, 3),
        "postprocess": round(timings.postprocess * 1000, 3),
        "total": round(total_s * 1000, 3),
    }
