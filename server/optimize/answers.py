"""What a session sees in pictures, by the gateway's own parsers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from server.core.errors import BackendFailed
from server.core.infer import InferResponse
from server.core.result import Classes, Detections, VisionResult
from server.core.tensor import Array, tensor_from_numpy
from server.optimize.agreement import Agreement, class_agreement, detection_agreement
from server.optimize.errors import OptimizeError
from server.optimize.samples import Sample
from server.optimize.source import SourceModel
from server.vision.postprocess import parse


class Session(Protocol):
    """Whatever computes a network: ONNX Runtime's session, or an engine that behaves like one."""

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Array], /) -> Sequence[Any]:
        """The outputs of these names, arrays in that order; all of them for None."""


def answer(session: Session, source: SourceModel, samples: Iterable[Sample]) -> list[VisionResult]:
    """One result a sample, in order. Raises OptimizeError where an answer is none that the card's parser reads."""
    names = [output.name for output in source.config.outputs]
    results: list[VisionResult] = []
    for sample in samples:
        arrays: Sequence[Any] = session.run(names, {source.card.input_name: sample.array})
        tensors = tuple(tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True))
        response = InferResponse(source.name, "", tensors)
        try:
            results.append(parse(source.card, response, 0 if sample.has_batch_axis else None, sample.geometry))
        except BackendFailed as error:
            raise OptimizeError(f"{sample.path.name}: {error.message}") from error
    return results


def agreement(float_found: Sequence[VisionResult], int8_found: Sequence[VisionResult]) -> Agreement:
    """Of two lists that one card's parser made."""
    one, other = detections_of(float_found), detections_of(int8_found)
    if len(one) == len(float_found) and len(other) == len(int8_found):
        return detection_agreement(one, other)
    return class_agreement(
        [result for result in float_found if isinstance(result, Classes)],
        [result for result in int8_found if isinstance(result, Classes)],
    )


def detections_of(found: Sequence[VisionResult]) -> list[Detections]:
    """The boxes, where the results are a detector's."""
    return [result for result in found if isinstance(result, Detections)]
