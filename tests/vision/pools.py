"""What the tests of the pool share: a pool that closes itself, and a hand on its processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from penstock.protocol.inference import Array
from penstock.vision.decode import decode
from penstock.vision.decode_pool import DecodePool
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.preprocess import prepare
from penstock.vision.spec import PrepareSpec
from tests.vision import images

SPEC = PrepareSpec(width=64, height=48, scale=1 / 255)
FIRST, SECOND, THIRD = (images.jpeg(images.picture(120, 90, seed=seed)) for seed in (1, 2, 3))


@asynccontextmanager
async def open_pool(
    workers: int = 1, *, job_timeout_s: float = 30.0, max_waiting: int = 16, max_pixels: int = 40_000_000
) -> AsyncIterator[DecodePool]:
    pool = DecodePool(workers=workers, job_timeout_s=job_timeout_s, max_waiting=max_waiting, max_pixels=max_pixels)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


def workers() -> list[psutil.Process]:
    """The decoder processes of this process."""
    children = psutil.Process().children()
    return [child for child in children if "penstock.vision.decoder_worker" in child.cmdline()]


def peak_memory_kb(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def stop_workers() -> None:
    """From now on every job hangs: the deterministic moment for everything that may happen in the middle of one."""
    for worker in workers():
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED:
            os.sched_yield()


def wake_workers() -> None:
    for worker in workers():
        worker.resume()


async def begun(pool: DecodePool, job: Awaitable[PreparedImage]) -> "asyncio.Task[PreparedImage]":
    """The job as a task that has gone as far as it can without a worker's answer."""

    async def wait() -> PreparedImage:
        return await job

    before = pool.statistics()
    task = asyncio.create_task(wait())
    while pool.statistics() == before and not task.done():
        await asyncio.sleep(0)
    return task


def expected(encoded: bytes, spec: PrepareSpec) -> Array:
    return prepare(decode(encoded, spec.color), spec)[0]


def assert_is(prepared: PreparedImage, encoded: bytes, spec: PrepareSpec = SPEC) -> None:
    assert np.array_equal(prepared.array, expected(encoded, spec))


def crash(number: signal.Signals) -> None:
    for worker in workers():
        worker.send_signal(number)
        with suppress(psutil.NoSuchProcess):
            worker.resume()
