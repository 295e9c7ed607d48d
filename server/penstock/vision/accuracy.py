"""A detector's average precision by pycocotools. Class id: the index of a category's id among the sorted ids."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections

ANNOTATIONS = "annotations.json"

_MOST_DETECTIONS = 1000  # per image and class; COCO's own 100 is too few for a crowd
_WHOLE_RANGE = [0.0, 1e10]


@dataclass(frozen=True, slots=True)
class Truth:
    """Ground truth of one image."""

    xyxy: FloatArray  # (n, 4), corners in source pixels
    class_id: IntArray  # (n,) int64
    is_ignored: npt.NDArray[np.bool_] | None = None  # (n,) COCO's iscrowd: misses and matches do not count

    def __post_init__(self) -> None:
        count = len(self.class_id)
        if self.xyxy.shape != (count, 4) or (self.is_ignored is not None and self.is_ignored.shape != (count,)):
            raise ValueError(f"{count} class ids need boxes of shape ({count}, 4), not {self.xyxy.shape}")

    @property
    def ignored(self) -> npt.NDArray[np.bool_]:
        """(n,) bool; all False if is_ignored is None."""
        return np.zeros(len(self.class_id), np.bool_) if self.is_ignored is None else self.is_ignored


@dataclass(frozen=True, slots=True)
class AveragePrecision:
    """In [0, 1]. by_class: None for classes without a ground-truth box. mean: over the other classes."""

    mean: float
    by_class: tuple[float | None, ...]


def average_precision(
    truth: Sequence[Truth], found: Sequence[Detections], *, iou: float = 0.5, class_count: int
) -> AveragePrecision:
    """COCO's 101-point AP. truth[i] and found[i] belong to one image. Raises ValueError."""
    if len(truth) != len(found):
        raise ValueError(f"{len(truth)} images of truth, {len(found)} of detections; one each is needed")
    for class_id in [boxes.class_id for boxes in truth] + [boxes.class_id for boxes in found]:
        if np.any((class_id < 0) | (class_id >= class_count)):
            raise ValueError(f"class ids {sorted(set(class_id.tolist()))} are not all under {class_count}")
    wanted = _index(
        len(truth), [row for image_id, boxes in enumerate(truth, 1) for row in _annotations(image_id, boxes)]
    )
    given = _index(len(truth), [row for image_id, boxes in enumerate(found, 1) for row in _guesses(image_id, boxes)])
    by_class = _evaluate(wanted, given, iou, class_count)
    known = [value for value in by_class if value is not None]
    if not known:
        raise ValueError("the truth holds no box that counts")
    return AveragePrecision(sum(known) / len(known), by_class)


def read_annotations(folder: Path) -> dict[str, Truth]:
    """Truth by file name, also for images without boxes. Raises OSError; raises ValueError for other formats."""
    path = folder / ANNOTATIONS
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not in COCO's format: {error}") from error
    class_ids = {number: index for index, number in enumerate(sorted(item.id for item in document.categories))}
    boxes: dict[int, list[_Annotation]] = {image.id: [] for image in document.images}
    for box in document.annotations:
        if box.image_id not in boxes or box.category_id not in class_ids:
            raise ValueError(f"{path}: a box names image {box.image_id} and category {box.category_id}; one is unknown")
        boxes[box.image_id].append(box)
    return {image.file_name: _truth(boxes[image.id], class_ids) for image in document.images}


def write_annotations(
    folder: Path, truth: Mapping[str, Truth], *, labels: Sequence[str], sizes: Mapping[str, tuple[int, int]]
) -> None:
    """Writes folder/annotations.json for read_annotations. sizes: (width, height) by file name."""
    images = [_Image(number, name, *sizes[name]) for number, name in enumerate(truth, 1)]
    rows = [row for image_id, boxes in enumerate(truth.values(), 1) for row in _annotations(image_id, boxes)]
    annotations = [
        _Annotation(number, row["image_id"], row["category_id"] + 1, row["bbox"], row["area"], row["iscrowd"])
        for number, row in enumerate(rows, 1)
    ]
    categories = [_Category(number, name) for number, name in enumerate(labels, 1)]
    document = _Document(images, annotations, categories)
    (folder / ANNOTATIONS).write_bytes(msgspec.json.encode(document))


class _Image(msgspec.Struct):
    id: int
    file_name: str
    width: int = 0
    height: int = 0


class _Annotation(msgspec.Struct):
    id: int
    image_id: int
    category_id: int
    bbox: Annotated[list[float], msgspec.Meta(min_length=4, max_length=4)]
    area: float
    iscrowd: int = 0


class _Category(msgspec.Struct):
    id: int
    name: str


class _Document(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


class _Row(TypedDict):
    """A box as pycocotools takes it; category_id is the class id."""

    image_id: int
    category_id: int
    bbox: list[float]  # left, top, width, height; pycocotools takes only a list
    area: float
    iscrowd: int
    score: NotRequired[float]
    id: NotRequired[int]


def _truth(boxes: Sequence[_Annotation], class_ids: Mapping[int, int]) -> Truth:
    corners = [(x, y, x + width, y + height) for x, y, width, height in (box.bbox for box in boxes)]
    return Truth(
        np.array(corners, np.float32).reshape(-1, 4),
        np.array([class_ids[box.category_id] for box in boxes], np.int64),
        np.array([bool(box.iscrowd) for box in boxes], np.bool_),
    )


def _annotations(image_id: int, boxes: Truth) -> Iterator[_Row]:
    for xyxy, class_id, is_ignored in zip(boxes.xyxy, boxes.class_id, boxes.ignored, strict=True):
        yield _row(image_id, xyxy, int(class_id), is_crowd=bool(is_ignored))


def _guesses(image_id: int, boxes: Detections) -> Iterator[_Row]:
    for xyxy, class_id, score in zip(boxes.xyxy, boxes.class_id, boxes.score, strict=True):
        yield {**_row(image_id, xyxy, int(class_id)), "score": float(score)}


def _row(image_id: int, xyxy: FloatArray, class_id: int, *, is_crowd: bool = False) -> _Row:
    left, top, right, bottom = (float(value) for value in xyxy)
    width, height = right - left, bottom - top
    return {
        "image_id": image_id,
        "category_id": class_id,
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": int(is_crowd),
    }


def _index(image_count: int, rows: Sequence[_Row]) -> COCO:
    """Ids start at 1, because pycocotools takes an id of 0 for "no match"."""
    index = COCO()
    index.dataset = {
        "images": [{"id": number} for number in range(1, image_count + 1)],
        "annotations": [{**row, "id": number} for number, row in enumerate(rows, 1)],
        "categories": [],
    }
    with _silence():
        index.createIndex()
    return index


def _evaluate(wanted: COCO, given: COCO, iou: float, class_count: int) -> tuple[float | None, ...]:
    with _silence():
        evaluation = COCOeval(wanted, given, "bbox")
        evaluation.params.catIds = list(range(class_count))
        evaluation.params.imgIds = sorted(wanted.imgs)
        evaluation.params.iouThrs = np.array([iou])
        evaluation.params.maxDets = [_MOST_DETECTIONS]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [_WHOLE_RANGE], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, 0]  # (recalls, classes); -1 without ground truth
    return tuple(None if column.min() < 0 else float(column.mean()) for column in precision.T)


def _silence() -> contextlib.redirect_stdout[io.StringIO]:
    """Suppresses pycocotools' progress output."""
    return contextlib.redirect_stdout(io.StringIO())
