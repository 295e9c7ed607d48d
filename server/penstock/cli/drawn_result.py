"""A result of the image endpoint as arrays, drawn into its picture."""

import base64
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from msgspec import UNSET

from penstock.cli.image_result import (
    ClassArea,
    ClassScore,
    DepthImage,
    Detection,
    ImageResult,
    RecognisedText,
    SegmentationAreas,
)
from penstock.protocol.errors import InvalidRequest
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
from penstock.vision.decode import decode
from penstock.vision.drawing import draw_result
from penstock.vision.masks import mask_of
from penstock.vision.spec import ColorFormat

NO_PIXEL_LIMIT = 1 << 62  # the gateway has checked the picture


class CannotDraw(Exception):
    """The picture has a result, but drawing it failed. str() is for display."""


def draw_file(data: bytes, result: ImageResult, target: Path, skeleton: Sequence[tuple[int, int]]) -> None:
    """Writes the encoded picture with its result, upright as the gateway decodes it. Raises CannotDraw."""
    try:
        picture = decode(data, ColorFormat.BGR, max_pixels=NO_PIXEL_LIMIT).pixels
        height, width = picture.shape[:2]
        draw_result(picture, vision_result(result, width, height), result.labels, skeleton=skeleton)
    except (InvalidRequest, ValueError) as error:
        raise CannotDraw(f"{target} cannot be drawn: {error}") from error
    try:
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(cv2.imencode(target.suffix, picture)[1].tobytes())
    except OSError as error:
        raise CannotDraw(f"{target} cannot be written ({error.strerror}): give --draw another place") from error


def vision_result(result: ImageResult, width: int, height: int) -> VisionResult:
    """The result as arrays. width, height: of the picture, in pixels.

    Raises ValueError if a mask or a depth map is not a valid encoding for that size.
    """
    if result.detections is not None:
        return _detections(result.detections, width, height)
    if result.embedding is not None:
        return Embedding(np.array(result.embedding, np.float32))
    if result.text is not None:
        return TextLines(tuple(_text_line(line) for line in result.text))
    if result.segmentation is not None:
        return _segmentation(result.segmentation, width, height)
    if result.depth is not None:
        return _depth(result.depth)
    classes = result.classes or ()
    return Classes(_floats([one.score for one in classes]), _ids(classes))


def mask_area(found: Detection) -> int:
    """Pixels of the box's mask or outlines; 0 without them. Raises ValueError for an invalid encoding."""
    if found.mask is not UNSET:
        height, width = found.mask.size
        return mask_of(found.mask.counts, height, width).area
    outlines = () if found.polygons is UNSET else found.polygons
    return round(sum(cv2.contourArea(_floats(outline)) for outline in outlines))


def _detections(found: Sequence[Detection], width: int, height: int) -> Detections:
    has_masks = any(one.mask is not UNSET or one.polygons is not UNSET for one in found)
    keypoints = [one.keypoints for one in found if one.keypoints is not UNSET]
    xywhr = [one.xywhr for one in found if one.xywhr is not UNSET]
    return Detections(
        _floats([one.xyxy for one in found]).reshape(-1, 4),
        _floats([one.score for one in found]),
        _ids(found),
        tuple(_mask(one, width, height) for one in found) if has_masks else None,
        _floats(keypoints) if keypoints and len(keypoints) == len(found) else None,
        _floats(xywhr) if xywhr and len(xywhr) == len(found) else None,
    )


def _mask(found: Detection, width: int, height: int) -> Mask:
    if found.mask is not UNSET:
        return _decoded(found.mask.counts, found.mask.size, width, height)
    pixels = np.zeros((height, width), np.uint8)
    outlines = () if found.polygons is UNSET else found.polygons
    cv2.fillPoly(pixels, [np.array(outline, np.float32).round().astype(np.int32) for outline in outlines], (1,))
    return Mask(height, width, 0, 0, pixels.astype(np.bool_))


def _decoded(counts: str, size: tuple[int, int], width: int, height: int) -> Mask:
    if size != (height, width):
        raise ValueError(f"a mask is of {size[1]}x{size[0]} pixels, the picture of {width}x{height}")
    return mask_of(counts, height, width)


def _text_line(line: RecognisedText) -> TextLine:
    return TextLine(line.text, line.score, None if line.polygon is UNSET else _floats(line.polygon))


def _segmentation(found: SegmentationAreas, width: int, height: int) -> SegmentationMap:
    shown = [one for one in found.classes if one.counts is not UNSET]
    masks = tuple(_decoded(one.counts, found.size, width, height) for one in shown if one.counts is not UNSET)
    return SegmentationMap(height, width, _ids(shown), masks)


def _depth(found: DepthImage) -> DepthMap:
    data = np.frombuffer(base64.b64decode(found.png16), np.uint8)
    pixels = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if len(data) else None
    if pixels is None or pixels.ndim != 2:
        raise ValueError("the depth map is not a PNG of one channel")
    return DepthMap((pixels.astype(np.float64) * found.scale + found.offset).astype(np.float32))


def _floats(values: object) -> FloatArray:
    return np.array(values, np.float32)


def _ids(found: Sequence[ClassScore | ClassArea]) -> IntArray:
    return np.array([one.class_id for one in found], np.int64)
