"""The two quantised forms of a small network, read node by node."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization.calibrate import TensorsData

from penstock.models.optimize.quantize import (
    Ranges,
    behind_the_last_weights,
    for_onnxruntime,
    measure_ranges,
    prepare_graph,
)
from penstock.models.optimize.source import OptimizeError, Progress, SourceModel, read_samples


@pytest.fixture
def prepared(source: SourceModel, tmp_path: Path) -> Path:
    prepare_graph(source.path, tmp_path / "prepared.onnx")
    return tmp_path / "prepared.onnx"


@pytest.fixture
def ranges(prepared: Path, source: SourceModel, pictures: list[Path], silent: Progress) -> TensorsData:
    feeds = (sample.feed for sample in read_samples(pictures, source))
    return measure_ranges(prepared, feeds, Ranges.MINMAX, silent.advance)


def zero_points(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Of the activations' QuantizeLinear nodes, by name."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {node.name: constants[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def test_form_for_onnxruntime_runs_and_stays_near_float(
    prepared: Path, ranges: TensorsData, source: SourceModel, pictures: list[Path]
) -> None:
    """uint8 activations, int8 weights with a scale a channel, answers within a few hundredths of float's."""
    model = for_onnxruntime(prepared, ranges, ())
    assert {array.dtype for array in zero_points(model).values()} == {np.dtype(np.uint8)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    quantised = [tensor for name, tensor in constants.items() if "weight_quantized" in name]
    assert [tensor.data_type for tensor in quantised] == [TensorProto.INT8] * 3
    scales = [tensor for name, tensor in constants.items() if name.endswith("weight_scale") and "stem" in name]
    assert [tuple(tensor.dims) for tensor in scales] == [(16,)]
    images = np.concatenate([sample.feed["image"] for sample in read_samples(pictures, source)])
    sessions = [ort.InferenceSession(str(source.path)), ort.InferenceSession(model.SerializeToString())]
    one, other = (session.run(None, {"image": images})[0] for session in sessions)
    assert np.abs(one - other).max() < 0.05
    assert np.abs(one - other).max() > 0.0  # it is another arithmetic


def test_node_that_is_left_float_has_no_quantised_weight(prepared: Path, ranges: TensorsData) -> None:
    """What is named stays as it was, the others are quantised."""
    model = for_onnxruntime(prepared, ranges, {"head"})
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    (head,) = (node for node in model.graph.node if node.op_type == "Gemm")
    assert kinds[head.input[1]] == TensorProto.FLOAT
    assert any(name.startswith("branch.weight_quantized") for name in kinds)


def test_ranges_are_left_as_they_were_by_a_quantisation(prepared: Path, ranges: TensorsData) -> None:
    """Quantising twice with the same ranges gives the same model."""
    first = for_onnxruntime(prepared, ranges, ()).SerializeToString(deterministic=True)
    for_onnxruntime(prepared, ranges, {"head"})
    assert for_onnxruntime(prepared, ranges, ()).SerializeToString(deterministic=True) == first


def test_behind_the_last_weights_are_the_nodes_to_the_outputs(source: SourceModel) -> None:
    """The softmax is behind, the matrix product is the last weighted node, nothing before it is named."""
    tail, last = behind_the_last_weights(onnx.load(source.path).graph)
    assert (tail, last) == ({"logits"}, {"head"})


def test_prepare_graph_raises_an_old_opset_and_names_nodes(source: SourceModel, tmp_path: Path) -> None:
    """A file of opset 11 without node names, as exporters wrote them, gets both, and its normalisation is folded."""
    model = onnx.load(source.path)
    model.opset_import[0].version = 11
    old = next(node for node in model.graph.node if node.op_type == "Softmax")
    del old.attribute[:]
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "old.onnx")
    prepare_graph(tmp_path / "old.onnx", tmp_path / "new.onnx")
    prepared = onnx.load(tmp_path / "new.onnx")
    assert next(item.version for item in prepared.opset_import if item.domain == "") == 17
    assert all(node.name for node in prepared.graph.node)
    assert "BatchNormalization" not in {node.op_type for node in prepared.graph.node}


def test_prepare_graph_of_rubbish_is_one_sentence(tmp_path: Path) -> None:
    """Not a stack trace of protobuf's."""
    (tmp_path / "model.onnx").write_bytes(b"rubbish")
    with pytest.raises(OptimizeError, match=r"model\.onnx cannot be prepared for quantisation"):
        prepare_graph(tmp_path / "model.onnx", tmp_path / "new.onnx")
