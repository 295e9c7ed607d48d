"""Decoding in child processes: right results, a fair and bounded queue, and a clean start and end."""

import asyncio
import gc
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.protocol.errors import (
    EngineUnavailable,
    InferenceError,
    Overloaded,
    TooLarge,
    UndecodableImage,
    UnsupportedMedia,
)
from penstock.protocol.inference import Datatype
from penstock.vision.decode import decode
from penstock.vision.decode_pool import DecodePool, PoolStatistics
from penstock.vision.decoder_process import DecoderProcess, PreparedImage
from penstock.vision.decoder_worker import DecodeReply, error_reply, from_wire, to_wire
from penstock.vision.preprocess import prepare
from penstock.vision.spec import InputOrder, PrepareSpec, ResizeMode
from tests.vision import images
from tests.vision.pools import (
    FIRST,
    SECOND,
    SPEC,
    THIRD,
    assert_is,
    begun,
    open_pool,
    stop_workers,
    wake_workers,
    workers,
)

CHECKOUT = Path(__file__).resolve().parent.parent.parent
OWN_SIZE = PrepareSpec(width=0, height=0, fit=ResizeMode.KEEP, layout=InputOrder.NHWC, datatype=Datatype.UINT8)


async def test_pool_prepares_what_the_plain_functions_prepare() -> None:
    """Array, geometry and times come from the other process as from this one, image after image of any size."""
    specs = [
        SPEC,
        replace(SPEC, datatype=Datatype.FP16),
        replace(SPEC, layout=InputOrder.NHWC, fit=ResizeMode.PAD_SYMMETRIC),
        replace(SPEC, fit=ResizeMode.CROP, shorter_side=72),
        OWN_SIZE,
    ]
    pictures = [images.picture(*size) for size in [(120, 90), (1, 1), (1000, 750), (33, 77)]]
    async with open_pool() as pool:
        for spec, encoded in itertools.product(specs, [images.png(one, color_type=2) for one in pictures]):
            prepared = await pool.prepare(encoded, spec)
            array, geometry = prepare(decode(encoded, spec.color), spec)
            assert np.array_equal(prepared.array, array)
            assert prepared.array.dtype == array.dtype
            assert prepared.geometry == geometry
            assert prepared.decode_s > 0
            assert prepared.preprocess_s > 0


async def test_pool_arrays_belong_to_the_caller() -> None:
    """The next image does not write over the last one's result."""
    async with open_pool() as pool:
        results = [await pool.prepare(encoded, SPEC) for encoded in (FIRST, SECOND, FIRST)]
        for prepared, encoded in zip(results, (FIRST, SECOND, FIRST), strict=True):
            assert_is(prepared, encoded)
            assert prepared.array.flags.writeable


async def test_pool_serves_many_callers_at_once_each_with_its_own_image() -> None:
    """Each caller gets its own picture's result."""
    pictures = [images.jpeg(images.picture(90 + number, 80, seed=number)) for number in range(40)]
    async with open_pool(workers=2, max_waiting=40) as pool:
        results = await asyncio.gather(*(pool.prepare(encoded, SPEC) for encoded in pictures))
    for prepared, encoded in zip(results, pictures, strict=True):
        assert_is(prepared, encoded)


async def test_pool_refuses_with_the_error_and_sentence_of_the_decoder() -> None:
    """The class and the text survive the hop, and the process is not worn out by it."""
    refusals: list[tuple[bytes, type[InferenceError], str]] = [
        (b"", UndecodableImage, "no bytes"),
        (b"GIF89a" + bytes(20), UnsupportedMedia, "a GIF"),
        (FIRST[:-100], UndecodableImage, "Premature end"),
        (images.jpeg(images.picture(130, 90)), TooLarge, re.escape("130 x 90 = 11700 pixels (limit 11000)")),
    ]
    async with open_pool(max_pixels=11_000) as pool:
        for data, error, sentence in refusals * 3:
            with pytest.raises(error, match=sentence) as refusal:
                await pool.prepare(data, SPEC)
            assert type(refusal.value) is error
        small = images.png(images.picture(20, 20), color_type=2)
        assert_is(await pool.prepare(small, SPEC), small)
        assert pool.statistics() == PoolStatistics(waiting=0, busy=0, restarts=0, quarantined=0)


@pytest.mark.parametrize("error", [UndecodableImage("a"), TooLarge("b"), UnsupportedMedia("c"), InferenceError("d")])
def test_reply_carries_an_error_over_the_wire(error: InferenceError) -> None:
    """Class and text come back; a sentence too long for the record is cut, not refused."""
    back = from_wire(to_wire(error_reply(error)), DecodeReply).error()
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert len(str(from_wire(to_wire(error_reply(TooLarge("ü" * 999))), DecodeReply).error())) == 400


async def test_pool_of_a_decoder_that_fails_inside_answers_and_lives_on() -> None:
    """A bug in the decoder is an internal error of that one job: here a size that no array can have."""
    async with open_pool() as pool:
        with pytest.raises(InferenceError) as failure:
            await pool.prepare(FIRST, replace(SPEC, width=0))
        assert "decoder failed" in str(failure.value)
        assert_is(await pool.prepare(SECOND, SPEC), SECOND)
        assert pool.statistics().restarts == 0


# waiting and cancelling -----------------------------------------------------------------------------------------------


async def test_pool_that_is_full_refuses_and_recovers() -> None:
    """The queue has a bound; what waits in it is served in order."""
    async with open_pool(max_waiting=2) as pool:
        stop_workers()
        jobs = [await begun(pool, pool.prepare(encoded, SPEC)) for encoded in (FIRST, SECOND, THIRD)]
        assert pool.statistics() == PoolStatistics(waiting=2, busy=1, restarts=0, quarantined=0)
        with pytest.raises(Overloaded, match=r"2 images wait for a decoder \(limit 2\)"):
            await pool.prepare(FIRST, SPEC)
        wake_workers()
        for job, encoded in zip(jobs, (FIRST, SECOND, THIRD), strict=True):
            assert_is(await job, encoded)
        assert pool.statistics().waiting == 0


async def test_pool_of_a_caller_that_leaves_the_queue_frees_its_place() -> None:
    """A cancelled caller leaves the queue, and another may wait instead."""
    async with open_pool(max_waiting=1) as pool:
        stop_workers()
        running = await begun(pool, pool.prepare(FIRST, SPEC))
        leaving = await begun(pool, pool.prepare(SECOND, SPEC))
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert pool.statistics().waiting == 0
        staying = await begun(pool, pool.prepare(THIRD, SPEC))
        wake_workers()
        assert_is(await running, FIRST)
        assert_is(await staying, THIRD)


async def test_pool_finishes_a_running_job_whose_caller_left() -> None:
    """Cancelled while decoding: the next image gets its own result, not the abandoned one."""
    async with open_pool() as pool:
        stop_workers()
        leaving = await begun(pool, pool.prepare(FIRST, SPEC))
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        staying = await begun(pool, pool.prepare(SECOND, SPEC))
        wake_workers()
        assert_is(await staying, SECOND)
        assert pool.statistics() == PoolStatistics(waiting=0, busy=0, restarts=0, quarantined=0)


async def test_pool_of_a_caller_that_leaves_a_bad_image_keeps_its_error_to_itself() -> None:
    """An error whose caller left is not logged."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    async with open_pool() as pool:
        stop_workers()
        leaving = await begun(pool, pool.prepare(b"GIF89a" + bytes(20), SPEC))
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        wake_workers()
        assert_is(await pool.prepare(SECOND, SPEC), SECOND)
    del leaving
    gc.collect()
    assert complaints == []


async def test_pool_of_a_caller_that_leaves_as_its_turn_comes_hands_it_on() -> None:
    """Every interleaving of leaving and being served: no process is lost with the caller."""
    async with open_pool(max_waiting=8) as pool:
        for steps in range(12):
            running = asyncio.create_task(_prepared(pool, FIRST))
            leaving = asyncio.create_task(_prepared(pool, SECOND))
            staying = asyncio.create_task(_prepared(pool, THIRD))
            await running if steps % 2 else await asyncio.wait([running])
            for _ in range(steps // 2):
                await asyncio.sleep(0)
            leaving.cancel()
            assert_is(await staying, THIRD)
            await asyncio.wait([leaving])


async def test_pool_of_a_caller_that_leaves_in_the_moment_of_its_turn_loses_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's wait is cancelled but not yet removed when a process becomes free."""
    answer = DecoderProcess.prepare

    async def then_leave(*arguments: Any) -> PreparedImage:
        prepared = await answer(*arguments)
        leaving.cancel()
        return prepared

    async with open_pool() as pool:
        stop_workers()
        monkeypatch.setattr(DecoderProcess, "prepare", then_leave)
        running = await begun(pool, pool.prepare(FIRST, SPEC))
        leaving = await begun(pool, pool.prepare(SECOND, SPEC))
        staying = await begun(pool, pool.prepare(THIRD, SPEC))
        wake_workers()
        assert_is(await running, FIRST)
        assert_is(await staying, THIRD)
        assert leaving.cancelled()


async def _prepared(pool: DecodePool, encoded: bytes) -> PreparedImage:
    return await pool.prepare(encoded, SPEC)


# start and end --------------------------------------------------------------------------------------------------------


async def test_pool_that_closes_leaves_no_process_and_no_file() -> None:
    """With idle, busy or stopped processes, and every running or waiting caller gets an error."""
    before = len(os.listdir("/proc/self/fd"))
    async with open_pool(workers=2) as pool:
        stop_workers()
        jobs = [await begun(pool, pool.prepare(encoded, SPEC)) for encoded in (FIRST, SECOND, THIRD)]
        assert len(workers()) == 2
        await pool.aclose()
        assert workers() == []
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable | Overloaded) for result in results)
        with pytest.raises(Overloaded, match="stopped") as refusal:
            await pool.prepare(FIRST, SPEC)
        assert refusal.value.reason == "draining"
    assert len(os.listdir("/proc/self/fd")) == before


async def test_pool_that_closes_while_replacing_a_process_leaves_none() -> None:
    """The replacement, half started, goes too."""
    async with open_pool() as pool:
        workers()[0].kill()
        while pool.statistics().restarts == 0:
            await asyncio.sleep(0)
        await pool.aclose()
    assert workers() == []


async def test_pool_whose_processes_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error at start, not a pool that never answers."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RuntimeError, match=r"decoder process did not come up.*/nonexistent/python"):
        await DecodePool(workers=2).start()
    assert workers() == []


PARENT = """
import asyncio, sys
from penstock.vision.decode_pool import DecodePool

async def main():
    pool = DecodePool(workers=2)
    await pool.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_decoders_of_a_parent_that_is_killed_die_with_it() -> None:
    """kill -9 of the gateway leaves no decoder behind, not even a stopped one."""
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=CHECKOUT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        children[0].suspend()
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
