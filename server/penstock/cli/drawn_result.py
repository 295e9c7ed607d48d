"""`penstock infer --draw`: draws the result of a picture into it."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from penstock.client.arrays import vision_result
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.image_answer import Detection, ImageResult
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


def mask_area(found: Detection) -> int:
    """Pixels of the box's mask or outlines; 0 without them. Raises ValueError for an invalid encoding."""
    if found.mask:
        height, width = found.mask.size
        return mask_of(found.mask.counts, height, width).area
    return round(sum(cv2.contourArea(np.array(outline, np.float32)) for outline in found.polygons or ()))
