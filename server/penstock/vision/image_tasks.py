"""Concurrent work on the images of one request, and encoded images that the engine decodes."""

import asyncio
import struct
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from penstock.protocol.cancellation import CancelStage, PendingStage, cancel_stage_of, note_cancel_stage
from penstock.protocol.errors import DeadlineExceeded
from penstock.protocol.inference import Array, Datatype, Tensor, tensor_from_numpy
from penstock.protocol.shared_memory import Lease, Slab
from penstock.vision.decode import header_within
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.preprocess import geometry_of
from penstock.vision.spec import PrepareSpec

T = TypeVar("T")


async def gather_or_cancel(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all jobs concurrently; the first error cancels the others and is raised unchanged.

    A TaskGroup would retain the images until the garbage collector runs, because its errors and tasks form a cycle. If
    the caller is cancelled, the CancelledError carries the first recorded stage of a job.
    """
    if len(jobs) == 1:
        return [await jobs[0]]
    left: list[CancelStage | PendingStage] = []
    tasks = [asyncio.create_task(_record_cancellation(job, left)) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as cancelled:
        await _cancel_all(tasks)
        if left:
            note_cancel_stage(cancelled, left[0])
        raise
    failure = _first_failure(tasks)
    if failure is None:
        return [task.result() for task in tasks]
    await _cancel_all(tasks)
    try:
        raise failure
    finally:  # avoids a reference cycle: its traceback refers to this frame and the images
        del failure, tasks


def _first_failure(tasks: Sequence[asyncio.Task[T]]) -> BaseException | None:
    failed = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((error for error in failed if error is not None), None)


async def _cancel_all(tasks: Sequence[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved


async def _record_cancellation(job: Coroutine[Any, Any, T], left: list[CancelStage | PendingStage]) -> T:
    try:
        return await job
    except asyncio.CancelledError as cancelled:
        where = cancel_stage_of(cancelled)
        if where is not None:
            left.append(where)
        raise


MAX_INLINE_BYTES = 1 << 20  # PNG checksums, progressive JPEG scans: 1 ms of the event loop, 10 ms at worst
_LENGTH = struct.Struct("<I")


def reads_headers_inline(size_bytes: int) -> bool:
    """Whether headers of pictures of this total size are read on the event loop."""
    return size_bytes <= MAX_INLINE_BYTES


async def pass_encoded(
    data: bytes, spec: PrepareSpec, max_pixels: int, slab: Slab | None, size_bytes: int, deadline: float | None
) -> PreparedImage:
    """As pass_encoded_now; also raises DeadlineExceeded. size_bytes: of the request; large ones use a thread."""
    if reads_headers_inline(size_bytes):
        return pass_encoded_now(data, spec, max_pixels, slab)
    prepared = await asyncio.to_thread(_pass_encoded_before_deadline, data, spec, max_pixels, deadline)
    return replace(prepared, lease=_write_to_slab(data, slab))


def _pass_encoded_before_deadline(
    data: bytes, spec: PrepareSpec, max_pixels: int, deadline: float | None
) -> PreparedImage:
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceeded("the deadline passed before the image's header was read; allow more time")
    return pass_encoded_now(data, spec, max_pixels, None)


def pass_encoded_now(data: bytes, spec: PrepareSpec, max_pixels: int, slab: Slab | None) -> PreparedImage:
    """The encoded picture as an array of one element, with its geometry in the network's input.

    spec: the engine's preprocessing. The lease, if the slab has space, holds the picture after its length.
    Raises UnsupportedMedia, TooLarge and UndecodableImage, from the header.
    """
    started = time.perf_counter()
    width, height = header_within(data, max_pixels).upright_size
    array: Array = np.empty(1, np.object_)
    array[0] = data
    lease = _write_to_slab(data, slab)
    return PreparedImage(array, geometry_of(width, height, spec), time.perf_counter() - started, 0.0, lease)


def input_tensor(name: str, array: Array, lease: Lease | None) -> Tensor:
    """The array as the model's input, without a copy. lease: the shared memory of its one image, or None."""
    if lease is None:
        return tensor_from_numpy(name, array)
    if array.dtype == np.object_:
        return Tensor(name, Datatype.BYTES, array.shape, lease.view, lease.place)
    return replace(tensor_from_numpy(name, array), place=lease.place)


def _write_to_slab(data: bytes, slab: Slab | None) -> Lease | None:
    lease = slab.lease(_LENGTH.size + len(data)) if slab is not None else None
    if lease is not None:
        view = lease.view
        _LENGTH.pack_into(view, 0, len(data))
        view[_LENGTH.size :] = data
    return lease
