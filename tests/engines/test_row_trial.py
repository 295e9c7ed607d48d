"""Whether a model's requests may be merged: the trial with a batch of two rows, and the ONNX graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.engines.ort_serving.batch import missing_batch_dimension
from penstock.engines.row_trial import (
    FULL_PRECISION,
    REDUCED_PRECISION,
    Answer,
    Arrays,
    InputSpec,
    computes_in_8_bits,
    declared,
    is_alike,
    row_trial,
    run_trial,
    tolerance_of,
)
from tests.engines import onnx_models

Model = Callable[[Any], Any]  # x → y
X = InputSpec("x", "FP32", (3,))


def outcome(model: Model, *inputs: InputSpec, tolerance: float = FULL_PRECISION) -> str:
    """The result of the trial of a model with one output."""

    def run(arrays: Arrays) -> Answer:
        return {"y": model(next(iter(arrays.values())))}

    return run_trial(row_trial(inputs or (X,), tolerance), run)


def count_of(x: Any) -> Any:
    """One row for each value above 0.5, like NMS inside a model."""
    return x[x > 0.4].reshape(-1, 1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda x: x * 2, ""),
        (lambda x: x.argmax(axis=1), ""),
        (lambda x: x.sum(axis=1, keepdims=True), ""),
        (lambda x: np.full((len(x), 2), np.nan), ""),
        (count_of, "output 'y' has the shape"),
        (lambda x: x.repeat(2, axis=0), "output 'y' has the shape [2, 3] for one row of input"),
        (lambda x: x.mean(axis=0, keepdims=True), "output 'y' has the shape [1, 3] for 2 rows of input"),
        (lambda x: x.mean(), "output 'y' has the shape [] for one row of input"),
        (lambda x: x[::-1], "row 1 of output 'y' differs between a batch of 2 and a request alone"),
        (lambda x: np.sort(x, axis=0), "row 1 of output 'y' differs"),
        (lambda x: x - x.mean(axis=0), "row 1 of output 'y' differs"),
        (lambda x: x / x.max(), "row 2 of output 'y' differs"),
        (lambda x: (x * 1000).astype(np.int64) + len(x), "row 1 of output 'y' differs"),
    ],
)
def test_row_trial_tells_models_whose_rows_follow_from_others(model: Model, why: str) -> None:
    """Missing, additional, shuffled and mixed rows are detected."""
    found = outcome(model)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_row_trial_of_answers_that_differ_by_chance_says_so() -> None:
    """A model with random answers cannot be tried."""
    random = np.random.default_rng(1)
    assert outcome(lambda x: x * random.random()) == "its results for the same input differ between runs"


def test_row_trial_failures_of_the_model_are_reported() -> None:
    """Failures with one row and with two rows are reported."""

    def run_one(arrays: Arrays) -> Answer:
        return {"y": arrays["x"]} if len(arrays["x"]) == 1 else "only one row"

    assert run_trial(row_trial([X], FULL_PRECISION), lambda _: "no") == "its trial fails: no"
    assert run_trial(row_trial([X], FULL_PRECISION), run_one) == "a batch of two rows fails: only one row"
    assert run_trial(row_trial([], FULL_PRECISION), lambda _: {}) == "its trial fails: it has no inputs"


@pytest.mark.parametrize("side", [32, 1, 224])
def test_row_trial_of_free_dimensions_finds_a_size_that_the_model_takes(side: int) -> None:
    """A model may limit a dimension that is variable in its config."""
    sizes = []

    def run(arrays: Arrays) -> Answer:
        sizes.append(arrays["x"].shape[2])
        return {"y": arrays["x"]} if sizes[-1] == side else "not this size"

    assert run_trial(row_trial([InputSpec("x", "FP32", (3, -1, -1))], FULL_PRECISION), run) == ""
    assert sizes[-3:] == [side] * 3


@pytest.mark.parametrize("data_type", [*onnx_models.TYPES, "BF16"])
@pytest.mark.parametrize("dims", [(), (1,), (3, 8, 8)])
def test_row_trial_inputs_of_every_type_are_two_unlike_rows(data_type: str, dims: tuple[int, ...]) -> None:
    """With equal rows, mixed rows would not be detected."""
    seen: list[Any] = []

    def run(arrays: Arrays) -> Answer:
        seen.append(arrays["x"])
        return {"y": arrays["x"]}

    spec = InputSpec("x", data_type, dims)
    assert run_trial(row_trial([spec], FULL_PRECISION, takes_pictures=True), run) == ""
    assert [array.shape for array in seen] == [(1, *dims), (1, *dims), (2, *dims)]
    assert not np.array_equal(seen[0], seen[1])


def test_is_alike_compares_integers_exactly_and_floats_within_their_precision() -> None:
    """The tolerance is relative to the row's largest value; infinities and NaN must be equal."""
    one = np.array([[1000.0, 0.0, np.inf, np.nan]], np.float32)
    near, off = one + np.float32(0.9), one + np.float32(1.1)
    assert is_alike(near, one, FULL_PRECISION)
    assert not is_alike(off, one, FULL_PRECISION)
    assert is_alike(off, one, REDUCED_PRECISION)
    assert not is_alike(-one, one, FULL_PRECISION)
    assert not is_alike(np.array([[1000]]), np.array([[1001]]), REDUCED_PRECISION)
    assert tolerance_of(["FP32", "INT64"]) == FULL_PRECISION
    assert tolerance_of(["FP32", "FP16"]) == tolerance_of(["FP32"], is_reduced=True) == REDUCED_PRECISION


def test_declared_words_are_flags() -> None:
    """Other values are refused, with the value in the message."""
    assert [declared(word) for word in ("1", " true", "0", "off", "")] == [True, True, False, False, None]
    with pytest.raises(ValueError, match="parameter rows_follow_batch is 'maybe': say 1 or 0"):
        declared("maybe")


def graph(nodes: list[Any], y_dims: list[Any], x_dims: tuple[Any, ...] = ("n", 6)) -> onnx.ModelProto:
    """x of floats → y of floats, with the inputs that Reshape needs."""
    tensors = [onnx.numpy_helper.from_array(np.array(values, np.int64), name) for name, values in CONSTANTS.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x_dims))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, y_dims)
    made = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CONSTANTS = {"rest": [3, 2], "minus": [-1, 3, 2], "halves": [-1, 3], "axis": [0]}
COMPUTED = [
    helper.make_node("Shape", ["x"], ["count"], end=1),
    helper.make_node("Concat", ["count", "rest"], ["wanted"], axis=0),
    helper.make_node("Reshape", ["x", "wanted"], ["y"]),
]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (onnx_models.identity(), ""),
        (onnx_models.add_and_multiply(), ""),
        (onnx_models.lookup(), ""),
        (graph(COMPUTED, ["some", 3, 2]), ""),
        (graph([helper.make_node("Reshape", ["x", "minus"], ["y"])], ["n", 3, 2]), ""),
        (graph([helper.make_node("Reshape", ["x", "halves"], ["y"])], ["n", 3]), "output 'y'"),
        (graph([helper.make_node("ReduceMean", ["x"], ["y"], axes=[0])], ["n", 6]), "output 'y'"),
        (graph([helper.make_node("Identity", ["x"], ["y"])], [None, 6], (None, 6)), "the first dimension of input 'x'"),
        (onnx_models.nms_inside(), "output 'found'"),
    ],
)
def test_lost_batch_says_whether_the_graph_carries_the_batch(model: onnx.ModelProto, why: str, tmp_path: Path) -> None:
    """Shape inference decides, not the names of the outputs' dimensions in the file."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    found = missing_batch_dimension(path, {})
    assert why in found
    assert bool(found) == bool(why)


def test_computes_in_8_bits_is_seen_in_the_file(tmp_path: Path) -> None:
    """Answers of such a model may differ by a quantization step."""
    path = tmp_path / "model.onnx"
    for name, is_so in (("DequantizeLinear", False), ("QuantizeLinear", True)):
        path.write_bytes(name.encode().replace(b"Deq", b"") if is_so else b"Conv")
        assert computes_in_8_bits(path) is is_so
