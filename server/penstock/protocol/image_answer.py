"""The JSON of the image endpoint's response: the gateway writes it, clients read it."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.protocol.batch_reports import RequestExplanation

MAX_LABELS = 100_000  # class ids from here on are drawn without their label

Size = Annotated[list[int], Meta(min_length=2, max_length=2)]
Point = Annotated[list[float], Meta(min_length=2, max_length=2)]
Keypoint = Annotated[list[float], Meta(min_length=3, max_length=3)]
Outlines = list[list[Point]]


class MaskForm(StrEnum):
    """How masks are written."""

    RLE = "rle"
    POLYGON = "polygon"
    NONE = "none"


class ClassScore(msgspec.Struct):
    """A class of the whole picture. label: the class id as text if the model has none. score: in [0, 1]."""

    class_id: int
    label: str
    score: float


class RunLengths(msgspec.Struct):
    """COCO's compressed run-length encoding of a mask. size: [height, width] of the picture."""

    size: Size
    counts: str


class Detection(msgspec.Struct, repr_omit_defaults=True):
    """An object. xyxy: corners in pixels of the picture after EXIF rotation. score: in [0, 1].

    The other members are present if the model has them.
    """

    xyxy: Annotated[list[float], Meta(min_length=4, max_length=4)]
    class_id: int
    label: str
    score: float
    mask: RunLengths | UnsetType = UNSET
    polygons: Annotated[Outlines | UnsetType, Meta(description="With masks=polygon: outlines of [x, y] points.")] = (
        UNSET
    )
    keypoints: Annotated[list[Keypoint] | UnsetType, Meta(description="[x, y, score] each.")] = UNSET
    xywhr: Annotated[
        Annotated[list[float], Meta(min_length=5, max_length=5)] | UnsetType,
        Meta(description="Centre x, y, width, height, and clockwise angle in radians."),
    ] = UNSET


class RecognisedText(msgspec.Struct, repr_omit_defaults=True):
    """text: empty if the model only finds regions. polygon: four corners, if the model finds the region."""

    text: str
    score: float
    polygon: list[Point] | UnsetType = UNSET


class ClassArea(msgspec.Struct, repr_omit_defaults=True):
    """The pixels of one class. area: their number. counts: as in a mask. polygons: instead, with masks=polygon."""

    class_id: int
    label: str
    area: int
    counts: str | UnsetType = UNSET
    polygons: Outlines | UnsetType = UNSET


class SegmentationAreas(msgspec.Struct):
    """size: [height, width] of the picture."""

    size: Size
    classes: list[ClassArea]


class DepthImage(msgspec.Struct):
    """png16: a PNG of 16 bits in base64. Depth = pixel × scale + offset. size: [height, width]."""

    size: Size
    png16: str
    scale: float
    offset: float


class ImageResult(msgspec.Struct, kw_only=True, repr_omit_defaults=True):
    """The result of one picture. One member is present, by the kind of the model.

    Classes and detections are sorted by descending score, text from top to bottom.
    """

    classes: list[ClassScore] | UnsetType = UNSET
    detections: list[Detection] | UnsetType = UNSET
    embedding: list[float] | UnsetType = UNSET
    text: list[RecognisedText] | UnsetType = UNSET
    segmentation: SegmentationAreas | UnsetType = UNSET
    depth: DepthImage | UnsetType = UNSET

    def __bool__(self) -> bool:
        """Whether anything was found."""
        areas = self.segmentation and self.segmentation.classes
        return bool(self.detections or self.classes or self.embedding or self.text or self.depth or areas)

    @property
    def labels(self) -> list[str]:
        """By class id; empty for classes that are not in the result."""
        areas = self.segmentation.classes if self.segmentation else ()
        known = {one.class_id: one.label for one in (*(self.detections or self.classes or ()), *areas)}
        return [known.get(class_id, "") for class_id in range(min(max(known, default=-1) + 1, MAX_LABELS))]


class ImageAnswer(msgspec.Struct, omit_defaults=True):
    """One result for each image, in their order; corners in the pixels of the image that was sent."""

    model_name: str
    model_version: str
    results: list[Annotated[ImageResult, Meta(extra_json_schema={"minProperties": 1, "maxProperties": 1})]]
    timings_ms: Annotated[
        dict[str, float],
        Meta(description="Milliseconds by stage: decode, preprocess, queue, infer, postprocess, total."),
    ]
    batch_size: Annotated[int, Meta(ge=1, description="Rows of the engine's call that this request was part of.")]
    id: Annotated[str, Meta(description="The request's x-request-id.")] = ""
    explain: Annotated[
        list[RequestExplanation],
        Meta(description="Of the batch of each image, or of the call with all of them; with x-penstock-explain: 1."),
    ] = msgspec.field(default_factory=list)
