"""Agreement of two models on pictures, by the gateway's own output parsers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.models.optimize.source import OptimizeError, Sample, SourceModel
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import Array, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections, VisionResult
from penstock.vision.layouts.layout import overlaps
from penstock.vision.results import parse

IOU = 0.5


@dataclass(frozen=True, slots=True)
class DetectionAgreement:
    """Boxes of two detectors. float_boxes = found_again + lost; int8_boxes = found_again + new."""

    pictures: int
    float_boxes: int
    int8_boxes: int
    found_again: int

    @property
    def lost(self) -> int:
        return self.float_boxes - self.found_again

    @property
    def new(self) -> int:
        return self.int8_boxes - self.found_again

    @property
    def share(self) -> float:
        """F1 score; 1 if neither finds a box."""
        boxes = self.float_boxes + self.int8_boxes
        return 2 * self.found_again / boxes if boxes else 1.0


@dataclass(frozen=True, slots=True)
class ClassAgreement:
    """Pictures with the same top class from two classifiers."""

    pictures: int
    same_top1: int

    @property
    def share(self) -> float:
        return self.same_top1 / self.pictures if self.pictures else 1.0


Agreement = DetectionAgreement | ClassAgreement


def detection_agreement(float_found: Sequence[Detections], int8_found: Sequence[Detections]) -> DetectionAgreement:
    """Matches boxes one to one, of the same class and with IoU >= 0.5."""
    pairs = list(zip(float_found, int8_found, strict=True))
    return DetectionAgreement(
        pictures=len(pairs),
        float_boxes=sum(len(one.score) for one in float_found),
        int8_boxes=sum(len(other.score) for other in int8_found),
        found_again=sum(_matches(one, other) for one, other in pairs),
    )


def class_agreement(float_found: Sequence[Classes], int8_found: Sequence[Classes]) -> ClassAgreement:
    """Compares the first class of each; two empty results agree."""
    pairs = list(zip(float_found, int8_found, strict=True))
    same = sum(one.class_id[:1].tolist() == other.class_id[:1].tolist() for one, other in pairs)
    return ClassAgreement(len(pairs), same)


def _matches(one: Detections, other: Detections) -> int:
    left = overlaps(one.xyxy, other.xyxy)
    left[one.class_id[:, np.newaxis] != other.class_id[np.newaxis]] = 0.0
    count = 0
    while left.size and left.max() >= IOU:
        row, column = np.unravel_index(int(left.argmax()), left.shape)
        left[row], left[:, column] = 0.0, 0.0
        count += 1
    return count


class Session(Protocol):
    """An ONNX Runtime session, or an engine with the same interface."""

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Array], /) -> Sequence[Any]:
        """The named outputs in that order, or all outputs for None."""


def run_samples(session: Session, source: SourceModel, samples: Iterable[Sample]) -> list[VisionResult]:
    """One result per sample, in order. Raises OptimizeError if the card's parser rejects an output."""
    names = [output.name for output in source.config.outputs]
    results: list[VisionResult] = []
    for sample in samples:
        arrays: Sequence[Any] = session.run(names, {source.card.input_name: sample.array})
        tensors = tuple(tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True))
        response = InferResponse(source.name, "", tensors)
        try:
            results.append(parse(source.card, response, 0 if sample.has_batch_axis else None, sample.geometry))
        except EngineFailed as error:
            raise OptimizeError(f"{sample.path.name}: {error.message}") from error
    return results


def measure_agreement(float_found: Sequence[VisionResult], int8_found: Sequence[VisionResult]) -> Agreement:
    """Agreement of two lists of results from one card's parser."""
    one, other = detections_of(float_found), detections_of(int8_found)
    if len(one) == len(float_found) and len(other) == len(int8_found):
        return detection_agreement(one, other)
    return class_agreement(
        [result for result in float_found if isinstance(result, Classes)],
        [result for result in int8_found if isinstance(result, Classes)],
    )


def detections_of(found: Sequence[VisionResult]) -> list[Detections]:
    """The boxes of a detector's results."""
    return [result for result in found if isinstance(result, Detections)]
