"""The response of the gateway's image endpoint, as commands read it."""

import msgspec
from msgspec import UNSET, UnsetType

from penstock.gateway.batching.explanation import RequestExplanation

MAX_LABELS = 100_000  # class ids from here on are drawn without their label

Point = tuple[float, float]


class ClassScore(msgspec.Struct, frozen=True):
    """A likely class of the whole picture. score in [0, 1]."""

    class_id: int
    score: float
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the class id if the model has no label for it."""
        return self.label or f"class {self.class_id}"


class RunLengths(msgspec.Struct, frozen=True):
    """COCO's compressed run-length encoding. size: [height, width] of the picture."""

    size: tuple[int, int]
    counts: str


class Detection(ClassScore, frozen=True, kw_only=True):
    """An object, in pixels of the picture after EXIF rotation. Members after xyxy are present if the model has them."""

    xyxy: tuple[float, float, float, float]
    mask: RunLengths | UnsetType = UNSET
    polygons: tuple[tuple[Point, ...], ...] | UnsetType = UNSET
    keypoints: tuple[tuple[float, float, float], ...] | UnsetType = UNSET
    xywhr: tuple[float, float, float, float, float] | UnsetType = UNSET


class RecognisedText(msgspec.Struct, frozen=True):
    """A line of text. polygon: its four corners, if the model finds regions."""

    text: str
    score: float
    polygon: tuple[Point, ...] | UnsetType = UNSET


class ClassArea(msgspec.Struct, frozen=True):
    """The pixels of one class. area: their number. counts: as in RunLengths, missing with masks=none."""

    class_id: int
    area: int
    label: str = ""
    counts: str | UnsetType = UNSET

    @property
    def name(self) -> str:
        """The label, or the class id if the model has no label for it."""
        return self.label or f"class {self.class_id}"


class SegmentationAreas(msgspec.Struct, frozen=True):
    """size: [height, width] of the picture."""

    size: tuple[int, int]
    classes: tuple[ClassArea, ...]


class DepthImage(msgspec.Struct, frozen=True):
    """png16: a PNG of 16 bits in base64; depth = pixel * scale + offset. size: [height, width]."""

    size: tuple[int, int]
    png16: str
    scale: float
    offset: float


class ImageResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one picture. One member is present, by the kind of the model."""

    detections: tuple[Detection, ...] | None = None
    classes: tuple[ClassScore, ...] | None = None
    embedding: tuple[float, ...] | None = None
    text: tuple[RecognisedText, ...] | None = None
    segmentation: SegmentationAreas | None = None
    depth: DepthImage | None = None

    def __bool__(self) -> bool:
        """Whether anything was found."""
        found = self.detections or self.classes or self.embedding or self.text or self.depth
        return bool(found or (self.segmentation is not None and self.segmentation.classes))

    @property
    def labels(self) -> list[str]:
        """By class id; empty for classes that are not in the result."""
        scores = self.detections or self.classes or ()
        areas = self.segmentation.classes if self.segmentation is not None else ()
        known = {one.class_id: one.label for one in scores} | {one.class_id: one.label for one in areas}
        return [known.get(class_id, "") for class_id in range(min(max(known, default=-1) + 1, MAX_LABELS))]


class ImageResults(msgspec.Struct, frozen=True):
    """The response of /image. timings_ms: by stage, and `total`. explain: of its batch, if requested."""

    model_name: str
    model_version: str
    results: tuple[ImageResult, ...]
    timings_ms: dict[str, float]
    batch_size: int = 1
    explain: tuple[RequestExplanation, ...] = ()
