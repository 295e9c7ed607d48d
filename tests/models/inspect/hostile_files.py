"""Damaged and malicious ONNX files, and a program that inspects many of them, each in a limited process of its own.

python -m tests.models.inspect.hostile_files COUNT SEED: prints how many ended how, as JSON.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.models.inspect.child import run
from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Hints, InspectionRequest, Limits
from penstock.models.inspect.trial import ModelTrial
from tests.models.inspect.made_models import centres, constant_model, joined, numbers, scores, transposed, ultralytics
from tests.support.damage import damaged

IMPORTED = ModelTrial  # once, not in each forked process
MEMORY_BYTES = 1 << 30
CPU_S = 20
_EXIT_SENTENCE, _EXIT_EXCEPTION = 3, 4


def seeds(folder: Path) -> list[bytes]:
    """Small whole files: a detector with metadata, a classifier, a network with a convolution."""
    rows = transposed(joined(centres(84, 64), scores(84, 2)))
    metadata = ultralytics("detect", ("cat", "dog"), (64, 64))
    detector = constant_model(folder / "a.onnx", {"output0": rows}, image=(1, 3, 64, 64), metadata=metadata)
    classifier = constant_model(folder / "b.onnx", {"out": numbers(1, 10)}, image=("b", 3, 32, 32))
    return [detector.read_bytes(), classifier.read_bytes(), convolution()]


def convolution() -> bytes:
    """A network that computes: a convolution, and the mean of each channel."""
    weights = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["m"]),
        helper.make_node("Flatten", ["m"], ["out"]),
    ]
    return _model(nodes, [weights]).SerializeToString()


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], output: str = "out") -> onnx.ModelProto:
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 32, 32])
    made = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "hostile", [image], [made], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def huge_output() -> bytes:
    """2 ** 40 numbers, of a shape of 24 bytes."""
    shape = numpy_helper.from_array(np.array([1 << 20, 1 << 20], np.int64), "s")
    return _model([helper.make_node("ConstantOfShape", ["s"], ["out"])], [shape]).SerializeToString()


def huge_sides() -> bytes:
    """A picture of 10 ** 12 pixels."""
    model = _model([helper.make_node("Identity", ["images"], ["out"])], [])
    for dim in list(model.graph.input[0].type.tensor_type.shape.dim)[2:]:
        dim.dim_value = 10**6
    return model.SerializeToString()


def huge_batch() -> bytes:
    """A fixed batch of 2 ** 62 pictures, and an output whose shape only a run shows."""
    model = onnx.ModelProto.FromString(convolution())
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 62
    return model.SerializeToString()


def deep_chain() -> bytes:
    """A chain of 50,000 operators."""
    nodes = [helper.make_node("Relu", [f"t{number}"], [f"t{number + 1}"]) for number in range(50_000)]
    nodes[0].input[0], nodes[-1].output[0] = "images", "out"
    return _model(nodes, []).SerializeToString()


def deep_nesting() -> bytes:
    """Graphs inside of operators, 28 deep; the first 12 twice each, 4,096 in all."""
    graph = helper.make_graph([], "inner", [], [])
    for number in range(28):
        graph = helper.make_graph(
            [helper.make_node("If", ["images"], [f"o{number}"], then_branch=graph, else_branch=graph)]
            if number < 12
            else [helper.make_node("If", ["images"], [f"o{number}"], then_branch=graph)],
            "outer", [], [],
        )  # fmt: skip
    return _model([helper.make_node("If", ["images"], ["out"], then_branch=graph)], []).SerializeToString()


def endless_loop() -> bytes:
    """An operator that repeats for ever."""
    yes = numpy_helper.from_array(np.array(True), "yes")
    many = numpy_helper.from_array(np.array(1 << 62, np.int64), "many")
    kinds = (("i", TensorProto.INT64), ("go", TensorProto.BOOL))
    inputs = [helper.make_tensor_value_info(name, kind, []) for name, kind in kinds]
    before, after = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 32, 32]) for name in ("x", "y"))
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["x"], ["y"])],
        "body",
        [*inputs, before],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []), after],
    )
    return _model(
        [helper.make_node("Loop", ["many", "yes", "images"], ["out"], body=body)], [yes, many]
    ).SerializeToString()


def cyclic() -> bytes:
    """Two operators that wait for each other."""
    nodes = [helper.make_node("Add", ["images", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    return _model([*nodes, helper.make_node("Relu", ["b"], ["out"])], []).SerializeToString()


def without_outputs() -> bytes:
    """A detector with 300 operators that make nothing."""
    model = onnx.ModelProto.FromString(convolution())
    for _ in range(300):
        model.graph.node.add(op_type="Relu", input=["images"])
    return model.SerializeToString()


def external(location: str) -> bytes:
    """Weights in another file."""
    weights = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "432")):
        weights.external_data.add(key=key, value=value)
    return _model([helper.make_node("Conv", ["images", "w"], ["out"])], [weights]).SerializeToString()


def hostile_metadata(value: str) -> bytes:
    """A detector whose names are no list of names."""
    model = onnx.ModelProto.FromString(convolution())
    helper.set_model_props(model, {"names": value, "task": "detect", "imgsz": value, "kpt_shape": value})
    return model.SerializeToString()


MADE: dict[str, Callable[[], bytes]] = {
    "huge output": huge_output,
    "huge sides": huge_sides,
    "huge batch": huge_batch,
    "deep chain": deep_chain,
    "deep nesting": deep_nesting,
    "endless loop": endless_loop,
    "cycle": cyclic,
    "external file above": lambda: external("../../../etc/passwd"),
    "external absolute file": lambda: external("/etc/passwd"),
    "external file that is absent": lambda: external("weights.bin"),
    "nested names": lambda: hostile_metadata("[" * 5000 + "]" * 5000),
    "names that compute": lambda: hostile_metadata("__import__('os').system('true')"),
    "huge ids": lambda: hostile_metadata("{10**9: 'a', 99999999: 'b'}"),
    "names that are no text": lambda: convolution().replace(b"Conv", b"\xff\xfeo\xdd"),
    "metadata that is no text": lambda: hostile_metadata("['name']").replace(b"['name']", b"['\xffame']"),
    "operators without outputs": without_outputs,
    "no input": lambda: helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString(),
}


def damages(count: int, seed: int, folder: Path) -> Iterator[bytes]:
    """Whole files cut at random places, or with bytes changed, flipped, cut out, doubled or put in."""
    chance = random.Random(seed)
    whole = seeds(folder)
    for _ in range(count):
        data = chance.choice(whole)
        yield data[: chance.randrange(len(data))] if chance.random() < 0.25 else damaged(data, chance)


def outcome(path: Path) -> str:
    """How the inspection ends in a process with limits: its verdict, "sentence", "killed" or "exception"."""
    child = os.fork()
    if child == 0:
        os._exit(_inspect_limited(path))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    names = {_EXIT_SENTENCE: "sentence", _EXIT_EXCEPTION: "exception"}
    return names.get(os.WEXITSTATUS(status), "verdict")


def _inspect_limited(path: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        run(InspectionRequest(str(path), Hints(), Limits()))
    except (UnreadableModel, MemoryError, RecursionError):
        return _EXIT_SENTENCE
    except BaseException:  # noqa: BLE001 - what is not foreseen is the fault that this looks for
        sys.excepthook(*sys.exc_info())
        path.with_suffix(".fault").write_bytes(path.read_bytes())
        return _EXIT_EXCEPTION
    return 0


def main(arguments: list[str]) -> None:
    """Prints {"outcomes": {…}, "most_mib": …}."""
    count, seed = map(int, arguments)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for data in damages(count, seed, Path(folder)):
            path.write_bytes(data)
            found[outcome(path)] += 1
    most_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    sys.stdout.write(json.dumps({"outcomes": found, "most_mib": most_kib >> 10}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
