"""Small networks whose outputs are smooth functions of the picture, in the forms of real exporters' files.

They are no detectors: a picture always gives the same results, different pictures give different ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from penstock.protocol.inference import Array, FloatArray

SIDE = 64
CELLS = 84  # of the strides 8, 16 and 32
_POOLS = 4  # cells of the grid of means on each side
_FEATURES = 3 * _POOLS * _POOLS
COCO_CLASSES = 80


class Range(NamedTuple):
    """An output of `shape` for one picture: between low and high, which broadcast to it. gain: steepness.

    has_softmax: over the last axis, instead. kind: ONNX's type, 0 for that of the picture.
    """

    shape: tuple[int, ...]
    low: FloatArray | float = 0.0
    high: FloatArray | float = 1.0
    gain: float = 12.0
    has_softmax: bool = False
    kind: int = 0


def write_network(
    path: Path,
    outputs: Mapping[str, Range],
    *,
    image: str = "images",
    size: tuple[int, int] = (SIDE, SIDE),
    batch: int | str = "batch",
    brightest: float = 1.0,
    with_sizes: tuple[str, ...] = (),
    metadata: Mapping[str, str] | None = None,
    kind: int = TensorProto.FLOAT,
) -> Path:
    """Each output is low + (high - low) · sigmoid(gain · weights · means of the picture).

    brightest: the input's largest value. with_sizes: outputs whose last axis, corners in parts of 1, is multiplied by a
    second input orig_target_sizes. kind: of the picture and the outputs.
    """
    kernel = [size[0] // _POOLS, size[1] // _POOLS]
    nodes = [
        helper.make_node("Cast", [image], ["float"], to=TensorProto.FLOAT),
        helper.make_node("AveragePool", ["float"], ["pooled"], kernel_shape=kernel, strides=kernel),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Mul", ["flat", "unit"], ["means"]),
    ]
    values: dict[str, Array] = {"unit": np.array(1.0 / brightest, np.float32)}
    declared = []
    for name, one in outputs.items():
        nodes += _output(name, one, one.kind or kind, is_sized=name in with_sizes)
        values |= _constants(name, one)
        declared.append(helper.make_tensor_value_info(name, one.kind or kind, (batch, *one.shape)))
    inputs = [helper.make_tensor_value_info(image, kind, (batch, 3, *size))]
    if with_sizes:
        inputs.append(helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, (batch, 2)))
        nodes += [
            helper.make_node("Cast", ["orig_target_sizes"], ["size"], to=TensorProto.FLOAT),
            helper.make_node("Concat", ["size", "size"], ["corners"], axis=1),
            helper.make_node("Unsqueeze", ["corners", "axis"], ["scale"]),
        ]
        values["axis"] = np.array([1], np.int64)
    in_order = sorted(nodes, key=lambda node: node.name.startswith("last"))
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(in_order, "made", inputs, declared, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    return path


def _output(name: str, one: Range, kind: int, *, is_sized: bool) -> list[NodeProto]:
    steps = [
        ("Gemm", [f"{name}.means", f"{name}.weights", f"{name}.bias"]),
        ("Reshape", [f"{name}.0", f"{name}.shape"]),
        ("Softmax" if one.has_softmax else "Sigmoid", [f"{name}.1"]),
        ("Mul", [f"{name}.2", f"{name}.span"]),
        ("Add", [f"{name}.3", f"{name}.low"]),
        *([("Mul", [f"{name}.4", "scale"])] if is_sized else []),
    ]
    nodes = [helper.make_node("Identity", ["means"], [f"{name}.means"])]
    nodes += [
        helper.make_node(operator, read, [f"{name}.{index}"], name=f"last.{name}.{index}")
        for index, (operator, read) in enumerate(steps)
    ]
    return [*nodes, helper.make_node("Cast", [f"{name}.{len(steps) - 1}"], [name], to=kind, name=f"last.{name}.cast")]


def _constants(name: str, one: Range) -> dict[str, Array]:
    count = int(np.prod(one.shape))
    weights = np.random.default_rng(len(name) + count).normal(size=(_FEATURES, count)) * one.gain / np.sqrt(_FEATURES)
    low, high = np.asarray(one.low, np.float32), np.asarray(one.high, np.float32)
    return {
        f"{name}.weights": weights.astype(np.float32),
        f"{name}.bias": (-0.5 * weights.sum(axis=0)).astype(np.float32),
        f"{name}.shape": np.array([-1, *one.shape], np.int64),
        f"{name}.low": low,
        f"{name}.span": np.asarray(high - low, np.float32),
    }


def yolox(path: Path) -> Path:
    """YOLOX of 80 classes, not decoded, its batch fixed to 1."""
    low = np.array([-0.5, -0.5, -1.0, -1.0, *[0.0] * (1 + COCO_CLASSES)], np.float32)
    high = np.array([1.5, 1.5, 2.0, 2.0, *[1.0] * (1 + COCO_CLASSES)], np.float32)
    return write_network(path, {"output": Range((CELLS, len(low)), low, high)}, batch=1, brightest=255.0)


def detector_with_sizes(path: Path) -> Path:
    """D-FINE's two inputs and three outputs."""
    queries = 20
    boxes = Range((queries, 4), np.array([0, 0, 0.5, 0.5], np.float32), np.array([0.4, 0.4, 1, 1], np.float32))
    outputs = {
        "labels": Range((queries,), 0.0, 79.0, kind=TensorProto.INT64),
        "boxes": boxes,
        "scores": Range((queries,)),
    }
    return write_network(path, outputs, with_sizes=("boxes",))


def faces(path: Path) -> Path:
    """UltraFace's scores and corners in parts of 1."""
    boxes = Range((CELLS, 4), np.array([0, 0, 0.5, 0.5], np.float32), np.array([0.4, 0.4, 1, 1], np.float32))
    return write_network(path, {"scores": Range((CELLS, 2), has_softmax=True), "boxes": boxes}, size=(240, 320))


def embedding(path: Path) -> Path:
    """A re-identification network of 256 × 128 pixels."""
    return write_network(path, {"features": Range((512,), -1.0, 1.0, 2.0)}, size=(256, 128), batch=1)


def classifier(path: Path) -> Path:
    """Logits of 1,000 classes."""
    return write_network(path, {"logits": Range((1000,), -4.0, 4.0, 2.0)})


def segmentation(path: Path) -> Path:
    """Scores of three classes for each cell of 4 × 4 pixels."""
    return write_network(path, {"scores": Range((3, SIDE // 4, SIDE // 4), -4.0, 4.0, 2.0)})


def depth(path: Path) -> Path:
    """One number for each cell of 4 × 4 pixels."""
    return write_network(path, {"depth": Range((1, SIDE // 4, SIDE // 4), 1.0, 40.0, 2.0)})


def ultralytics(path: Path, *, task: str = "detect", kind: int = TensorProto.FLOAT) -> Path:
    """YOLOv8's outputs with three classes, and the metadata that Ultralytics' exporter writes."""
    names = {0: "person", 1: "helmet", 2: 'it\'s a "vest"'}
    coefficients = 32 if task == "segment" else 0
    sides = [0.0, 0.0, 4.0, 4.0, *[0.0] * len(names), *[-1.0] * coefficients]
    ends = [SIDE, SIDE, 24.0, 24.0, *[1.0] * (len(names) + coefficients)]
    low, high = (np.array(one, np.float32)[:, np.newaxis] for one in (sides, ends))
    outputs = {"output0": Range((len(sides), CELLS), low, high)}
    if coefficients:
        outputs = {"output1": Range((coefficients, SIDE // 4, SIDE // 4), -1.0, 1.0, 2.0)} | outputs
    metadata = {
        "description": "made in a test",
        "task": task,
        "stride": "32",
        "batch": "1",
        "imgsz": str([SIDE, SIDE]),
        "names": str(names),
        "args": str({"batch": 1, "half": kind == TensorProto.FLOAT16, "dynamic": False, "nms": False}),
        "channels": "3",
    }
    return write_network(path, outputs, batch=1, metadata=metadata, kind=kind)
