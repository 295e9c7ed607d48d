"""Previews: the newest picture of a source, once or again and again, for viewers that may be slow or leave."""

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deepstream_pipeline.api.answers import Refusal
from deepstream_pipeline.api.asked_sources import found_in, refuse_pictureless
from deepstream_pipeline.api.calls import Calls
from deepstream_pipeline.api.streams import SourceId
from deepstream_pipeline.interfaces import PipelineControl, Previews

FIRST_PICTURE_S = 2.0
_TURN_S = 1.0  # how often a viewer of a source without pictures looks whether the source is still there
_BEFORE_ALL = -1
_BOUNDARY = b"\r\n--frame\r\n"
_JPEG: dict[int | str, dict[str, object]] = {200: {"content": {"image/jpeg": {}}}}
_MJPEG: dict[int | str, dict[str, object]] = {200: {"content": {"multipart/x-mixed-replace": {}}}}


class Viewers:
    """How many watch, and how many may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self) -> None:
        """One more. Raises Refusal (503)."""
        if self.count >= self._limit:
            raise Refusal(503, f"{self.count} viewers watch previews (limit {self._limit}); retry, or take preview.jpg")
        self.count += 1

    def leave(self) -> None:
        """One less."""
        self.count -= 1


class _Moving(StreamingResponse):
    """Pictures, each in the place of the former; who stops reading is cut by its connection."""

    def __init__(self, pictures: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(pictures, media_type="multipart/x-mixed-replace; boundary=frame")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class _Watch:
    """The pictures of sources, for as long as they are there."""

    def __init__(self, control: PipelineControl, previews: Previews, calls: Calls) -> None:
        self._control, self._previews, self._calls = control, previews, calls

    async def check(self, source_id: str) -> None:
        """Raises Refusal: 404, or 409 where no picture comes of it until it is resumed, or added anew."""
        refuse_pictureless(found_in(await self._calls.run(self._control.statistics), source_id))

    async def next(self, source_id: str, after: int, timeout_s: float) -> tuple[int, bytes] | None:
        return await self._calls.run(lambda: self._previews.wait(source_id, after, timeout_s))

    async def parts(self, source_id: str) -> AsyncIterator[bytes]:
        """Of a multipart answer: each picture with the boundary behind it, at which a browser shows it."""
        number, clock = _BEFORE_ALL, asyncio.get_running_loop().time
        yield _BOUNDARY.lstrip()
        while True:
            asked_at = clock()
            try:
                found = await self.next(source_id, number, _TURN_S)
                if found is None and not await self._is_there(source_id):
                    return
            except Refusal:  # the program ends, or the pipeline hangs
                return
            if found is not None:
                number, jpeg = found
                yield b"content-type: image/jpeg\r\ncontent-length: %d\r\n\r\n" % len(jpeg) + jpeg + _BOUNDARY
            else:  # a source that is over has none at once, too
                await asyncio.sleep(asked_at + _TURN_S - clock())

    async def _is_there(self, source_id: str) -> bool:
        return any(each.source_id == source_id for each in await self._calls.run(self._control.statistics))


def previews_router(control: PipelineControl, previews: Previews, calls: Calls, viewers: Viewers) -> APIRouter:
    """preview.jpg and preview.mjpeg of each source. viewers: of the latter. calls: of their own, they wait long."""
    router = APIRouter(prefix="/v1/streams", tags=["previews"])
    watch = _Watch(control, previews, calls)

    @router.get("/{source_id}/preview.jpg", response_class=Response, responses=_JPEG, summary="Its newest picture.")
    async def still(source_id: SourceId) -> Response:
        await watch.check(source_id)
        found = await watch.next(source_id, _BEFORE_ALL, FIRST_PICTURE_S)
        if found is None:
            raise Refusal(503, f"no picture of {source_id!r} came within {FIRST_PICTURE_S:g} s; its state says why")
        return Response(found[1], media_type="image/jpeg")

    @router.get("/{source_id}/preview.mjpeg", response_class=Response, responses=_MJPEG, summary="Picture by picture.")
    async def moving(source_id: SourceId) -> Response:
        await watch.check(source_id)
        viewers.enter()
        return _Moving(watch.parts(source_id), viewers.leave)

    return router
