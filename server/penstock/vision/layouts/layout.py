"""Common parts of output layouts: options, validated outputs, non-maximum suppression, final steps of detectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import Array, Datatype, Detections, FloatArray, InferResponse, IntArray, Tensor


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Post-processing options, named as in nvinfer."""

    output_names: tuple[str, ...]  # in config.pbtxt's order
    pre_cluster_threshold: float = 0.2  # boxes with at most this score are dropped before the suppression
    nms_iou_threshold: float = 0.3
    topk: int | None = None  # maximum results; None for all
    classifier_threshold: float = -math.inf  # classes below it are dropped
    has_softmax: bool = False  # the scores are logits


_FLOAT_TYPES = {Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16}
_INTEGER_TYPES = {datatype for datatype in Datatype if "INT" in datatype}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one image. Methods raise EngineFailed if an output is not as expected."""

    response: InferResponse
    row: int | None  # index in the batch; None without a batch dimension

    def floats(self, name: str, rank: int) -> FloatArray:
        """One image's part of a float output: `rank` dimensions, float32, finite."""
        tensor = self._tensor(name, _FLOAT_TYPES)
        array = self._part(tensor, rank)
        if array.dtype != np.float32:
            with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes inf, which is rejected below
                array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise self.broken(name, f"has {int(np.count_nonzero(~np.isfinite(array)))} values that are NaN or infinite")
        return array

    def integers(self, name: str, rank: int) -> IntArray:
        """One image's part of an integer output: `rank` dimensions, int64."""
        return self._part(self._tensor(name, _INTEGER_TYPES), rank).astype(np.int64, copy=False)

    def refuse(self, name: str, array: Array, wanted: str) -> EngineFailed:
        """The error for a part of the wrong shape."""
        return self.broken(name, f"has shape {list(array.shape)} for one image; {wanted} was expected")

    def broken(self, name: str, what: str) -> EngineFailed:
        """The error for an unexpected output. what: the rest of the sentence."""
        version = self.response.model_version or "?"
        return EngineFailed(f"model {self.response.model_name!r} version {version}: output {name!r} {what}")

    def _tensor(self, name: str, datatypes: set[Datatype]) -> Tensor:
        tensor = self.response.output(name)
        if tensor is None:
            has = ", ".join(repr(output.name) for output in self.response.outputs) or "none"
            raise self.broken(name, f"is missing (outputs that came: {has})")
        if tensor.datatype not in datatypes:
            raise self.broken(name, f"is of type {tensor.datatype}; one of {', '.join(sorted(datatypes))} was expected")
        size_bytes = tensor.element_count * (tensor.datatype.size_bytes or 0)
        if tensor.data.nbytes != size_bytes:
            raise self.broken(
                name, f"has {tensor.data.nbytes} bytes; its shape {list(tensor.shape)} needs {size_bytes}"
            )
        return tensor

    def _part(self, tensor: Tensor, rank: int) -> Array:
        """Without a batch axis, one of rows, the only row, or with trailing dimensions of 1: (N, classes, 1, 1)."""
        array = tensor.to_numpy()
        has_batch_axis = self.row is not None or array.shape[:1] == (1,)
        while array.ndim > rank + has_batch_axis and array.shape[-1] == 1:
            array = array[..., 0]
        if array.ndim == rank and not self.row:
            return array
        if array.ndim == rank + 1:
            row = self.row or 0
            if row < array.shape[0] and (self.row is not None or array.shape[0] == 1):
                part: Array = array[row]
                return part
        where = "the image" if self.row is None else f"row {self.row} of the batch"
        raise self.broken(tensor.name, f"has shape {list(tensor.shape)}, in which {where} has no {rank}-D part")


MAX_CANDIDATES = 1024


def non_maximum_suppression(xyxy: FloatArray, score: FloatArray, class_id: IntArray, iou_threshold: float) -> IntArray:
    """Indices of the selected boxes by descending score: greedy, per class, among the best MAX_CANDIDATES."""
    order = np.argsort(-score, kind="stable")[:MAX_CANDIDATES]
    boxes, classes = xyxy[order].astype(np.float64), class_id[order]
    areas = _areas(boxes)
    is_selected = np.ones(len(order), np.bool_)
    for best in range(len(order)):
        if is_selected[best]:
            rest = best + 1 + np.flatnonzero(is_selected[best + 1 :] & (classes[best + 1 :] == classes[best]))
            overlap = _intersection_over_union(boxes[best], boxes[rest], areas[best] + areas[rest])
            is_selected[rest[overlap > iou_threshold]] = False
    return order[is_selected].astype(np.int64)


def _areas(boxes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sides = np.clip(boxes[:, 2:] - boxes[:, :2], 0.0, None)
    areas: npt.NDArray[Any] = sides[:, 0] * sides[:, 1]
    return areas


def overlaps(one: FloatArray, other: FloatArray) -> FloatArray:
    """Intersection over union of boxes (n, 4) and (m, 4): (n, m); 0 if both boxes are empty."""
    areas = _areas(one)[:, np.newaxis] + _areas(other)[np.newaxis]
    return _intersection_over_union(one[:, np.newaxis], other[np.newaxis], areas)


def _intersection_over_union(
    one: npt.NDArray[Any], other: npt.NDArray[Any], areas: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Of boxes (…, 4) that broadcast to each other. areas: the sum of both; 0 where it is 0."""
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    sides = np.clip(high - low, 0.0, None)
    shared = sides[..., 0] * sides[..., 1]
    union = areas - shared
    found: npt.NDArray[Any] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return found


def finish_detections(
    xyxy: FloatArray,
    score: FloatArray,
    class_id: IntArray,
    options: ParserOptions,
    to_source: Callable[[FloatArray], FloatArray],
) -> Detections:
    """Detections after threshold, suppression and topk, in source pixels; suppression precedes clipping."""
    is_candidate = score > options.pre_cluster_threshold
    xyxy, score, class_id = xyxy[is_candidate], score[is_candidate], class_id[is_candidate]
    selected = non_maximum_suppression(xyxy, score, class_id, options.nms_iou_threshold)
    source = to_source(xyxy[selected])
    is_inside = (source[:, 2] > source[:, 0]) & (source[:, 3] > source[:, 1])
    source, selected = source[is_inside][: options.topk], selected[is_inside][: options.topk]
    return Detections(
        source, np.clip(score[selected], 0.0, 1.0).astype(np.float32), class_id[selected].astype(np.int64)
    )
