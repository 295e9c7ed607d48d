"""Preprocessing of the model families: the one table of it, and the card parameters for it."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.vision.spec import Triple


class Resize(StrEnum):
    """How a picture is fitted to the network's size; the values of --resize."""

    LETTERBOX = "letterbox"  # aspect kept, centred
    CORNER = "corner"  # aspect kept, at the top left
    SQUASH = "squash"  # aspect lost
    CROP = "crop"  # shorter side resized, centre cut out
    KEEP = "keep"  # the picture's own size


@dataclass(frozen=True, slots=True)
class Family:
    """Preprocessing of one family: value = scale * (pixel - mean) / std, in the family's colour order.

    mean: in pixel values. std: as factor's divisor after the scale. is_antialiased: trained on an antialiased resize.
    """

    name: str
    resize: Resize
    padding: float = 0.0
    is_bgr: bool = False
    scale: float = 1.0
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    is_antialiased: bool = False
    is_certain: bool = True  # False: members of the family differ; the trial's figures or a flag decide


PIXEL = 1.0 / 255.0
_IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_IMAGENET_STD = (0.229, 0.224, 0.225)

_PLAIN = Family("rgb-255", Resize.SQUASH, scale=PIXEL)
_ROWS = (
    Family("ultralytics", Resize.LETTERBOX, padding=114.0, scale=PIXEL),
    Family("ultralytics-classify", Resize.CROP, scale=PIXEL, is_antialiased=True),
    Family("yolox", Resize.CORNER, padding=114.0, is_bgr=True),
    Family("rt-detr", Resize.SQUASH, scale=PIXEL),
)
FAMILIES = {family.name: family for family in (_PLAIN, *_ROWS)}
