"""Draws results into pictures. Decoder processes decode the picture again; a few threads draw."""

from functools import partial

import simplejpeg

from penstock.gateway.thread_slots import THREADS_AT_ONCE, ThreadSlot, ThreadSlots
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Array, Datatype
from penstock.protocol.vision_results import VisionResult
from penstock.vision.card import VisionCard
from penstock.vision.decode_pool import DecodePool
from penstock.vision.drawing import draw_result
from penstock.vision.results import ImageRequest
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode

MAX_JPEG_SIDE = 65500  # pixels; libjpeg's limit
QUALITY = 90
_PIXELS = PrepareSpec(
    width=0, height=0, color=ColorFormat.BGR, layout=InputOrder.NHWC, fit=ResizeMode.KEEP, datatype=Datatype.UINT8
)


class PictureDrawer:
    """Draws results into pictures. A request occupies a slot from its start, because results of pictures are large."""

    def __init__(self, pool: DecodePool) -> None:
        self._pool = pool
        self.slots = ThreadSlots(
            THREADS_AT_ONCE, what="the picture was drawn", others="the pictures that are drawn before it"
        )

    async def draw(self, request: ImageRequest, result: VisionResult, card: VisionCard, slot: ThreadSlot) -> bytes:
        """The request's image with the result drawn into it, as JPEG.

        Raises InvalidRequest for pictures too large for JPEG, DeadlineExceeded, and errors of DecodePool.prepare.
        """
        (image,) = request.images
        pixels = (await self._pool.prepare(image, _PIXELS, client=request.client, deadline=request.deadline)).array
        _check_size(pixels)
        return await slot.run(partial(_drawn, pixels, result, card))


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
