"""Results of inference on one image: NumPy arrays and labels, with drawing and conversion to other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.client.drawings import Column, Drawing, notebook_html, timings_text
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray, DepthMap, Mask, SegmentationMap, VisionResult

if TYPE_CHECKING:  # pandas and supervision are optional; the others are imported on use
    import pandas
    import supervision

    from penstock.protocol.batch_reports import RequestExplanation
    from penstock.protocol.image_answer import (
        ClassArea,
        ClassScore,
        Detection,
        ImageAnswer,
        ImageResult,
        RecognisedText,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(ABC):
    """The result of inference on one image. Each task of a model has a subclass.

    timings_ms: milliseconds in the gateway by stage: decode, preprocess, queue, infer, postprocess, total. batch_size:
    size of the batch that the engine ran. explanation: how the batch was formed, with `explain=True`. picture: the
    encoded image. found: the decoded JSON of the result.
    """

    model_name: str
    model_version: str
    timings_ms: Mapping[str, float]
    batch_size: int
    explanation: RequestExplanation | None
    picture: bytes
    found: ImageResult

    @property
    def labels(self) -> list[str]:
        """Labels by class id; empty strings for classes that are not in the result."""
        return self.found.labels

    def __iter__(self) -> Iterator[Any]:
        """The objects, classes, text lines or areas, as decoded from JSON."""
        return iter(self._items())

    def __len__(self) -> int:
        """Number of objects, classes, text lines or areas."""
        return len(self._items())

    def __bool__(self) -> bool:
        """Whether the result is not empty."""
        return bool(self.found)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.model_name}: {self._summary()}>"

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The result as a table: columns of equal length by name."""

    def to_pandas(self) -> pandas.DataFrame:
        """One row per object, class, text line or area. Raises NotSupported if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise NotSupported("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.columns())

    def draw(
        self, image: np.ndarray[Any, np.dtype[np.uint8]] | None = None, *, skeleton: Sequence[tuple[int, int]] = ()
    ) -> Drawing:
        """The image, upright, with the result drawn on it.

        image: (height, width, 3) uint8 BGR, which is copied; by default the image that was sent. skeleton: pairs of
        keypoint indices to connect by lines. Raises InvalidRequest if the masks have another size than the image.
        """
        from penstock.client.arrays import vision_result
        from penstock.vision.drawing import draw_result

        pixels = self._decoded() if image is None else image.copy()
        height, width = pixels.shape[:2]
        try:
            draw_result(pixels, vision_result(self.found, width, height), self.labels, skeleton=skeleton)
        except ValueError as error:
            raise InvalidRequest(f"the result cannot be drawn on this image: {error}") from error
        return pixels.view(Drawing)

    def _items(self) -> Sequence[Any]:
        return ()

    def _summary(self) -> str:
        names = [f"{one.label} {one.score:.2f}" for one in self._items()[:5]]
        more = ", …" if len(self._items()) > 5 else ""
        return ", ".join(names) + more if names else "nothing found"

    def _decoded(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from penstock.vision.decode import MAX_PIXELS, decode
        from penstock.vision.spec import ColorFormat

        return decode(self.picture, ColorFormat.BGR, max_pixels=MAX_PIXELS).pixels

    @cached_property
    def _size(self) -> tuple[int, int]:
        """(height, width) of the image, upright."""
        from penstock.vision.decode import read_header

        width, height = read_header(self.picture).upright_size
        return height, width

    def _vision(self) -> VisionResult:
        from penstock.client.arrays import vision_result

        height, width = self._size
        return vision_result(self.found, width, height)

    def _repr_html_(self) -> str:
        """HTML for a notebook: the drawn image, the timings and the first rows. All text is escaped."""
        notes = [f"{self.model_name} {self.model_version}", timings_text(self.timings_ms)]
        notes += [self.explanation.text] if self.explanation is not None else []
        return notebook_html(self.draw(), repr(self), notes, self.columns())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DetectionResult(Result):
    """Objects, by descending score: `for detection in result: detection.label, detection.score, detection.xyxy`.

    xyxy: (n, 4) float32, box corners in pixels of the image after EXIF rotation. score: (n,) float32 in [0, 1].
    class_id: (n,) int64. keypoints: (n, k, 3) float32 of x, y, score, or None. xywhr: (n, 5) float32 of centre, width,
    height and clockwise angle in radians, or None.
    """

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray
    keypoints: FloatArray | None
    xywhr: FloatArray | None

    def __iter__(self) -> Iterator[Detection]:
        return iter(self._items())

    def _items(self) -> list[Detection]:
        return self.found.detections or []

    @property
    def label(self) -> list[str]:
        """The label of each object."""
        return [one.label for one in self._items()]

    @cached_property
    def masks(self) -> tuple[Mask, ...] | None:
        """The mask of each object; None if the model has no masks. Raises ValueError if one is malformed."""
        found = self._vision()
        return getattr(found, "masks", None)

    def full_masks(self) -> BoolArray | None:
        """Masks of the size of the image: (n, height, width) bool; None if the model has no masks."""
        return None if self.masks is None else _full(self.masks, self._size)

    def columns(self) -> dict[str, Column]:
        """label, score, x1, y1, x2, y2, class_id."""
        corners = dict(zip(("x1", "y1", "x2", "y2"), self.xyxy.T, strict=True))
        return {"label": self.label, "score": self.score, **corners, "class_id": self.class_id}

    def to_supervision(self) -> supervision.Detections:
        """supervision.Detections, with class names, masks and oriented boxes. Raises NotSupported if not installed."""
        sv = _imported_supervision()
        data: dict[str, Any] = {"class_name": np.array(self.label, str)}
        if self.xywhr is not None:
            from penstock.vision.drawing import oriented_corners

            data["xyxyxyxy"] = oriented_corners(self.xywhr).astype(np.float32)
        found: supervision.Detections = sv.Detections(
            xyxy=self.xyxy, confidence=self.score, class_id=self.class_id, mask=self.full_masks(), data=data
        )
        return found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ClassificationResult(Result):
    """Classes of the image, by descending score. score: (n,) float32 in [0, 1]. class_id: (n,) int64."""

    score: FloatArray
    class_id: IntArray

    def __iter__(self) -> Iterator[ClassScore]:
        return iter(self._items())

    def _items(self) -> list[ClassScore]:
        return self.found.classes or []

    @property
    def top(self) -> ClassScore | None:
        """The class with the highest score; None if there is none."""
        return next(iter(self), None)

    def columns(self) -> dict[str, Column]:
        """label, score, class_id."""
        return {"label": [one.label for one in self], "score": self.score, "class_id": self.class_id}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EmbeddingResult(Result):
    """An embedding of the image. vector: (d,) float32."""

    vector: FloatArray

    def _summary(self) -> str:
        return f"{len(self.vector)} values"

    def columns(self) -> dict[str, Column]:
        """value."""
        return {"value": self.vector}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TextResult(Result):
    """Lines of text, from top to bottom: `for line in result: line.text, line.score, line.polygon`."""

    def __iter__(self) -> Iterator[RecognisedText]:
        return iter(self._items())

    def _items(self) -> list[RecognisedText]:
        return self.found.text or []

    @property
    def text(self) -> str:
        """All lines, joined by newlines."""
        return "\n".join(one.text for one in self)

    def _summary(self) -> str:
        return repr(self.text[:80])

    def columns(self) -> dict[str, Column]:
        """text, score, polygon."""
        polygons = [one.polygon or None for one in self]
        return {"text": [one.text for one in self], "score": [one.score for one in self], "polygon": polygons}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SegmentationResult(Result):
    """Semantic segmentation: a class for each pixel. height, width: of the image. class_id: (n,) int64, ascending."""

    height: int
    width: int
    class_id: IntArray

    def __iter__(self) -> Iterator[ClassArea]:
        return iter(self._items())

    def _items(self) -> list[ClassArea]:
        return self.found.segmentation.classes if self.found.segmentation else []

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of each class; empty with masks="none". Raises ValueError if one is malformed."""
        found = self._vision()
        return tuple(found.masks) if isinstance(found, SegmentationMap) else ()

    def full_masks(self) -> BoolArray:
        """Masks of the size of the image: (n, height, width) bool."""
        return _full(self.masks, (self.height, self.width))

    def _shown(self) -> list[ClassArea]:
        """The areas that have a mask."""
        return [one for one in self._items() if one.counts or one.polygons]

    def _summary(self) -> str:
        return ", ".join(f"{one.label} {one.area} pixels" for one in self._items()[:5]) or "nothing found"

    def columns(self) -> dict[str, Column]:
        """label, area, class_id."""
        return {"label": [one.label for one in self], "area": [one.area for one in self], "class_id": self.class_id}

    def to_supervision(self) -> supervision.Detections:
        """supervision.Detections with a mask for each class. Raises NotSupported without supervision."""
        sv = _imported_supervision()
        masks = self.full_masks()
        data = {"class_name": np.array([one.label for one in self._shown()], str)}
        boxes = np.array([(m.left, m.top, m.left + m.bits.shape[1], m.top + m.bits.shape[0]) for m in self.masks])
        found: supervision.Detections = sv.Detections(
            xyxy=boxes.reshape(-1, 4), class_id=np.array([one.class_id for one in self._shown()]), mask=masks, data=data
        )
        return found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DepthResult(Result):
    """Depth or inverse depth, as the model outputs it. height, width: of the image."""

    height: int
    width: int

    @cached_property
    def values(self) -> FloatArray:
        """(height, width) float32. Raises ValueError if the PNG is malformed."""
        found = self._vision()
        if not isinstance(found, DepthMap):
            raise ValueError("the result has no depth")
        return found.values

    def _summary(self) -> str:
        return f"{self.width} x {self.height} pixels"

    def columns(self) -> dict[str, Column]:
        """Lowest, mean and highest value."""
        return {"lowest": [self.values.min()], "mean": [self.values.mean()], "highest": [self.values.max()]}


def result_of_response(answer: ImageAnswer, picture: bytes) -> Result:
    """The first result of the response. Raises ValueError if it is malformed."""
    from penstock.client.arrays import floats, ids, points

    found = answer.results[0]
    shared: dict[str, Any] = {
        "model_name": answer.model_name,
        "model_version": answer.model_version,
        "timings_ms": answer.timings_ms,
        "batch_size": answer.batch_size,
        "explanation": answer.explain[0] if answer.explain else None,
        "picture": picture,
        "found": found,
    }
    if isinstance(found.detections, list):
        xyxy, score, class_id, keypoints, xywhr = points(found.detections)
        return DetectionResult(**shared, xyxy=xyxy, score=score, class_id=class_id, keypoints=keypoints, xywhr=xywhr)
    if isinstance(found.classes, list):
        score = floats([one.score for one in found.classes])
        return ClassificationResult(**shared, score=score, class_id=ids(found.classes))
    if isinstance(found.embedding, list):
        return EmbeddingResult(**shared, vector=floats(found.embedding))
    if isinstance(found.text, list):
        return TextResult(**shared)
    if found.segmentation:
        height, width = found.segmentation.size
        return SegmentationResult(**shared, height=height, width=width, class_id=ids(found.segmentation.classes))
    if found.depth:
        height, width = found.depth.size
        return DepthResult(**shared, height=height, width=width)
    raise ValueError("the response has a result of an unknown kind")


def _full(masks: Sequence[Mask], size: tuple[int, int]) -> BoolArray:
    full = np.zeros((len(masks), *size), np.bool_)
    for pixels, mask in zip(full, masks, strict=True):
        rows, columns = mask.bits.shape
        pixels[mask.top : mask.top + rows, mask.left : mask.left + columns] = mask.bits
    return full


def _imported_supervision() -> Any:
    try:
        import supervision
    except ImportError as error:
        raise NotSupported("to_supervision needs supervision: pip install 'penstock[video]'") from error
    return supervision
