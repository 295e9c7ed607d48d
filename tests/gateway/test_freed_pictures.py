"""Pictures of failed requests are freed at once, without the garbage collector."""

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from penstock.protocol.call import InferHead
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import Verb
from penstock.protocol.request_checks import EncodedCall
from penstock.vision.results import ImageRequest
from tests.gateway.rig import CALL, Rig, picture
from tests.vision.pools import stop_workers, wake_workers


async def _one(rig: Rig, torn: bytes) -> None:
    await rig.plane.infer_images(ImageRequest("classes", "", (torn,), None))


async def _several(rig: Rig, torn: bytes) -> None:
    await rig.plane.infer_images(ImageRequest("classes", "", (picture(1), torn, torn), None))


async def _as_a_tensor(rig: Rig, torn: bytes) -> None:
    encoded = EncodedCall(InferHead("classes"), (torn,), lambda _: CALL)
    await rig.plane.relay(Verb.INFER, encoded.head, encoded)


async def _several_late(rig: Rig, torn: bytes) -> None:
    stop_workers()
    await rig.plane.infer_images(ImageRequest("classes", "", (torn, torn), time.monotonic() + 0.05))


@pytest.mark.parametrize("ask", [_one, _several, _as_a_tensor, _several_late])
async def test_picture_of_a_failed_request_is_freed_at_once(
    rig: Rig, ask: Callable[[Rig, bytes], Awaitable[None]]
) -> None:
    """Whether it was refused or late, alone or with others, no error, task or future refers to it afterwards."""
    torn = picture(9)[:-20]

    async def fail() -> str:
        try:
            await ask(rig, torn)
        except InferenceError as error:
            return error.reason
        return ""

    gc.collect()
    gc.disable()
    try:
        before = sys.getrefcount(torn)
        for _ in range(3):
            assert await asyncio.create_task(fail()) in ("undecodable_image", "deadline")
            wake_workers()
            await _settled(rig)
        assert sys.getrefcount(torn) == before
    finally:
        gc.enable()


async def _settled(rig: Rig) -> None:
    """Waits until all work for ended requests has ended."""
    async with asyncio.timeout(20):
        await rig.plane.infer_images(ImageRequest("classes", "", (picture(3),), None))
        while rig.pool.statistics().busy:
            await asyncio.sleep(0.01)
