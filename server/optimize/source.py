"""The float model: its folder as Triton reads it, its card, and a session as the engine would open it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import config_from_proto, read_config
from server.backends.onnx_reference import is_quantised
from server.backends.ort_serving.errors import LoadError
from server.backends.ort_serving.session import model_path, open_session, session_options
from server.backends.ort_serving.threads import thread_budget
from server.core.errors import InvalidRequest
from server.core.model import ModelConfig
from server.core.model_files import is_version
from server.core.tensor import Datatype
from server.optimize.errors import OptimizeError
from server.vision.card import VisionCard, card_from_config

WEIGHTS, RANDOM = "weights", "random"  # the parameter of config.pbtxt that marks weights that mean nothing
PRECISION = "precision"
CPU_INSTANCES = 2  # Triton's default for ONNX models on the CPU, where the config names no instances
_LARGER_BATCH = 8
_KINDS = model_config_pb2.ModelInstanceGroup


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A vision model that ONNX Runtime serves. path: the ONNX file of its newest version; proto: config.pbtxt, all."""

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
        """What speed is measured at: 1, and a larger batch where the model takes one of a fixed size."""
        larger = min(_LARGER_BATCH, self.config.max_batch_size)
        return (1, larger) if larger > 1 and self.card.prepare_spec.width else (1,)


def read_source(folder: Path) -> SourceModel:
    """The model of a folder. Raises OptimizeError where it is none that can be optimised here, and says why."""
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
    if card.prepare_spec.datatype is Datatype.FP16 or config.parameters.get(PRECISION) == "int8":
        raise OptimizeError(f"model {config.name!r} is not a float32 model: start from the float32 original")
    proto = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    proto.name = config.name
    try:
        file = model_path(_newest_version(folder), engine_config(proto))
    except LoadError as error:
        raise OptimizeError(f"model {config.name!r}: {error}") from error
    _require_float(config.name, file)
    return SourceModel(config.name, folder, file, proto, config_from_proto(proto), card)


def _require_float(name: str, file: Path) -> None:
    """Whatever config.pbtxt says of it."""
    try:
        is_8_bit = is_quantised(file)
    except (DecodeError, OSError):
        return  # opening it says what is wrong with it
    if is_8_bit:
        raise OptimizeError(f"model {name!r} computes in 8 bits already: start from the float32 original")


def engine_config(proto: model_config_pb2.ModelConfig) -> dict[str, Any]:
    """The config as the engine's session code reads it: Triton's JSON, with Triton's instances where it names none."""
    full = model_config_pb2.ModelConfig()
    full.CopyFrom(proto)
    if not full.instance_group:
        full.instance_group.add(count=CPU_INSTANCES, kind=_KINDS.KIND_CPU)
    as_dict: dict[str, Any] = json_format.MessageToDict(full, preserving_proto_field_name=True)
    return as_dict


def engine_options(source: SourceModel) -> ort.SessionOptions:
    """Threads, spinning and graph level as an instance of the model has them on this machine's CPU."""
    config = engine_config(source.proto)
    try:
        return session_options(config, thread_budget(config))
    except LoadError as error:
        raise OptimizeError(f"model {source.name!r}: {error}") from error


def open_model(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on this CPU. Raises OptimizeError with ONNX Runtime's reason."""
    try:
        return open_session(path, options, ["CPUExecutionProvider"])
    except LoadError as error:
        raise OptimizeError(str(error)) from error


def _newest_version(folder: Path) -> Path:
    versions = [item for item in folder.iterdir() if is_version(item.name) and item.is_dir()]
    if not versions:
        raise OptimizeError(f"model {folder.name!r} has no version: {folder} holds no numbered folder")
    return max(versions, key=lambda item: int(item.name))
