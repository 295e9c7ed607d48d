"""Draws a result into its picture: boxes, masks, keypoints, oriented boxes, text, areas, depth, names of classes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

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
from penstock.vision import palette
from penstock.vision.captions import CaptionedBox, lettering_of, position_captions
from penstock.vision.lettering import Picture, drawable, line_px_of
from penstock.vision.palette import Color

Points = npt.NDArray[np.int32]  # (n, 2): x, y in pixels of the picture

MIN_KEYPOINT_SCORE = 0.25
MAX_CAPTIONS = 200  # boxes; more captions would hide each other
MAX_LEGEND_LINES = 12  # of classes of a segmentation, the largest first
MAX_CAPTION_CHARACTERS = 80
_FARTHEST = 1e9  # pixels


def draw_result(
    image: Picture, result: VisionResult, labels: Sequence[str], *, skeleton: Sequence[tuple[int, int]] = ()
) -> None:
    """Draws into image, (H, W, 3) BGR, the picture that the result is about.

    labels: by class id. skeleton: pairs of keypoints that lines join. Depth replaces the picture.
    """
    match result:
        case Detections():
            _draw_detections(image, result, labels, skeleton)
        case Classes():
            rows = zip(result.class_id.tolist(), result.score.tolist(), strict=True)
            draw_lines(
                image, [(_caption(label_of(one, labels), score), color_of(i)) for i, (one, score) in enumerate(rows)]
            )
        case Embedding():
            draw_lines(image, [(f"embedding of {len(result.vector)} values", color_of(0))])
        case TextLines():
            _draw_text_lines(image, result)
        case SegmentationMap():
            _draw_areas(image, result, labels)
        case DepthMap():
            _draw_depth(image, result)


def color_of(class_id: int) -> Color:
    """The class's colour in the palette: blue, green, red."""
    red, green, blue = palette.color_of(class_id)
    return blue, green, red


def draw_lines(image: Picture, lines: Iterable[tuple[str, Color]]) -> None:
    """Draws lines of text into the upper left corner, each on its own colour. Lines below the picture are left out."""
    lettering, top = lettering_of(image), 0
    for text, color in lines:
        plain = lettering.fitted(drawable(text)[:MAX_CAPTION_CHARACTERS], image.shape[1])
        if top and top + lettering.height > image.shape[0]:
            return
        lettering.plate(image, plain, (0, top), color)
        top += lettering.height


def draw_boxes(image: Picture, boxes: Sequence[CaptionedBox]) -> None:
    """Draws rectangles with a dark edge, the first on top, and their captions."""
    for box in reversed(boxes):
        low, high = _points(image, np.array(box.xyxy).reshape(2, 2)).tolist()
        if (width := line_width(image)) > 1:
            cv2.rectangle(image, low, high, palette.INK, width + 2)
        cv2.rectangle(image, low, high, color_of(box.class_id), width)
    draw_captions(image, boxes)


def draw_captions(image: Picture, boxes: Sequence[CaptionedBox]) -> None:
    """Draws the boxes' captions where they hide no other box.

    A small box has a small caption. One that would hide another box or an earlier box's caption is left out.
    """
    full = lettering_of(image)
    boxes = [replace(box, caption=full.fitted(box.caption, image.shape[1])) for box in boxes[:MAX_CAPTIONS]]
    for box, placed in zip(boxes, position_captions(image, boxes), strict=True):
        if placed is not None:
            lettering, at = placed
            lettering.plate(image, box.caption, (at.left, at.top), color_of(box.class_id))


def line_width(image: Picture) -> int:
    """Line width in pixels for the picture's size."""
    return line_px_of(image.shape[1], image.shape[0])


def _draw_detections(
    image: Picture, found: Detections, labels: Sequence[str], skeleton: Sequence[tuple[int, int]]
) -> None:
    class_ids = found.class_id.tolist()
    if found.masks is not None:
        for class_id, mask in reversed(list(zip(class_ids, found.masks, strict=True))):
            _blend(image, mask, color_of(class_id))
    corners = _points(image, found.xyxy.reshape(-1, 2)).reshape(-1, 4)
    boxes = [
        CaptionedBox((x1, y1, x2, y2), _caption(label_of(class_id, labels), score), class_id)
        for (x1, y1, x2, y2), class_id, score in zip(corners.tolist(), class_ids, found.score.tolist(), strict=True)
    ]
    if found.xywhr is not None:
        outlines = _points(image, oriented_corners(found.xywhr).reshape(-1, 2)).reshape(-1, 4, 2)
        for class_id, outline in zip(class_ids, outlines, strict=True):
            _draw_outline(image, outline, color_of(class_id))
        draw_captions(image, boxes)
    else:
        draw_boxes(image, boxes)
    if found.keypoints is not None:
        for class_id, keypoints in zip(class_ids, found.keypoints, strict=True):
            _draw_keypoints(image, keypoints, skeleton, color_of(class_id))


def _draw_keypoints(
    image: Picture, keypoints: npt.NDArray[np.float32], skeleton: Sequence[tuple[int, int]], color: Color
) -> None:
    """keypoints: (k, 3)."""
    points, is_seen = _points(image, keypoints[:, :2]).tolist(), (keypoints[:, 2] >= MIN_KEYPOINT_SCORE).tolist()
    width = line_width(image)
    for one, other in skeleton:
        if max(one, other) < len(points) and is_seen[one] and is_seen[other]:
            cv2.line(image, points[one], points[other], palette.INK, width + 2, cv2.LINE_AA)
            cv2.line(image, points[one], points[other], color, width, cv2.LINE_AA)
    for point, is_drawn in zip(points, is_seen, strict=True):
        if is_drawn:
            cv2.circle(image, point, width + 3, palette.INK, cv2.FILLED, cv2.LINE_AA)
            cv2.circle(image, point, width + 2, color, cv2.FILLED, cv2.LINE_AA)


def _draw_text_lines(image: Picture, found: TextLines) -> None:
    placed = [(line, line.polygon) for line in found.lines if line.polygon is not None]
    boxes = []
    for line, polygon in placed:
        outline = _points(image, polygon)
        _draw_outline(image, outline, color_of(0))
        low, high = outline.min(axis=0).tolist(), outline.max(axis=0).tolist()
        boxes.append(CaptionedBox((*low, *high), _text_caption(line), 0))
    draw_captions(image, boxes)
    draw_lines(image, [(_text_caption(line), color_of(0)) for line in found.lines if line.polygon is None])


def _text_caption(line: TextLine) -> str:
    return _caption(line.text, line.score)


def _draw_areas(image: Picture, found: SegmentationMap, labels: Sequence[str]) -> None:
    class_ids = found.class_id.tolist()
    areas = []
    for class_id, mask in zip(class_ids, found.masks, strict=True):  # a mask may be computed here
        _blend(image, mask, color_of(class_id))
        areas.append(mask.area)
    largest = sorted(range(len(areas)), key=lambda index: -areas[index])[:MAX_LEGEND_LINES]
    whole = max(found.width * found.height, 1)
    draw_lines(
        image,
        [
            (f"{label_of(class_ids[one], labels)} {100 * areas[one] / whole:.0f}%", color_of(class_ids[one]))
            for one in largest
        ],
    )


def _draw_depth(image: Picture, found: DepthMap) -> None:
    """Bright: high values."""
    low, high = float(found.values.min()), float(found.values.max())
    scale = 255 / (high - low) if high > low else 0.0
    colors = cv2.applyColorMap(cv2.convertScaleAbs(found.values, alpha=scale, beta=-low * scale), cv2.COLORMAP_INFERNO)
    if colors.shape != image.shape:
        colors = cv2.resize(colors, (image.shape[1], image.shape[0]))
    image[:] = colors


def _blend(image: Picture, mask: Mask, color: Color) -> None:
    """Mixes the colour with the mask's pixels, half and half."""
    top, left = max(mask.top, 0), max(mask.left, 0)
    region = image[top : mask.top + mask.bits.shape[0], left : mask.left + mask.bits.shape[1]]
    bits = mask.bits[top - mask.top :, left - mask.left :][: region.shape[0], : region.shape[1]]
    region[bits] = region[bits] // 2 + np.array(color, np.uint8) // 2


def _draw_outline(image: Picture, outline: Points, color: Color) -> None:
    width = line_width(image)
    if width > 1:
        cv2.polylines(image, [outline], True, palette.INK, width + 2, cv2.LINE_AA)
    cv2.polylines(image, [outline], True, color, width, cv2.LINE_AA)


def oriented_corners(xywhr: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """(n, 5) to (n, 4, 2): the corners of oriented boxes."""
    boxes = np.nan_to_num(xywhr.astype(np.float64), posinf=_FARTHEST, neginf=-_FARTHEST)
    centre, size, angle = boxes[:, np.newaxis, :2], boxes[:, 2:4] / 2, boxes[:, 4]
    along = np.stack([np.cos(angle), np.sin(angle)], axis=1) * size[:, :1]
    across = np.stack([-np.sin(angle), np.cos(angle)], axis=1) * size[:, 1:]
    return centre + np.stack([-along - across, along - across, along + across, across - along], axis=1)


def _points(image: Picture, points: npt.NDArray[Any]) -> Points:
    """(n, 2) pixels of the picture and one picture around it; OpenCV cannot draw to 1e30 or NaN."""
    sides = np.array([image.shape[1], image.shape[0]], np.float64)
    bounded = np.clip(np.nan_to_num(points.astype(np.float64)), -sides, 2 * sides)
    return np.round(bounded).astype(np.int32)


def _caption(text: str, score: float) -> str:
    return f"{drawable(text)[:MAX_CAPTION_CHARACTERS]} {score:.2f}".strip()
