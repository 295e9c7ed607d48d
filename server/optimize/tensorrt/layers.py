"""What TensorRT made of a network: EngineInspector's JSON, counted. Pure.

The form, from NVIDIA's page on the engine inspector and trt-engine-explorer's examples: {"Layers": [{"Name",
"LayerType", "Inputs": [{"Name", "Format/Datatype"}], "Outputs": […], "Metadata": "[ONNX Layer: conv]…"}]}; a layer
is its name alone where the plan was not built with details, and the examples of 8.x have no Metadata.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_COPIES = ("Reformat", "NoOp")
_TYPES = (("INT8", ("int8",)), ("FP16", ("fp16", "half")), ("FP32", ("fp32", "float")))
_UNKNOWN = "other"


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer of the engine. nodes: names of the file's nodes in it, in the engine's order; may be empty."""

    name: str
    kind: str
    precision: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineLayers:
    """network_nodes: nodes of the file that TensorRT was given. copies: layers that only move or cast.

    kinds, precisions: layers by kind, and those that compute by what they write. example: the layer that holds the
    first convolution, or None.
    """

    network_nodes: int
    total: int
    copies: int
    fused: int
    kinds: dict[str, int]
    precisions: dict[str, int]
    example: FusedLayer | None


def read_layers(text: str, network_nodes: Sequence[tuple[str, str]]) -> EngineLayers:
    """text: the inspector's. network_nodes: (operator, name) of each node of the file, constants left out."""
    layers = [_layer(item) for item in _items(text)]
    computing = [layer for layer in layers if layer.kind not in _COPIES]
    return EngineLayers(
        network_nodes=len(network_nodes),
        total=len(layers),
        copies=len(layers) - len(computing),
        fused=sum(len(layer.nodes) > 1 for layer in computing),
        kinds=dict(Counter(layer.kind for layer in layers).most_common()),
        precisions=dict(Counter(layer.precision for layer in computing).most_common()),
        example=_example(computing, network_nodes),
    )


def _items(text: str) -> list[object]:
    """[] where the text is none that can be read: a report is no reason to fail."""
    try:
        told = json.loads(text)
    except ValueError:
        return []
    found = told.get("Layers", []) if isinstance(told, Mapping) else told
    return list(found) if isinstance(found, list) else []


def _layer(item: object) -> FusedLayer:
    if not isinstance(item, Mapping):
        return FusedLayer(str(item), "unknown", _UNKNOWN, _split(str(item)))
    name = str(item.get("Name", ""))
    nodes = tuple(dict.fromkeys(_ONNX_LAYER.findall(str(item.get("Metadata", "")))))
    return FusedLayer(
        name, str(item.get("LayerType", "unknown")), _precision(item.get("Outputs")), nodes or _split(name)
    )


def _split(name: str) -> tuple[str, ...]:
    """ "conv + relu" → both: how a fused layer is called where it has no metadata."""
    return tuple(part.strip() for part in name.split(" + ") if part.strip())


def _precision(outputs: object) -> str:
    """Of the first output: "Channel major FP16 format where channel % 8 == 0" or "Half"."""
    first = outputs[0] if isinstance(outputs, list) and outputs else {}
    words = (
        str(first.get("Format/Datatype") or first.get("Datatype") or "").lower() if isinstance(first, Mapping) else ""
    )
    return next((name for name, marks in _TYPES if any(mark in words for mark in marks)), _UNKNOWN)


def _example(layers: Sequence[FusedLayer], network_nodes: Sequence[tuple[str, str]]) -> FusedLayer | None:
    first = next((name for operator, name in network_nodes if operator == "Conv"), None)
    return next((layer for layer in layers if first in layer.nodes), None) if first else None
