"""The TensorRT accelerator in config.pbtxt."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import read_proto
from penstock.gpu.tensorrt import Accelerator
from penstock.models.add import AddOptions, add_model
from penstock.models.inspect.inspection import Hints
from penstock.models.tensorrt_accelerator import add_accelerator, write_accelerator
from penstock.protocol.errors import InvalidRequest
from tests.models.add.test_add import write_yolox

HINTS = Hints(layout="yolox", color="bgr")


def config(text: str) -> model_config_pb2.ModelConfig:
    """Of config.pbtxt's text."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(proto: model_config_pb2.ModelConfig) -> dict[str, str]:
    """Of the config's only TensorRT accelerator."""
    accelerators = proto.optimization.execution_accelerators.gpu_execution_accelerator
    (found,) = [one for one in accelerators if one.name == "tensorrt"]
    return dict(found.parameters)


def test_added_model_has_the_accelerator_and_its_largest_batch_is_preferred(tmp_path: Path) -> None:
    """Engines are cached in the model's folder, and the batch size that was best on the CPU does not count."""
    options = AddOptions(HINTS, accelerator=Accelerator.TENSORRT_FP16)
    added = add_model(write_yolox(tmp_path / "m.onnx", batch="b"), "m", options, home=tmp_path)
    proto = read_proto(added.folder / "config.pbtxt")
    assert parameters(proto) == {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(added.folder / "tensorrt"),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(added.folder / "tensorrt"),
        "trt_profile_min_shapes": "x:1x3x64x64",
        "trt_profile_opt_shapes": "x:8x3x64x64",
        "trt_profile_max_shapes": "x:8x3x64x64",
    }
    assert proto.parameters["max_batch_size"].string_value == "8"
    assert f"Engines are cached in {added.folder / 'tensorrt'}, a path as Triton sees it" in added.notes[0]
    assert f"## TensorRT\n\n{added.notes[0]}.\n" in (added.folder / "MODEL.md").read_text()


def test_model_of_another_backend_takes_no_accelerator(tmp_path: Path) -> None:
    """The accelerator is the onnxruntime backend's."""
    (tmp_path / "config.pbtxt").write_text('name: "m" backend: "torch"')
    with pytest.raises(InvalidRequest, match="model 'm' is of backend 'torch': --accelerator is for ONNX models"):
        write_accelerator(tmp_path, "FP32", "/a")


def test_accelerator_replaces_only_an_earlier_one_of_tensorrt() -> None:
    """NGC's `cuda` accelerator stays, and there are never two of TensorRT."""
    cuda = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" } } }'
    proto = config(f'max_batch_size: 2 input {{ name: "x" dims: [3] }} {cuda}')
    add_accelerator(proto, "FP32", "/a")
    add_accelerator(proto, "FP16", "/b")
    assert (parameters(proto)["precision_mode"], parameters(proto)["trt_engine_cache_path"]) == ("FP16", "/b")
    names = [one.name for one in proto.optimization.execution_accelerators.gpu_execution_accelerator]
    assert names == ["cuda", "tensorrt"]


def test_instances_on_the_cpu_may_use_a_gpu_then() -> None:
    """NGC's backend ignores GPU accelerators of KIND_CPU; a GPU that is named stays."""
    proto = config("instance_group { kind: KIND_CPU count: 2 } instance_group { kind: KIND_GPU gpus: [1] }")
    add_accelerator(proto, "FP32", "/a")
    kinds = [model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) for group in proto.instance_group]
    assert kinds == ["KIND_AUTO", "KIND_GPU"]
    assert proto.instance_group[0].count == 2


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ('max_batch_size: 4 input { name: "x" dims: [3, 8] } input { name: "y" dims: [2] }', "x:4x3x8,y:4x2"),
        ('max_batch_size: 4 input { name: "x" dims: [1] reshape { shape: [] } }', "x:4"),
        ('max_batch_size: 4 input { name: "x" dims: [3, -1] }', None),
        ('max_batch_size: 0 input { name: "x" dims: [-1, 3] }', None),
    ],
)
def test_profile_has_the_models_own_shapes(text: str, shapes: str | None) -> None:
    """One engine for all batch sizes; without a fixed shape ONNX Runtime chooses."""
    proto = config(text)
    add_accelerator(proto, "FP32", "/a")
    assert parameters(proto).get("trt_profile_max_shapes") == shapes
