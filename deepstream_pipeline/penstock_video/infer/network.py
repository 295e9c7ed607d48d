"""A model as the pipeline uses it: its input rows, and its outputs parsed to detections and classes."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock.gateway.batching.options import UNTRIED, read_options
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineFailed, InferenceError, InvalidRequest
from penstock.protocol.inference import BatchOwner, Classes, Datatype, InferResponse, VisionResult
from penstock.vision.card import NetworkType, VisionCard, card_from_config
from penstock.vision.decode import MAX_PIXELS
from penstock.vision.preprocess import NUMPY_OF, Geometry, geometry_of
from penstock.vision.results import parse
from penstock.vision.spec import InputOrder, PrepareSpec, ResizeMode
from penstock_video.errors import InferFailed, ModelUnusable
from penstock_video.types import ClassScore, Detections, DeviceRow


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """An image model of the engine.

    version: empty for the engine's choice. spec: PrepareSpec.pack(). row_bytes: of one row, the maximum if the network
    keeps sizes. row_dtype: of its elements. max_batch_size: rows of one call, 0 without a batch axis. unmerged: why it
    is 1 although the config has more; otherwise empty. labels: by class id, may be shorter. input_shape: without the
    batch axis, -1 for variable. card: for the parser. class_ids: of wanted objects; empty for all.
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
    class_ids: frozenset[int] = frozenset()
    is_batched_by_gateway: bool = False
    unmerged: str = ""

    @property
    def is_classifier(self) -> bool:
        return self.card.network_type is NetworkType.CLASSIFIER

    @property
    def prepare_spec(self) -> PrepareSpec:
        return self.card.prepare_spec

    @property
    def keeps_size(self) -> bool:
        """Whether rows may have different shapes."""
        return self.prepare_spec.fit is ResizeMode.KEEP

    def with_threshold(self, threshold: float | None) -> "Network":
        """The network with another pre-cluster-threshold, or classifier-threshold; None for the model's own."""
        if threshold is None:
            return self
        options = self.card.parser_options
        if self.is_classifier:
            options = replace(options, classifier_threshold=threshold)
        else:
            options = replace(options, pre_cluster_threshold=threshold)
        return replace(self, card=replace(self.card, parser_options=options))

    def of_classes(self, class_ids: frozenset[int]) -> "Network":
        """The network restricted to objects of these classes (operate-on-class-ids); empty for all."""
        return replace(self, class_ids=class_ids)

    def refusal_of(self, row: "np.ndarray[Any, Any] | DeviceRow") -> str:
        """Why this is no row of the network; empty if it is one."""
        spec = self.prepare_spec
        channels = spec.color.channels
        if row.dtype != self.row_dtype or row.ndim != 3:
            return f"a row of {self.name} is {self.row_dtype} with three axes, not {row.dtype} of {list(row.shape)}"
        height, width = (row.shape[1:]) if spec.layout is InputOrder.NCHW else row.shape[:2]
        own = row.shape[0] if spec.layout is InputOrder.NCHW else row.shape[2]
        if own != channels or (not self.keeps_size and (width, height) != (spec.width, spec.height)):
            return f"a row of {self.name} is {spec.width}x{spec.height} of {channels} channels, not {list(row.shape)}"
        return "" if row.nbytes <= self.row_bytes else f"a row of {self.name} has {row.nbytes} bytes, over its limit"


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
        input_shape=config.inputs[0].shape,
        card=card,
        is_batched_by_gateway=options.owner is BatchOwner.GATEWAY,
        unmerged=_unmerged(config),
    )


def _unmerged(config: ModelConfig) -> str:
    if config.max_batch_size < 2:
        return ""
    return UNTRIED if config.unmerged is None else config.unmerged


def _row_bytes(spec: PrepareSpec) -> int:
    if spec.fit is not ResizeMode.KEEP:
        return spec.row_bytes
    pixels = spec.max_side**2 if spec.max_side else MAX_PIXELS
    return pixels * spec.color.channels * (spec.datatype.size_bytes or 1)


def datatype_of(network: Network) -> Datatype:
    """KServe v2's name of the rows' element type."""
    return network.prepare_spec.datatype


class ParsedNetwork(Protocol):
    """The part of Network that parsing needs. class_ids: of wanted objects; empty for all."""

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> VisionCard: ...

    @property
    def class_ids(self) -> frozenset[int]: ...


class ParsedRow(Protocol):
    """The part of RowsResult that parsing needs."""

    def row(self, index: int) -> tuple[InferResponse, int | None]:
        """The response with this row's outputs, and its index there, None if the whole response is the row's."""
        ...


def detections_of(network: ParsedNetwork, answer: ParsedRow, index: int, width: int, height: int) -> Detections:
    """A detector's objects in a frame of width x height pixels; highest score first. Raises InferFailed."""
    seen = _parsed(network, answer, index, geometry_of(width, height, network.card.prepare_spec))
    if isinstance(seen, Classes):
        raise InferFailed(f"model {network.name!r} says what a whole picture is, and not where things are in it")
    wanted = np.isin(seen.class_id, list(network.class_ids)) if network.class_ids else slice(None)
    return Detections(
        np.ascontiguousarray(seen.xyxy[wanted], np.float32),
        np.ascontiguousarray(seen.score[wanted], np.float32),
        np.ascontiguousarray(seen.class_id[wanted], np.int64),
    )


def classes_of(network: ParsedNetwork, answer: ParsedRow, index: int) -> tuple[ClassScore, ...]:
    """A classifier's classes of the row's picture; highest score first. Raises InferFailed as above."""
    seen = _parsed(network, answer, index, _NOWHERE)
    if not isinstance(seen, Classes):
        raise InferFailed(f"model {network.name!r} finds objects, and does not say what a whole picture is")
    labels = network.card.labels
    scores = [
        ClassScore(network.name, number, _label(labels, number), score)
        for number, score in zip(seen.class_id.tolist(), seen.score.tolist(), strict=True)
        if not network.class_ids or number in network.class_ids
    ]
    return tuple(scores)


def _parsed(network: ParsedNetwork, answer: ParsedRow, index: int, geometry: Geometry) -> VisionResult:
    response, place = answer.row(index)
    try:
        return parse(network.card, response, place, geometry)
    except EngineFailed as error:
        raise InferFailed(error.message) from error
    except InferenceError as error:
        raise InferFailed(f"model {network.name!r}: {error.message}") from error


def _label(labels: tuple[str, ...], class_id: int) -> str:
    return labels[class_id] if 0 <= class_id < len(labels) else f"class {class_id}"


_NOWHERE = Geometry(1, 1, 1, 1, 1.0, 1.0)  # a classifier's output has no coordinates
