"""Preprocessing of the model families, and its card parameters."""

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.models.inspect.inspection import Hints
from penstock.vision.spec import Triple


class Resize(StrEnum):
    """How a picture is fitted to the network's size; the values of --resize."""

    LETTERBOX = "letterbox"  # aspect kept, centred
    CORNER = "corner"  # aspect kept, at the top left
    SQUASH = "squash"  # aspect lost
    CROP = "crop"  # shorter side resized, centre cut out
    KEEP = "keep"  # the picture's own size, for inputs of variable size


@dataclass(frozen=True, slots=True)
class Family:
    """Preprocessing of one family: (pixel * scale - mean) / std, in the family's colour order.

    padding: a pixel value. crop: with CROP, the network's side divided by the shorter side. is_antialiased: trained on
    an antialiased resize. ambiguity: a sentence on what differs between models of the family; empty if
    nothing does.
    """

    name: str
    resize: Resize
    padding: float = 0.0
    color: str = "rgb"
    scale: float = 1.0
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    crop: float = 1.0
    is_antialiased: bool = False
    size_multiple: int = 1
    min_side: int = 0
    max_side: int = 0
    ambiguity: str = ""

    def unconfirmed(self, *, is_nhwc: bool, is_gray: bool) -> "Family":
        """The family, with ImageNet's mean and std as a question for NHWC (TensorFlow's) and grey networks.

        They are usual only for PyTorch's networks of colour pictures.
        """
        is_imagenet = self.mean == _MEAN and not self.ambiguity
        return replace(self, ambiguity=_NORMALISATION) if is_imagenet and (is_nhwc or is_gray) else self


PIXEL = 1.0 / 255.0
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)
_IMAGENET = Family("imagenet", Resize.SQUASH, scale=PIXEL, mean=_MEAN, std=_STD)
_NORMALISATION = (
    "the file does not say with which mean, standard deviation and colour order (--color) the network was trained"
)
_ROWS = (
    _IMAGENET,
    Family("ultralytics", Resize.LETTERBOX, padding=114.0, scale=PIXEL),
    Family("ultralytics-classify", Resize.CROP, scale=PIXEL, is_antialiased=True),
    Family("yolox", Resize.CORNER, padding=114.0, color="bgr"),
    Family("rt-detr", Resize.SQUASH, scale=PIXEL),
    replace(_IMAGENET, name="detr", is_antialiased=True),
    replace(_IMAGENET, name="detr-any-size", resize=Resize.KEEP, min_side=800, max_side=1333),
    Family("torchvision", Resize.KEEP, scale=PIXEL),
    Family("raw", Resize.SQUASH),
    Family("tensorflow-any-size", Resize.KEEP, max_side=1333),  # the graph resizes
    Family("nanodet", Resize.LETTERBOX, color="bgr", mean=(103.53, 116.28, 123.675), std=(57.375, 57.12, 58.395)),
    replace(_IMAGENET, name="picodet"),
    Family("fastestdet", Resize.SQUASH, color="bgr", scale=PIXEL),
    Family("street", Resize.CORNER, color="bgr", scale=PIXEL),
    Family("ultraface", Resize.SQUASH, mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0)),
    Family("yunet", Resize.CORNER, color="bgr"),
    Family("centerface", Resize.SQUASH),
    replace(_IMAGENET, name="classify", resize=Resize.CROP, crop=0.875, is_antialiased=True),
    replace(_IMAGENET, name="re-identification"),
    Family("faces", Resize.SQUASH, scale=PIXEL, mean=_HALF, std=_HALF, ambiguity=_NORMALISATION),
    replace(_IMAGENET, name="embedding", ambiguity=_NORMALISATION),
    replace(_IMAGENET, name="maps", ambiguity=_NORMALISATION),
    Family("mmdeploy", Resize.LETTERBOX, padding=114.0, scale=PIXEL, ambiguity=_NORMALISATION),
    Family("ctc", Resize.KEEP, color="bgr", scale=PIXEL, mean=_HALF, std=_HALF),
    Family(
        "db",
        Resize.KEEP,
        color="bgr",
        scale=PIXEL,
        mean=_HALF,
        std=_HALF,
        size_multiple=32,
        min_side=736,
        max_side=1920,
    ),
)
FAMILIES = {family.name: family for family in _ROWS}
_LAYOUTS = {  # by family, where their names differ
    "ultralytics": (
        "yolov5",
        "yolov5-seg",
        "yolov8",
        "yolov8-seg",
        "yolov8-pose",
        "yolov8-obb",
        "yolo-end2end",
        "yolo-end2end-seg",
        "yolo-end2end-pose",
        "yolo-end2end-obb",
        "yolov7-nms",
        "efficient-nms",
        "deepstream-yolo",
        "deepstream-yolo-cxcywh",
        # YOLO-NAS: RGB, 0 to 1, longer side 636, centred in 640 x 640 of 114; the border of 2 pixels is left out.
        # Source: default_yolo_nas_coco_processing_params in training/processing/processing.py of
        # github.com/Deci-AI/super-gradients.
        "yolo-nas",
        "yolo-nas-flat",
    ),
    "yolox": ("rtmo",),
    "rt-detr": ("rt-detr-ultralytics",),
    "detr": ("rf-detr", "rf-detr-seg"),
    "nanodet": ("nanodet-plus",),
    "raw": ("tf-detection",),
    "classify": ("classification",),
    "maps": ("semantic", "semantic-multilabel", "depth"),
    "street": ("center-heatmap",),
}
_FAMILY_NAMES = {layout: name for name, layouts in _LAYOUTS.items() for layout in layouts}


def family_of(layout: str) -> Family:
    """The usual preprocessing of a layout's models; mmdeploy's for layouts of many exporters."""
    return FAMILIES.get(_FAMILY_NAMES.get(layout, layout), FAMILIES["mmdeploy"])


def with_hints(family: Family, hints: Hints) -> Family:
    """The family with the hints applied. A mean or std over 2 is in pixel values, so the scale is 1."""
    mean, std, scale = hints.mean, hints.std, hints.scale
    if scale is None and (mean or std):
        scale = 1.0 if max(*std, *mean, 0.0, 0.0) > 2.0 else PIXEL
        mean, std = mean or (0.0,) * 3, std or (1.0,) * 3
    is_given = bool(hints.mean or hints.std or hints.scale is not None or "net-scale-factor" in hints.parameters)
    return replace(
        family,
        resize=Resize(hints.resize) if hints.resize else family.resize,
        padding=family.padding if hints.padding is None else hints.padding,
        color=hints.color or family.color,
        scale=family.scale if scale is None else scale,
        mean=_three(mean) or ((0.0,) * 3 if scale is not None else family.mean),
        std=_three(std) or ((1.0,) * 3 if scale is not None else family.std),
        ambiguity="" if is_given else family.ambiguity,
    )


def _three(values: tuple[float, ...]) -> Triple | None:
    if not values:
        return None
    one, two, three = values * 3 if len(values) == 1 else values
    return one, two, three


def card_parameters(family: Family, *, is_uint8: bool, side: int = 0, is_variable: bool = False) -> dict[str, str]:
    """The parameters of config.pbtxt. side: the network's longer side, for a crop. is_variable: H and W are free."""
    found = {"model-color-format": {"rgb": "0", "bgr": "1", "gray": "2"}[family.color]}
    if not is_uint8:
        found |= _normalisation(family)
    if is_variable:
        sizes = {"size-multiple": family.size_multiple, "min-side": family.min_side, "max-side": family.max_side}
        return found | {key: str(value) for key, value in sizes.items() if value > 1}
    if family.resize in (Resize.LETTERBOX, Resize.CORNER):
        found |= {"maintain-aspect-ratio": "1", "padding-value": f"{family.padding:g}"}
        if family.resize is Resize.LETTERBOX:
            found["symmetric-padding"] = "1"
    elif family.resize is Resize.CROP and side:
        found["resize-shorter-side"] = str(round(side / family.crop))
    if family.is_antialiased:
        found["scaling-filter"] = "area"
    return found


def _normalisation(family: Family) -> dict[str, str]:
    """(pixel * scale - mean) / std as net-scale-factor * (pixel - offset) * channel factor."""
    found = {"net-scale-factor": f"{family.scale:.17g}"}
    channels = 1 if family.color == "gray" else 3
    if any(family.mean):
        found["offsets"] = _listed(tuple(mean / family.scale for mean in family.mean[:channels]))
    if family.std != (1.0, 1.0, 1.0):
        found["channel-scale-factors"] = _listed(tuple(1.0 / std for std in family.std[:channels]))
    return found


def _listed(values: tuple[float, ...]) -> str:
    return ";".join(f"{value:.12g}" for value in values)
