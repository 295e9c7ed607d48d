"""The report of an engine: figures as sentences, JSON, and a Markdown page with every layer."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from penstock.gpu.tensorrt import MIN_DRIVER, TensorRtAdvice, advise_tensorrt, capability_text
from penstock.models.tensorrt_rtx.build import BuiltEngine, Shape
from penstock.models.tensorrt_rtx.layers import EngineLayer, FusedPattern, FusionTable

SERVED = "ONNX Runtime's TensorRT-RTX plug-in serves it"
OWN_OPERATORS = (
    "In brackets: layers that name no ONNX nodes. They have TensorRT's names, cut to four letters: Resh reshapes, Slic "
    "slices, Conc concatenates, Tran transposes, Move copies. TensorRT generates the kernels of layer type kgen."
)
NEVER_RUN = "It was built on a CPU; no GPU ran it."


def operators_text(one: EngineLayer | FusedPattern) -> str:
    """`Slice × 4 + Concat` of the operators that a layer holds; in brackets TensorRT's own, if it names no nodes."""
    if one.operators:
        return _counted(one.operators)
    return f"({_counted(one.own_operators)} of TensorRT)" if one.own_operators else "(a kernel of TensorRT)"


def _counted(operators: Sequence[str]) -> str:
    runs = ((name, len(list(run))) for name, run in groupby(operators))
    return " + ".join(name if count == 1 else f"{name} × {count}" for name, count in runs)


def shape_text(least: Shape, greatest: Shape) -> str:
    """`[1–8, 3, 416, 416]`."""
    sides = (str(one) if one == other else f"{one}–{other}" for one, other in zip(least, greatest, strict=True))
    return f"[{', '.join(sides)}]"


def summary_lines(built: BuiltEngine) -> list[str]:
    """The engine as sentences: what it is for, its inputs, and its fusions in numbers."""
    table, advice = built.table, advise_tensorrt(built.architecture)
    inputs = ", ".join(f"{name} {shape_text(*shapes)}" for name, shapes in built.shapes.items())
    lines = [
        f"for {capability_text(built.architecture)} ({advice.cards}) in {built.precision.name} by TensorRT-RTX "
        f"{built.library}: {built.engine_bytes / 1e6:.1f} MB in {built.build_s:.1f} s",
        f"inputs: {inputs}",
        f"{table.node_count} ONNX nodes became {len(table.layers)} layers; {table.fused_count} of them fuse several "
        f"operators; not counted: {table.control_count} that synchronize CUDA streams or compute shapes",
        *_folded(table),
    ]
    return [*lines, _served(advice)] if advice.is_served else [_served(advice), *lines]


def _served(advice: TensorRtAdvice) -> str:
    if advice.is_served:
        return f"{SERVED}, with driver {MIN_DRIVER} or newer; Penstock never ran it on such a GPU"
    return f"warning: ONNX Runtime's plug-in does not run this engine; for such a GPU use {advice.sentence}"


def _folded(table: FusionTable) -> list[str]:
    if not table.folded:
        return []
    nodes = ", ".join(f"{count} {operator}" for operator, count in table.folded.items())
    return [f"computed in advance, not needed, or merged into a layer that names no nodes: {nodes}"]


def as_json(built: BuiltEngine, file: Path) -> dict[str, object]:
    """All values as plain JSON types, with the derived figures."""
    table = built.table
    return {
        "architecture": capability_text(built.architecture),
        "precision": built.precision.value,
        "file": str(file),
        "library": f"TensorRT-RTX {built.library}",
        "model_sha256": built.model_sha256,
        "engine_bytes": built.engine_bytes,
        "build_s": round(built.build_s, 3),
        "shapes": {name: {"least": least, "greatest": most} for name, (least, most) in built.shapes.items()},
        "is_served": advise_tensorrt(built.architecture).is_served,
        "onnx_nodes": table.node_count,
        "layer_count": len(table.layers),
        "fused_layers": table.fused_count,
        "control_layers": table.control_count,
        "folded": table.folded,
        "patterns": [
            {"operators": one.operators, "tensorrt_operators": one.own_operators, "layers": one.layers}
            for one in table.patterns
        ],
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "nodes": [node.name for node in layer.nodes],
                "operators": layer.operators,
                "tensorrt_operators": layer.own_operators,
                "outputs": layer.outputs,
            }
            for layer in table.layers
        ],
    }


def _code(name: str) -> str:
    """A name from the file as code in a cell of a table."""
    return f"`{name.replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def page(title: str, built: BuiltEngine) -> str:
    """The Markdown page of an engine: summary, the fusion table, and all layers."""
    facts = "\n".join(f"* {line}" for line in summary_lines(built))
    patterns = "\n".join(f"| {one.layers} | {operators_text(one)} |" for one in built.table.patterns)
    layers = "\n".join(
        f"| {number} | {layer.kind} | {operators_text(layer)} | "
        f"{', '.join(_code(node.name) for node in layer.nodes) or _code(layer.name)} | {'; '.join(layer.outputs)} |"
        for number, layer in enumerate(built.table.layers, 1)
    )
    return f"""\
# {title}: engine for {capability_text(built.architecture)} in {built.precision.name}

{NEVER_RUN} Model file: SHA-256 `{built.model_sha256}`.

{facts}

## What was fused

| layers | ONNX operators of each |
|---|---|
{patterns}

{OWN_OPERATORS}

## Layers

| | layer type | ONNX operators | ONNX nodes | outputs |
|---|---|---|---|---|
{layers}
"""
