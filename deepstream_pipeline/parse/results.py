"""An engine's raw outputs to what the pipeline speaks of: boxes in source pixels, and named classes."""

from typing import Protocol

import numpy as np

from deepstream_pipeline.errors import InferFailed
from deepstream_pipeline.types import ClassScore, Detections
from server.core.errors import BackendFailed, InferenceError
from server.core.infer import InferResponse
from server.core.result import Classes, VisionResult
from server.vision.card import VisionCard
from server.vision.postprocess import parse
from server.vision.preprocess import Geometry, geometry_of


class ParsedNetwork(Protocol):
    """What is to be known of a network: infer.network.Network.

    class_ids: of the objects that are wanted; empty for all.
    """

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> VisionCard: ...

    @property
    def class_ids(self) -> frozenset[int]: ...


class Answered(Protocol):
    """Rows and their outputs: infer.answer.Answer."""

    def row(self, index: int) -> tuple[InferResponse, int | None]:
        """The response with that row's outputs, and its place there, None where all of it is the row's."""
        ...


def detections_of(network: ParsedNetwork, answer: Answered, index: int, width: int, height: int) -> Detections:
    """What a detector saw in the row's frame, a source of width x height pixels; the likeliest first.

    Raises InferFailed where the row was not answered, or its answer is none: it names the model and the output.
    """
    seen = _parsed(network, answer, index, geometry_of(width, height, network.card.prepare_spec))
    if isinstance(seen, Classes):
        raise InferFailed(f"model {network.name!r} says what a whole picture is, and not where things are in it")
    wanted = np.isin(seen.class_id, list(network.class_ids)) if network.class_ids else slice(None)
    return Detections(
        np.ascontiguousarray(seen.xyxy[wanted], np.float32),
        np.ascontiguousarray(seen.score[wanted], np.float32),
        np.ascontiguousarray(seen.class_id[wanted], np.int64),
    )


def classes_of(network: ParsedNetwork, answer: Answered, index: int) -> tuple[ClassScore, ...]:
    """What a classifier says of the row's picture, the likeliest class first. Raises InferFailed as above."""
    seen = _parsed(network, answer, index, _NOWHERE)
    if not isinstance(seen, Classes):
        raise InferFailed(f"model {network.name!r} finds objects, and does not say what a whole picture is")
    labels = network.card.labels
    scores = [
        ClassScore(network.name, number, _label(labels, number), score)
        for number, score in zip(seen.class_id.tolist(), seen.score.tolist(), strict=True)
        if not network.class_ids or number in network.class_ids
    ]
    return tuple(scores)


def _parsed(network: ParsedNetwork, answer: Answered, index: int, geometry: Geometry) -> VisionResult:
    response, place = answer.row(index)
    try:
        return parse(network.card, response, place, geometry)
    except BackendFailed as error:
        raise InferFailed(error.message) from error
    except InferenceError as error:
        raise InferFailed(f"model {network.name!r}: {error.message}") from error


def _label(labels: tuple[str, ...], class_id: int) -> str:
    return labels[class_id] if 0 <= class_id < len(labels) else f"class {class_id}"


_NOWHERE = Geometry(1, 1, 1, 1, 1.0, 1.0)  # a classifier's answer has no place
