"""Requests and responses of the image endpoint, stage timings, and parsing of model outputs."""

import base64
import difflib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineFailed, InvalidRequest, Overloaded, error_for_client
from penstock.protocol.inference import BatchTrace, Datatype, InferResponse, Timings
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    SegmentationMap,
    TextLines,
    VisionResult,
)
from penstock.vision.card import VisionCard
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.layouts.layout import Outputs
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

CANARY_PICTURE = zlib.decompress(  # a grey JPEG of 640 x 480 pixels
    base64.b64decode(
        "eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZlBQ0ZOWU5SQ1lRWVdbw8AmxdHG3NymOiLWM2Viw8xp/Q09XQu2PDu8YNWttV09J/6fvvXu6///"
        "/2cfBBK//j/7+/8HyBBGbV1dG1ObMkfHsh9Le5b+IBn8P8AgyMH4gKmBmVGJgUmQkVmQ8f8RBhGQI1EBSFQAqygjVlFBTNFbDDzMjEBLmAUZ"
        "7BlGwSgYBaNgFIyCkQz+3wQATIJxlg=="
    )
)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """A request's overrides of the card; None for the card's value. conf, iou: 0 to 1. classes: ids or labels."""

    conf: float | None = None
    iou: float | None = None
    classes: tuple[str, ...] | None = None
    max_detections: int | None = None
    needs_masks: bool | None = None


CARD_DEFAULTS = ResultOptions()
LOWEST_CONF = 0.001  # lower requests are raised to it; the card's threshold may be lower


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """Encoded images for one model.

    is_drawn: the response has a drawing of the only image. write: converts a result and the labels to the response's
    form; called in a thread for large results.
    """

    model_name: str
    model_version: str
    images: tuple[bytes, ...]
    deadline: float | None  # monotonic seconds; None for the model's default
    id: str = ""
    client: str = ""  # for fair queueing
    result_options: ResultOptions = CARD_DEFAULTS
    is_drawn: bool = False
    write: Callable[[VisionResult, Sequence[str]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ImageResponse:
    """One result per image, in the request's order. drawing: a JPEG, if the request is_drawn."""

    model_name: str
    model_version: str
    results: tuple[object, ...]  # VisionResult each, or the return value of the request's `write`
    labels: tuple[str, ...]  # by class_id; may be incomplete
    timings: Timings
    total_s: float
    explanations: tuple[BatchTrace, ...] = ()  # one per image, if the gateway formed the batches
    drawing: bytes = b""


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model and its image configuration."""

    config: ModelConfig
    card: VisionCard


def may_take_images(config: ModelConfig) -> bool:
    """Quick check, so that BYTES requests to other models lose no time."""
    if "network-type" not in config.parameters:
        return False
    has_bytes_input = any(spec.datatype is Datatype.BYTES for spec in config.inputs)
    return not has_bytes_input or "image-decoder" in config.parameters


def preparation_timings(prepared: Sequence[PreparedImage], passed_s: float) -> Timings:
    """Timings of images prepared concurrently: the longest of each stage; the rest of passed_s is queue time."""
    at_work_s = max(item.decode_s + item.preprocess_s for item in prepared)
    return Timings(
        decode=max(item.decode_s for item in prepared),
        preprocess=max(item.preprocess_s for item in prepared),
        queue=max(passed_s - at_work_s, 0.0),
    )


def concurrent_timings(timings: Sequence[Timings], passed_s: float) -> Timings:
    """Timings of images processed concurrently: the longest of each stage; the rest of passed_s is queue time."""
    if len(timings) == 1:
        (one,) = timings
        queue = passed_s - one.decode - one.preprocess - one.infer - one.postprocess
        return Timings(one.decode, one.preprocess, max(queue, 0.0), one.infer, one.postprocess, one.batch_size)
    decode, preprocess = max(item.decode for item in timings), max(item.preprocess for item in timings)
    infer, postprocess = max(item.infer for item in timings), max(item.postprocess for item in timings)
    queue = max(passed_s - decode - preprocess - infer - postprocess, 0.0)
    return Timings(decode, preprocess, queue, infer, postprocess, max(item.batch_size for item in timings))


def sequential_timings(timings: Sequence[Timings]) -> Timings:
    """Sums of all stages; the largest batch size."""
    return Timings(
        decode=sum(item.decode for item in timings),
        preprocess=sum(item.preprocess for item in timings),
        queue=sum(item.queue for item in timings),
        infer=sum(item.infer for item in timings),
        postprocess=sum(item.postprocess for item in timings),
        batch_size=max(item.batch_size for item in timings),
    )


def parse(card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry) -> VisionResult:
    """The result of one image. row: its index in the batch; None without a batch dimension.

    Raises EngineFailed, TooLarge, and Overloaded if there is too little memory for the result.
    """
    try:
        result = card.layout.decode(Outputs(response, row), card.layout_options, geometry)
    except (MemoryError, cv2.error) as error:
        if isinstance(shown := error_for_client(error), Overloaded):
            raise shown from error
        size, reason = f"{geometry.source_width}x{geometry.source_height} pixels", " ".join(str(error).split())[:200]
        raise EngineFailed(
            f"model {response.model_name!r}: layout {card.layout.name!r} cannot decode the outputs for a picture of "
            f"{size}: {reason}"
        ) from error
    if not all(np.isfinite(numbers).all() for numbers in _numbers_of(result)):
        raise EngineFailed(
            f"model {response.model_name!r}: layout {card.layout.name!r} computes numbers that are NaN or infinite "
            "from the outputs; another layout or other parameters may fit the model"
        )
    return result


def result_of(
    request: ImageRequest, card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry
) -> object:
    """As `parse`, converted by the request's `write` if it has one."""
    result = parse(card, response, row, geometry)
    return result if request.write is None else request.write(result, card.labels)


def _numbers_of(result: VisionResult) -> tuple[npt.ArrayLike, ...]:
    """All floats of the result."""
    match result:
        case Detections():
            more = (numbers for numbers in (result.keypoints, result.xywhr) if numbers is not None)
            return (result.xyxy, result.score, *more)
        case Classes():
            return (result.score,)
        case Embedding():
            return (result.vector,)
        case TextLines():
            polygons = (line.polygon for line in result.lines if line.polygon is not None)
            return ([line.score for line in result.lines], *polygons)
        case DepthMap():
            return (result.values,)
        case SegmentationMap():
            return ()


_FIELDS = {
    "conf": "conf",
    "iou": "iou",
    "classes": "classes",
    "max_detections": "max_detections",
    "needs_masks": "masks",
}  # by their names for clients
_BIGGEST_CLASS_ID = 1_000_000
_MAX_COMPARED_LABELS = 2000  # with an unknown one: 10 ms


def card_for(card: VisionCard, requested: ResultOptions) -> VisionCard:
    """The card with a request's options applied. Raises InvalidRequest for unusable options and unknown labels."""
    if requested == CARD_DEFAULTS:
        return card
    _refuse_unusable(card, requested)
    options = card.layout_options
    if requested.conf is not None:
        conf = max(requested.conf, LOWEST_CONF)
        options = replace(options, pre_cluster_threshold=conf, classifier_threshold=requested.conf, class_thresholds=())
    if requested.iou is not None:
        options = replace(options, nms_iou_threshold=requested.iou)
    if requested.max_detections is not None:
        options = replace(options, topk=requested.max_detections)
    if requested.classes is not None:
        ids = frozenset(class_id for name in requested.classes for class_id in _class_ids(name, card))
        options = replace(options, class_filter=ids)
    needs_masks = requested.needs_masks is not False or card.network_type is NetworkType.SEGMENTATION  # for the areas
    return replace(card, layout_options=replace(options, needs_masks=needs_masks))


def _refuse_unusable(card: VisionCard, requested: ResultOptions) -> None:
    usable = card.layout.usable_options
    for member, name in _FIELDS.items():
        if name not in usable and getattr(requested, member) is not None:
            kind, layout = card.network_type.name.lower().replace("_", " "), card.layout.name
            can = f"it can use {', '.join(sorted(usable))}" if usable else "leave it out"
            raise InvalidRequest(f"{name} has no effect on this model ({kind}, layout {layout!r}); {can}")


def _class_ids(name: str, card: VisionCard) -> list[int]:
    """The class of that id, or the classes of that label, in any case. Raises InvalidRequest for another one."""
    labels, class_ids = card.labels, card.layout_options.class_ids
    if name.isascii() and name.isdigit():
        last = max(len(labels) - 1, *class_ids, -1) if labels or class_ids else _BIGGEST_CLASS_ID
        if len(name) > len(str(_BIGGEST_CLASS_ID)) or int(name) > last:
            raise InvalidRequest(f"classes: the model has no class {name[:80]}; its class ids are 0 to {last}")
        return [int(name)]
    folded = [label.casefold() for label in labels]
    ids = [class_id for class_id, label in enumerate(folded) if label == name.casefold()]
    if ids:
        return ids
    if not labels:
        raise InvalidRequest(f"classes: {name[:80]!r} is not a class id, and this model has no labels; use class ids")
    near = difflib.get_close_matches(name[:80].casefold(), folded[:_MAX_COMPARED_LABELS], n=3)
    known = list(dict.fromkeys(labels[folded.index(label)] for label in near)) or list(filter(None, labels[:3]))
    hint = "did you mean" if near else "its labels begin with"
    raise InvalidRequest(f"classes: the model has no label {name[:80]!r}; {hint} {', '.join(map(repr, known))}")
