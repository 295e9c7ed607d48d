"""Small ONNX files whose declarations are those of real exporters' files, with plausible constant outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.models.inspect.child import run
from penstock.models.inspect.inspection import Hints, Inspection, InspectionRequest, Limits

Shape = Sequence[int | str]
Array = npt.NDArray[Any]
CHANCE = np.random.default_rng(0)


def constant_model(
    path: Path,
    outputs: Mapping[str, Array],
    *,
    image: Shape = (1, 3, 416, 416),
    image_type: int = TensorProto.FLOAT,
    input_name: str = "images",
    size_input: str = "",
    shapes: Mapping[str, Shape] | None = None,
    metadata: Mapping[str, str] | None = None,
    last: Mapping[str, str] | None = None,
    operators: Sequence[tuple[str, str]] = (),
) -> Path:
    """A model whose outputs are constants.

    size_input: name of an int64 input [B, 2]. shapes: what is declared where it is not the arrays' own. last: the
    operator that makes an output, Identity by default. operators: (domain, type) of further ones, which are not run.
    """
    nodes, declared, initializers = [], [], []
    for name, array in outputs.items():
        initializers.append(numpy_helper.from_array(array, f"{name}.value"))
        nodes.append(helper.make_node((last or {}).get(name, "Identity"), [f"{name}.value"], [name]))
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        declared.append(helper.make_tensor_value_info(name, kind, list((shapes or {}).get(name, array.shape))))
    inputs = [helper.make_tensor_value_info(input_name, image_type, list(image))]
    if size_input:
        inputs.append(helper.make_tensor_value_info(size_input, TensorProto.INT64, [image[0], 2]))
    for number, (domain, kind_of) in enumerate(operators):
        first = next(iter(outputs))
        nodes.append(helper.make_node(kind_of, [f"{first}.value"], [f"unused.{number}"], domain=domain))
    domains = {"", *(domain for domain, _ in operators)}
    opsets = [helper.make_opsetid(domain, 17 if not domain else 1) for domain in sorted(domains)]
    graph = helper.make_graph(nodes, "made", inputs, declared, initializers)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    return path


def inspected(path: Path, hints: Hints | None = None, *pictures: Path) -> Inspection:
    """The inspection, in this process."""
    return run(InspectionRequest(str(path), hints or Hints(), Limits(), tuple(map(str, pictures))))


def asked(found: Inspection) -> list[str]:
    """The flags of the blocking questions."""
    return [question.flag for question in found.recognition.questions if question.is_blocking]


def ultralytics(task: str, names: Sequence[str], size: tuple[int, int], **more: str) -> dict[str, str]:
    """Metadata as Ultralytics' exporter writes it, with keys out of order."""
    shuffled = dict(sorted(enumerate(names), key=lambda item: str(item[0])))
    return {
        "author": "Ultralytics",
        "stride": "32",
        "task": task,
        "batch": "1",
        "imgsz": str(list(size)),
        "names": str(shuffled),
        **more,
    }


def cells(size: int, strides: Sequence[int] = (8, 16, 32)) -> int:
    """Cells of all grids over a square picture."""
    return sum((-(-size // stride)) ** 2 for stride in strides)


def numbers(*shape: int, low: float = 0.0, high: float = 1.0) -> Array:
    """Random float32."""
    return CHANCE.uniform(low, high, shape).astype(np.float32)


def centres(count: int, size: float) -> Array:
    """(count, 4) centre and size of boxes inside of a picture."""
    sides = numbers(count, 2, low=0.02 * size, high=0.3 * size)
    middle = sides / 2 + numbers(count, 2) * (size - sides)
    return np.concatenate([middle, sides], axis=1).astype(np.float32)


def corners(count: int, size: float) -> Array:
    """(count, 4) corners of boxes inside of a picture."""
    boxes = centres(count, size)
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)


def scores(count: int, classes: int) -> Array:
    """(count, classes) mostly low scores of 0 to 1."""
    return numbers(count, classes) ** 8


def joined(*columns: Array) -> Array:
    """[1, n, columns] of arrays (n, …)."""
    flat = [column.reshape(len(column), -1) for column in columns]
    return np.concatenate(flat, axis=1, dtype=np.float32)[np.newaxis]


def transposed(rows: Array) -> Array:
    """[1, columns, n] of [1, n, columns]."""
    return np.ascontiguousarray(rows.transpose(0, 2, 1))


def whole(count: int, below: int) -> Array:
    """(count, 1) class ids as floats."""
    return CHANCE.integers(0, below, (count, 1)).astype(np.float32)
