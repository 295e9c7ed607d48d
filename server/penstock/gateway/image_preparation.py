"""Prepares a request's images: decode and preprocess, each within its deadline; then the model's input tensors."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from penstock.gateway.batching.merging import MergedRows, merge_rows
from penstock.gateway.metrics import Metrics
from penstock.protocol.cancellation import CancelStage, note_cancel_stage
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest
from penstock.protocol.inference import Array, Batcher, Tensor
from penstock.protocol.shared_memory import Lease, Slab
from penstock.vision.card import VisionCard
from penstock.vision.decode import codec_label
from penstock.vision.decode_pool import DecodePool
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.image_tasks import (
    PreparationEstimator,
    gather_or_cancel,
    input_tensors,
    max_rows,
    pass_encoded,
    reads_headers_inline,
)
from penstock.vision.results import ImageModel, ImageRequest


class ImagePreparer:
    """Decodes and preprocesses images, or reads the headers of those that the engine decodes."""

    def __init__(self, pool: DecodePool, metrics: Metrics) -> None:
        self._pool, self._metrics = pool, metrics
        self._estimator = PreparationEstimator()

    def refuse_hopeless(self, request: ImageRequest, batching: Batcher) -> None:
        """Raises Overloaded if the images cannot be answered in time."""
        if request.deadline is not None:
            name, preparing = request.model_name, self._estimator
            rows = preparing.rows_with(name, request.client, len(request.images))
            deadline = request.deadline - preparing.takes_s(name, request.client)
            batching.refuse_hopeless(name, rows=rows, deadline=deadline)

    async def together(
        self, request: ImageRequest, which: range, model: ImageModel, slab: Slab | None = None
    ) -> list[PreparedImage]:
        """The images with these indices. slab: memory for a single image; the caller releases leases.

        Raises InferenceError.
        """
        jobs = [self.one(request, index, model, slab if len(which) == 1 else None) for index in which]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if request.deadline is None else request.deadline - time.monotonic()):
                    return await gather_or_cancel(jobs)
        except asyncio.CancelledError as cancelled:
            note_cancel_stage(cancelled, CancelStage.DECODE)
            raise
        # Not in the handler: the error's context would be the TimeoutError, which would close a reference cycle.
        raise DeadlineExceeded("the deadline passed while the image was decoded; allow more time")

    async def alone(self, request: ImageRequest, index: int, model: ImageModel, slab: Slab | None) -> PreparedImage:
        """One image, independent of the others of its request. Raises InferenceError."""
        if model.card.is_relayed and reads_headers_inline(sum(map(len, request.images))):  # nothing to wait for
            return await self.one(request, index, model, slab)
        started = time.monotonic()
        self._estimator.began(request.model_name, request.client)
        try:
            (prepared,) = await self.together(request, range(index, index + 1), model, slab)
        finally:
            self._estimator.ended(request.model_name, request.client, time.monotonic() - started)
        return prepared

    async def one(self, request: ImageRequest, index: int, model: ImageModel, slab: Slab | None) -> PreparedImage:
        """One image; several run concurrently. Raises InferenceError."""
        data, spec = request.images[index], model.card.prepare_spec
        try:
            if model.card.is_relayed:
                size_bytes = sum(map(len, request.images))
                return await pass_encoded(data, spec, self._pool.max_pixels, slab, size_bytes, request.deadline)
            return await self._pool.prepare(data, spec, slab, client=request.client, deadline=request.deadline)
        except InvalidRequest as error:
            self._metrics.decode_error(codec_label(data), error.reason)
            if len(request.images) == 1:
                raise
            raise type(error)(f"image {index + 1} of {len(request.images)}: {error}") from error


def stack_rows(arrays: Sequence[Array], model: ImageModel) -> MergedRows:
    """All rows in one array. Raises InvalidRequest for images of different sizes if the model keeps their sizes."""
    config, shape = model.config, model.card.input_shape
    rows = config.max_batch_size or (len(arrays) if max_rows(config, model.card) is None else 0)
    calls = merge_rows(arrays, declared_shape=shape, max_batch_size=rows)
    if len(calls) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise InvalidRequest(
            f"model {config.name!r} takes images at their own size, and these differ ({shapes[0]} and {shapes[1]}): "
            "no tensor holds both; send each in a request of its own"
        )
    return calls[0]


def inputs_of(
    card: VisionCard, prepared: Sequence[PreparedImage], call: MergedRows, lease: Lease | None = None
) -> tuple[Tensor, ...]:
    """The inputs of one engine call. lease: as in input_tensors."""
    geometries = [prepared[member].geometry for member in call.members]
    return input_tensors(card, call.array, geometries, has_batch_axis=call.has_batch_axis, lease=lease)
