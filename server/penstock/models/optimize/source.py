"""The float model, its sessions with the engine's options, and the pictures for calibration and evaluation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_config
from penstock.engines.ort_serving.config import OrtLoadError
from penstock.engines.ort_serving.session import model_path, open_session, session_options
from penstock.engines.ort_serving.threads import thread_budget
from penstock.gateway.batching.merging import merge_rows
from penstock.models.onnx_reference import is_quantised
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InferenceError, InvalidRequest
from penstock.protocol.inference import Array, Datatype
from penstock.protocol.request_checks import is_version
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import decode
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import Geometry, least_decoded_size, prepare
from penstock.vision.spec import NetworkType


class OptimizeError(Exception):
    """The model cannot be optimised, or not with these pictures; nothing was written."""


@dataclass(frozen=True, slots=True)
class Progress:
    """step(what, count): a step of `count` parts begins. advance(): one part is done."""

    step: Callable[[str, int], None]
    advance: Callable[[], None]


WEIGHTS, RANDOM = "weights", "random"  # parameter in config.pbtxt: weights without meaning
PRECISION = "precision"
JUDGED_LAYOUTS = ("embedding",)  # of network-type other
CPU_INSTANCES = 2  # Triton's default for ONNX models on the CPU
_LARGER_BATCH = 8
_KINDS = model_config_pb2.ModelInstanceGroup


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A vision model in ONNX format. path: of the newest version. proto: all of config.pbtxt."""

    name: str
    folder: Path
    path: Path
    proto: model_config_pb2.ModelConfig
    config: ModelConfig
    card: VisionCard

    @property
    def has_random_weights(self) -> bool:
        return self.config.parameters.get(WEIGHTS) == RANDOM

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes for speed measurements: 1, and a larger one if the model's input size is fixed."""
        larger = min(_LARGER_BATCH, self.config.max_batch_size)
        return (1, larger) if larger > 1 and self.card.prepare_spec.width else (1,)


def read_source(folder: Path) -> SourceModel:
    """The model of a folder. Raises OptimizeError if it cannot be optimised here."""
    path = folder / "config.pbtxt"
    try:
        config = read_config(path)
        card = card_from_config(config)
    except InvalidRequest as error:
        raise OptimizeError(error.message) from error
    if config.backend != "onnxruntime":
        raise OptimizeError(
            f"model {config.name!r} is of backend {config.backend or 'unknown'!r}: only models of backend onnxruntime "
            "can be optimised"
        )
    if card is None:
        raise OptimizeError(
            f"model {config.name!r} does not say how it sees pictures, so there is nothing to calibrate it with: add "
            f"its vision parameters (network-type …) to {path}"
        )
    if card.network_type is NetworkType.OTHER and card.layout.name not in JUDGED_LAYOUTS:
        raise OptimizeError(
            f"model {config.name!r} has results of layout {card.layout.name!r}, whose loss is not measured: only "
            "detectors, classifiers, segmentations and embeddings can be optimised"
        )
    if card.prepare_spec.datatype is Datatype.FP16 or config.parameters.get(PRECISION) == "int8":
        raise OptimizeError(f"model {config.name!r} is not a float32 model: start from the float32 original")
    proto = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    proto.name = config.name
    try:
        file = model_path(_newest_version(folder), engine_config(proto))
    except OrtLoadError as error:
        raise OptimizeError(f"model {config.name!r}: {error}") from error
    _require_float(config.name, file)
    return SourceModel(config.name, folder, file, proto, config_from_proto(proto), card)


def _require_float(name: str, file: Path) -> None:
    try:
        is_8_bit = is_quantised(file)
    except (DecodeError, OSError):
        return  # opening it reports the problem
    if is_8_bit:
        raise OptimizeError(f"model {name!r} computes in 8 bits already: start from the float32 original")


def engine_config(proto: model_config_pb2.ModelConfig) -> dict[str, Any]:
    """The config as Triton's JSON, with Triton's default instances."""
    full = model_config_pb2.ModelConfig()
    full.CopyFrom(proto)
    if not full.instance_group:
        full.instance_group.add(count=CPU_INSTANCES, kind=_KINDS.KIND_CPU)
    as_dict: dict[str, Any] = json_format.MessageToDict(full, preserving_proto_field_name=True)
    return as_dict


def engine_options(source: SourceModel) -> ort.SessionOptions:
    """The session options of one engine instance on this machine's CPU."""
    config = engine_config(source.proto)
    try:
        return session_options(config, thread_budget(config))
    except OrtLoadError as error:
        raise OptimizeError(f"model {source.name!r}: {error}") from error


def open_model(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on this CPU. Raises OptimizeError with ONNX Runtime's reason."""
    try:
        return open_session(path, options, ["CPUExecutionProvider"])
    except OrtLoadError as error:
        raise OptimizeError(str(error)) from error


def _newest_version(folder: Path) -> Path:
    versions = [item for item in folder.iterdir() if is_version(item.name) and item.is_dir()]
    if not versions:
        raise OptimizeError(f"model {folder.name!r} has no version: {folder} holds no numbered folder")
    return max(versions, key=lambda item: int(item.name))


FEWEST_PICTURES = 8
ENOUGH_CALIBRATING = 50  # half of the 100 pictures that are advised
MOST_CALIBRATING = 64  # ranges change little after some dozens; their arrays stay in memory


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture. feed: the inputs of one engine call by name, with batch axis if the model has one."""

    path: Path
    feed: dict[str, Array]
    has_batch_axis: bool
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Split:
    """Pictures for calibration and for evaluation. unreadable: one sentence each."""

    calibrating: tuple[Path, ...]
    held_out: tuple[Path, ...]
    unreadable: tuple[str, ...]


def split_pictures(paths: Sequence[Path], source: SourceModel, on_picture: Callable[[], None]) -> Split:
    """Every second readable picture calibrates, up to MOST_CALIBRATING. Raises OptimizeError if there are too few."""
    readable: list[Path] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            read_sample(path, source)
            readable.append(path)
        except InferenceError as error:
            unreadable.append(f"{path.name}: {error}")
        except OSError as error:
            unreadable.append(f"{path.name}: {error.strerror}")
        on_picture()
    if len(readable) < FEWEST_PICTURES:
        why = f"; {len(unreadable)} cannot be read, the first is {unreadable[0]}" if unreadable else ""
        raise OptimizeError(
            f"{len(readable)} readable picture{'s' * (len(readable) != 1)} {'are' if len(readable) != 1 else 'is'} too "
            f"few to calibrate and to judge (at least {FEWEST_PICTURES}, better 100){why}"
        )
    step = max(2, -(-len(readable) // MOST_CALIBRATING))
    calibrating = tuple(readable[::step])
    chosen = set(calibrating)
    return Split(calibrating, tuple(path for path in readable if path not in chosen), tuple(unreadable))


def read_sample(path: Path, source: SourceModel) -> Sample:
    """One picture, decoded and preprocessed as by the gateway. Raises OSError and InferenceError."""
    spec = source.card.prepare_spec
    decoded = decode(path.read_bytes(), spec.color, at_least=least_decoded_size(spec))
    array, geometry = prepare(decoded, spec)
    card = source.card
    (call,) = merge_rows([array], declared_shape=card.input_shape, max_batch_size=source.config.max_batch_size)
    sizes = size_tensors(card, [geometry], has_batch_axis=call.has_batch_axis)
    feed = {card.input_name: call.array, **{size.name: size.to_numpy() for size in sizes}}
    return Sample(path, feed, call.has_batch_axis, geometry)


def read_samples(paths: Sequence[Path], source: SourceModel) -> Iterator[Sample]:
    """Samples one by one, because all may not fit into memory."""
    return (read_sample(path, source) for path in paths)
