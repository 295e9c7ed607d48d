"""Requests and responses of the image endpoint, stage timings, and parsing of model outputs."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.protocol.engine import ModelConfig
from penstock.protocol.inference import BatchTrace, Datatype, InferResponse, Timings
from penstock.protocol.vision_results import VisionResult
from penstock.vision.card import VisionCard
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.layouts.layout import LayoutOptions, Outputs
from penstock.vision.preprocess import Geometry

CANARY_PICTURE = zlib.decompress(  # a grey JPEG of 640 x 480 pixels
    base64.b64decode(
        "eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZlBQ0ZOWU5SQ1lRWVdbw8AmxdHG3NymOiLWM2Viw8xp/Q09XQu2PDu8YNWttV09J/6fvvXu6///"
        "/2cfBBK//j/7+/8HyBBGbV1dG1ObMkfHsh9Le5b+IBn8P8AgyMH4gKmBmVGJgUmQkVmQ8f8RBhGQI1EBSFQAqygjVlFBTNFbDDzMjEBLmAUZ"
        "7BlGwSgYBaNgFIyCkQz+3wQATIJxlg=="
    )
)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What a client asks of the results; None for the card's. conf, iou: 0 to 1. classes: class ids."""

    conf: float | None = None
    iou: float | None = None
    classes: frozenset[int] | None = None
    max_detections: int | None = None
    needs_masks: bool = True


AS_CARD = ResultOptions()
LOWEST_CONF = 0.001  # lower ones would only add noise; the card's own threshold may be lower


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """Encoded images for one model."""

    model_name: str
    model_version: str
    images: tuple[bytes, ...]
    deadline: float | None  # monotonic seconds; None for the model's default
    id: str = ""
    client: str = ""  # for fair queueing
    wanted: ResultOptions = AS_CARD


@dataclass(frozen=True, slots=True)
class ImageResponse:
    """One result per image, in the request's order."""

    model_name: str
    model_version: str
    results: tuple[VisionResult, ...]
    labels: tuple[str, ...]  # by class_id; may be incomplete
    timings: Timings
    total_s: float
    explanations: tuple[BatchTrace, ...] = ()  # one per image, if the gateway formed the batches


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


def parse(
    card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry, wanted: ResultOptions = AS_CARD
) -> VisionResult:
    """The result of one image. row: its index in the batch; None without a batch dimension. Raises EngineFailed."""
    options = card.layout_options if wanted is AS_CARD else _replaced(card.layout_options, wanted)
    return card.layout.decode(Outputs(response, row), options, geometry)


def _replaced(options: LayoutOptions, wanted: ResultOptions) -> LayoutOptions:
    if wanted.conf is not None:
        conf = max(wanted.conf, LOWEST_CONF)
        options = replace(options, pre_cluster_threshold=conf, classifier_threshold=wanted.conf, class_thresholds=())
    if wanted.iou is not None:
        options = replace(options, nms_iou_threshold=wanted.iou)
    if wanted.max_detections is not None:
        options = replace(options, topk=wanted.max_detections)
    return replace(options, wanted_classes=wanted.classes, needs_masks=wanted.needs_masks)
