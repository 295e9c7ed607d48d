"""The TensorRT accelerator of NGC's onnxruntime backend, in a model's config.pbtxt. Never run with NGC's Triton.

The parameters are those of the README of triton-inference-server/onnxruntime_backend, read in November 2026.
"""

from collections.abc import Iterable
from pathlib import Path

from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_proto
from penstock.gateway.batching.options import MAX_BATCH_SIZE, MEASURED_ON
from penstock.gpu.tensorrt import Accelerator
from penstock.models.added_folder import proto_text
from penstock.protocol.errors import InvalidRequest

CACHE_FOLDER = "tensorrt"  # in the model's folder: engines, and the calibration table
WORKSPACE_BYTES = 1 << 30  # the backend's default, written out so that it is seen


def write_accelerator(folder: Path, precision: str, cache: str, *, table: str = "") -> None:
    """Adds the accelerator to the config.pbtxt of a model's folder.

    precision: FP32, FP16 or INT8. cache: folder for engines, as Triton sees it. table: calibration table in it, for
    INT8. Raises InvalidRequest, OSError.
    """
    path = folder / "config.pbtxt"
    proto = read_proto(path)
    backend = config_from_proto(proto).backend
    if backend != "onnxruntime":
        raise InvalidRequest(f"model {proto.name!r} is of backend {backend!r}: --accelerator is for ONNX models")
    add_accelerator(proto, precision, cache, table=table)
    path.write_text(proto_text(proto), encoding="utf-8")


def accelerator_sentence(accelerator: Accelerator, cache: str) -> str:
    """What the accelerator means, for the user. cache: folder for engines, as Triton sees it."""
    return (
        f"TensorRT in {accelerator.precision} runs it in Triton of NGC only, which was never tried; elsewhere ONNX "
        f"Runtime runs it. Engines are cached in {cache}, a path as Triton sees it (--accelerator-cache)"
    )


def add_accelerator(proto: model_config_pb2.ModelConfig, precision: str, cache: str, *, table: str = "") -> None:
    """Replaces the TensorRT accelerator of a config; other accelerators stay. KIND_CPU becomes KIND_AUTO.

    The gateway forms batches of max_batch_size rows, the profile's: a smaller limit was measured on a CPU.
    """
    if MAX_BATCH_SIZE in proto.parameters:
        proto.parameters[MAX_BATCH_SIZE].string_value = str(proto.max_batch_size)
    proto.parameters.pop(MEASURED_ON, None)
    for group in proto.instance_group:
        if group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU:
            group.kind = model_config_pb2.ModelInstanceGroup.KIND_AUTO
    accelerators = proto.optimization.execution_accelerators.gpu_execution_accelerator
    others = [one for one in accelerators if one.name != Accelerator.TENSORRT]
    del accelerators[:]
    accelerators.extend(others)
    added = accelerators.add(name=str(Accelerator.TENSORRT))
    for key, value in _parameters(proto, precision, cache, table).items():
        added.parameters[key] = value


def _parameters(proto: model_config_pb2.ModelConfig, precision: str, cache: str, table: str) -> dict[str, str]:
    found = {
        "precision_mode": precision,
        "max_workspace_size_bytes": str(WORKSPACE_BYTES),
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": cache,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": cache,
    }
    if table:
        found |= {"int8_calibration_table_name": table, "int8_use_native_calibration_table": "0"}
    return found | _profile_shapes(proto)


def _profile_shapes(proto: model_config_pb2.ModelConfig) -> dict[str, str]:
    """The optimization profile: minimum, optimum and maximum batch. One engine serves all sizes, the largest fastest.

    Empty without a batch axis, and if other sides vary: ONNX Runtime then builds engines for the shapes that it gets.
    """
    if proto.max_batch_size < 1 or any(side < 1 for tensor in proto.input for side in _dims(tensor)):
        return {}
    sizes = {"min": 1, "opt": proto.max_batch_size, "max": proto.max_batch_size}
    return {f"trt_profile_{name}_shapes": _shapes(proto.input, size) for name, size in sizes.items()}


def _shapes(inputs: "Iterable[model_config_pb2.ModelInput]", rows: int) -> str:
    return ",".join(f"{tensor.name}:{'x'.join(map(str, (rows, *_dims(tensor))))}" for tensor in inputs)


def _dims(tensor: "model_config_pb2.ModelInput") -> list[int]:
    """The model's own dims: those of the reshape, if any."""
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
