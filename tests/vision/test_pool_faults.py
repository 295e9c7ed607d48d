"""Every way in which one image or one process can fail, alone."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop

from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError, TooLarge, UndecodableImage
from penstock.protocol.inference import Datatype
from penstock.vision.decode_pool import PoolStatistics
from penstock.vision.decoder_process import DecoderDied, DecoderProcess, PreparedImage
from penstock.vision.decoder_worker import DecodeReply, DecodeStatus, to_wire
from penstock.vision.spec import InputOrder, PrepareSpec, ResizeMode
from tests.vision import images
from tests.vision.pools import (
    FIRST,
    SECOND,
    SPEC,
    THIRD,
    assert_is,
    begun,
    crash,
    open_pool,
    peak_memory_kb,
    stop_workers,
    wake_workers,
    workers,
)

OWN_SIZE = PrepareSpec(width=0, height=0, fit=ResizeMode.KEEP, layout=InputOrder.NHWC, datatype=Datatype.UINT8)


async def test_pool_of_a_crashing_decoder_fails_one_image_and_replaces_the_process_within_a_second() -> None:
    """SIGSEGV in the middle of a job: that job fails, the one behind it is decoded by the replacement."""
    delays_s = []
    async with open_pool() as pool:
        for number in range(3):
            stop_workers()
            victim = await begun(pool, pool.prepare(FIRST + bytes([number]), SPEC))
            waiting = await begun(pool, pool.prepare(SECOND, SPEC))
            crash(signal.SIGSEGV)
            with pytest.raises(UndecodableImage, match=r"the decoder died on this image \(SIGSEGV\)"):
                await victim
            died_at = time.monotonic()
            async with asyncio.timeout(20):
                assert_is(await waiting, SECOND)
            delays_s.append(time.monotonic() - died_at)
            assert pool.statistics() == PoolStatistics(0, 0, restarts=number + 1, quarantined=number + 1)
    assert min(delays_s) < 1.0


async def test_pool_of_a_crashing_decoder_leaves_the_other_processes_alone() -> None:
    """Only the job of the process that died fails."""
    async with open_pool(workers=2) as pool:
        stop_workers()
        jobs = [
            await begun(pool, pool.prepare(encoded, SPEC, client=name))
            for name, encoded in (("a", FIRST), ("b", SECOND))
        ]
        workers()[0].send_signal(signal.SIGSEGV)
        wake_workers()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["PreparedImage", "UndecodableImage"]


async def test_pool_of_a_hanging_decoder_fails_one_image_and_replaces_the_process() -> None:
    """A job over its time limit is killed with its process; the replacement runs the next job, even of the same image.

    The stopped decoder represents a busy host: the image is not the cause.
    """
    async with open_pool(job_timeout_s=0.3) as pool:
        stop_workers()
        with pytest.raises(DeadlineExceeded, match=re.escape("not decoded within 0.3 s (decode_timeout_s)")):
            await pool.prepare(FIRST, SPEC)
        while pool.statistics().restarts == 0:
            await asyncio.sleep(0)
    async with open_pool() as pool:
        stop_workers()
        with pytest.raises(DeadlineExceeded, match="the deadline passed while the image was decoded"):
            await pool.prepare(FIRST, SPEC, deadline=time.monotonic() + 0.1)
        for encoded in (SECOND, FIRST):
            assert_is(await pool.prepare(encoded, SPEC), encoded)
        assert pool.statistics() == PoolStatistics(0, 0, restarts=1, quarantined=0)


async def test_pool_kills_an_abandoned_job_at_its_deadline() -> None:
    """It does not wait for the time limit of an image, 30 s here; the next client gets the replacement."""
    async with open_pool() as pool:
        stop_workers()
        leaving = await begun(pool, pool.prepare(FIRST, SPEC, deadline=time.monotonic() + 0.1))
        leaving.cancel()
        async with asyncio.timeout(20):
            assert_is(await pool.prepare(SECOND, SPEC), SECOND)
        assert pool.statistics() == PoolStatistics(0, 0, restarts=1, quarantined=0)


async def test_pool_starts_no_image_whose_deadline_passes_while_it_waits() -> None:
    """The image leaves the queue, and no process is lost."""
    async with open_pool() as pool:
        stop_workers()
        running = await begun(pool, pool.prepare(FIRST, SPEC))
        with pytest.raises(DeadlineExceeded, match="waited for a decoder"):
            await pool.prepare(SECOND, SPEC, deadline=time.monotonic() + 0.05)
        assert pool.statistics() == PoolStatistics(waiting=0, busy=1, restarts=0, quarantined=0)
        wake_workers()
        assert_is(await running, FIRST)


async def test_decoder_whose_reply_is_not_utf8_is_killed() -> None:
    """An image may have compromised it: its replies are not trusted."""
    decoder = await DecoderProcess.start(2 << 30, 5.0)
    reply = to_wire(DecodeReply(DecodeStatus.BROKEN_WORKER, text="hello")).replace(b"hello", b"hell\xff")
    with pytest.raises(DecoderDied):
        decoder._understand(reply, OWN_SIZE, 40_000_000)
    assert await decoder.ended() == -signal.SIGKILL
    await decoder.aclose()


async def test_decoder_that_takes_too_much_cpu_time_is_ended_and_the_image_quarantined() -> None:
    """However busy the host is, this much CPU time is caused by the image."""
    slow = images.jpeg(np.full((5000, 8000, 3), 77, np.uint8), quality=50)
    decoder = await DecoderProcess.start(2 << 30, 0.01)
    with pytest.raises(DecoderDied):
        await decoder.prepare(slow, OWN_SIZE, 40_000_000)
    assert await decoder.ended() == -signal.SIGPROF
    await decoder.aclose()
    async with open_pool() as pool:
        stop_workers()
        victim = await begun(pool, pool.prepare(FIRST, SPEC))
        crash(signal.SIGPROF)
        with pytest.raises(UndecodableImage, match=re.escape("used 27 s of CPU time on this image")):
            await victim
        assert pool.statistics().quarantined == 1


async def test_pool_of_a_client_with_many_images_serves_another_client_next() -> None:
    """A client's queue delays only this client."""
    async with open_pool() as pool:
        stop_workers()
        ended: list[str] = []

        async def ask(client: str, encoded: bytes) -> PreparedImage:
            prepared = await pool.prepare(encoded, SPEC, client=client)
            ended.append(client)
            return prepared

        jobs = [await begun(pool, ask(client, FIRST)) for client in ("many", "many", "many", "many", "one", "other")]
        wake_workers()
        await asyncio.gather(*jobs)
        assert ended == ["many", "one", "other", "many", "many", "many"]


async def test_pool_keeps_a_process_for_others_while_a_client_sends_its_first_images() -> None:
    """All of them may be slow until one has finished. A single client may use all processes."""
    async with open_pool(workers=2) as pool:
        stop_workers()
        jobs = [await begun(pool, pool.prepare(FIRST, SPEC, client="other")) for _ in range(2)]
        assert pool.statistics().busy == 2
        wake_workers()
        await asyncio.gather(*jobs)
        stop_workers()
        jobs = [await begun(pool, pool.prepare(FIRST, SPEC, client="new")) for _ in range(3)]
        assert pool.statistics() == PoolStatistics(waiting=2, busy=1, restarts=0, quarantined=0)
        jobs.append(await begun(pool, pool.prepare(SECOND, SPEC, client="other")))
        assert pool.statistics().busy == 2
        wake_workers()
        await asyncio.gather(*jobs)
        stop_workers()
        jobs = [await begun(pool, pool.prepare(FIRST, SPEC, client="new")) for _ in range(2)]
        assert pool.statistics().busy == 2
        wake_workers()
        await asyncio.gather(*jobs)


async def test_pool_refuses_poison_at_once_when_it_comes_again() -> None:
    """By content: no second process is lost to the same image, and an image of the same size is none of it."""
    async with open_pool() as pool:
        stop_workers()
        victim = await begun(pool, pool.prepare(FIRST, SPEC))
        crash(signal.SIGABRT)
        with pytest.raises(UndecodableImage, match="SIGABRT"):
            await victim
        with pytest.raises(UndecodableImage, match="before"):
            await pool.prepare(bytes(FIRST), SPEC)
        harmless = FIRST[:-3] + bytes([FIRST[-3] ^ 1]) + FIRST[-2:]
        await pool.prepare(harmless, SPEC)
        assert pool.statistics().restarts == 1


async def test_pool_of_a_decoder_killed_from_outside_quarantines_no_image() -> None:
    """The OOM killer's or an operator's SIGKILL is no poison: the caller may send the image again, and it works."""
    async with open_pool() as pool:
        stop_workers()
        victim = await begun(pool, pool.prepare(FIRST, SPEC))
        crash(signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="send the image again"):
            await victim
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)
        assert pool.statistics().quarantined == 0


async def test_pool_of_a_decoder_that_dies_idle_replaces_it() -> None:
    """No request is lost to an idle decoder that died."""
    async with open_pool() as pool:
        (worker,) = workers()
        worker.kill()
        while pool.statistics().restarts == 0:
            await asyncio.sleep(0)
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)


async def test_pool_ignores_the_terminals_signals() -> None:
    """Ctrl-C and a group's SIGTERM belong to the parent, which drains."""
    async with open_pool() as pool:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            workers()[0].send_signal(number)
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)
        assert pool.statistics().restarts == 0


# size -----------------------------------------------------------------------------------------------------------------


def memory_files() -> list[os.stat_result]:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [link.stat() for link in links if link.is_symlink() and "penstock-decoder" in os.readlink(link)]


async def test_pool_of_a_forty_megapixel_image_gives_its_memory_back() -> None:
    """The largest image that is allowed works, even at its own size, and leaves the memory file empty."""
    encoded = images.jpeg(np.full((5000, 8000, 3), 77, np.uint8), quality=50, subsampling="420")
    async with open_pool() as pool:
        whole = await pool.prepare(encoded, OWN_SIZE)
        assert whole.array.shape == (5000, 8000, 3)
        assert abs(int(whole.array[4999, 7999, 1]) - 77) <= 2
        assert [memory.st_blocks for memory in memory_files()] == [0]
        assert workers()[0].memory_info().rss < 200 << 20
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)


async def test_pool_takes_bodies_larger_than_its_copying_steps() -> None:
    """A body of 48 MiB, most of it behind the picture's end."""
    async with open_pool() as pool:
        assert_is(await pool.prepare(FIRST + bytes(48 << 20), SPEC), FIRST)
        assert [memory.st_blocks for memory in memory_files()] == [0]


def bombs() -> list[bytes]:
    """30,000 x 30,000 pixels in a few bytes, or as many as the format can say."""
    small = images.jpeg(images.picture(8, 8))
    frame = small.index(b"\xff\xc0") + 5
    chunks = images.png_header(30_000, 30_000, depth=8, color_type=2) + images.png_chunk(b"IDAT", b"x\x9c")
    lossless = (0x2F).to_bytes(1, "little") + ((16383) | (16383 << 14)).to_bytes(4, "little")
    return [
        small[:frame] + (30_000).to_bytes(2, "big") * 2 + small[frame + 4 :],
        b"\x89PNG\r\n\x1a\n" + chunks + images.png_chunk(b"IEND", b""),
        images.webp_file(images.webp_chunk(b"VP8L", lossless)),
        images.webp_file(images.webp_canvas(30_000, 30_000)),
    ]


async def test_pool_refuses_a_pixel_bomb_by_its_header_with_memory_flat() -> None:
    """413 with the size, before a byte of pixels is allocated."""
    async with open_pool() as pool:
        await pool.prepare(FIRST, SPEC)
        peak = peak_memory_kb(workers()[0])
        for bomb in bombs():
            with pytest.raises(TooLarge, match=r"(30000 x 30000 = 900000000|16384 x 16384 = 268435456) pixels"):
                await pool.prepare(bomb, SPEC)
        assert peak_memory_kb(workers()[0]) - peak < 4096


async def test_pool_of_a_thousand_images_keeps_memory_flat() -> None:
    """Neither side grows: good, broken and refused images in turn."""
    async with open_pool() as pool:

        async def rounds(count: int) -> int:
            for _ in range(count):
                await pool.prepare(FIRST, SPEC)
                for bad in (FIRST[:500], b"%PDF-1.7"):
                    with pytest.raises(InferenceError):
                        await pool.prepare(bad, SPEC)
            return sum(process.memory_info().rss for process in (psutil.Process(), *workers()))

        await rounds(100)
        before = await rounds(50)
        assert await rounds(250) - before < 2 << 20


def test_pool_runs_under_uvloop() -> None:
    """The gateway's own event loop: decode, crash, replace, close."""

    async def scenario() -> None:
        async with open_pool() as pool:
            assert_is(await pool.prepare(FIRST, SPEC), FIRST)
            stop_workers()
            victim = await begun(pool, pool.prepare(SECOND, SPEC))
            crash(signal.SIGSEGV)
            with pytest.raises(UndecodableImage, match="SIGSEGV"):
                await victim
            assert_is(await pool.prepare(THIRD, SPEC), THIRD)
            stop_workers()
        assert workers() == []

    uvloop.run(scenario())
