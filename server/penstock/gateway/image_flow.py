"""Inference from encoded images to labelled results: decode → preprocess → batch → engine → parse."""

import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.engines.model_health import EngineView
from penstock.gateway.batching.merging import MergedRows, merge_rows
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_preparation import ImagePreparer, inputs_of, stack_rows
from penstock.gateway.image_trial import why_pictures_fail
from penstock.gateway.metrics import Metrics
from penstock.gateway.picture_drawing import PictureDrawer
from penstock.gateway.thread_slots import THREADS_AT_ONCE, ThreadSlots
from penstock.gateway.tracing import engine_span, trace_preparation, trace_stages
from penstock.protocol.engine import Engine, ModelConfig
from penstock.protocol.errors import InvalidRequest, UnsupportedMedia
from penstock.protocol.inference import Batcher, BatchTrace, InferRequest, InferResponse, Tensor, Timings
from penstock.protocol.request_checks import ImageInput
from penstock.protocol.shared_memory import Lease, Slab
from penstock.protocol.vision_results import VisionResult
from penstock.vision.card import NotAnImageModel, VisionCard, card_from_config
from penstock.vision.decode_pool import DecodePool
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.image_tasks import (
    check_image_count,
    check_tensor_size,
    gather_or_cancel,
    input_tensors,
    max_images_in_memory,
)
from penstock.vision.preprocess import Geometry
from penstock.vision.results import (
    ImageModel,
    ImageRequest,
    ImageResponse,
    card_for,
    concurrent_timings,
    may_take_images,
    preparation_timings,
    result_of,
    sequential_timings,
)
from penstock.vision.spec import NetworkType


class _Wave(NamedTuple):
    """The results of some of a request's images."""

    model_version: str
    results: tuple[object, ...]
    timings: Timings
    explanations: tuple[BatchTrace, ...] = ()


class _ImageResult(NamedTuple):
    """The result of one image, in a batch that the gateway formed."""

    result: object
    response: InferResponse
    timings: Timings


class ImageFlow:
    """The image endpoint without its transport."""

    def __init__(  # noqa: PLR0913 - one argument for each part
        self,
        *,
        backend: Engine,
        watch: EngineView,
        pool: DecodePool,
        metrics: Metrics,
        batching: Batcher | None = None,
        slab: Slab | None = None,
        slots: EngineSlots | None = None,
    ) -> None:
        """batching: every image is one row. slab: memory that the engine reads. slots: None for no limit."""
        self._backend, self._batching, self._slab, self._slots = backend, batching, slab, slots
        self._watch, self._metrics = watch, metrics
        self._models: dict[str, ImageModel] = {}
        self._preparer = ImagePreparer(pool, metrics)
        self._drawer = PictureDrawer(pool)
        self._readers = ThreadSlots(
            THREADS_AT_ONCE, what="the model's outputs were read", others="the outputs that are read before its own"
        )

    async def model(self, model_name: str) -> ImageModel:
        """Raises ModelNotFound, ModelRefused, and InvalidRequest if its config does not describe images."""
        config = await self._watch.find(model_name)
        model = self._described(config)
        if model is None:
            raise InvalidRequest(
                f"model {model_name!r} does not say how it sees images (no `network-type` in the parameters of its "
                "config.pbtxt); send tensors to /infer instead"
            )
        return model

    def input_of(self, model_name: str) -> ImageInput | None:
        """The model's image input, or None. Raises InvalidRequest for invalid image parameters."""
        known = self._watch.models.get(model_name)
        if known is None or not known.is_ready or known.config is None or not may_take_images(known.config):
            return None
        model = self._described(known.config)
        if model is None:
            return None
        card = model.card
        row_bytes = 0 if card.is_relayed else card.prepare_spec.row_bytes
        return ImageInput(card.input_name, row_bytes, is_encoded=card.is_relayed)

    async def tensors(self, request: ImageRequest, label: str) -> tuple[Tensor, ...]:
        """The images as the model's input tensor, in their order, and their sizes if the model has an input for them.

        Raises InferenceError. label: for metrics.
        """
        model = await self.model(request.model_name)
        check_image_count(model.config, model.card, len(request.images))
        prepared, timings = list[PreparedImage](), list[Timings]()
        size = max_images_in_memory(model.card.prepare_spec)
        for first in range(0, len(request.images), size):
            started = time.monotonic()
            which = range(first, min(first + size, len(request.images)))
            try:
                prepared += await self._preparer.together(request, which, model)
            except UnsupportedMedia as error:  # 415 is about a body, and this body is the v2 protocol's
                raise InvalidRequest(error.message) from error
            timings.append(preparation_timings(prepared[first:], time.monotonic() - started))
            trace_preparation(timings[-1])
            check_tensor_size(sum(item.array.nbytes for item in prepared))
        self._metrics.prepared(label, sequential_timings(timings))
        self._metrics.batch(label, len(prepared))
        return inputs_of(model.card, prepared, stack_rows([item.array for item in prepared], model))

    async def run(self, request: ImageRequest, model: ImageModel, label: str) -> ImageResponse:
        """Results of all images, in waves of at most WAVE_BYTES. Raises InferenceError. label: for metrics."""
        model = ImageModel(model.config, card_for(model.card, request.result_options))
        if not request.is_drawn:
            return await self._answered(request, model, label)
        async with self._drawer.slots.slot(request.client, request.deadline) as slot:
            response = await self._answered(replace(request, write=None), model, label)
            (result,) = response.results
            assert isinstance(result, VisionResult)
            return replace(response, drawing=await self._drawer.draw(request, result, model.card, slot))

    async def _answered(self, request: ImageRequest, model: ImageModel, label: str) -> ImageResponse:
        started = time.monotonic()
        size, batching = max_images_in_memory(model.card.prepare_spec), self._batching
        owner = batching if batching is not None and batching.owns(request.model_name) else None
        if owner is not None:
            self._preparer.refuse_hopeless(request, owner)
        waves = []
        slots = self._slots if owner is None else None
        count = len(request.images)
        with slots.pictures(model.config.name, request.client, count, request.deadline) if slots else nullcontext():
            for first in range(0, count, size):
                which = range(first, min(first + size, count))
                if owner is not None:
                    waves.append(await self._owned_wave(request, which, model, owner))
                else:
                    waves.append(await self._wave(request, which, model, label))
        whole = waves[0] if len(waves) == 1 else _joined(waves)
        self._metrics.stages(label, whole.timings)
        return ImageResponse(
            request.model_name,
            whole.model_version,
            whole.results,
            model.card.labels,
            whole.timings,
            time.monotonic() - started,
            whole.explanations,
        )

    async def trial(self, config: ModelConfig, timeout_s: float) -> str:
        """Why images fail with the model, or which image parameter is invalid; otherwise "".

        timeout_s: for decode and inference together. Not counted in metrics. Raises InferenceError if the decoders or
        the engine are unreachable.
        """
        try:
            model = self._described(config)
        except NotAnImageModel:  # `/image` reports it; the model serves tensors
            return ""
        except InvalidRequest as error:
            return error.message.removeprefix(f"model {config.name!r}: ")
        if model is None or config.is_decoupled or config.has_sequence_batching:
            return ""
        deadline = time.monotonic() + timeout_s

        def prepare(picture: bytes) -> Awaitable[PreparedImage]:
            return self._preparer.one(ImageRequest(config.name, "", (picture,), deadline), 0, model, None)

        return await why_pictures_fail(model, prepare, self._backend, deadline)

    def card(self, config: ModelConfig) -> VisionCard | None:
        """The model's card, or None. Raises InvalidRequest for invalid image parameters."""
        return model.card if (model := self._described(config)) is not None else None

    def _described(self, config: ModelConfig) -> ImageModel | None:
        """The model with its card, read once per config; None if it has none."""
        known = self._models.get(config.name)
        if known is not None and known.config is config:
            return known
        card = card_from_config(config)
        if card is None:
            return None
        self._models[config.name] = ImageModel(config, card)
        return self._models[config.name]

    async def _wave(self, request: ImageRequest, which: range, model: ImageModel, label: str) -> _Wave:
        """Processes the images with these indices together."""
        started = time.monotonic()
        prepared = await self._preparer.together(request, which, model, self._slab)
        timings = preparation_timings(prepared, time.monotonic() - started)
        trace_preparation(timings)
        calls = merge_rows(
            [item.array for item in prepared],
            declared_shape=model.card.input_shape,
            max_batch_size=model.config.merged_rows,
        )
        infer_started = time.monotonic()
        lease = prepared[0].lease  # of the only image
        inputs = [inputs_of(model.card, prepared, call, lease) for call in calls]
        for call in calls:
            self._metrics.batch(label, len(call.members))
        responses = await self._infer(request, inputs, lease)
        parse_started = time.monotonic()
        results = await self._read(request, model.card, prepared, calls, responses)
        timings = replace(
            timings,
            infer=parse_started - infer_started,
            postprocess=time.monotonic() - parse_started,
            batch_size=max(len(call.members) for call in calls),
        )
        trace_stages(("postprocess", timings.postprocess))
        return _Wave(responses[0].model_version, results, timings)

    async def _owned_wave(self, request: ImageRequest, which: range, model: ImageModel, batching: Batcher) -> _Wave:
        """Processes the images with these indices independently: none waits for another to be decoded."""
        started = time.monotonic()
        seen = await gather_or_cancel([self._see(request, index, model, batching) for index in which])
        passed_s = time.monotonic() - started
        return _Wave(
            seen[0].response.model_version,
            tuple([one.result for one in seen]),
            concurrent_timings([one.timings for one in seen], passed_s),
            tuple([one.response.explanation for one in seen if one.response.explanation is not None]),
        )

    async def _see(self, request: ImageRequest, index: int, model: ImageModel, batching: Batcher) -> _ImageResult:
        prepared = await self._preparer.alone(request, index, model, self._slab)
        trace_stages(("decode", prepared.decode_s), ("preprocess", prepared.preprocess_s))
        row, lease = prepared.array[np.newaxis], prepared.lease
        inputs = input_tensors(model.card, row, [prepared.geometry], has_batch_axis=True, lease=lease)
        call = InferRequest(request.model_name, inputs, request.model_version, request.id, deadline=request.deadline)
        try:
            response = await batching.infer(call, client=request.client)
        finally:  # a call that still reads the array has its own reference
            if lease is not None:
                lease.release()
        parse_started = time.monotonic()
        result = await self._parsed(request, model.card, response, 0, prepared.geometry)
        received = response.timings
        postprocess_s = time.monotonic() - parse_started
        timings = Timings(
            prepared.decode_s, prepared.preprocess_s, received.queue, received.infer, postprocess_s, received.batch_size
        )
        trace_stages(("postprocess", timings.postprocess))
        return _ImageResult(result, response, timings)

    async def _infer(
        self, request: ImageRequest, inputs: Sequence[tuple[Tensor, ...]], lease: Lease | None
    ) -> list[InferResponse]:
        """One engine call per element of inputs. lease: slab memory of the only image; released here."""
        base = InferRequest(request.model_name, (), request.model_version, request.id, deadline=request.deadline)
        calls = [self._in_turn(replace(base, inputs=tensors), request.client) for tensors in inputs]
        try:
            responses = await gather_or_cancel(calls)
        except BaseException:
            if lease is not None:
                lease.release_later()  # an abandoned call may still read the memory
            raise
        if lease is not None:
            lease.release()
        return responses

    async def _read(
        self,
        request: ImageRequest,
        card: VisionCard,
        prepared: Sequence[PreparedImage],
        calls: Sequence[MergedRows],
        responses: Sequence[InferResponse],
    ) -> tuple[object, ...]:
        results: dict[int, object] = {}
        for call, response in zip(calls, responses, strict=True):
            for row, member in enumerate(call.members):
                batch_row, geometry = row if call.has_batch_axis else None, prepared[member].geometry
                results[member] = await self._parsed(request, card, response, batch_row, geometry)
        return tuple(results[index] for index in range(len(prepared)))

    async def _parsed(
        self, request: ImageRequest, card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry
    ) -> object:
        """The result of one image. Results that can need 500 MB are read in a limited number of threads."""
        work = partial(result_of, request, card, response, row, geometry)
        if card.network_type in (NetworkType.DETECTOR, NetworkType.CLASSIFIER):
            return work()
        return await self._readers.run(work, client=request.client, deadline=request.deadline)

    def _in_turn(self, request: InferRequest, client: str) -> Coroutine[Any, Any, InferResponse]:
        if self._slots is None:
            return self._engine(request)
        return self._slots.ask(partial(self._engine, request), request.model_name, client, request.deadline)

    async def _engine(self, request: InferRequest) -> InferResponse:
        with engine_span() as span:
            response = await self._backend.infer(request if span is None else replace(request, metadata=span.headers))
        if span is not None:
            span.end()
        return response


def _joined(waves: Sequence[_Wave]) -> _Wave:
    """Joins waves that ran one after the other."""
    return _Wave(
        waves[0].model_version,
        tuple(result for wave in waves for result in wave.results),
        sequential_timings([wave.timings for wave in waves]),
        tuple(explanation for wave in waves for explanation in wave.explanations),
    )
