"""Memory that the decode pool retains after a picture: none in this process, little in its decoders."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil
import pytest

from penstock.process import GROWTH_BYTES, MemoryTrimmer, private_bytes, trim_memory
from penstock.protocol.errors import InferenceError
from penstock.vision.decode_pool import DecodePool, PoolStatistics
from penstock.vision.decoder_worker import MAX_GROWTH_BYTES, DecodeReply, DecodeStatus, MemoryGrowth, from_wire
from penstock.vision.preprocess import Geometry
from tests.vision import images
from tests.vision.pools import (
    FIRST,
    SECOND,
    SPEC,
    assert_is,
    begun,
    crash,
    open_pool,
    stop_workers,
    wake_workers,
    workers,
)

MIB = 1 << 20


@pytest.fixture
async def _no_collector() -> AsyncIterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def _is_decoded(pool: DecodePool, data: bytes) -> None:
    await pool.prepare(data, SPEC)


async def _is_torn(pool: DecodePool, data: bytes) -> None:
    await pool.prepare(memoryview(data)[:-100], SPEC)


async def _is_late(pool: DecodePool, data: bytes) -> None:
    stop_workers()
    await pool.prepare(data, SPEC, deadline=time.monotonic() + 0.01)


async def _is_late_in_the_queue(pool: DecodePool, data: bytes) -> None:
    stop_workers()
    running = await begun(pool, pool.prepare(FIRST, SPEC))
    try:
        await pool.prepare(data, SPEC, deadline=time.monotonic() + 0.01)
    finally:
        wake_workers()
        await running


async def _crashes(pool: DecodePool, data: bytes) -> None:
    stop_workers()
    victim = await begun(pool, pool.prepare(data, SPEC))
    crash(signal.SIGSEGV)
    try:
        await victim
    finally:
        del victim  # it has the error, which refers to this frame


async def _is_abandoned(pool: DecodePool, data: bytes) -> None:
    stop_workers()
    leaving = await begun(pool, pool.prepare(data, SPEC, deadline=time.monotonic() + 0.01))
    leaving.cancel()
    await asyncio.wait([leaving])


ENDS = [_is_decoded, _is_torn, _is_late, _is_late_in_the_queue, _crashes, _is_abandoned]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("_no_collector")
async def test_picture_that_is_over_waits_for_no_garbage_collector(
    end: Callable[[DecodePool, bytes], Awaitable[None]],
) -> None:
    """However it ended, its bytes are freed at once; formerly 60 MB waited for the garbage collector."""
    data = bytes(bytearray(FIRST))
    before = sys.getrefcount(data)

    async def ask() -> str:
        try:
            await end(pool, data)
        except InferenceError as error:
            return error.reason
        return ""

    async with open_pool() as pool:
        await asyncio.create_task(ask())
        wake_workers()
        assert_is(await pool.prepare(SECOND, SPEC), SECOND)
        async with asyncio.timeout(20):
            while pool.statistics().busy:
                await asyncio.sleep(0.01)
        assert sys.getrefcount(data) == before


async def test_decoder_that_keeps_too_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced after its answer; the replacement decodes the next picture."""

    def worn(wire: bytes, kind: type[DecodeReply]) -> DecodeReply:
        return replace(from_wire(wire, kind), needs_replacement=True)

    async with open_pool() as pool:
        (first,) = workers()
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)
        assert [first] == workers()
        with monkeypatch.context() as patched:
            patched.setattr("penstock.vision.decoder_process.from_wire", worn)
            assert_is(await pool.prepare(FIRST, SPEC), FIRST)
        async with asyncio.timeout(20):
            assert_is(await pool.prepare(SECOND, SPEC), SECOND)
        assert first not in workers()
        assert pool.statistics() == PoolStatistics(0, 0, restarts=1, quarantined=0)


@pytest.mark.parametrize(
    ("reply", "kept_bytes", "needs_replacement"),
    [
        (DecodeReply(DecodeStatus.OK, geometry=Geometry(1000, 1000, 1, 1, 1.0, 1.0)), MAX_GROWTH_BYTES + 1, True),
        (DecodeReply(DecodeStatus.OK, geometry=Geometry(1000, 1000, 1, 1, 1.0, 1.0)), MAX_GROWTH_BYTES, False),
        (DecodeReply(DecodeStatus.OK, geometry=Geometry(640, 480, 1, 1, 1.0, 1.0)), MAX_GROWTH_BYTES + 1, False),
        (DecodeReply(DecodeStatus.UNDECODABLE), MAX_GROWTH_BYTES + 1, True),
    ],
)
def test_decoder_is_worn_by_what_it_keeps_after_giving_back(
    reply: DecodeReply, kept_bytes: int, needs_replacement: bool
) -> None:
    """This is checked after a large picture, and after one that failed, whose size may be unknown."""
    sizes = iter([MIB, MIB, MIB + MAX_GROWTH_BYTES * 2, *[MIB + kept_bytes] * 2])
    trims: list[None] = []
    wear = MemoryGrowth(lambda: next(sizes), lambda: trims.append(None))
    assert wear.is_too_much(reply) == needs_replacement
    assert len(trims) == (reply.geometry.source_width != 640)


@pytest.mark.long
async def test_decoders_keep_a_bounded_amount_after_the_largest_pictures() -> None:
    """After valid and truncated pictures of each format, it uses at most WORN_BYTES more than a new process."""
    pixels = np.full((5000, 7900, 3), 77, np.uint8)
    large = [images.jpeg(pixels), images.progressive_jpeg(pixels), images.png(pixels, color_type=2)]
    large.append(images.webp(pixels))
    async with open_pool() as pool:
        new_bytes = private(workers()[0])
        for encoded in [*large, *(one[: len(one) * 3 // 4] for one in large)]:
            with suppress(InferenceError):
                await pool.prepare(encoded, SPEC)
            assert_is(await pool.prepare(FIRST, SPEC), FIRST)
            assert private(workers()[0]) - new_bytes < MAX_GROWTH_BYTES + 8 * MIB


def private(process: psutil.Process) -> int:
    memory = process.memory_info()
    size_bytes: int = memory.rss - memory.shared
    return size_bytes


def test_freed_memory_is_given_back_while_it_is_above_its_lowest() -> None:
    """Memory in use at one check may be freed at a later one; checks that return nothing become rare."""
    size_bytes, freed_bytes, trims = 100, 0, 0

    def trim() -> None:
        nonlocal size_bytes, trims
        size_bytes -= freed_bytes
        trims += 1

    memory = MemoryTrimmer(lambda: size_bytes, trim)
    memory.check()
    assert trims == 0
    size_bytes += 2 * GROWTH_BYTES
    for _ in range(40):
        memory.check()
    assert 4 <= trims <= 7, "nothing was freed"
    freed_bytes, before = 2 * GROWTH_BYTES, trims
    for _ in range(40):
        memory.check()
    assert (trims, size_bytes) == (before + 1, 100)


def test_malloc_gives_back_what_lies_between_live_blocks() -> None:
    """By default malloc returns only the end of a heap."""
    blocks = [bytearray(100_000) for _ in range(1000)]
    full_bytes = private_bytes()
    del blocks[:999]
    trim_memory()
    assert full_bytes - private_bytes() > 50 * MIB
    assert len(blocks) == 1


def test_memory_in_cycles_is_given_back_too() -> None:
    """Libraries' errors may hold memory until garbage collection, which runs when memory has grown."""
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [bytes(bytearray(64 * MIB))]
        cycle.append(cycle)
        full_bytes = private_bytes()
        del cycle
        trim_memory()
        assert full_bytes - private_bytes() > 50 * MIB
    finally:
        gc.enable()
