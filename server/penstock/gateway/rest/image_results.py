"""The JSON of the image endpoint's results: one object per picture, with numbers rounded and labels by class id."""

import base64
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLines,
    VisionResult,
    label_of,
)
from penstock.vision.masks import png16_of, polygons_of, rle_of

PIXEL_DECIMALS, SCORE_DECIMALS, RADIAN_DECIMALS = 3, 6, 5


class MaskForm(StrEnum):
    """How masks are written."""

    RLE = "rle"
    POLYGON = "polygon"
    NONE = "none"


class LabelledClass(msgspec.Struct):
    """score: in [0, 1]."""

    class_id: int
    label: str
    score: float


class RunLengths(msgspec.Struct):
    """COCO's compressed run-length encoding of a mask. size: [height, width] of the picture."""

    size: list[int]
    counts: str


class LabelledBox(msgspec.Struct):
    """xyxy: corners in source pixels. score: in [0, 1]. The other members are present if the model has them."""

    xyxy: list[float]
    class_id: int
    label: str
    score: float
    mask: RunLengths | UnsetType = UNSET
    polygons: Annotated[
        list[list[list[float]]] | UnsetType, Meta(description="With masks=polygon: outlines of [x, y] points.")
    ] = UNSET
    keypoints: Annotated[list[list[float]] | UnsetType, Meta(description="[x, y, score] each.")] = UNSET
    xywhr: Annotated[
        list[float] | UnsetType, Meta(description="Centre x, y, width, height, and clockwise angle in radians.")
    ] = UNSET


class ClassesResult(msgspec.Struct):
    """Classes of one image, by descending score."""

    classes: list[LabelledClass]


class DetectionsResult(msgspec.Struct):
    """Detections of one image, by descending score."""

    detections: list[LabelledBox]


class EmbeddingResult(msgspec.Struct):
    """The embedding of one image."""

    embedding: list[float]


class RecognisedText(msgspec.Struct):
    """text: empty if the model only finds regions. polygon: four corners, if the model finds the region."""

    text: str
    score: float
    polygon: list[list[float]] | UnsetType = UNSET


class TextResult(msgspec.Struct):
    """Text lines of one image, from top to bottom."""

    text: list[RecognisedText]


class ClassArea(msgspec.Struct):
    """The pixels of one class. area: their number. counts: as in a mask. polygons: instead, with masks=polygon."""

    class_id: int
    label: str
    area: int
    counts: str | UnsetType = UNSET
    polygons: list[list[list[float]]] | UnsetType = UNSET


class SegmentationAreas(msgspec.Struct):
    """size: [height, width] of the picture."""

    size: list[int]
    classes: list[ClassArea]


class SegmentationResult(msgspec.Struct):
    """Semantic segmentation of one image."""

    segmentation: SegmentationAreas


class DepthImage(msgspec.Struct):
    """png16: a PNG of 16 bits in base64. Depth = pixel × scale + offset. size: [height, width]."""

    size: list[int]
    png16: str
    scale: float
    offset: float


class DepthResult(msgspec.Struct):
    """Depth of one image."""

    depth: DepthImage


RESULTS = (ClassesResult, DetectionsResult, EmbeddingResult, TextResult, SegmentationResult, DepthResult)
ImageResult = ClassesResult | DetectionsResult | EmbeddingResult | TextResult | SegmentationResult | DepthResult


def result_json(result: VisionResult, labels: Sequence[str], masks: MaskForm = MaskForm.RLE) -> ImageResult:
    """The wire form of a picture's result."""
    match result:
        case Detections():
            return DetectionsResult(_boxes(result, labels, masks))
        case Classes():
            rows = zip(result.class_id.tolist(), _rounded(result.score, SCORE_DECIMALS), strict=True)
            return ClassesResult(
                [LabelledClass(class_id, label_of(class_id, labels), score) for class_id, score in rows]
            )
        case Embedding():
            return EmbeddingResult(result.vector.astype(np.float64).round(SCORE_DECIMALS).tolist())
        case TextLines():
            return TextResult([_text(line.text, line.score, line.polygon) for line in result.lines])
        case SegmentationMap():
            return SegmentationResult(_areas(result, labels, masks))
        case DepthMap():
            return DepthResult(_depth(result))


def _boxes(found: Detections, labels: Sequence[str], masks: MaskForm) -> list[LabelledBox]:
    ids = found.class_id.tolist()
    corners, scores = _rounded(found.xyxy, PIXEL_DECIMALS), _rounded(found.score, SCORE_DECIMALS)
    boxes = [
        LabelledBox(xyxy, class_id, label_of(class_id, labels), score)
        for xyxy, class_id, score in zip(corners, ids, scores, strict=True)
    ]
    if found.masks is not None and masks is not MaskForm.NONE:
        for box, mask in zip(boxes, found.masks, strict=True):
            if masks is MaskForm.RLE:
                box.mask = RunLengths([mask.height, mask.width], rle_of(mask))
            else:
                box.polygons = _outlines(mask)
    if found.keypoints is not None:
        for box, points in zip(boxes, _rounded(found.keypoints, PIXEL_DECIMALS), strict=True):
            box.keypoints = points
    if found.xywhr is not None:
        for box, xywhr in zip(boxes, _rounded(found.xywhr, RADIAN_DECIMALS), strict=True):
            box.xywhr = xywhr
    return boxes


def _text(text: str, score: float, polygon: Any) -> RecognisedText:
    one = RecognisedText(text, round(score, SCORE_DECIMALS))
    if polygon is not None:
        one.polygon = _rounded(polygon, PIXEL_DECIMALS)
    return one


def _areas(found: SegmentationMap, labels: Sequence[str], masks: MaskForm) -> SegmentationAreas:
    areas = []
    for class_id, mask in zip(found.class_id.tolist(), found.masks, strict=True):  # a mask may be computed here
        area = ClassArea(class_id, label_of(class_id, labels), mask.area)
        if masks is MaskForm.RLE:
            area.counts = rle_of(mask)
        elif masks is MaskForm.POLYGON:
            area.polygons = _outlines(mask)
        areas.append(area)
    return SegmentationAreas([found.height, found.width], areas)


def _outlines(mask: Mask) -> list[list[list[float]]]:
    return [_rounded(outline, PIXEL_DECIMALS) for outline in polygons_of(mask)]


def _depth(found: DepthMap) -> DepthImage:
    png, scale, offset = png16_of(found)
    return DepthImage(list(found.values.shape), base64.b64encode(png).decode(), scale, offset)


def _rounded(values: "np.ndarray[Any, np.dtype[np.float32]]", decimals: int) -> Any:
    return values.astype(np.float64).round(decimals).tolist()
