"""Makes a fixed batch axis of 1 in an ONNX file dynamic, and tests that the rows of a batch are independent."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper, shape_inference

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.inspect.trial_session import TrialFailed
from penstock.protocol.inference import Array

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]  # inputs to outputs by name; raises TrialFailed
BATCH = "batch"  # name of the freed axis
MAX_SHAPED_BYTES = 1 << 30  # onnx's shape inference serialises the model
RELATIVE, OF_RANGE = 1e-3, 1e-4  # allowed difference of a row in a batch, of its own value and of the largest value
_REASON = 300  # characters of ONNX Runtime's message, which may be long
_STRAY_SHARE = 1e-3  # of a quantised network's values may differ by whole steps


class RowsProof(NamedTuple):
    """Whether a batch equals its rows run one by one. why: a sentence for the user. error: the engine's own message."""

    is_proven: bool
    why: str
    error: str = ""


def is_free(shapes: Mapping[str, Sequence[int | str | None]]) -> bool:
    """Whether the first axis of all inputs or outputs is dynamic. shapes: names or None for dynamic axes."""
    return all(len(shape) > 0 and not isinstance(shape[0], int) for shape in shapes.values())


def free_batch(path: Path, target: Path) -> str:
    """Writes a copy of the model with a dynamic first axis. Returns the reason if that is not possible, or "".

    Only declared shapes and constant shapes of Reshape nodes change. Test the result with prove_rows.
    """
    model = onnx.load(path)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    for value in (*inputs, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if not dims or (dims[0].HasField("dim_value") and dims[0].dim_value != 1):
            return f"{value.name!r} has no first axis of 1"
    shapes = _inferred(model)
    for node in graph.node:
        if node.op_type == "Reshape":
            why = _free_reshape(graph, node, shapes)
            if why:
                return why
    for value in (*inputs, *graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        dim.dim_param = BATCH
    del graph.value_info[:]
    onnx.save(model, target)
    return ""


def _inferred(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes by tensor, 0 for unknown axes, at a batch of 1."""
    if model.ByteSize() > MAX_SHAPED_BYTES:
        return {}
    inferred = shape_inference.infer_shapes(model).graph
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }


def _free_reshape(graph: onnx.GraphProto, node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> str:
    """Makes the first axis of the target shape follow the input's. Returns the reason if it cannot, or ""."""
    constant = _constant(graph, node.input[1])
    if constant is None:
        return ""  # computed by the graph: prove_rows tests it
    target = numpy_helper.to_array(constant).tolist()
    if not target or target[0] != 1:
        return ""
    source = shapes.get(node.input[0], [])
    if source[:1] == [1]:
        target[0] = 0  # copies the input's first axis
    elif -1 not in target:
        target[0] = -1
    else:
        return f"the node {node.name!r} reshapes to {target}, which would have two dynamic axes with a dynamic batch"
    name = f"{node.input[1]}_{BATCH}_{len(graph.initializer)}"
    graph.initializer.append(numpy_helper.from_array(np.array(target, np.int64), name))
    node.input[1] = name
    for attribute in node.attribute:
        if attribute.name == "allowzero":
            attribute.i = 0
    return ""


def _constant(graph: onnx.GraphProto, name: str) -> onnx.TensorProto | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return tensor
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
    return None


def session_run(session: ort.InferenceSession, options: ort.RunOptions | None = None) -> Run:
    """One call of the session. options: of all runs."""
    names = [output.name for output in session.get_outputs()]

    def run(feed: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            return dict(zip(names, map(np.asarray, session.run(names, dict(feed), options)), strict=True))
        except ORT_ERRORS as error:
            raise TrialFailed(ort_error_text(error)) from None

    return run


def prove_rows(run: Run, rows: Sequence[Mapping[str, Array]], *, is_quantised: bool) -> RowsProof:
    """Compares the rows run one by one with the rows in one batch. rows: two or more different inputs, (1, …) each.

    is_quantised: 8-bit networks may differ by whole steps in a thousandth of the values.
    """
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        singles = [run(row) for row in rows]
        merged = run(batch)
    except TrialFailed as error:
        reason = str(error)
        why = f"the network does not run with {len(rows)} pictures in one call"
        return RowsProof(False, why, f"{reason[:_REASON]}{'…' * (len(reason) > _REASON)}")
    for name, whole in merged.items():
        for index, single in enumerate(singles):
            alone = single[name]
            if alone.shape[:1] != (1,) or whole.shape != (len(rows), *alone.shape[1:]):
                shape = f"{list(whole.shape)} for a batch of {len(rows)} and {list(alone.shape)} for one row"
                return RowsProof(False, f"output {name!r} has shape {shape}: its rows are not the batch's")
            share = _share_of_differences(alone[0], whole[index])
            if share > (_STRAY_SHARE if is_quantised else 0.0):
                return RowsProof(False, f"output {name!r} of row {index} differs when it runs in a batch")
    return RowsProof(True, f"a batch of {len(rows)} different pictures equals {len(rows)} single ones")


def _share_of_differences(alone: Array, in_batch: Array) -> float:
    """Share of the values that differ by more than rounding."""
    if alone.dtype.kind not in "fiu":
        return float(np.mean(alone != in_batch)) if alone.size else 0.0
    one, other = alone.astype(np.float64), in_batch.astype(np.float64)
    finite = one[np.isfinite(one)]
    allowed = RELATIVE * np.abs(one) + OF_RANGE * float(np.abs(finite).max(initial=0.0))
    differs = ~((np.abs(one - other) <= allowed) | (one == other) | (np.isnan(one) & np.isnan(other)))
    return float(differs.mean()) if differs.size else 0.0
