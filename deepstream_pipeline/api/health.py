"""Whether it lives, whether it is ready, and its metrics: never in the way of a call that hangs."""

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from deepstream_pipeline.api.answers import Refusal
from deepstream_pipeline.api.bodies import Health
from deepstream_pipeline.api.calls import Calls
from deepstream_pipeline.interfaces import PipelineControl

READY_TIMEOUT_S = 2.0
_TEXT: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}}}
_NOT_READY: dict[int | str, dict[str, object]] = {503: {"model": Health}}


def health_router(control: PipelineControl, page: Callable[[], bytes], content_type: str) -> tuple[APIRouter, Calls]:
    """health/live, health/ready and metrics; and the calls that they make, to be closed. page: the metrics' text."""
    router = APIRouter(tags=["health"])
    calls = Calls(4, READY_TIMEOUT_S)

    @router.get("/health/live", response_model_exclude_none=True, summary="Whether the API answers.")
    async def live() -> Health:
        return Health()

    @router.get("/health/ready", response_model=Health, responses=_NOT_READY, summary="Whether the pipeline works.")
    async def ready() -> Response:
        try:
            is_healthy = await calls.run(control.is_healthy)
        except Refusal:
            is_healthy = False
        return JSONResponse(Health(ready=is_healthy).model_dump(), status_code=200 if is_healthy else 503)

    @router.get("/metrics", response_class=Response, responses=_TEXT, summary="In Prometheus' text format.")
    async def metrics() -> Response:
        return Response(await calls.run(page), media_type=content_type)

    return router, calls
