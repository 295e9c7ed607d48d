"""The repository that both engines serve in the wire's contract suite."""

from pathlib import Path

from onnx import TensorProto

from tests.engines import onnx_models

CONFIG = """backend: "onnxruntime"
max_batch_size: {max_batch_size}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{rest}
"""
IN_AND_OUT = """input [ {{ name: "x" data_type: {data_type} dims: {dims} }} ]
output [ {{ name: "y" data_type: {data_type} dims: {dims} {labels} }} ]
"""
OPTIONAL = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
input [ { name: "bias" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
LOOKUP = """dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100 }
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters [ { key: "owner" value: { string_value: "tests" } } ]
"""


def write_models(repository: Path) -> None:
    """plain has labels for two of its three classes; pair is completed from its file; spare is for loads; broken is
    no ONNX file."""
    save, text = onnx_models.save, TensorProto.STRING
    write_plain(repository)
    save(onnx_models.identity(("N", "M")), repository, "vary", config=_config(8, _in_and_out()))
    strings = _in_and_out(data_type="TYPE_STRING")
    save(onnx_models.identity(("N", "M"), elem_type=text), repository, "text", config=_config(8, strings))
    one_string = _in_and_out(data_type="TYPE_STRING", dims="[ 1 ]")
    save(onnx_models.identity(("N", 1), elem_type=text), repository, "word", config=_config(8, one_string))
    save(onnx_models.identities(), repository, "types", config=_config(0))
    save(onnx_models.add_and_multiply(), repository, "pair")
    both = _config(8, _in_and_out(dims="[ 3 ]") + "version_policy { all {} }")
    for version in (1, 2):
        save(onnx_models.plus(version), repository, "versions", version=version, config=both)
    save(onnx_models.square(("N", "H", "W")), repository, "dynamic", config=_config(0))
    save(onnx_models.square(("N",)), repository, "scalars", config=_config(0))
    save(onnx_models.plus_optional(), repository, "optional", config=_config(0, OPTIONAL))
    save(onnx_models.lookup(), repository, "lookup", config=_config(8, LOOKUP))
    save(onnx_models.identity(), repository, "spare", config=_config(8, _in_and_out(dims="[ 3 ]")))
    save(onnx_models.identity(), repository, "broken", config=_config(0))
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"this is no ONNX file")


def write_plain(repository: Path) -> None:
    """x [N, 3] FP32 → y = x, at most 8 rows; the first two classes have labels."""
    labelled = _in_and_out(dims="[ 3 ]", labels='label_filename: "labels.txt"')
    onnx_models.save(onnx_models.identity(), repository, "plain", config=_config(8, labelled))
    (repository / "plain" / "labels.txt").write_text("left\nmiddle\n")


def _config(max_batch_size: int, rest: str = "") -> str:
    return CONFIG.format(max_batch_size=max_batch_size, rest=rest)


def _in_and_out(*, data_type: str = "TYPE_FP32", dims: str = "[ -1 ]", labels: str = "") -> str:
    return IN_AND_OUT.format(data_type=data_type, dims=dims, labels=labels)
