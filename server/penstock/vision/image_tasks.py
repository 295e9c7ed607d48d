"""The images of one request: limits, predicted preparation time, concurrent work, and what the engine decodes."""

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from penstock.protocol.cancellation import CancelStage, PendingStage, cancel_stage_of, note_cancel_stage
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest, TooLarge
from penstock.protocol.inference import Array, Datatype, Tensor, tensor_from_numpy
from penstock.protocol.shared_memory import Lease, Slab
from penstock.vision.card import VisionCard
from penstock.vision.decode import header_within
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.preprocess import Geometry, geometry_of
from penstock.vision.spec import PrepareSpec

MAX_IMAGE_BYTES_IN_MEMORY = 64 << 20
MAX_VARIABLE_SIZE_IMAGES = 4  # in memory at once, for models with a variable input size
MAX_TENSOR_BYTES = 256 << 20  # of the tensor of one request's encoded images


def max_images_in_memory(spec: PrepareSpec) -> int:
    """Maximum images of one request in memory at once, prepared for this network."""
    row_bytes = spec.row_bytes
    return max(1, MAX_IMAGE_BYTES_IN_MEMORY // row_bytes) if row_bytes else MAX_VARIABLE_SIZE_IMAGES


def max_rows(config: ModelConfig, card: VisionCard) -> int | None:
    """Maximum images in one input: max_batch_size, or the first dimension without it. None for no limit."""
    shape = card.input_shape
    takes_one_size = card.size_input is not None and len(card.size_input.shape) == 1
    is_free = len(shape) == 4 and shape[0] == -1 and not takes_one_size
    return config.max_batch_size or (None if is_free else 1)


def check_image_count(config: ModelConfig, card: VisionCard, count: int) -> None:
    """Checks count and size before decoding. Raises InvalidRequest, TooLarge."""
    most = max_rows(config, card)
    if most is not None and count > most:
        raise InvalidRequest(
            f"{count} images for model {config.name!r}, which takes {most} at once; send fewer in one request"
        )
    check_tensor_size(count * card.prepare_spec.row_bytes)


def check_tensor_size(size_bytes: int) -> None:
    """Raises TooLarge above MAX_TENSOR_BYTES."""
    if size_bytes > MAX_TENSOR_BYTES:
        raise TooLarge(
            f"the images make a tensor of {size_bytes} bytes (limit {MAX_TENSOR_BYTES}); send fewer or smaller ones"
        )


SMOOTHING_WEIGHT = 0.1  # of one image in the average


class PreparationEstimator:
    """Tracks images in preparation, by model and client, before they reach the gateway's queues."""

    def __init__(self) -> None:
        self._images: Counter[str] = Counter()
        self._clients: Counter[tuple[str, str]] = Counter()
        self._clients_of: Counter[str] = Counter()
        self._usual_s: dict[tuple[str, str], float] = {}

    def rows_with(self, model_name: str, client: str, images: int) -> int:
        """Maximum rows that are ready once these images are. Decoders take turns, so only part of the others counts."""
        own = self._clients[model_name, client]
        clients = self._clients_of[model_name] + (not own)
        return min(self._images[model_name] + images, (own + images) * clients)

    def takes_s(self, model_name: str, client: str) -> float:
        """Average seconds for one of the client's pictures, with the wait for a decoder; 0 if none is in progress."""
        return self._usual_s.get((model_name, client), 0.0)

    def began(self, model_name: str, client: str) -> None:
        """Counts one more image in preparation."""
        self._images[model_name] += 1
        if not self._clients[model_name, client]:
            self._clients_of[model_name] += 1
        self._clients[model_name, client] += 1

    def ended(self, model_name: str, client: str, seconds: float) -> None:
        """Counts one image less, whether it succeeded or failed."""
        self._images[model_name] -= 1
        key = model_name, client
        self._clients[key] -= 1
        if not self._clients[key]:
            del self._clients[key]
            self._clients_of[model_name] -= 1
            self._usual_s.pop(key, None)
            return
        usual_s = self._usual_s.get(key, 0.0)
        self._usual_s[key] = usual_s + (seconds - usual_s) * SMOOTHING_WEIGHT


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


def input_tensors(
    card: VisionCard, array: Array, geometries: Sequence[Geometry], *, has_batch_axis: bool, lease: Lease | None = None
) -> tuple[Tensor, ...]:
    """All inputs of the model for these pictures. array: their rows. lease: as in input_tensor."""
    image = input_tensor(card.input_name, array, lease)
    return (image, *size_tensors(card, geometries, has_batch_axis=has_batch_axis))


def size_tensors(card: VisionCard, geometries: Sequence[Geometry], *, has_batch_axis: bool) -> tuple[Tensor, ...]:
    """The input that gets the pictures' (width, height), if the model has it. has_batch_axis: of the image's tensor.

    Raises InvalidRequest for several pictures where the model takes one size.
    """
    spec = card.size_input
    if spec is None:
        return ()
    is_whole_shape = len(card.input_shape) == 4  # without max_batch_size, dims include the batch axis
    rank = len(spec.shape) + (has_batch_axis and not is_whole_shape)
    sizes = [(one.source_width, one.source_height) for one in geometries]
    return (tensor_from_numpy(spec.name, size_array(sizes, spec.datatype, rank)),)


def size_array(sizes: Sequence[tuple[int, int]], datatype: Datatype, rank: int) -> Array:
    """(width, height) of pictures: [B, 2] of rank 2, [B, 1, 2] of rank 3, [2] of rank 1, which holds one picture.

    Raises InvalidRequest.
    """
    array = np.array(sizes, datatype.dtype)
    if rank == 1 and len(sizes) > 1:
        raise InvalidRequest(f"the model's input for sizes takes one image, not {len(sizes)}; send one per request")
    return array[0] if rank == 1 else array.reshape(len(sizes), *(1,) * (rank - 2), 2)


def _write_to_slab(data: bytes, slab: Slab | None) -> Lease | None:
    lease = slab.lease(_LENGTH.size + len(data)) if slab is not None else None
    if lease is not None:
        view = lease.view
        _LENGTH.pack_into(view, 0, len(data))
        view[_LENGTH.size :] = data
    return lease
