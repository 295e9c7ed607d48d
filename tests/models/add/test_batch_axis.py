"""A batch fixed to 1 is freed where the graph allows it, and only a proof makes it count."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.models.batch_axis import free_batch, prove_rows, session_run

FloatArray = npt.NDArray[np.float32]
MODELS = Path(__file__).resolve().parents[4] / "shared" / "models"
needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="shared/models is not here")


def write(path: Path, *nodes: onnx.NodeProto, constants: dict[str, list[int]], shape: tuple[int, ...]) -> Path:
    """A network from x (1, 3, 4) to y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def rows(count: int = 2, *shape: int) -> list[dict[str, FloatArray]]:
    generator = np.random.default_rng(1)
    return [{"x": generator.random((1, *(shape or (3, 4))), np.float32)} for _ in range(count)]


@pytest.mark.parametrize("target", [[1, 12], [1, 4, 3], [1, 2, 6]])
def test_reshape_that_keeps_the_batch_is_freed_and_proven(tmp_path: Path, target: list[int]) -> None:
    """The freed network gives the original's answer for one row, bit by bit, and each row's for three."""
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    path = write(tmp_path / "m.onnx", reshape, constants={"shape": target}, shape=tuple(target))
    free = tmp_path / "free.onnx"
    assert free_batch(path, free) == ""
    one, *others = rows(3)
    assert np.array_equal(session(free).run(None, one)[0], session(path).run(None, one)[0])
    proof = prove_rows(session_run(session(free)), [one, *others], is_quantised=False)
    assert proof.is_proven
    assert "3 different pictures" in proof.why


def test_reshape_to_a_batch_from_other_axes_is_freed_by_its_size(tmp_path: Path) -> None:
    """(1, 3, 4) to (3, 4) and back to (1, 12): the last first axis is computed."""
    path = write(
        tmp_path / "m.onnx",
        helper.make_node("Reshape", ["x", "flat"], ["f"]),
        helper.make_node("Reshape", ["f", "shape"], ["y"]),
        constants={"flat": [-1, 4], "shape": [1, 12]},
        shape=(1, 12),
    )
    assert free_batch(path, tmp_path / "free.onnx") == ""
    assert prove_rows(session_run(session(tmp_path / "free.onnx")), rows(), is_quantised=False).is_proven


def test_network_that_mixes_its_rows_is_not_proven(tmp_path: Path) -> None:
    """A mean over the batch: each row is another one alone."""
    mean = helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1)
    path = write(tmp_path / "m.onnx", mean, helper.make_node("Sub", ["x", "m"], ["y"]), constants={}, shape=(1, 3, 4))
    assert free_batch(path, tmp_path / "free.onnx") == ""
    proof = prove_rows(session_run(session(tmp_path / "free.onnx")), rows(), is_quantised=False)
    assert proof == (False, "output 'y' of row 0 differs when it runs in a batch", "")


def test_network_whose_output_is_no_batch_is_not_proven(tmp_path: Path) -> None:
    """Rows of detections, as with NonMaxSuppression inside, belong to no picture."""
    path = write(
        tmp_path / "m.onnx",
        helper.make_node("Reshape", ["x", "flat"], ["y"]),
        constants={"flat": [-1, 4]},
        shape=(3, 4),
    )
    assert "first axis of 1" in free_batch(path, tmp_path / "free.onnx")
    proof = prove_rows(session_run(session(path)), [{"x": row["x"]} for row in rows()], is_quantised=False)
    assert not proof.is_proven
    assert proof.why == "the network does not run with 2 pictures in one call"
    assert "invalid dimensions" in proof.error


@pytest.mark.parametrize("is_quantised", [False, True])
def test_stray_values_are_allowed_to_quantised_networks_only(tmp_path: Path, *, is_quantised: bool) -> None:
    """One value in two thousand is another step in a batch."""
    shape = (1, 1, 4000)
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
            helper.make_node("Cast", ["b"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["mask", "f"], ["d"]),
            helper.make_node("Add", ["x", "d"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("b", 1, 4000))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("b", 1, 4000))],
        [
            numpy_helper.from_array(np.array([0], np.int64), "zero"),
            numpy_helper.from_array(np.eye(1, 4000, dtype=np.float32).reshape(shape), "mask"),
        ],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    assert prove_rows(session_run(session(path)), rows(2, 1, 4000), is_quantised=is_quantised).is_proven == is_quantised


@needs_models
@pytest.mark.parametrize(
    ("name", "is_free"),
    [("yolox_nano", True), ("deimv2_atto", True), ("ultraface_rfb320", True), ("FastestDet", False)],
)
def test_real_files_are_freed_where_their_graph_allows_it(tmp_path: Path, name: str, *, is_free: bool) -> None:
    """FastestDet's channel shuffles mix the batch with the channels."""
    path, free = MODELS / f"{name}.onnx", tmp_path / "free.onnx"
    assert free_batch(path, free) == ""
    opened = session(free)
    generator = np.random.default_rng(1)

    def row() -> dict[str, npt.NDArray[np.generic]]:
        made: dict[str, npt.NDArray[np.generic]] = {}
        for node in opened.get_inputs():
            shape = (1, *node.shape[1:])
            is_size = node.type == "tensor(int64)"
            made[node.name] = np.array([[640, 480]]) if is_size else generator.random(shape, np.float32) * 200
        return made

    assert prove_rows(session_run(opened), [row(), row(), row()], is_quantised=False).is_proven == is_free
