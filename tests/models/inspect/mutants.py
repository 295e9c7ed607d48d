"""Real networks, changed so that what they declare misleads: other colours, scales, axes, boxes and scores."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from tests.models.inspect.made_models import ultralytics

Change = Callable[["Network"], None]


class Network:
    """An ONNX model with nodes put before its first input and after its outputs."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        self.graph = self.model.graph
        self._count = 0

    def save(self, path: Path) -> Path:
        """The file. Shapes of outputs are those of a run."""
        del self.graph.value_info[:]
        onnx.save(self.model, path)
        return path

    def constant(self, value: npt.ArrayLike | range, dtype: npt.DTypeLike = np.float32) -> str:
        """The name of a constant."""
        self._count += 1
        name = f"mutant.{self._count}"
        self.graph.initializer.append(
            numpy_helper.from_array(np.array(list(value) if isinstance(value, range) else value, dtype), name)
        )
        return name

    def before(self, kind: str, *more: str, shape: Sequence[int] | None = None, **attributes: object) -> None:
        """Puts an operator between the first input and its users."""
        value = self.graph.input[0]
        self._count += 1
        inner = f"inner.{self._count}"
        for node in self.graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        self.graph.node.insert(0, helper.make_node(kind, [value.name, *more], [inner], **attributes))
        if shape is not None:
            for dim, side in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                dim.dim_value = side

    def after(self, output: str, build: Callable[[str], str], shape: Sequence[int] | None = None) -> None:
        """Replaces an output by what `build` makes of it, under its name."""
        self._count += 1
        inner = f"{output}.inner.{self._count}"
        for node in self.graph.node:
            node.input[:] = [inner if name == output else name for name in node.input]
            node.output[:] = [inner if name == output else name for name in node.output]
        made = build(inner)
        self.graph.node.append(helper.make_node("Identity", [made], [output]))
        value = next(value for value in self.graph.output if value.name == output)
        if shape is not None:
            value.CopyFrom(helper.make_tensor_value_info(output, value.type.tensor_type.elem_type, list(shape)))

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        """The output of a further operator."""
        self._count += 1
        name = f"made.{self._count}"
        self.graph.node.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def columns(self, name: str, first: int, last: int) -> str:
        """Columns first to last - 1 of the last axis, which is the third before opset 10."""
        if self.model.opset_import[0].version < 10:
            return self.add("Gather", name, self.constant(range(first, last), np.int64), axis=2)
        bounds = (self.constant([bound], np.int64) for bound in (first, last, -1))
        return self.add("Slice", name, *bounds)


def swap_colors(network: Network) -> None:
    """Wants the other colour order."""
    network.before("Gather", network.constant([2, 1, 0], np.int64), axis=1)


def scaled(factor: float) -> Change:
    """Wants pixels of another scale."""
    return lambda network: network.before("Mul", network.constant(factor))


def channels_last(network: Network) -> None:
    """Takes [B, H, W, 3]."""
    sides = [dim.dim_value or 1 for dim in network.graph.input[0].type.tensor_type.shape.dim]
    network.before("Transpose", shape=[sides[0], *sides[2:], sides[1]], perm=[0, 3, 1, 2])


def transposed(network: Network) -> None:
    """The first output's axes 1 and 2 are exchanged."""
    value = network.graph.output[0]
    batch, rows, columns = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
    network.after(value.name, lambda name: network.add("Transpose", name, perm=[0, 2, 1]), (batch, columns, rows))


def _logits(network: Network, name: str) -> str:
    """log(p / (1 - p)) of shares, which are kept from 0 and 1."""
    shares = network.add("Min", network.add("Max", name, network.constant(1e-6)), network.constant(1.0 - 1e-6))
    rest = network.add("Sub", network.constant(1.0), shares)
    return network.add("Log", network.add("Div", shares, rest))


def scores_are_logits(first: int, last: int) -> Change:
    """The first output's columns from `first` on have no sigmoid."""

    def change(network: Network) -> None:
        def build(name: str) -> str:
            scores = _logits(network, network.columns(name, first, last))
            return network.add("Concat", network.columns(name, 0, first), scores, axis=2)

        network.after(network.graph.output[0].name, build)

    return change


def output_is_logits(output: str) -> Change:
    """That output has no sigmoid or softmax."""
    return lambda network: network.after(output, lambda name: _logits(network, name))


def output_times(output: str, factor: float) -> Change:
    """That output is in another unit."""
    return lambda network: network.after(output, lambda name: network.add("Mul", name, network.constant(factor)))


def output_of_centres(output: str) -> Change:
    """Corners become centre and size."""

    def change(network: Network) -> None:
        def build(name: str) -> str:
            low, high = network.columns(name, 0, 2), network.columns(name, 2, 4)
            middle = network.add("Mul", network.add("Add", low, high), network.constant(0.5))
            return network.add("Concat", middle, network.add("Sub", high, low), axis=2)

        network.after(output, build)

    return change


def decode_yolox(network: Network) -> None:
    """YOLOX's rows with centre and size in pixels, of 416 x 416."""
    grids = [np.indices((416 // one, 416 // one)).reshape(2, -1)[::-1].T for one in (8, 16, 32)]
    cells = np.concatenate(grids)[np.newaxis].astype(np.float32)
    sides = [np.full((len(grid), 1), one) for grid, one in zip(grids, (8, 16, 32), strict=True)]
    strides = np.concatenate(sides)[np.newaxis]

    def build(name: str) -> str:
        moved = network.add("Add", network.columns(name, 0, 2), network.constant(cells))
        sizes = network.add("Exp", network.columns(name, 2, 4))
        boxes = [network.add("Mul", part, network.constant(strides)) for part in (moved, sizes)]
        return network.add("Concat", *boxes, network.columns(name, 4, 85), axis=2)

    network.after("output", build)


def boxes_times(factor: float) -> Change:
    """The first output's boxes are in another unit."""

    def change(network: Network) -> None:
        def build(name: str) -> str:
            boxes = network.add("Mul", network.columns(name, 0, 4), network.constant(factor))
            return network.add("Concat", boxes, network.columns(name, 4, 1000), axis=2)

        network.after(network.graph.output[0].name, build)

    return change


def boxes_are_corners(network: Network) -> None:
    """The first output's boxes become corners."""

    def build(name: str) -> str:
        middle = network.columns(name, 0, 2)
        half = network.add("Mul", network.columns(name, 2, 4), network.constant(0.5))
        low, high = network.add("Sub", middle, half), network.add("Add", middle, half)
        return network.add("Concat", low, high, network.columns(name, 4, 1000), axis=2)

    network.after(network.graph.output[0].name, build)


def as_yolov8(network: Network) -> None:
    """[1, 3549, 84] of scores without objectness, of RGB pixels of 0 to 1, with Ultralytics' metadata."""
    decode_yolox(network)

    def build(name: str) -> str:
        scores = network.add("Mul", network.columns(name, 4, 5), network.columns(name, 5, 85))
        return network.add("Concat", network.columns(name, 0, 4), scores, axis=2)

    network.after("output", build, (1, 3549, 84))
    scaled(255.0)(network)
    swap_colors(network)
    names = [f"class {number}" for number in range(80)]
    helper.set_model_props(network.model, ultralytics("detect", names, (416, 416)))


def columns_first(network: Network) -> None:
    """As Ultralytics exports it."""
    transposed(network)


def scores_are_zero(network: Network) -> None:
    """As a file that was quantised with boxes and scores in one scale."""

    def build(name: str) -> str:
        scores = network.add("Mul", network.columns(name, 4, 1000), network.constant(0.0))
        return network.add("Concat", network.columns(name, 0, 4), scores, axis=2)

    network.after(network.graph.output[0].name, build)


def broken_values(network: Network) -> None:
    """One output is NaN."""
    network.after(
        network.graph.output[0].name, lambda name: network.add("Sqrt", network.add("Sub", name, network.constant(1e6)))
    )


def size_is_height_width(network: Network) -> None:
    """The second input is (height, width)."""
    value = network.graph.input[1]
    for node in network.graph.node:
        node.input[:] = ["swapped.size" if name == value.name else name for name in node.input]
    order = network.constant([1, 0], np.int64)
    network.graph.node.insert(0, helper.make_node("Gather", [value.name, order], ["swapped.size"], axis=1))


def lose_batch_axis(network: Network) -> None:
    """Outputs of one picture, without batch axis."""
    for value in network.graph.output:
        axis = network.constant([0], np.int64)
        network.after(value.name, lambda name, axis=axis: network.add("Squeeze", name, axis))  # type: ignore[misc]
        kind = value.type.tensor_type.elem_type
        shape = [300, 4] if value.name == "boxes" else [300]
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))
