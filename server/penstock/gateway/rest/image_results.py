"""The JSON of the image endpoint's response: the gateway writes it, commands read it."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from penstock.protocol.image_answer import (
    ClassArea,
    ClassScore,
    DepthImage,
    Detection,
    ImageResult,
    MaskForm,
    Outlines,
    RecognisedText,
    RunLengths,
    SegmentationAreas,
)
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
    VisionResult,
    label_of,
)
from penstock.vision.masks import png16_of, polygons_of, rle_of

PIXEL_DECIMALS, SCORE_DECIMALS, RADIAN_DECIMALS = 3, 6, 5


def result_json(result: VisionResult, labels: Sequence[str], masks: MaskForm = MaskForm.RLE) -> ImageResult:
    """The JSON form of a picture's result. labels: by class id."""
    match result:
        case Detections():
            return ImageResult(detections=_boxes(result, labels, masks))
        case Classes():
            rows = zip(result.class_id.tolist(), _rounded(result.score, SCORE_DECIMALS), strict=True)
            return ImageResult(
                classes=[ClassScore(class_id, label_of(class_id, labels), score) for class_id, score in rows]
            )
        case Embedding():
            return ImageResult(embedding=_rounded(result.vector, SCORE_DECIMALS))
        case TextLines():
            return ImageResult(text=[_text(line) for line in result.lines])
        case SegmentationMap():
            return ImageResult(segmentation=_areas(result, labels, masks))
        case DepthMap():
            png, scale, offset = png16_of(result)
            size, text = list(result.values.shape), base64.b64encode(png).decode()
            return ImageResult(depth=DepthImage(size, text, scale, offset))


def _boxes(found: Detections, labels: Sequence[str], masks: MaskForm) -> list[Detection]:
    ids = found.class_id.tolist()
    corners, scores = _rounded(found.xyxy, PIXEL_DECIMALS), _rounded(found.score, SCORE_DECIMALS)
    boxes = [
        Detection(xyxy, class_id, label_of(class_id, labels), score)
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


def _text(line: TextLine) -> RecognisedText:
    polygon = UNSET if line.polygon is None else _rounded(line.polygon, PIXEL_DECIMALS)
    return RecognisedText(line.text, round(line.score, SCORE_DECIMALS), polygon)


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


def _outlines(mask: Mask) -> Outlines:
    return [_rounded(outline, PIXEL_DECIMALS) for outline in polygons_of(mask)]


def _rounded(values: "np.ndarray[Any, np.dtype[np.float32]]", decimals: int) -> Any:
    return values.astype(np.float64).round(decimals).tolist()
