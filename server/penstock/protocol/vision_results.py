"""Results of one picture, in its own pixels after EXIF rotation: detections, classes, masks, embeddings, text, maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mask:
    """The pixels of one object or class. bits: (h, w) bool, with its top left corner at (left, top) of the picture.

    height, width: of the whole picture. All pixels outside bits are False.
    """

    height: int
    width: int
    left: int
    top: int
    bits: BoolArray

    @property
    def area(self) -> int:
        """Number of pixels."""
        return int(np.count_nonzero(self.bits))


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image, by descending score.

    xyxy: (n, 4) float32, corners in source pixels after EXIF rotation. score: (n,) float32 in [0, 1]. class_id: (n,)
    int64. masks: one per box. keypoints: (n, k, 3) float32: x, y in source pixels, score in [0, 1] (1 if the model has
    none). xywhr: (n, 5) float32: centre, width and height in source pixels, and the angle of the width's side in
    radians, clockwise. Each is None if the model has none.
    """

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray
    masks: tuple[Mask, ...] | None = None
    keypoints: FloatArray | None = None
    xywhr: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Classes:
    """The most likely classes of one image: score (n,) float32, descending; class_id (n,) int64."""

    score: FloatArray
    class_id: IntArray


@dataclass(frozen=True, slots=True)
class Embedding:
    """One image as a vector. vector: (d,) float32."""

    vector: FloatArray


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text. text: empty if only the region is known. polygon: (4, 2) float32; None for the whole image."""

    text: str
    score: float
    polygon: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class TextLines:
    """Text of one image, from top to bottom."""

    lines: tuple[TextLine, ...]


@dataclass(frozen=True, slots=True)
class SegmentationMap:
    """Classes of the pixels. masks[i]: the pixels of class_id[i]; they may overlap if a pixel can have many classes.

    height, width: of the image. class_id: (n,) int64, ascending; classes without a pixel are left out. masks may be
    computed when they are read: read each once.
    """

    height: int
    width: int
    class_id: IntArray
    masks: Sequence[Mask]


@dataclass(frozen=True, slots=True)
class DepthMap:
    """Depth or inverse depth, as the model outputs it. values: (height, width) float32, finite."""

    values: FloatArray


VisionResult = Detections | Classes | Embedding | TextLines | SegmentationMap | DepthMap


def label_of(class_id: int, labels: Sequence[str]) -> str:
    """The class's label, or its id as text."""
    known = labels[class_id] if 0 <= class_id < len(labels) else ""
    return known or str(class_id)
