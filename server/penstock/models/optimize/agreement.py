"""Agreement of two models on pictures, by the gateway's own output parsers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.models.optimize.source import OptimizeError, Sample, SourceModel
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Array, FloatArray, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import (
    BoolArray,
    Classes,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    VisionResult,
)
from penstock.vision.layouts.suppression import overlaps
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


@dataclass(frozen=True, slots=True)
class EmbeddingAgreement:
    """Cosine of the angle between the vectors of two networks. mean, least: over the pictures."""

    pictures: int
    mean_cosine: float
    least_cosine: float

    @property
    def share(self) -> float:
        return max(self.mean_cosine, 0.0)


@dataclass(frozen=True, slots=True)
class SegmentationAgreement:
    """Maps of two segmentations. mean_iou: over the classes that one of them shows, pixels of all pictures together."""

    pictures: int
    mean_iou: float
    by_class: tuple[tuple[int, float], ...]  # (class id, IoU)

    @property
    def share(self) -> float:
        return self.mean_iou


Agreement = DetectionAgreement | ClassAgreement | EmbeddingAgreement | SegmentationAgreement


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


def embedding_agreement(float_found: Sequence[Embedding], int8_found: Sequence[Embedding]) -> EmbeddingAgreement:
    """Compares the directions; a vector of length 0 is like no other."""
    cosines = [_cosine(one.vector, other.vector) for one, other in zip(float_found, int8_found, strict=True)]
    return EmbeddingAgreement(len(cosines), float(np.mean(cosines)), float(np.min(cosines)))


def _cosine(one: FloatArray, other: FloatArray) -> float:
    vectors = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(vectors[0]) * np.linalg.norm(vectors[1]))
    return float(vectors[0] @ vectors[1]) / lengths if lengths else 0.0


def segmentation_agreement(
    float_found: Sequence[SegmentationMap], int8_found: Sequence[SegmentationMap]
) -> SegmentationAgreement:
    """Intersection over union of each class. 1 if neither shows a class."""
    shared, all_pixels = Counter[int](), Counter[int]()
    for one, other in zip(float_found, int8_found, strict=True):
        left, right = (dict(zip(found.class_id.tolist(), found.masks, strict=True)) for found in (one, other))
        for class_id in left.keys() | right.keys():
            both = [_pixels(found[class_id]) for found in (left, right) if class_id in found]
            shared[class_id] += int(np.count_nonzero(np.logical_and.reduce(both))) if len(both) == 2 else 0
            all_pixels[class_id] += int(np.count_nonzero(np.logical_or.reduce(both)))
    by_class = tuple((class_id, shared[class_id] / count) for class_id, count in sorted(all_pixels.items()) if count)
    mean = sum(iou for _, iou in by_class) / len(by_class) if by_class else 1.0
    return SegmentationAgreement(len(float_found), mean, by_class)


def _pixels(mask: Mask) -> BoolArray:
    """(height, width) of the whole picture."""
    whole = np.zeros((mask.height, mask.width), np.bool_)
    rows, columns = mask.bits.shape
    whole[mask.top : mask.top + rows, mask.left : mask.left + columns] = mask.bits
    return whole


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
        arrays: Sequence[Any] = session.run(names, sample.feed)
        tensors = tuple(tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True))
        response = InferResponse(source.name, "", tensors)
        try:
            results.append(parse(source.card, response, 0 if sample.has_batch_axis else None, sample.geometry))
        except InferenceError as error:
            raise OptimizeError(f"{sample.path.name}: {error.message}") from error
    return results


def measure_agreement(float_found: Sequence[VisionResult], int8_found: Sequence[VisionResult]) -> Agreement:
    """Agreement of two lists of results from one card's parser. Raises OptimizeError for text and depth."""
    both = float_found, int8_found
    if all(isinstance(result, Detections) for found in both for result in found):
        return detection_agreement(*(_of(Detections, found) for found in both))
    if all(isinstance(result, Embedding) for found in both for result in found):
        return embedding_agreement(*(_of(Embedding, found) for found in both))
    if all(isinstance(result, SegmentationMap) for found in both for result in found):
        return segmentation_agreement(*(_of(SegmentationMap, found) for found in both))
    if all(isinstance(result, Classes) for found in both for result in found):
        return class_agreement(*(_of(Classes, found) for found in both))
    raise OptimizeError("results of this layout cannot be compared; choose a detector, classifier or segmentation")


def detections_of(found: Sequence[VisionResult]) -> list[Detections]:
    """The boxes of a detector's results."""
    return _of(Detections, found)


_Result = TypeVar("_Result", bound=VisionResult)


def _of(kind: type[_Result], found: Sequence[VisionResult]) -> list[_Result]:
    return [result for result in found if isinstance(result, kind)]
