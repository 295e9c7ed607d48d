"""The reference that engines are judged by."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.models.onnx_reference import run_reference
from penstock.protocol.errors import InvalidRequest, ModelNotReady
from penstock.protocol.inference import tensor_from_bytes, tensor_from_numpy
from tests.engines import onnx_models

X = tensor_from_numpy("x", np.array([[1, 2, 3]], np.float32))


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def in_steps_of_a_half() -> onnx.ModelProto:
    """x [N, 3] → y = x rounded to halves, by way of 8 bits."""
    constants = [numpy_helper.from_array(np.array(0.5, np.float32), "step")]
    constants.append(numpy_helper.from_array(np.array(0, np.int8), "zero"))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in "xy")
    graph = helper.make_graph(nodes, "steps", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("model", "answer", "is_quantised"),
    [(onnx_models.plus(1), [2, 3, 4], False), (in_steps_of_a_half(), [1, 2, 3], True)],
    ids=["float", "8 bits"],
)
def test_reference_answers_by_both_graphs_and_knows_8_bits(
    tmp_path: Path, model: onnx.ModelProto, answer: list[float], is_quantised: bool
) -> None:
    """The file's own answer, twice, and whether the two may differ by steps."""
    reference = run_reference(saved(model, tmp_path), {}, (X,))
    for outputs in (reference.plain, reference.optimised):
        assert outputs[0].to_numpy().tolist() == [answer]
    assert reference.is_quantised is is_quantised


def test_reference_takes_texts_and_scalars(tmp_path: Path) -> None:
    """BYTES go as text, and one number goes into an input without dimensions."""
    texts = tensor_from_bytes("x", [b"caf\xc3\xa9", b""], (1, 2))
    model = onnx_models.identity(("N", 2), elem_type=TensorProto.STRING)
    (answer,) = run_reference(saved(model, tmp_path), {}, (texts,)).plain
    assert bytes(answer.data) == bytes(texts.data)
    number = tensor_from_numpy("x", np.array([3], np.float32))
    (square,) = run_reference(saved(onnx_models.square(()), tmp_path), {}, (number,)).plain
    assert (square.shape, square.to_numpy().item()) == ((), 9.0)


def test_reference_tells_a_file_that_is_none_from_an_input_that_does_not_fit(tmp_path: Path) -> None:
    """The one is the model's fault, the other the question's."""
    path = saved(onnx_models.plus(1), tmp_path)
    with pytest.raises(InvalidRequest, match="plain ONNX Runtime does not take the input"):
        run_reference(path, {}, (tensor_from_numpy("x", np.zeros((1, 4), np.float32)),))
    path.write_bytes(b"\x08")
    with pytest.raises(ModelNotReady, match="cannot open"):
        run_reference(path, {}, (X,))
