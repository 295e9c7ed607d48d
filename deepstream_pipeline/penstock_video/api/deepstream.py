"""DeepStream's REST API for streams (nvmultiurisrcbin's server), with its bodies and responses."""

import threading
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from penstock_video.api.calls import Calls, Refusal, error_response
from penstock_video.api.models import DeepStreamAnswer, DeepStreamError, SensorChange, SensorValue, missing
from penstock_video.api.options import ApiOptions
from penstock_video.api.routes import make, validated_source
from penstock_video.interfaces import PipelineControl, SourceAdded, SourceRemoved
from penstock_video.types import SourceConfig

PREFIX = "/api/v1"
_OK = "HTTP/1.1 200 OK"
_SHOWN_CHARACTERS = 80
DEEPSTREAM_ERRORS: dict[int | str, dict[str, object]] = {
    "4XX": {"model": DeepStreamError},
    "5XX": {"model": DeepStreamError},
}


class SourceNumbers:
    """DeepStream's source_id of each camera_id: a small number that stays while the source is there."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, camera_ids: Iterable[str]) -> list[int]:
        """In their order. A new one gets the least number that is free; the numbers of the others are free again."""
        ids = list(camera_ids)
        with self._lock:
            kept = {camera_id: self._numbers[camera_id] for camera_id in ids if camera_id in self._numbers}
            taken = set(kept.values())
            free = (number for number in range(len(ids) + len(kept)) if number not in taken)
            for camera_id in ids:
                if camera_id not in kept:
                    kept[camera_id] = next(free)
            self._numbers = kept
            return [kept[camera_id] for camera_id in ids]


def deepstream_router(control: PipelineControl, calls: Calls, options: ApiOptions) -> APIRouter:
    """stream/add, stream/remove, stream/get-stream-info and health/get-dsready-state."""
    router = APIRouter(prefix=PREFIX, tags=["DeepStream"])
    numbers = SourceNumbers()

    @router.post("/stream/add", summary="Add a source, as DeepStream does.")
    async def add(change: SensorChange, response: Response) -> DeepStreamAnswer:
        value = _value(change, ("add", "streaming"))
        if not value.camera_url:
            raise Refusal(400, "value.camera_url is missing; a source's address is needed")
        config = SourceConfig(uri=value.camera_url, source_id=value.camera_id, camera_name=value.camera_name)
        asked = validated_source(config, options)
        await make(calls, options, response, (SourceAdded(asked), lambda: control.add(asked)))
        return DeepStreamAnswer(status=_OK, reason="STREAM_ADD_SUCCESS")

    @router.post("/stream/remove", summary="Take a source out, as DeepStream does.")
    async def remove(change: SensorChange, response: Response) -> DeepStreamAnswer:
        source_id = _value(change, ("remove",)).camera_id
        await make(calls, options, response, (SourceRemoved(source_id), lambda: control.remove(source_id)))
        return DeepStreamAnswer(status=_OK, reason="STREAM_REMOVE_SUCCESS")

    @router.get("/stream/get-stream-info", summary="The sources, as DeepStream lists them.")
    async def get_stream_info() -> dict[str, object]:
        sources = await calls.run(control.statistics)
        rows = [
            {"camera_id": source.source_id, "camera_name": source.camera_name, "source_id": number}
            for source, number in zip(sources, numbers.of(source.source_id for source in sources), strict=True)
        ]
        return {
            "reason": "GET_LIVE_STREAM_INFO_SUCCESS",
            "status": _OK,
            "stream-info": {"stream-count": len(rows), "stream-info": rows},
        }

    @router.get("/health/get-dsready-state", summary="Whether the pipeline is ready, as DeepStream says it.")
    async def get_ready_state() -> dict[str, object]:
        is_healthy = await calls.run(control.is_healthy)
        return {
            "health-info": {"ds-ready": "YES" if is_healthy else "NO"},
            "reason": "GET_DS_READINESS_INFO_SUCCESS",
            "status": _OK,
        }

    return router


def _value(change: SensorChange, words: tuple[str, ...]) -> SensorValue:
    value = change.value or change.event
    if value is None:
        raise Refusal(400, missing("value"))
    if not any(word in value.change for word in words):
        given = f"{value.change[:_SHOWN_CHARACTERS]!r} is not taken" if value.change else "it is missing"
        raise Refusal(400, f"value.change: {given}; it has to hold {words[0]!r}, as camera_{words[0]} does")
    return value


def deepstream_error(path: str, status: int, text: str) -> Response:
    """The answer that a DeepStream client knows, with our own error in it."""
    phrase = HTTPStatus(status).phrase
    verb = {"/stream/add": "STREAM_ADD_FAIL", "/stream/remove": "STREAM_REMOVE_FAIL"}.get(path.removeprefix(PREFIX))
    answer = error_response(status, text)
    body = {"status": f"HTTP/1.1 {status} {phrase}", "reason": f"{verb or 'FAIL'}, {text}", "error": text}
    headers = {name: value for name, value in answer.headers.items() if name in ("retry-after", "connection")}
    return JSONResponse(body, status_code=status, headers=headers)
