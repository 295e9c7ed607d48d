"""Tiny ONNX models, made on the spot, for the tests of the onnxruntime backend."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

Dims = Sequence[int | str]

TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}  # Triton's datatypes
SAMPLES = {
    "BOOL": np.array([[True, False]]),
    "FP16": np.array([[0.1, -65504]], np.float16),
    "FP32": np.array([[0.1, np.inf]], np.float32),
    "FP64": np.array([[0.1, -1e300]]),
    "BYTES": np.array([["Zürich".encode(), b""]], object),
} | {
    name: np.array([[np.iinfo(name.lower()).min, np.iinfo(name.lower()).max]], name.lower())
    for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
}  # of each datatype, [1, 2]: its ends where it has some
SLOW_SIDE = 256
TABLE = np.arange(4, dtype=np.float32) * 10


def save(model: onnx.ModelProto, repository: Path, name: str, *, version: int = 1, config: str | None = None) -> None:
    """A version of a model in Triton's layout; without `config` the folder has no config.pbtxt."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    if config is not None:
        (folder.parent / "config.pbtxt").write_text(config)


def identity(dims: Dims = ("N", 3), *, elem_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """x → y = x."""
    return _model(
        [helper.make_node("Identity", ["x"], ["y"])], [_value("x", elem_type, dims)], [("y", elem_type, dims)]
    )


def greedy(tensors: int) -> onnx.ModelProto:
    """count [1] → mean [1]: with so many tensors of `count` numbers in memory at once."""
    nodes = [helper.make_node("ConstantOfShape", ["count"], ["large_0"])]
    nodes += [helper.make_node("Add", [f"large_{i}", "one"], [f"large_{i + 1}"]) for i in range(tensors - 1)]
    nodes += [
        helper.make_node("Sum", [f"large_{i}" for i in range(tensors)], ["sum"]),
        helper.make_node("ReduceMean", ["sum"], ["mean"], axes=[0]),
    ]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    return _model(
        nodes, [_value("count", TensorProto.INT64, [1])], [("mean", TensorProto.FLOAT, [1])], initializers=[one]
    )


def identities() -> onnx.ModelProto:
    """One input in_T [N, 2] and output out_T for every datatype T."""
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in TYPES]
    inputs = [_value(f"in_{name}", elem_type, ("N", 2)) for name, elem_type in TYPES.items()]
    return _model(nodes, inputs, [(f"out_{name}", elem_type, ("N", 2)) for name, elem_type in TYPES.items()])


def add_and_multiply() -> onnx.ModelProto:
    """a, b [N, 3] → sum = a + b, product = a · b."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Mul", ["a", "b"], ["product"])]
    inputs = [_value(name, TensorProto.FLOAT, ("N", 3)) for name in ("a", "b")]
    return _model(nodes, inputs, [(name, TensorProto.FLOAT, ("N", 3)) for name in ("sum", "product")])


def plus(addend: float) -> onnx.ModelProto:
    """x [N, 3] → y = x + addend."""
    constant = numpy_helper.from_array(np.array([addend], np.float32), "addend")
    node = helper.make_node("Add", ["x", "addend"], ["y"])
    inputs, outputs = [_value("x", TensorProto.FLOAT, ("N", 3))], [("y", TensorProto.FLOAT, ("N", 3))]
    return _model([node], inputs, outputs, initializers=[constant])


def minus_batch_mean() -> onnx.ModelProto:
    """x [N, 3] → y = x - mean of x over the rows of the batch: rows depend on each other."""
    mean = helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1)
    nodes = [mean, helper.make_node("Sub", ["x", "mean"], ["y"])]
    return _model(nodes, [_value("x", TensorProto.FLOAT, ("N", 3))], [("y", TensorProto.FLOAT, ("N", 3))])


def plus_optional() -> onnx.ModelProto:
    """x [3] → y = x + bias, where bias [1] is 5 unless the request brings another."""
    bias = numpy_helper.from_array(np.array([5], np.float32), "bias")
    inputs = [_value("x", TensorProto.FLOAT, (3,)), _value("bias", TensorProto.FLOAT, (1,))]
    node = helper.make_node("Add", ["x", "bias"], ["y"])
    return _model([node], inputs, [("y", TensorProto.FLOAT, (3,))], initializers=[bias])


def sorted_rows() -> onnx.ModelProto:
    """x [N, 3] → y: each row in descending order."""
    node = helper.make_node("TopK", ["x", "three"], ["y", "places"])
    three = numpy_helper.from_array(np.array([3], np.int64), "three")
    outputs = [("y", TensorProto.FLOAT, ("N", 3)), ("places", TensorProto.INT64, ("N", 3))]
    return _model([node], [_value("x", TensorProto.FLOAT, ("N", 3))], outputs, initializers=[three])


def square(dims: Dims) -> onnx.ModelProto:
    """x → y = x · x; dims () makes both scalars."""
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    return _model([node], [_value("x", TensorProto.FLOAT, dims)], [("y", TensorProto.FLOAT, dims)])


def lookup() -> onnx.ModelProto:
    """index [N, 1] int64 → value [N, 1] = TABLE[index]; an index outside -4…3 makes the whole run fail."""
    table = numpy_helper.from_array(TABLE, "table")
    return _model(
        [helper.make_node("Gather", ["table", "index"], ["value"], name="lookup")],
        [_value("index", TensorProto.INT64, ("N", 1))],
        [("value", TensorProto.FLOAT, ("N", 1))],
        initializers=[table],
    )


def slow() -> onnx.ModelProto:
    """trips [N, 1] int64 → done [N, 1] = trips, after max(trips) products of two matrices of SLOW_SIDE."""
    shape = (SLOW_SIDE, SLOW_SIDE)
    matrix = _value("kept", TensorProto.FLOAT, shape)
    body = helper.make_graph(
        [helper.make_node("MatMul", ["kept", "eye"], ["next"]), helper.make_node("Identity", ["go"], ["go_on"])],
        "trip",
        [_value("i", TensorProto.INT64, ()), _value("go", TensorProto.BOOL, ()), matrix],
        [_value("go_on", TensorProto.BOOL, ()), _value("next", TensorProto.FLOAT, shape)],
    )
    nodes = [
        helper.make_node("ReduceMax", ["trips"], ["count"], keepdims=0),
        helper.make_node("Loop", ["count", "true", "eye"], ["matrix"], body=body),
        helper.make_node("ReduceMax", ["matrix"], ["one"], keepdims=0),
        helper.make_node("Cast", ["one"], ["whole_one"], to=TensorProto.INT64),
        helper.make_node("Mul", ["trips", "whole_one"], ["done"]),
    ]
    initializers = [
        numpy_helper.from_array(np.eye(SLOW_SIDE, dtype=np.float32), "eye"),
        numpy_helper.from_array(np.array(True), "true"),
    ]
    dims = ("N", 1)
    inputs, outputs = [_value("trips", TensorProto.INT64, dims)], [("done", TensorProto.INT64, dims)]
    return _model(nodes, inputs, outputs, initializers=initializers)


def one_long_node() -> onnx.ModelProto:
    """n [1] int64 → y [1] = n, after one node that takes n² steps: ONNX Runtime ends a run between nodes only."""
    zero = numpy_helper.from_array(np.zeros(1, np.float32))
    nodes = [
        helper.make_node("Concat", ["one", "n", "four"], ["boxes_shape"], axis=0),
        helper.make_node("Concat", ["one", "one", "n"], ["scores_shape"], axis=0),
        helper.make_node("ConstantOfShape", ["boxes_shape"], ["boxes"], value=zero),
        helper.make_node("ConstantOfShape", ["scores_shape"], ["scores"], value=zero),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "n"], ["kept"]),
        helper.make_node("Shape", ["kept"], ["kept_shape"]),
        helper.make_node("Gather", ["kept_shape", "first"], ["y"]),
    ]
    numbers = {"one": 1, "four": 4, "first": 0}
    initializers = [numpy_helper.from_array(np.array([number], np.int64), name) for name, number in numbers.items()]
    dims = (1,)
    inputs, outputs = [_value("n", TensorProto.INT64, dims)], [("y", TensorProto.INT64, dims)]
    return _model(nodes, inputs, outputs, initializers=initializers)


def wide(weights: int) -> onnx.ModelProto:
    """x [N, 1000] → y [N, 1] through so many float weights: a file that takes a while to open."""
    columns = weights // 1000
    initializers = [
        numpy_helper.from_array(np.full((1000, columns), 1, np.float32), "weights"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["wide"]),
        helper.make_node("ReduceSum", ["wide", "axis"], ["y"], keepdims=1),
    ]
    inputs, outputs = [_value("x", TensorProto.FLOAT, ("N", 1000))], [("y", TensorProto.FLOAT, ("N", 1))]
    return _model(nodes, inputs, outputs, initializers=initializers)


def running_total() -> onnx.ModelProto:
    """x [N, 1], start [N, 1] int32 (Triton's control tensor) → y = x + 100 · start."""
    hundred = numpy_helper.from_array(np.array([100], np.float32), "hundred")
    nodes = [
        helper.make_node("Cast", ["start"], ["flag"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["flag", "hundred"], ["marked"]),
        helper.make_node("Add", ["x", "marked"], ["y"]),
    ]
    inputs = [_value("x", TensorProto.FLOAT, ("N", 1)), _value("start", TensorProto.INT32, ("N", 1))]
    return _model(nodes, inputs, [("y", TensorProto.FLOAT, ("N", 1))], initializers=[hundred])


def nms_inside() -> onnx.ModelProto:
    """images [n, 2, 32, 32] → found [rows, 4], one row (picture in the batch, cell, score, mark) for each bright cell.

    Bright cells of channel 0 of all pictures, by NonMaxSuppression; mark is the mean of the picture's channel 1.
    """
    cells = np.array([[y, x, y + 8, x + 8] for y in range(0, 32, 8) for x in range(0, 32, 8)], np.float32)
    numbers = {
        "flat": [0, 1, 16],
        "four": [16, 4],
        "most": [16],
        "zero": [0],
        "one": [1],
        "two": [2],
        "axes": [1, 2, 3],
    }
    constants = {name: np.array(values, np.int64) for name, values in numbers.items()}
    constants |= {"boxes1": cells[None], "half": np.array([0.5], np.float32), "columns": np.array([0, 2], np.int64)}
    node = helper.make_node
    nodes = [
        node("Slice", ["images", "zero", "one", "one"], ["objects"]),
        node("Slice", ["images", "one", "two", "one"], ["marks"]),
        node("MaxPool", ["objects"], ["pooled"], kernel_shape=[8, 8], strides=[8, 8]),
        node("Reshape", ["pooled", "flat"], ["pooled1"]),
        node("Shape", ["images"], ["count"], end=1),
        node("Concat", ["count", "four"], ["wanted"], axis=0),
        node("Expand", ["boxes1", "wanted"], ["everywhere"]),
        node("NonMaxSuppression", ["everywhere", "pooled1", "most", "half", "half"], ["selected"]),
        node("GatherND", ["pooled1", "selected"], ["score1"]),
        node("Unsqueeze", ["score1", "one"], ["score"]),
        node("Gather", ["selected", "columns"], ["where"], axis=1),
        node("Cast", ["where"], ["where_f"], to=TensorProto.FLOAT),
        node("ReduceMean", ["marks"], ["mark1"], axes=[1, 2, 3], keepdims=0),
        node("Gather", ["selected", "zero"], ["picture"], axis=1),
        node("GatherND", ["mark1", "picture"], ["mark2"]),
        node("Unsqueeze", ["mark2", "one"], ["mark"]),
        node("Concat", ["where_f", "score", "mark"], ["found"], axis=1),
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    inputs, outputs = (
        [_value("images", TensorProto.FLOAT, ("n", 2, 32, 32))],
        [("found", TensorProto.FLOAT, ("rows", 4))],
    )
    return _model(nodes, inputs, outputs, initializers=initializers)


def nms_detector() -> onnx.ModelProto:
    """images [n, 3, 32, 32] → boxes [1, rows, 4], scores [1, rows], class_ids [1, rows]: the rows of `nms_inside`.

    The boxes are its cells; the class is ten times the mark.
    """
    model, node = nms_inside(), helper.make_node
    graph = model.graph
    graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    graph.node.extend(
        [
            node("Div", ["count", "count"], ["unit"]),  # like a batch axis that the file does not fix to 1
            node("Concat", ["unit", "any", "side4"], ["of_boxes"], axis=0),
            node("Concat", ["unit", "any"], ["of_scores"], axis=0),
            node("Gather", ["selected", "two"], ["cell"], axis=1),
            node("GatherND", ["xyxy", "cell"], ["found_boxes"]),
            node("Reshape", ["found_boxes", "of_boxes"], ["boxes"]),
            node("Reshape", ["score1", "of_scores"], ["scores"]),
            node("Mul", ["mark2", "ten"], ["tenfold"]),
            node("Round", ["tenfold"], ["rounded"]),
            node("Cast", ["rounded"], ["classes"], to=TensorProto.INT64),
            node("Reshape", ["classes", "of_scores"], ["class_ids"]),
        ]
    )
    cells = np.array([[x, y, x + 8, y + 8] for y in range(0, 32, 8) for x in range(0, 32, 8)], np.float32)
    sizes = {"any": np.array([-1], np.int64), "side4": np.array([4], np.int64)}
    more = sizes | {"xyxy": cells, "ten": np.array(10, np.float32)}
    graph.initializer.extend([numpy_helper.from_array(value, name) for name, value in more.items()])
    del graph.output[:]
    graph.output.extend(
        [
            _value("boxes", TensorProto.FLOAT, ("b", "rows", 4)),
            _value("scores", TensorProto.FLOAT, ("b", "rows")),
            _value("class_ids", TensorProto.INT64, ("b", "rows")),
        ]
    )
    return model


def sequence_output() -> onnx.ModelProto:
    """x [N, 3] → y, a sequence of tensors, which Triton cannot carry."""
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, ["N", 3])
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    return _checked(helper.make_graph([node], "tiny", [_value("x", TensorProto.FLOAT, ("N", 3))], [output]))


def _value(name: str, elem_type: int, dims: Dims) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, list(dims))


def _model(
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[tuple[str, int, Dims]],
    *,
    initializers: Sequence[TensorProto] = (),
) -> onnx.ModelProto:
    values = [_value(*output) for output in outputs]
    return _checked(helper.make_graph(nodes, "tiny", inputs, values, list(initializers)))


def _checked(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
