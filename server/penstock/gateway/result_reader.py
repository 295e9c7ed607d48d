"""Decodes the engine's outputs to results, and converts these to the response's form."""

import os
from functools import partial

from penstock.gateway.thread_slots import ThreadSlots
from penstock.protocol.inference import InferResponse
from penstock.vision.card import VisionCard
from penstock.vision.preprocess import Geometry
from penstock.vision.results import ImageRequest, parse
from penstock.vision.spec import NetworkType

READ_AT_ONCE = max(2, min(8, os.cpu_count() or 1))
_SMALL = (NetworkType.DETECTOR, NetworkType.CLASSIFIER)


class ResultReader:
    """Decodes results. Those with values per pixel run in threads, a few at a time: each can need 500 MB."""

    def __init__(self) -> None:
        self._slots = ThreadSlots(
            READ_AT_ONCE, what="the model's outputs were read", others="the outputs that are read before its own"
        )

    async def read(
        self, request: ImageRequest, card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry
    ) -> object:
        """The result of one image, or what the request's `write` returns. Raises EngineFailed, DeadlineExceeded."""
        work = partial(_read, request, card, response, row, geometry)
        if card.network_type in _SMALL:
            return work()
        return await self._slots.run(work, client=request.client, deadline=request.deadline)


def _read(
    request: ImageRequest, card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry
) -> object:
    result = parse(card, response, row, geometry)
    return result if request.write is None else request.write(result, card.labels)
