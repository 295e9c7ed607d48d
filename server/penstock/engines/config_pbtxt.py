"""Reads config.pbtxt, Triton's description of a model, into a ModelConfig."""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_CONFIG_BYTES = 1 << 20  # parsing that takes about a second
MAX_REASON = 500  # characters of the parser's text, which may quote a whole line
_BACKEND_OF_PLATFORM = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_PROCESS_AN_INSTANCE = ("python", "torch")
_KIND_GPU = model_config_pb2.ModelInstanceGroup.KIND_GPU


def read_config(path: Path) -> ModelConfig:
    """The model in the file; its default name is the folder's. Raises InvalidRequest as "path:line: problem"."""
    proto = read_proto(path)
    try:
        proto.name = _checked_name(proto.name, path.absolute().parent.name)
        return config_from_proto(proto)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}") from error


def read_proto(path: Path) -> model_config_pb2.ModelConfig:
    """The file's message. Raises InvalidRequest as "path:line: problem"."""
    proto = model_config_pb2.ModelConfig()
    try:
        _check_file(path)
        text_format.Parse(path.read_text(encoding="utf-8"), proto)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except text_format.ParseError as error:
        raise InvalidRequest(_located(path, error)) from error
    return proto


def _check_file(path: Path) -> None:
    """Rejects special files, which may block, and large files. Raises OSError, InvalidRequest."""
    seen = path.stat()
    if not stat.S_ISREG(seen.st_mode):
        raise InvalidRequest(f"{path}: it is no file")
    if seen.st_size > MAX_CONFIG_BYTES:
        raise InvalidRequest(f"{path}: it has {seen.st_size} bytes (limit {MAX_CONFIG_BYTES})")


def config_from_proto(proto: model_config_pb2.ModelConfig) -> ModelConfig:
    """The model in Triton's message. Raises InvalidRequest if no Triton would serve it."""
    if proto.max_batch_size < 0:
        raise InvalidRequest(f"max_batch_size is {proto.max_batch_size}; it must be 0 or more")
    return ModelConfig(
        name=proto.name,
        backend=proto.backend or _BACKEND_OF_PLATFORM.get(proto.platform, proto.platform),
        max_batch_size=proto.max_batch_size,
        inputs=tuple(_spec("input", tensor) for tensor in proto.input),
        outputs=tuple(_spec("output", tensor) for tensor in proto.output),
        parameters={key: value.string_value for key, value in proto.parameters.items()},
        instance_count=_instance_count(proto.instance_group),
        is_decoupled=proto.model_transaction_policy.decoupled,
        has_dynamic_batching=proto.HasField("dynamic_batching"),
        has_sequence_batching=proto.HasField("sequence_batching"),
        is_ensemble=proto.HasField("ensemble_scheduling") or proto.platform == "ensemble",
        has_priorities=proto.dynamic_batching.priority_levels > 0,
        is_on_gpu=any(group.kind == _KIND_GPU for group in proto.instance_group),
    )


def config_message(config: ModelConfig) -> model_config_pb2.ModelConfig:
    """Triton's message of the model: name, backend, batches, tensors, instances and parameters."""
    message = model_config_pb2.ModelConfig(
        name=config.name, backend=config.backend, max_batch_size=config.max_batch_size
    )
    message.instance_group.add(count=config.instance_count, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for spec in config.inputs:
        message.input.add(name=spec.name, data_type=_type_number(spec.datatype), dims=spec.shape)
    for spec in config.outputs:
        message.output.add(name=spec.name, data_type=_type_number(spec.datatype), dims=spec.shape)
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    return message


def _type_number(datatype: Datatype) -> int:
    datatype_name = "STRING" if datatype is Datatype.BYTES else datatype.value
    number: int = model_config_pb2.DataType.Value(f"TYPE_{datatype_name}")
    return number


@dataclass(frozen=True, slots=True)
class GpuInstances:
    """count: instances on each card. cards: indexes, empty for all."""

    count: int
    cards: tuple[int, ...] = ()


def gpu_instances(path: Path) -> tuple[GpuInstances, ...]:
    """Instances on GPUs, of a model with a process per instance; empty for others, and for unreadable files."""
    try:
        proto = read_proto(path)
    except InvalidRequest:
        return ()
    return gpu_groups(proto) if proto.backend in _PROCESS_AN_INSTANCE else ()


def gpu_groups(proto: model_config_pb2.ModelConfig) -> tuple[GpuInstances, ...]:
    """Instances on GPUs of any model. An ensemble has none."""
    kinds = {_KIND_GPU} if proto.backend == "python" else {_KIND_GPU, model_config_pb2.ModelInstanceGroup.KIND_AUTO}
    groups = proto.instance_group or [model_config_pb2.ModelInstanceGroup()]
    if proto.HasField("ensemble_scheduling"):
        return ()
    return tuple(
        GpuInstances(max(1, group.count), tuple(group.gpus))
        for group in groups
        if group.kind in kinds and not group.passive
    )


def _checked_name(name: str, folder_name: str) -> str:
    if name and name != folder_name:
        raise InvalidRequest(f"name is {name!r} but the folder is {folder_name!r}; Triton wants them equal")
    return folder_name


def _spec(kind: str, tensor: "model_config_pb2.ModelInput | model_config_pb2.ModelOutput") -> TensorSpec:
    if any(dim == 0 or dim < -1 for dim in tensor.dims):
        raise InvalidRequest(f"{kind} {tensor.name!r} has dims {list(tensor.dims)}; each must be -1 or 1 or more")
    return TensorSpec(tensor.name, _datatype(kind, tensor.name, tensor.data_type), tuple(tensor.dims))


def _datatype(kind: str, name: str, number: int) -> Datatype:
    if number == model_config_pb2.TYPE_STRING:
        return Datatype.BYTES
    word = model_config_pb2.DataType.Name(number).removeprefix("TYPE_")
    try:
        return Datatype(word)
    except ValueError:
        raise InvalidRequest(f"{kind} {name!r} has no data_type") from None


def _instance_count(groups: "Sequence[model_config_pb2.ModelInstanceGroup]") -> int:
    """Concurrent instances: a GPU group's count is per GPU, and 1 by default."""
    return sum(_group_count(group) for group in groups if not group.passive) or 1


def _group_count(group: model_config_pb2.ModelInstanceGroup) -> int:
    count: int = max(1, group.count)
    return count * max(1, len(group.gpus)) if group.kind == _KIND_GPU else count


def _located(path: Path, error: text_format.ParseError) -> str:
    """`path:line: text`; the error's own text starts with `line:column : `."""
    line = error.GetLine()
    if line is None:
        return f"{path}: {str(error)[:MAX_REASON]}"
    text = str(error)[:MAX_REASON].removeprefix(f"{line}:{error.GetColumn()} : ")
    return f"{path}:{line}: {text}"
