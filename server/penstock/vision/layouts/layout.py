"""Interface of output layouts: Layout, its options, validated outputs, and the last steps of detectors.

A module of this package decodes one family of layouts; registry.py lists them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import EngineFailed, TooLarge
from penstock.protocol.inference import Array, Datatype, FloatArray, InferResponse, IntArray, Tensor
from penstock.protocol.vision_results import Detections, VisionResult
from penstock.vision.layouts.suppression import MAX_CANDIDATES, MAX_PIXEL, non_maximum_suppression
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Post-processing options of a model, named as in nvinfer where it has them. Clients can replace some."""

    output_names: tuple[str, ...]  # output-blob-names, else in config.pbtxt's order
    pre_cluster_threshold: float = 0.25  # boxes with this score or less are dropped before NMS
    nms_iou_threshold: float = 0.45
    topk: int | None = None  # maximum results; None for all
    classifier_threshold: float = -math.inf  # classes below it are dropped
    has_softmax: bool = False  # apply-softmax: the scores are logits of one class each
    has_sigmoid: bool = False  # apply-sigmoid: the scores are logits of independent classes
    class_thresholds: tuple[tuple[int, float], ...] = ()  # (class id, threshold) where it differs
    is_class_agnostic: bool = False  # NMS ignores classes
    class_ids: tuple[int, ...] = ()  # class id of each class of the network; empty for 0, 1, 2 …
    class_filter: frozenset[int] | None = None  # class ids to return; None for all
    keypoint_shape: tuple[int, int] = (0, 3)  # (count, 2 or 3 values each)
    segmentation_threshold: float = 0.5  # pixels of a mask are over this probability
    needs_masks: bool = True
    characters: str = ""  # of a text recogniser, in the network's order, without the blank
    unclip_ratio: float = 1.5  # growth of a text detector's rectangles, as in PaddleOCR
    is_unit_length: bool = False  # embeddings are divided by their length
    depth_scale: float = 1.0

    def lowest_threshold(self) -> float:
        """The lowest score threshold of all classes."""
        return min((self.pre_cluster_threshold, *(threshold for _, threshold in self.class_thresholds)))

    def mapped(self, class_id: IntArray) -> IntArray:
        """The class id of each class of the network. class_id: (n,) int64; values beyond class_ids are unchanged."""
        if not self.class_ids:
            return class_id
        table = np.array(self.class_ids, np.int64)
        is_listed = (class_id >= 0) & (class_id < len(table))
        return np.where(is_listed, table[np.clip(class_id, 0, len(table) - 1)], class_id)


Decode = Callable[["Outputs", LayoutOptions, Geometry], VisionResult]


@dataclass(frozen=True, slots=True)
class Layout:
    """An output layout: how one picture's outputs become its result.

    decode: raises EngineFailed if the outputs are not as expected. outputs: their names and shapes for one picture, as
    Markdown for docs/card-parameters.md. threshold, iou, segmentation_threshold: defaults of pre-cluster-threshold,
    nms-iou-threshold and segmentation-threshold. uses: query parameters of /image that change the result, if they are
    not the usual ones of the network type. needs_size_input: the boxes are in pixels of the picture, which the network
    knows by an image-size-input. keeps_aspect_ratio: the picture may not be stretched. is_one_picture: the outputs have
    no batch axis, so max_batch_size must be 0.
    """

    name: str
    network_type: NetworkType
    decode: Decode
    outputs: str
    threshold: float = 0.25
    iou: float = 0.45
    segmentation_threshold: float = 0.5
    uses: frozenset[str] | None = None
    needs_size_input: bool = False
    keeps_aspect_ratio: bool = False
    is_one_picture: bool = False

    @property
    def usable_options(self) -> frozenset[str]:
        """The supported ones of conf, iou, classes, max_detections and masks."""
        return _USUAL_OPTIONS[self.network_type] if self.uses is None else self.uses


_BOX_OPTIONS = frozenset(("conf", "iou", "classes", "max_detections"))
FINAL_BOX_OPTIONS = _BOX_OPTIONS - {"iou"}  # of detectors without NMS here
FINAL_MASK_OPTIONS = FINAL_BOX_OPTIONS | {"masks"}
_USUAL_OPTIONS = {
    NetworkType.DETECTOR: _BOX_OPTIONS,
    NetworkType.CLASSIFIER: _BOX_OPTIONS - {"iou"},
    NetworkType.SEGMENTATION: frozenset(("classes", "masks")),
    NetworkType.INSTANCE_SEGMENTATION: _BOX_OPTIONS | {"masks"},
    NetworkType.OTHER: frozenset[str](),
}


_FLOAT_TYPES = {Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16}
_INTEGER_TYPES = {datatype for datatype in Datatype if "INT" in datatype}
_ROUNDING = 0.01  # of whole numbers as floats
_MAX_CLASS_ID = 2**31 - 1  # OpenCV's NMS takes 32 bits


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one image. Methods raise EngineFailed if an output is not as expected."""

    response: InferResponse
    row: int | None  # index in the batch; None without a batch dimension

    def floats(self, name: str, rank: int, first: int | None = None) -> FloatArray:
        """One image's part of a float output: `rank` dimensions, float32, finite. first: rows to read."""
        return self.finite(name, self._part(self._tensor(name, _FLOAT_TYPES), rank)[:first])

    def float_rows(self, name: str, columns: int) -> Array:
        """A float output without batch axis, all rows of all images: (n, columns), perhaps NaN or infinite."""
        tensor = self._tensor(name, _FLOAT_TYPES)
        array = tensor.to_numpy()
        if array.shape[-1:] != (columns,):
            raise self.refuse(name, array, f"[…, {columns}]")
        return array.reshape(-1, columns)

    def integers(self, name: str, rank: int) -> IntArray:
        """One image's part of an integer output: `rank` dimensions, int64."""
        return self._part(self._tensor(name, _INTEGER_TYPES), rank).astype(np.int64, copy=False)

    def class_ids(self, name: str, first: int | None = None) -> IntArray:
        """One image's class ids (n,) int64, from integers or floats without fraction. Padding rows may be below 0."""
        return self.whole_numbers(name, self._part(self._tensor(name, _FLOAT_TYPES | _INTEGER_TYPES), 1)[:first])

    def count(self, name: str) -> int:
        """One image's number of valid rows, from an integer or a float without fraction."""
        part = self._part(self._tensor(name, _FLOAT_TYPES | _INTEGER_TYPES), 0)
        number = int(self.whole_numbers(name, np.atleast_1d(part))[0])
        if number < 0:
            raise self.broken(name, f"is {number}; a number of rows was expected")
        return number

    def whole_numbers(self, name: str, array: Array) -> IntArray:
        """The values of an output as int64. Raises EngineFailed for fractions and for numbers beyond 32 bits."""
        values = array.astype(np.float64)  # a 16-bit float cannot be compared with the limit
        nearest = np.rint(values)
        with np.errstate(invalid="ignore"):  # inf - inf
            is_whole = (np.abs(nearest) <= _MAX_CLASS_ID) & (np.abs(values - nearest) <= _ROUNDING)
        if not is_whole.all():
            raise self.broken(name, f"holds {array[~is_whole][0]}; an integer of 32 bits was expected")
        return nearest.astype(np.int64)

    def finite(self, name: str, array: Array) -> FloatArray:
        """The values of an output as float32. Raises EngineFailed if one is NaN or infinite."""
        if array.dtype == np.float16 and array.size:  # OpenCV converts 8 times as fast as NumPy, and exactly
            array = cv2.subtract(array.reshape(1, -1), 0.0, dtype=cv2.CV_32F).reshape(array.shape)
        elif array.dtype != np.float32:
            with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes inf, which is rejected below
                array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise self.broken(name, f"has {int(np.count_nonzero(~np.isfinite(array)))} values that are NaN or infinite")
        return array

    def refuse(self, name: str, array: Array, expected: str) -> EngineFailed:
        """The error for a part of the wrong shape."""
        return self.broken(name, f"has shape {list(array.shape)} for one image; {expected} was expected")

    def broken(self, name: str, what: str) -> EngineFailed:
        """The error for an unexpected output. what: the end of the sentence."""
        return EngineFailed(self._sentence(name, what))

    def too_large(self, name: str, what: str) -> TooLarge:
        """The error for results of a picture that need too much memory: the model has not failed."""
        return TooLarge(self._sentence(name, what))

    def _sentence(self, name: str, what: str) -> str:
        version = self.response.model_version or "?"
        return f"model {self.response.model_name!r} version {version}: output {name!r} {what}"

    def pick(self, options: LayoutOptions, *roles: tuple[str, ...]) -> tuple[str, ...]:
        """The output name of each role: by the roles' usual names, else by the order of output_names."""
        usual = {name.partition(":")[0]: name for name in options.output_names}  # TensorFlow's have a port, `name:0`
        found = [next((usual[one] for one in role if one in usual), "") for role in roles]
        if all(found):
            return tuple(found)
        names = options.output_names[: len(roles)]
        if len(names) < len(roles):
            raise self.broken(names[-1], f"is not enough; the layout reads {', '.join(role[0] for role in roles)}")
        return names

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


def stride_of(cells: int, geometry: Geometry) -> int | None:
    """The stride, 4 to 128, of the grid that covers the network's image with so many cells; None if there is none."""
    for stride in (4, 8, 16, 32, 64, 128):
        if math.ceil(geometry.network_width / stride) * math.ceil(geometry.network_height / stride) == cells:
            return stride
    return None


def sigmoid(logits: FloatArray) -> FloatArray:
    """The logistic function of an array. Uses tanh, which does not overflow."""
    shares: FloatArray = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return shares


def logit(share: float) -> float:
    """The inverse of sigmoid: infinite for 0 and 1."""
    return math.log(share / (1.0 - share)) if 0.0 < share < 1.0 else math.copysign(math.inf, share - 0.5)


class Candidates(NamedTuple):
    """Rows of a network's output that may be objects, at most MAX_CANDIDATES, with the best class of each.

    row: (n,) int64 index. class_id: (n,) int64, of the network. score: (n,) float32.
    """

    row: IntArray
    class_id: IntArray
    score: FloatArray


def best_classes(scores: FloatArray, options: LayoutOptions, *, objectness: FloatArray | None = None) -> Candidates:
    """Candidates over the lowest threshold. scores: (classes, n), 0 to 1. objectness: (n,), multiplies all scores."""
    row = np.arange(scores.shape[1])
    if objectness is not None:  # no score is higher
        row = np.flatnonzero(objectness > options.lowest_threshold())
        scores = scores.T[row].T
    if not scores.size:
        return Candidates(row[:0], row[:0], np.zeros(0, np.float32))
    scores = _rows_by_class(scores)
    best = np.minimum(scores.max(axis=0), 1.0)
    if objectness is not None:
        best *= np.minimum(objectness[row], 1.0)
    hot = np.flatnonzero(best > options.lowest_threshold())
    if options.class_filter is None and not options.class_thresholds:
        hot = hot[_highest(best[hot])]
    class_id, score = scores[:, hot].argmax(axis=0), best[hot]
    good = _strongest(score, class_id, options)
    return Candidates(row[hot[good]], class_id[good], score[good])


def _rows_by_class(scores: FloatArray) -> FloatArray:
    """The scores with each class contiguous. The maximum is ten times as fast then, the transpose costs little."""
    return scores if scores.strides[1] == scores.itemsize else cv2.transpose(scores.T)


def _strongest(score: FloatArray, class_id: IntArray, options: LayoutOptions) -> IntArray:
    """Ascending indices of boxes over the threshold and in class_filter; at most MAX_CANDIDATES.

    score: (n,). class_id: (n,), of the network.
    """
    good = np.flatnonzero(is_selected(score, options.mapped(class_id), options))
    return good[_highest(score[good])]


def _highest(score: FloatArray) -> IntArray:
    """Ascending indices of the MAX_CANDIDATES highest scores."""
    if len(score) <= MAX_CANDIDATES:
        return np.arange(len(score))
    return np.sort(np.argpartition(-score, MAX_CANDIDATES)[:MAX_CANDIDATES])


def probabilities(logits: FloatArray, options: LayoutOptions) -> FloatArray:
    """Scores of logits (classes, n) with apply-sigmoid or apply-softmax; unchanged without both."""
    if options.has_sigmoid:
        return sigmoid(logits)
    if options.has_softmax and logits.size:
        with np.errstate(over="ignore"):  # a difference beyond float32's range is -inf, and its power 0
            powers = np.exp(logits - logits.max(axis=0))
        shares: FloatArray = powers / powers.sum(axis=0)
        return shares
    return logits


def corners_of(cxcywh: FloatArray) -> FloatArray:
    """Boxes (n, 4) with their centre, width and height, as x0, y0, x1, y1; within ±1e6."""
    centre, half = cxcywh[:, :2].astype(np.float64), cxcywh[:, 2:4].astype(np.float64) / 2
    xyxy = np.concatenate([centre - half, centre + half], axis=1)
    clipped: FloatArray = np.clip(xyxy, -MAX_PIXEL, MAX_PIXEL).astype(np.float32)
    return clipped


def finish_detections(
    xyxy: FloatArray,
    score: FloatArray,
    class_id: IntArray,
    options: LayoutOptions,
    to_source: Callable[[FloatArray], FloatArray],
) -> Detections:
    """Detections after threshold, NMS and topk, in source pixels. NMS precedes clipping. See finish_boxes."""
    return finish_boxes(xyxy, score, class_id, options, to_source)[0]


def finish_boxes(
    xyxy: FloatArray,
    score: FloatArray,
    class_id: IntArray,
    options: LayoutOptions,
    to_source: Callable[[FloatArray], FloatArray],
    *,
    needs_suppression: bool = True,
) -> tuple[Detections, IntArray]:
    """As finish_detections; also returns the index (n,) of each detection's box.

    xyxy: (m, 4). score: (m,). class_id: (m,) int64, of the network. to_source: converts (k, 4) to source pixels.
    needs_suppression: False if the network runs NMS.
    """
    class_id = options.mapped(class_id)
    chosen = np.flatnonzero(is_selected(score, class_id, options))
    if needs_suppression:
        groups = np.zeros(len(chosen), np.int64) if options.is_class_agnostic else class_id[chosen]
        chosen = chosen[non_maximum_suppression(xyxy[chosen], score[chosen], groups, options.nms_iou_threshold)]
    else:
        chosen = chosen[np.argsort(-score[chosen], kind="stable")[:MAX_CANDIDATES]]
    source = to_source(xyxy[chosen])
    is_inside = (source[:, 2] > source[:, 0]) & (source[:, 3] > source[:, 1])
    source, chosen = source[is_inside][: options.topk], chosen[is_inside][: options.topk]
    scores = np.clip(score[chosen], 0.0, 1.0).astype(np.float32)
    return Detections(source, scores, class_id[chosen].astype(np.int64)), chosen


def is_selected(score: FloatArray, class_id: IntArray, options: LayoutOptions) -> npt.NDArray[np.bool_]:
    """(n,) bool: over its class's threshold, in class_filter, and not below 0. class_id: after `mapped`."""
    threshold: float | npt.NDArray[np.float64] = options.pre_cluster_threshold
    if options.class_thresholds:
        threshold = np.full(len(score), options.pre_cluster_threshold)
        for one, own in options.class_thresholds:
            threshold[class_id == one] = own
    selected: npt.NDArray[np.bool_] = (score > threshold) & (class_id >= 0)
    if options.class_filter is not None:
        selected &= np.isin(class_id, list(options.class_filter))
    return selected
