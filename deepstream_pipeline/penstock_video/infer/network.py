"""A model as the pipeline uses it: its input rows, labels and options."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.gateway.batching.options import UNTRIED, read_options
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import BatchOwner
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import MAX_PIXELS
from penstock.vision.preprocess import NUMPY_OF
from penstock.vision.results import ResultOptions, card_for
from penstock.vision.spec import NetworkType, PrepareSpec, ResizeMode
from penstock_video.errors import ModelUnusable


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """An image model of the engine.

    version: empty for the engine's choice. spec: PrepareSpec.pack(). row_bytes: of one row, the maximum if the network
    keeps sizes. row_dtype: of its elements. max_batch_size: rows of one call, 0 without a batch axis. unmerged: why it
    is 1 although the config has more; otherwise empty. labels: by class id, may be shorter. input_shape: without the
    batch axis, -1 for variable. card: for the parser. class_ids: of objects to detect; empty for all.
    """

    name: str
    version: str
    spec: bytes
    row_bytes: int
    row_dtype: np.dtype[Any]
    max_batch_size: int
    labels: tuple[str, ...]
    input_name: str
    input_shape: tuple[int, ...]
    card: VisionCard
    is_classifier: bool
    class_ids: frozenset[int] = frozenset()
    is_batched_by_gateway: bool = False
    unmerged: str = ""

    @property
    def prepare_spec(self) -> PrepareSpec:
        return self.card.prepare_spec

    @property
    def skeleton(self) -> tuple[tuple[int, int], ...]:
        """Pairs of keypoints that lines join."""
        return self.card.skeleton

    @property
    def finds_objects(self) -> bool:
        """Whether it is a detector or an instance segmentation."""
        return self.card.network_type in (NetworkType.DETECTOR, NetworkType.INSTANCE_SEGMENTATION)

    @property
    def has_keypoints(self) -> bool:
        """Whether its card has a keypoint-shape."""
        return self.card.layout_options.keypoint_shape[0] > 0

    @property
    def takes_sizes(self) -> bool:
        """Whether a second input takes the pictures' sizes."""
        return self.card.size_input is not None

    def with_threshold(self, threshold: float | None) -> "Network":
        """The network with another pre-cluster-threshold and classifier-threshold; None for the model's own."""
        if threshold is None:
            return self
        options = replace(
            self.card.layout_options,
            pre_cluster_threshold=threshold,
            classifier_threshold=threshold,
            class_thresholds=(),
        )
        return replace(self, card=replace(self.card, layout_options=options))

    def with_iou(self, iou: float | None) -> "Network":
        """The network with another nms-iou-threshold; None for the model's own. Raises ModelUnusable."""
        if iou is None:
            return self
        try:
            return replace(self, card=card_for(self.card, ResultOptions(iou=iou)))
        except InvalidRequest as error:
            raise ModelUnusable(f"nms-iou-threshold (--iou) for {self.name!r}: {error.message}") from error

    def of_classes(self, class_ids: frozenset[int]) -> "Network":
        """The network restricted to objects of these classes (operate-on-class-ids); empty for all."""
        return replace(self, class_ids=class_ids)


def network_from(config: ModelConfig, version: str = "") -> Network:
    """The network of a config. Raises ModelUnusable if it has no valid image parameters."""
    try:
        card = card_from_config(config)
        options = read_options(config)
    except InvalidRequest as error:
        raise ModelUnusable(error.message) from error
    if card is None:
        raise ModelUnusable(
            f"model {config.name!r} does not say how it sees images: give its config.pbtxt a `network-type` parameter "
            "(docs/card-parameters.md lists them), or choose an image model from `penstock models list`"
        )
    if card.is_relayed:
        raise ModelUnusable(
            f"model {config.name!r} decodes encoded pictures itself (image-decoder engine), and video has frames: "
            "choose its twin that takes pixels"
        )
    spec = card.prepare_spec
    return Network(
        name=config.name,
        version=version,
        spec=spec.pack(),
        row_bytes=_row_bytes(spec),
        row_dtype=np.dtype(NUMPY_OF[spec.datatype]),
        max_batch_size=min(config.merged_rows, options.max_batch_size),  # may be the gateway's limit
        labels=card.labels,
        input_name=card.input_name,
        input_shape=card.input_shape,
        card=card,
        is_classifier=card.network_type is NetworkType.CLASSIFIER,
        is_batched_by_gateway=options.owner is BatchOwner.GATEWAY,
        unmerged=_unmerged(config),
    )


def _unmerged(config: ModelConfig) -> str:
    if config.max_batch_size < 2:
        return ""
    return UNTRIED if config.unmerged is None else config.unmerged


def _row_bytes(spec: PrepareSpec) -> int:
    """Of one row; the maximum if sizes vary."""
    if spec.fit is ResizeMode.KEEP:
        pixels = (spec.max_side + spec.size_multiple // 2) ** 2 if spec.max_side else MAX_PIXELS
    elif spec.fit is ResizeMode.FIT_HEIGHT:
        pixels = spec.height * max(spec.max_side or MAX_PIXELS // spec.height, spec.min_width)
    else:
        return spec.row_bytes
    return pixels * spec.color.channels * (spec.datatype.size_bytes or 1)
