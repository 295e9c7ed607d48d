"""Converts the JSON of an image result to arrays. The inverse of penstock.gateway.rest.image_results."""

import base64
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, UnsetType

from penstock.protocol.image_answer import (
    ClassArea,
    ClassScore,
    DepthImage,
    Detection,
    ImageResult,
    Outlines,
    RecognisedText,
    RunLengths,
    SegmentationAreas,
)
from penstock.protocol.inference import FloatArray, IntArray
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
)

MAX_DEPTH_PIXELS = 1 << 27

Points = tuple[FloatArray, FloatArray, IntArray, FloatArray | None, FloatArray | None]


def vision_result(result: ImageResult, width: int, height: int) -> VisionResult:
    """The result as arrays. width, height: of the image, in pixels.

    Raises ValueError if a mask or a depth map is not a valid encoding for that size.
    """
    if result.detections is not UNSET:
        return _detections(result.detections, width, height)
    if result.embedding is not UNSET:
        return Embedding(floats(result.embedding))
    if result.text is not UNSET:
        return TextLines(tuple(_text_line(line) for line in result.text))
    if result.segmentation is not UNSET:
        return _segmentation(result.segmentation, width, height)
    if result.depth is not UNSET:
        return _depth(result.depth)
    classes = result.classes or ()
    return Classes(floats([one.score for one in classes]), ids(classes))


def points(found: Sequence[Detection]) -> Points:
    """(xyxy, score, class_id, keypoints, xywhr). Raises ValueError if the objects have unequal keypoint counts."""
    keypoints = [one.keypoints for one in found if one.keypoints]
    xywhr = [one.xywhr for one in found if one.xywhr]
    return (
        floats([one.xyxy for one in found]).reshape(-1, 4),
        floats([one.score for one in found]),
        ids(found),
        floats(keypoints) if keypoints and len(keypoints) == len(found) else None,
        floats(xywhr) if xywhr and len(xywhr) == len(found) else None,
    )


def floats(values: object) -> FloatArray:
    """As float32."""
    return np.array(values, np.float32)


def ids(found: Sequence[Detection] | Sequence[ClassScore] | Sequence[ClassArea]) -> IntArray:
    """The class ids. Raises ValueError for one that has more than 64 bits."""
    try:
        return np.array([one.class_id for one in found], np.int64)
    except OverflowError as error:
        raise ValueError(f"a class id is too large: {error}") from error


def _detections(found: Sequence[Detection], width: int, height: int) -> Detections:
    xyxy, score, class_id, keypoints, xywhr = points(found)
    has_masks = any(one.mask or one.polygons for one in found)
    masks = tuple(_mask(one.mask, one.polygons, width, height) for one in found) if has_masks else None
    return Detections(xyxy, score, class_id, masks, keypoints, xywhr)


def _mask(runs: RunLengths | UnsetType, outlines: Outlines | UnsetType, width: int, height: int) -> Mask:
    from penstock.vision.masks import mask_of, mask_of_outlines

    if runs is UNSET:
        return mask_of_outlines(list(map(floats, outlines or ())), height, width)
    if runs.size != [height, width]:
        raise ValueError(f"a mask has {runs.size[1]}x{runs.size[0]} pixels, but the image has {width}x{height}")
    return mask_of(runs.counts, height, width)


def _text_line(line: RecognisedText) -> TextLine:
    return TextLine(line.text, line.score, floats(line.polygon) if line.polygon else None)


def _segmentation(found: SegmentationAreas, width: int, height: int) -> SegmentationMap:
    shown = [one for one in found.classes if one.counts is not UNSET or one.polygons is not UNSET]
    runs = [UNSET if one.counts is UNSET else RunLengths(found.size, one.counts) for one in shown]
    masks = tuple(_mask(run, one.polygons, width, height) for run, one in zip(runs, shown, strict=True))
    return SegmentationMap(height, width, ids(shown), masks)


def _depth(found: DepthImage) -> DepthMap:
    """Checks the size in the PNG header before decoding."""
    from penstock.vision.decode import header_within
    from penstock.vision.masks import depth_of

    png = base64.b64decode(found.png16)
    header = header_within(png, MAX_DEPTH_PIXELS)
    if [header.height, header.width] != found.size:
        raise ValueError(f"the depth map has {header.width}x{header.height} pixels; its size field says {found.size}")
    return DepthMap(depth_of(png, found.scale, found.offset))
