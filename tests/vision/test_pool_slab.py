"""Arrays that a decoder writes where the engine reads them, and whose room comes back whatever happens."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import uvloop

from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.protocol.errors import DeadlineExceeded, UndecodableImage
from penstock.protocol.inference import Datatype
from penstock.vision.decode_pool import DecodePool
from penstock.vision.spec import InputOrder, PrepareSpec, ResizeMode
from tests.vision.pools import FIRST, SECOND, assert_is, begun, crash, expected, open_pool, stop_workers, wake_workers

SPEC = PrepareSpec(width=128, height=64, scale=1 / 255)
OWN_SIZE = PrepareSpec(width=0, height=0, fit=ResizeMode.KEEP, layout=InputOrder.NHWC, datatype=Datatype.UINT8)


def new_slab(size_bytes: int = 1 << 20) -> SharedSlab:
    slab = SharedSlab(asyncio.get_running_loop().call_later)
    slab.renew(anonymous_memory(size_bytes))
    return slab


async def test_arrays_lie_in_the_slab_side_by_side_until_they_are_released() -> None:
    """What the engine would read at the place is the array itself, and one picture's row follows the other's."""
    slab = new_slab()
    async with open_pool(2) as pool:
        prepared = await asyncio.gather(*(pool.prepare(encoded, SPEC, slab) for encoded in (FIRST, SECOND)))
        for item, encoded in zip(prepared, (FIRST, SECOND), strict=True):
            assert item.lease is not None
            assert_is(item, encoded, SPEC)
            assert os.pread(item.lease.descriptor, SPEC.row_bytes, item.lease.place.offset) == item.array.tobytes()
        offsets = sorted(item.lease.place.offset for item in prepared if item.lease is not None)
        assert offsets == [0, SPEC.row_bytes]
        for item in prepared:
            assert item.lease is not None
            item.lease.release()
    assert slab.statistics().leases == 0


async def test_another_slab_is_handed_to_decoders_that_knew_the_former() -> None:
    """After the engine's restart arrays lie in the new memory; one that still lies in the old one stays as it is."""
    slab = new_slab()
    async with open_pool() as pool:
        former = await pool.prepare(FIRST, SPEC, slab)
        slab.renew(anonymous_memory(1 << 20))
        later = await pool.prepare(SECOND, SPEC, slab)
        assert former.lease is not None
        assert later.lease is not None
        assert (former.lease.place.generation, later.lease.place.generation) == (1, 2)
        assert_is(later, SECOND, SPEC)
        assert_is(former, FIRST, SPEC)
        assert slab.lease_of(former.lease.place) is None


async def test_array_without_room_in_the_slab_is_the_callers_own() -> None:
    """A slab that is full, images that keep their own size, and arrays that are too small for it."""
    async with open_pool() as pool:
        for size_bytes, spec in ((SPEC.row_bytes - 64, SPEC), (1 << 20, OWN_SIZE), (1 << 20, PrepareSpec(8, 8))):
            slab = new_slab(size_bytes)
            prepared = await pool.prepare(FIRST, spec, slab)
            assert prepared.lease is None
            assert np.array_equal(prepared.array, expected(FIRST, spec))
            assert slab.statistics().leases == 0


async def _leaves(pool: DecodePool, slab: SharedSlab) -> None:
    stop_workers()
    job = await begun(pool, pool.prepare(FIRST, SPEC, slab))
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert slab.statistics().leases == 1, "a decoder may still write there"
    wake_workers()


async def _dies(pool: DecodePool, slab: SharedSlab) -> None:
    stop_workers()
    job = await begun(pool, pool.prepare(FIRST, SPEC, slab))
    crash(signal.SIGSEGV)
    with pytest.raises(UndecodableImage):
        await job


async def _hangs(pool: DecodePool, slab: SharedSlab) -> None:
    stop_workers()
    with pytest.raises(DeadlineExceeded, match="decode_timeout_s"):
        await pool.prepare(FIRST, SPEC, slab)


async def _is_broken(pool: DecodePool, slab: SharedSlab) -> None:
    with pytest.raises(UndecodableImage):
        await pool.prepare(FIRST[: len(FIRST) // 2], SPEC, slab)


@pytest.mark.parametrize("what", [_leaves, _dies, _hangs, _is_broken])
async def test_slab_lease_is_released_when_an_image_fails_or_its_caller_left(
    what: Callable[[DecodePool, SharedSlab], Awaitable[None]],
) -> None:
    """Not before the decoder can write there no more."""
    slab = new_slab()
    async with open_pool(job_timeout_s=0.5 if what is _hangs else 30.0) as pool:
        await what(pool, slab)
        async with asyncio.timeout(60):
            while slab.statistics().leases:
                await asyncio.sleep(0.01)


def test_descriptors_pass_over_the_gateways_own_loop() -> None:
    """uvloop's transports leave room for a message that is sent beside them."""

    async def decode() -> None:
        slab = new_slab()
        async with open_pool() as pool:
            prepared = await pool.prepare(FIRST, SPEC, slab)
            assert prepared.lease is not None
            assert_is(prepared, FIRST, SPEC)

    uvloop.run(decode())
