"""The models of the contract suite, and how they are asked."""

from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.inference import Array, InferRequest, InferResponse, tensor_from_numpy
from tests.engines import onnx_models

CONFIG = """backend: "onnxruntime"
max_batch_size: {max_batch_size}
{rest}
"""
ONE_INSTANCE = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
X_AND_Y = """input [ {{ name: "x" data_type: {data_type} dims: {dims} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }} ]
"""
TABLE = """input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
OPTIONAL = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
input [ { name: "bias" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
RESHAPED = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]
"""
SLOW = """input [ { name: "trips" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "done" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
WARM = """model_warmup [
  { name: "rows" batch_size: 2 count: 2
    inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] random_data: true } } },
  { name: "row" batch_size: 1
    inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } }
]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""


def config(rest: str = "", *, max_batch_size: int = 0, instances: str = ONE_INSTANCE) -> str:
    """A config.pbtxt for an ONNX model."""
    return CONFIG.format(rest=rest + instances, max_batch_size=max_batch_size)


def x_and_y(*, data_type: str = "TYPE_FP32", dims: str = "[ 3 ]", rest: str = "") -> str:
    """The inputs and outputs of onnx_models.identity() and plus()."""
    return config(X_AND_Y.format(data_type=data_type, dims=dims) + rest, max_batch_size=8)


def write_repository(repository: Path) -> None:
    """Models of every kind that both engines serve, and `broken_…`, which neither does."""
    save = onnx_models.save
    save(onnx_models.add_and_multiply(), repository, "no_config")
    save(onnx_models.identities(), repository, "types", config=config())
    save(onnx_models.square((1, 3)), repository, "no_batch", config='platform: "onnxruntime_onnx"\n')
    save(onnx_models.square(("N", "H", "W")), repository, "dynamic", config=config(instances="instance_group {}"))
    save(onnx_models.square(()), repository, "scalar", config=config())
    save(onnx_models.square(("N",)), repository, "batched_scalar", config=config())
    save(onnx_models.square(("N", 2, 3)), repository, "reshaped", config=config(RESHAPED, max_batch_size=4))
    save(onnx_models.lookup(), repository, "table", config=config(TABLE, max_batch_size=8))
    save(onnx_models.plus_optional(), repository, "optional", config=config(OPTIONAL))
    save(onnx_models.slow(), repository, "slow", config=config(SLOW, max_batch_size=1))
    for name, rest in {"versions": "", "warm": WARM}.items():
        policy = "specific { versions: [ 2, 7 ] }" if rest else "all {}"
        for version in (2, 10):
            text = x_and_y(rest=f"version_policy {{ {policy} }}\n{rest}")
            save(onnx_models.plus(version), repository, name, version=version, config=text)
        (repository / name / "notes").mkdir()
    save(onnx_models.identity(), repository, "broken_datatype", config=x_and_y(data_type="TYPE_INT32"))
    save(onnx_models.identity(), repository, "broken_dims", config=x_and_y(dims="[ 4 ]"))
    save(onnx_models.identity(), repository, "broken_file", config=x_and_y())
    (repository / "broken_file" / "1" / "model.onnx").write_bytes(b"this is no ONNX file")


def ask(model: str, outputs: Sequence[str] = (), *, version: str = "", **inputs: Array) -> InferRequest:
    """A request with the arrays as its inputs."""
    tensors = tuple(tensor_from_numpy(name, array) for name, array in inputs.items())
    return InferRequest(model, tensors, version, outputs=tuple(outputs))


def arrays(response: InferResponse) -> dict[str, Array]:
    """The outputs by name."""
    return {tensor.name: tensor.to_numpy() for tensor in response.outputs}
