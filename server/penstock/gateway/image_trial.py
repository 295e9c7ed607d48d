"""Trial of a model at load: generated pictures pass through the same steps as in /image."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache

import cv2
import numpy as np

from penstock.gateway.batching.merging import MergedRows, merge_rows
from penstock.protocol.engine import Engine
from penstock.protocol.errors import EngineFailed, InvalidRequest, OutOfMemory, TooLarge
from penstock.protocol.inference import InferRequest
from penstock.vision.card import VisionCard
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.image_tasks import input_tensors
from penstock.vision.results import CANARY_PICTURE, LOWEST_CONF, ImageModel, parse

_TRIED_RESULTS = 100
_WIDTH, _HEIGHT = 500, 375  # neither a square nor a multiple of a stride


async def why_pictures_fail(
    model: ImageModel, prepare: Callable[[bytes], Awaitable[PreparedImage]], engine: Engine, deadline: float
) -> str:
    """Why the model cannot process pictures; empty if it can.

    Merges two pictures into one batch if the model's requests are merged, as a missing batch axis shows only in the
    second row. Uses the lowest threshold that a client can request, so that more rows are decoded. prepare: as for
    /image. Raises InferenceError if the decoders or the engine are unreachable.
    """
    card, config = _without_thresholds(model.card), model.config
    pictures = (_picture_with_detail(), CANARY_PICTURE) if config.merged_rows > 1 else (_picture_with_detail(),)
    try:
        prepared = [await prepare(picture) for picture in pictures]
    except TooLarge:  # this gateway's max_pixels
        return ""
    calls = merge_rows(
        [one.array for one in prepared], declared_shape=card.input_shape, max_batch_size=config.max_batch_size
    )
    for call in calls:
        try:
            await _try_call(card, call, prepared, engine, InferRequest(config.name, (), deadline=deadline))
        except OutOfMemory:  # memory is short now
            return ""
        except InvalidRequest as error:
            if not card.prepare_spec.row_bytes:  # the model may take pictures of other sizes
                return ""
            return f"a picture through /image: {error.message}"
        except EngineFailed as error:
            return f"a picture through /image: {error.message}"
    return ""


async def _try_call(
    card: VisionCard, call: MergedRows, prepared: list[PreparedImage], engine: Engine, base: InferRequest
) -> None:
    geometries = [prepared[member].geometry for member in call.members]
    inputs = input_tensors(card, call.array, geometries, has_batch_axis=call.has_batch_axis)
    response = await engine.infer(replace(base, inputs=inputs))
    for row, geometry in enumerate(geometries):
        await asyncio.to_thread(parse, card, response, row if call.has_batch_axis else None, geometry)


def _without_thresholds(card: VisionCard) -> VisionCard:
    options = replace(
        card.layout_options,
        pre_cluster_threshold=min(card.layout_options.pre_cluster_threshold, LOWEST_CONF),
        classifier_threshold=-math.inf,
        class_thresholds=(),
        topk=_TRIED_RESULTS,
    )
    return replace(card, layout_options=options)


@lru_cache(1)
def _picture_with_detail() -> bytes:
    """A JPEG of coloured patches, edges and noise, in which detectors find candidates."""
    random = np.random.default_rng(1)
    coarse = random.integers(0, 256, (6, 8, 3), np.uint8)
    pixels = cv2.resize(coarse, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC)
    for left, top, size, shade in random.integers((0, 0, 20, 0), (400, 300, 160, 256), (12, 4)).tolist():
        cv2.rectangle(pixels, (left, top), (left + size, top + size // 2), (shade, 255 - shade, shade // 2), cv2.FILLED)
    noise = random.integers(0, 32, pixels.shape, np.uint8)
    return cv2.imencode(".jpg", cv2.add(pixels, noise))[1].tobytes()
