"""An ONNX model's PyTorch twin: its folder by a stand-in for PyTorch's Python, its answers by the real one."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.engines.config_pbtxt import read_config, read_proto
from penstock.models.inspect.inspection import Limits
from penstock.models.onnx_to_torch.description import CannotDescribe, describe
from penstock.models.onnx_to_torch.description_process import describe_in_process, problem_of
from penstock.models.onnx_to_torch.twin import convert_model
from penstock.models.optimize.source import OptimizeError, read_source
from tests.models.optimize.conftest import write_model

PYTHON = """#!{python}
import json, os, pathlib, sys
out = pathlib.Path(sys.argv[-1])
out.write_bytes(b"program")
assert (out.parents[0].name, sys.argv[1]) == ("1", "-I")
assert not [name for name in os.environ if name.startswith("PENSTOCK")]
print("a warning of PyTorch")
print({said!r})
sys.exit({code})
"""


def stand_in(tmp_path: Path, said: dict[str, Any], code: int = 0) -> Path:
    """In the stead of the Python with torch: writes a file and answers."""
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable, said=json.dumps(said), code=code))
    path.chmod(0o755)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """The small classifier in a repository."""
    return read_source(
        write_model(
            tmp_path / "models", "small", more='parameters { key: "precision" value { string_value: "fp32" } }\n'
        )
    )


def test_twin_has_the_models_card_and_none_of_onnx_runtimes_settings(
    tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads and precision were for another engine; tensors, card and batches stay. PyTorch gets no secrets."""
    staged = tmp_path / "small-torch"
    staged.mkdir()
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    twin = convert_model(source, staged, stand_in(tmp_path, {"largest_difference": 2e-6, "torch": "2.11"}))
    assert (twin.name, twin.largest_difference, twin.size_bytes) == ("small-torch", 2e-6, 7)
    config, proto = read_config(staged / "config.pbtxt"), read_proto(staged / "config.pbtxt")
    assert (config.name, config.backend, proto.default_model_filename) == ("small-torch", "torch", "model.pt2")
    assert (config.max_batch_size, config.inputs[0].shape) == (16, (3, 32, 32))
    assert {"intra_op_thread_count", "precision"}.isdisjoint(config.parameters)
    assert config.parameters["net-scale-factor"] == "0.0078125"
    assert (staged / "labels.txt").is_file()
    assert "differ from ONNX Runtime's (FP32, CPU) by at most 2.0e-06" in (staged / "MODEL.md").read_text()


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ({"why": "the operator GridSample"}, 0, "no PyTorch equivalent for the operator GridSample"),
        ({"largest_difference": 0.02, "torch": "2.11"}, 0, r"its outputs differ by 2.0% from ONNX Runtime's"),
        ({"largest_difference": float("nan"), "torch": "2.11"}, 0, "from ONNX Runtime's"),
        ({}, 3, "PyTorch ended without converting the model: exit code 3"),
    ],
)
def test_program_that_is_none_or_errs_is_refused(
    tmp_path: Path, source: Any, said: dict[str, Any], code: int, why: str
) -> None:
    """In one sentence, which names the operator or the difference."""
    (tmp_path / "staged").mkdir()
    with pytest.raises(OptimizeError, match=why):
        convert_model(source, tmp_path / "staged", stand_in(tmp_path, said, code), describe=lambda *_: None)


def node(kind: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    """One output, named as the operator in lower case."""
    return helper.make_node(kind, list(inputs), [kind.lower()], **attributes)


def save(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, Any], shape: list[Any], output: str) -> None:
    """A graph of one input `x`."""
    initializers = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", shape), (output, None))
    )
    graph = helper.make_graph(nodes, "made", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_graph_within_an_operator_and_free_sides_are_refused(tmp_path: Path) -> None:
    """What the description cannot hold is named."""
    save(tmp_path / "free.onnx", [node("Relu", "x")], {}, ["n", 3, "h", "w"], "relu")
    with pytest.raises(CannotDescribe, match="input 'x' has dynamic dimensions after the batch dimension"):
        describe(tmp_path / "free.onnx", tmp_path)
    then = helper.make_graph([node("Relu", "x")], "then", [], [helper.make_tensor_value_info("relu", 1, None)])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=then)
    save(tmp_path / "if.onnx", [branch], {"c": np.array(True)}, ["n", 3], "y")
    with pytest.raises(CannotDescribe, match="an operator with a subgraph"):
        describe(tmp_path / "if.onnx", tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        helper.make_node("Constant", [], ["k"]),
        helper.make_node("Constant", [], []),
        helper.make_node("Cast", ["x"], ["k"]),
        helper.make_node("Conv", ["x"], ["k"], auto_pad=b"\xff\xfe"),
    ],
)
def test_damaged_graph_is_one_sentence(tmp_path: Path, broken: onnx.NodeProto) -> None:
    """Whatever is missing in the graph, the error has no traceback."""
    save(tmp_path / "model.onnx", [broken, helper.make_node("Relu", ["x"], ["y"])], {}, ["n", 3, 8, 8], "y")
    problem = problem_of(tmp_path / "model.onnx", tmp_path)
    assert problem
    assert "\n" not in problem


def test_model_without_a_finite_output_is_refused(tmp_path: Path) -> None:
    """Two outputs of NaN would not differ; one that is infinite in places is compared."""
    for value, why in ((np.nan, "its output 'add' has no finite value for random input"), ([np.inf, 0, 0], "")):
        save(tmp_path / "model.onnx", [node("Add", "x", "w")], {"w": np.float32(value)}, ["n", 3], "add")
        problem = problem_of(tmp_path / "model.onnx", tmp_path)
        assert problem.startswith(why) if why else not problem


def test_model_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    """The process that reads it has the limit, so neither this one nor the machine is full."""
    save(tmp_path / "model.onnx", [helper.make_node("Relu", ["x"], ["y"])], {}, ["n", 3, 30_000, 30_000], "y")
    with pytest.raises(CannotDescribe, match="Unable to allocate"):
        describe_in_process(tmp_path / "model.onnx", tmp_path)
    with pytest.raises(CannotDescribe, match=r"it could not be read and run within 0\.01 s"):
        describe_in_process(tmp_path / "model.onnx", tmp_path, Limits(wall_s=0.01))


def drawn(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


IMAGE = ["n", 6, 8, 10]
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], list[Any]]] = {
    "convolution, unequal pads": (
        [node("Conv", "x", "w", "b", pads=[0, 1, 2, 0], strides=[2, 1], group=2)],
        {"w": drawn(4, 3, 3, 3), "b": drawn(4)},
        IMAGE,
    ),
    "transposed": (
        [node("ConvTranspose", "x", "w", strides=[2, 2], output_padding=[1, 0])],
        {"w": drawn(6, 4, 3, 3)},
        IMAGE,
    ),
    "normalisation": (
        [node("BatchNormalization", "x", "s", "b", "m", "v", epsilon=1e-3)],
        {"s": drawn(6), "b": drawn(6), "m": drawn(6), "v": np.abs(drawn(6))},
        IMAGE,
    ),
    "clip": ([node("Clip", "x", "low", "high")], {"low": np.float32(-0.5), "high": np.float32(0.7)}, IMAGE),
    "half-open clip": ([node("Clip", "x", "", "high")], {"high": np.float32(0.7)}, IMAGE),
    "hard sigmoid": ([node("HardSigmoid", "x", alpha=0.3, beta=0.4)], {}, IMAGE),
    "pool, unequal pads": ([node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])], {}, IMAGE),
    "mean pool": ([node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1])], {}, IMAGE),
    "resize by scales": (
        [node("Resize", "x", "", "scales", mode="nearest", coordinate_transformation_mode="asymmetric")],
        {"scales": np.array([1, 1, 2, 2], np.float32)},
        IMAGE,
    ),
    "resize to sizes, linear": (
        [
            node("Shape", "x"),
            node("Slice", "shape", "zero", "one"),
            helper.make_node("Concat", ["slice", "rest"], ["sizes"], axis=0),
            node("Resize", "x", "", "", "sizes", mode="linear", coordinate_transformation_mode="half_pixel"),
        ],
        {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([6, 12, 15])},
        IMAGE,
    ),
    "reshape by the batch": (
        [
            node("Shape", "x"),
            node("Gather", "shape", "zero", axis=0),
            node("Unsqueeze", "gather", "axes"),
            helper.make_node("Concat", ["unsqueeze", "rest"], ["wanted"], axis=0),
            node("Reshape", "x", "wanted"),
        ],
        {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([3, -1])},
        IMAGE,
    ),
    "shuffle of channels": (
        [
            helper.make_node("Reshape", ["x", "five"], ["pairs"]),
            node("Transpose", "pairs", perm=[0, 2, 1, 3, 4]),
            node("Reshape", "transpose", "four"),
        ],
        {"five": np.array([-1, 2, 3, 8, 10]), "four": np.array([0, 6, 8, 10])},
        IMAGE,
    ),
    "split and sum": (
        [helper.make_node("Split", ["x", "sizes"], ["left", "right"], axis=1), node("Add", "left", "right")],
        {"sizes": np.array([3, 3])},
        IMAGE,
    ),
    "every second pixel": (
        [node("Slice", "x", "starts", "ends", "axes", "steps")],
        dict(zip(("starts", "ends", "axes", "steps"), np.array([[1, 0], [1 << 62, -1], [2, 3], [2, 2]]), strict=True)),
        IMAGE,
    ),
    "mean and power": (
        [node("ReduceMean", "x", axes=[2, 3], keepdims=0), node("Pow", "reducemean", "two")],
        {"two": np.float32(2)},
        IMAGE,
    ),
    "dense": (
        [node("Flatten", "x"), node("Gemm", "flatten", "w", "b", transB=1)],
        {"w": drawn(5, 480), "b": drawn(5)},
        IMAGE,
    ),
    "pad": ([node("Pad", "x", "pads", mode="reflect")], {"pads": np.array([0, 0, 1, 2, 0, 0, 2, 1])}, IMAGE),
    "one channel's bias": ([node("Conv", "x", "w", "b")], {"w": drawn(1, 6, 1, 1), "b": drawn(1)}, IMAGE),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_answers_as_onnx_runtime_does(tmp_path: Path, name: str) -> None:
    """With one row and with several, by the program that is written."""
    torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")
    from penstock.models.onnx_to_torch.program import convert

    nodes, constants, shape = CASES[name]
    save(tmp_path / "model.onnx", nodes, constants, shape, nodes[-1].output[0])
    describe(tmp_path / "model.onnx", tmp_path)
    convert(tmp_path, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module(check_guards=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for rows in (1, 3):
        x = np.random.default_rng(rows).standard_normal((rows, *shape[1:])).astype(np.float32)
        (right,) = session.run(None, {"x": x})
        np.testing.assert_allclose(program(torch.from_numpy(x))[0].numpy(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "constants", "why"),
    [
        ([node("Det", "x")], {}, "the operator Det"),
        ([node("Reshape", "x", "argmax")], {}, "a shape, axis or size that is computed from the input"),
        (
            [node("Resize", "x", "", "s", mode="cubic")],
            {"s": np.array([1, 1, 2, 2], np.float32)},
            "a Resize of mode cubic",
        ),
    ],
)
def test_operator_that_is_not_converted_is_named(
    tmp_path: Path, nodes: list[onnx.NodeProto], constants: dict[str, Any], why: str
) -> None:
    """Before anything is written."""
    pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")
    from penstock.models.onnx_to_torch.operators import NotConverted
    from penstock.models.onnx_to_torch.program import convert

    if nodes[0].op_type == "Reshape":
        nodes = [node("ArgMax", "x", axis=1, keepdims=0), *nodes]
    save(tmp_path / "model.onnx", nodes, constants, IMAGE, nodes[-1].output[0])
    describe(tmp_path / "model.onnx", tmp_path)
    with pytest.raises(NotConverted, match=why):
        convert(tmp_path, tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
