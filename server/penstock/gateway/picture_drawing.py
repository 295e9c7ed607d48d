"""Annotated pictures: decoded again by the decoder processes, drawn in threads, a few at a time."""

import asyncio
import os
import time
from contextlib import suppress

import simplejpeg

from penstock.gateway.engine_slots import SlotQueue
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest
from penstock.protocol.inference import Array, Datatype
from penstock.protocol.vision_results import VisionResult
from penstock.vision.card import VisionCard
from penstock.vision.decode_pool import DecodePool
from penstock.vision.drawing import draw_result
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode

MAX_JPEG_SIDE = 65500  # pixels; libjpeg's limit
QUALITY = 90
DRAWN_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))  # a picture takes 3 bytes a pixel
_PIXELS = PrepareSpec(
    width=0, height=0, color=ColorFormat.BGR, layout=InputOrder.NHWC, fit=ResizeMode.KEEP, datatype=Datatype.UINT8
)


class PictureDrawer:
    """Draws results into pictures, in threads."""

    def __init__(self, pool: DecodePool) -> None:
        self._pool = pool
        self._drawing = SlotQueue(DRAWN_AT_ONCE)

    async def draw(
        self, image: bytes, result: VisionResult, card: VisionCard, *, client: str, deadline: float | None
    ) -> bytes:
        """The image with the result in it, as JPEG.

        Raises InvalidRequest for pictures that no JPEG holds, DeadlineExceeded, and as DecodePool.prepare.
        """
        await self._drawing.enter(client, 1, deadline, "the pictures that are drawn before it")
        try:
            pixels = (await self._pool.prepare(image, _PIXELS, client=client, deadline=deadline)).array
            _check_size(pixels)
        except BaseException:
            self._drawing.leave(1)
            raise
        work = asyncio.create_task(asyncio.to_thread(_drawn, pixels, result, card))
        work.add_done_callback(self._done)  # a thread cannot be cancelled: it has its slot until it ends
        with suppress(TimeoutError):
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                return await asyncio.shield(work)
        raise DeadlineExceeded("the deadline passed while the picture was drawn; allow more time")

    def _done(self, work: "asyncio.Task[bytes]") -> None:
        self._drawing.leave(1)
        if not work.cancelled():
            work.exception()  # the caller may be gone; asyncio logs errors that were never retrieved


def _check_size(pixels: Array) -> None:
    height, width, _ = pixels.shape
    if max(height, width) > MAX_JPEG_SIDE:
        raise InvalidRequest(
            f"draw=1: the picture has {width} x {height} pixels, and a side of a JPEG at most {MAX_JPEG_SIDE}; leave "
            "draw out, or send a smaller one"
        )


def _drawn(pixels: Array, result: VisionResult, card: VisionCard) -> bytes:
    draw_result(pixels, result, card.labels, skeleton=card.skeleton)
    drawing: bytes = simplejpeg.encode_jpeg(pixels, QUALITY, colorspace="BGR")
    return drawing
