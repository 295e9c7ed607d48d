"""Conversion of ONNX files to FP16: what stays in FP32. The converted models run on the CPU."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from penstock.engines.ort_serving.half import converted_to_fp16

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
X = np.array([[0.25, 3.0]], np.float32)
CONSTANTS = {
    "weights": np.eye(2, dtype=np.float32),
    "far": np.full(2, 600.1, np.float32),  # FP16 has 600 and 600.5
    "more": np.full(2, 0.07, np.float32),
}


def value(name: str, elem_type: int = FLOAT, dims: Sequence[int | str] = ("N", 2)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, dims)


def converted(
    folder: Path, nodes: Sequence[NodeProto], *, outputs: Sequence[str] = ("y",), inputs: Sequence[str] = ("x",)
) -> onnx.ModelProto:
    """The model of these nodes in FP16."""
    used = {name for node in nodes for name in node.input} | {"far"}
    constants = [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in used]
    ins = [value(name, BOOL, [1]) if name == "flag" else value(name) for name in inputs]
    graph = helper.make_graph(nodes, "small", ins, [value(name) for name in outputs], constants)
    file = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return onnx.load_from_string(converted_to_fp16(file))


def run(model: onnx.ModelProto, **more: object) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X, **more})


def test_what_follows_the_last_product_stays_in_fp32(tmp_path: Path) -> None:
    """A box's column of 600.1 keeps its tenths, and the product's weights are FP16."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["offset"]),
        helper.make_node("Add", ["offset", "far"], ["column"]),
        helper.make_node("Add", ["column", "more"], ["y"]),
    ]
    model = converted(tmp_path, nodes)
    (y,) = run(model)
    assert np.allclose(y, X + 600.17, atol=1e-3)
    types = {one.name: one.data_type for one in model.graph.initializer}
    assert types == {"weights": TensorProto.FLOAT16, "far": FLOAT, "more": FLOAT}


def test_constant_of_both_parts_has_both_types(tmp_path: Path) -> None:
    """A number that is added before and after a product is FP16 there and FP32 here."""
    nodes = [
        helper.make_node("Add", ["x", "more"], ["near"]),
        helper.make_node("MatMul", ["near", "weights"], ["product"]),
        helper.make_node("Add", ["product", "far"], ["sum"]),
        helper.make_node("Add", ["sum", "more"], ["y"]),
    ]
    model = converted(tmp_path, nodes)
    assert np.allclose(run(model)[0], X + 600.24, atol=4e-3)  # FP16 has steps of 0.002 at 3
    types = {one.name: one.data_type for one in model.graph.initializer}
    assert (types["more"], types["more_fp32"]) == (TensorProto.FLOAT16, FLOAT)


def test_outputs_of_both_parts_keep_names_and_order(tmp_path: Path) -> None:
    """Of three outputs, one is a product and one is read by the nodes after it."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["first"]),
        helper.make_node("Add", ["first", "far"], ["second"]),
        helper.make_node("Relu", ["x"], ["third"]),
    ]
    model = converted(tmp_path, nodes, outputs=("third", "first", "second"))
    assert [one.name for one in model.graph.output] == ["third", "first", "second"]
    third, first, second = run(model)
    assert np.array_equal(third, X)
    assert np.array_equal(first, X)
    assert np.allclose(second, X + 600.1, atol=1e-3)


def test_tensor_that_a_subgraph_reads_is_no_part_of_the_end(tmp_path: Path) -> None:
    """What a branch of If reads from outside is converted with the branch, and the model still answers."""
    branches = {
        branch: helper.make_graph(
            [helper.make_node(operator, ["sum", "sum"], [branch])], branch, [], [value(branch)]
        )
        for branch, operator in (("then", "Add"), ("else", "Mul"))
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Add", ["product", "more"], ["sum"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=branches["then"], else_branch=branches["else"]),
    ]
    model = converted(tmp_path, nodes, inputs=("x", "flag"))
    for flag, wanted in ((True, 2 * (X + 0.07)), (False, (X + 0.07) ** 2)):
        assert np.allclose(run(model, flag=np.array([flag]))[0], wanted, atol=1e-2)


def test_model_without_product_is_all_fp16(tmp_path: Path) -> None:
    """Nothing stays in FP32 where no product is."""
    model = converted(tmp_path, [helper.make_node("Add", ["x", "far"], ["y"])])
    assert [one.data_type for one in model.graph.initializer] == [TensorProto.FLOAT16]
    assert run(model)[0].dtype == np.float32
