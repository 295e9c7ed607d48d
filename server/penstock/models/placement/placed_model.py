"""A model folder opened on one engine in one precision, as the embedded engine opens it, and its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_proto
from penstock.engines.embedded.loading import open_folder
from penstock.engines.embedded.model_version import OpenedVersion
from penstock.engines.embedded.repository import ModelFolder
from penstock.engines.ort_serving.config import OrtLoadError, OrtRequestError
from penstock.engines.ort_serving.placement import CUDA, Precision
from penstock.gateway.batching.merging import MergedRows, merge_rows
from penstock.models.check.answers import NO_RIVALS, Rivals, rivals_of
from penstock.models.inspect.trial_session import TrialFailed
from penstock.models.placement.choice import Device, ModelPlacement
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Array, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections, VisionResult
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import DecodedImage
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import Geometry, prepare
from penstock.vision.results import parse
from penstock.vision.spec import NetworkType

PRECISION, THREADS, CHECKS = "precision", "intra_op_thread_count", "check-answers"  # parameters of config.pbtxt
_KINDS = model_config_pb2.ModelInstanceGroup
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture as the network takes it. array: without batch axis."""

    array: Array
    geometry: Geometry


class PlacedModel:
    """One open model, a context that frees it. `results` may be called by several threads."""

    def __init__(
        self, folder: Path, placement: ModelPlacement, *, threads: int | None = None, is_checked: bool = True
    ) -> None:
        """folder: with config.pbtxt. threads: of one run on the CPU; None as configured. is_checked: see open_placed.

        Raises TrialFailed, also where the engine runs it elsewhere or in another precision.
        """
        config = placed_config(read_proto(folder / "config.pbtxt"), placement)
        if not is_checked:
            config.parameters[CHECKS].string_value = "0"
        self.is_checked = is_checked
        if threads is not None:
            config.parameters[THREADS].string_value = str(threads)
        self.placement, self.version = placement, _open(folder, config)
        facts = self.version.facts
        if placement.device is Device.GPU and (facts.provider, facts.precision) != (CUDA, placement.precision.value):
            self.close()
            raise TrialFailed(
                "; ".join(facts.fallbacks) or f"the engine runs it on {facts.device} in {facts.precision}"
            )
        self.config = config_from_proto(self.version.config)
        self._names = tuple(self.version.rules.outputs)
        self.card = _compared_card(card_from_config(self.config), folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the GPU's memory."""
        self.version.ort_model.close()

    def prepare(self, decoded: DecodedImage) -> PreparedPicture:
        """The gateway's preprocessing. Raises InferenceError."""
        return PreparedPicture(*prepare(decoded, self.card.prepare_spec))

    def results(self, pictures: Sequence[PreparedPicture]) -> list[VisionResult]:
        """One result a picture, in as few calls as max_batch_size allows. Raises TrialFailed."""
        return self._parsed(pictures, lambda response, row, geometry: parse(self.card, response, row, geometry))

    def results_with_rivals(self, pictures: Sequence[PreparedPicture]) -> list[tuple[VisionResult, Rivals]]:
        """As results; with the boxes that NMS dropped for one of nearly the same score."""
        return self._parsed(pictures, self._with_rivals)

    def _with_rivals(self, response: InferResponse, row: int | None, geometry: Geometry) -> tuple[VisionResult, Rivals]:
        result, options = parse(self.card, response, row, geometry), self.card.layout_options
        if not isinstance(result, Detections) or "iou" not in self.card.layout.usable_options:
            return result, NO_RIVALS
        every = replace(self.card, layout_options=replace(options, nms_iou_threshold=1.0, topk=None))
        candidates = parse(every, response, row, geometry)
        assert isinstance(candidates, Detections)
        return result, rivals_of(result, candidates, iou=options.nms_iou_threshold)

    def _parsed(
        self, pictures: Sequence[PreparedPicture], read: Callable[[InferResponse, int | None, Geometry], R]
    ) -> list[R]:
        found: dict[int, R] = {}
        for rows in self._merged(pictures):
            geometries = [pictures[index].geometry for index in rows.members]
            arrays = self._run(self._feed(rows, geometries))
            tensors = tuple(tensor_from_numpy(name, array) for name, array in zip(self._names, arrays, strict=True))
            response = InferResponse(self.config.name, "", tensors)
            try:
                for row, (index, geometry) in enumerate(zip(rows.members, geometries, strict=True)):
                    found[index] = read(response, row if rows.has_batch_axis else None, geometry)
            except InferenceError as error:
                raise TrialFailed(error.message) from error
        return [found[index] for index in range(len(pictures))]

    def call_of(self, pictures: Sequence[PreparedPicture]) -> Callable[[], object]:
        """Runs the network on the pictures, which fit into one call; for measuring rates."""
        (rows,) = self._merged(pictures)
        feed = self._feed(rows, [picture.geometry for picture in pictures])
        return lambda: self._run(feed)

    def _merged(self, pictures: Sequence[PreparedPicture]) -> list[MergedRows]:
        arrays = [picture.array for picture in pictures]
        most = self.config.max_batch_size
        return merge_rows(arrays, declared_shape=self.card.input_shape, max_batch_size=most)

    def _feed(self, rows: MergedRows, geometries: Sequence[Geometry]) -> dict[str, Array]:
        sizes = size_tensors(self.card, geometries, has_batch_axis=rows.has_batch_axis)
        return {self.card.input_name: rows.array, **{size.name: size.to_numpy() for size in sizes}}

    def _run(self, feed: dict[str, Array]) -> Sequence[Array]:
        try:
            return self.version.ort_model.run(self._names, feed)
        except OrtRequestError as error:
            raise TrialFailed(str(error)) from error


def open_placed(folder: Path, placement: ModelPlacement, *, threads: int | None = None) -> PlacedModel:
    """The model where it is placed. is_checked of it: whether the engine compared its outputs with the CPU's.

    The engine refuses FP16 and TF32 if outputs differ, or cannot be compared because the model sorts them. Then it is
    opened without that check, and the results decide. Raises TrialFailed.
    """
    try:
        return PlacedModel(folder, placement, threads=threads)
    except TrialFailed:
        if placement.precision is Precision.FP32:
            raise
        return PlacedModel(folder, placement, threads=threads, is_checked=False)


def placed_config(config: model_config_pb2.ModelConfig, placement: ModelPlacement) -> model_config_pb2.ModelConfig:
    """A copy whose instances run there. The number of instances is kept."""
    placed = model_config_pb2.ModelConfig()
    placed.CopyFrom(config)
    if not placed.instance_group:
        placed.instance_group.add()
    for group in placed.instance_group:
        group.kind = _KINDS.KIND_GPU if placement.device is Device.GPU else _KINDS.KIND_CPU
    placed.parameters[PRECISION].string_value = placement.precision.value
    return placed


def _open(folder: Path, config: model_config_pb2.ModelConfig) -> OpenedVersion:
    version = max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    config.name = folder.name
    try:
        opened = open_folder(
            ModelFolder(folder.name, folder, (version,)), json_format.MessageToJson(config), loaded=None
        )
    except (OrtLoadError, InferenceError) as error:
        raise TrialFailed(str(error)) from error
    if version not in opened.opened:
        raise TrialFailed(opened.failures.get(version, "no version of it is served"))
    return opened.opened[version]


def _compared_card(card: VisionCard | None, folder: Path) -> VisionCard:
    """A classifier gives all classes, so that ties are seen; masks are not made."""
    if card is None:
        raise TrialFailed(f"{folder / 'config.pbtxt'} has no picture parameters")
    is_classifier = card.network_type is NetworkType.CLASSIFIER
    topk = None if is_classifier else card.layout_options.topk
    return replace(card, layout_options=replace(card.layout_options, topk=topk, needs_masks=False))
