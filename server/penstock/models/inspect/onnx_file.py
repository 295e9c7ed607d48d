"""Reads ModelFacts from a model file without its external data. Run it in a bounded process: see inspection.py."""

import hashlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from penstock.models.inspect import torch_file
from penstock.models.inspect.facts import FileFormat, ModelFacts, TensorFacts, UnreadableModel
from penstock.protocol.inference import Datatype

MAX_NODES = 200_000
MAX_TENSORS = 256  # inputs, and outputs
MAX_RANK = 16
MAX_NAME = 512
MAX_METADATA = 64  # keys
MAX_VALUE = 1 << 20  # characters of all metadata: labels of the largest vocabularies
_TAIL_NODES = 48
_DATATYPES: dict[int, Datatype] = {
    TensorProto.BOOL: Datatype.BOOL,
    TensorProto.UINT8: Datatype.UINT8,
    TensorProto.UINT16: Datatype.UINT16,
    TensorProto.UINT32: Datatype.UINT32,
    TensorProto.UINT64: Datatype.UINT64,
    TensorProto.INT8: Datatype.INT8,
    TensorProto.INT16: Datatype.INT16,
    TensorProto.INT32: Datatype.INT32,
    TensorProto.INT64: Datatype.INT64,
    TensorProto.FLOAT16: Datatype.FP16,
    TensorProto.FLOAT: Datatype.FP32,
    TensorProto.DOUBLE: Datatype.FP64,
    TensorProto.BFLOAT16: Datatype.BF16,
    TensorProto.STRING: Datatype.BYTES,
}
_EIGHT_BITS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"}
_RUNTIME_DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "ai.onnx.training"}


def read_facts(path: Path) -> ModelFacts:
    """What the file declares. Raises UnreadableModel with one sentence."""
    data = _read(path)
    if data.startswith(torch_file.ARCHIVE):
        file_format, model = torch_file.read_archive(path, data)
    else:
        file_format, model = FileFormat.ONNX, _parse(path, data)
    graph = model.graph
    if not all(isinstance(text, str) for text in _texts(model)):
        raise UnreadableModel(f"{path} has names that are not UTF-8 text: the file is damaged; export it again")
    _check(path, model)
    initializers = {tensor.name for tensor in graph.initializer} | {
        tensor.values.name for tensor in graph.sparse_initializer
    }
    inputs = tuple(_tensor(path, value) for value in graph.input if value.name not in initializers)
    if len(inputs) > MAX_TENSORS:
        raise UnreadableModel(f"{path} has {len(inputs)} inputs (limit {MAX_TENSORS})")
    if not inputs:
        raise UnreadableModel(f"{path} has no inputs; a vision model has one that takes the picture")
    if not graph.output and file_format is not FileFormat.TORCHSCRIPT:
        raise UnreadableModel(f"{path} has no outputs")
    producers = _producers(path, graph, {tensor.name for tensor in inputs} | initializers)
    channels, kernel = _stem(graph)
    domains = {node.domain for node in graph.node} | {function.domain for function in model.functions}
    local = {function.domain for function in model.functions}
    return ModelFacts(
        path=str(path),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        producer=f"{model.producer_name} {model.producer_version}".strip()[:MAX_NAME],
        ir_version=model.ir_version,
        opset=next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0),
        inputs=inputs,
        outputs=tuple(_tensor(path, value) for value in graph.output),
        metadata={entry.key[:MAX_NAME]: entry.value for entry in model.metadata_props[:MAX_METADATA]},
        tail={value.name: _tail(value.name, producers) for value in graph.output},
        operators=frozenset(node.op_type[:MAX_NAME] for node in graph.node),
        custom_domains=tuple(sorted(domain[:MAX_NAME] for domain in domains - _RUNTIME_DOMAINS - local)),
        external_data=_external(path, model),
        is_quantised=any(node.op_type in _EIGHT_BITS or node.op_type.startswith("QLinear") for node in graph.node),
        node_count=len(graph.node),
        first_convolution_channels=channels,
        stem_kernel=kernel,
        file_format=file_format,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableModel(f"{path} cannot be read: {error.strerror}") from None


_OTHER_FILES = (
    (b"version https://git-lfs", 0, "a Git LFS pointer, not the model: fetch the model with git lfs pull"),
    (b"\x80", 0, f"a Python pickle, perhaps of PyTorch: {torch_file.EXPORT_ONNX}"),
    (b"\xff\xd8\xff", 0, "a JPEG picture, not a model: add a model first, then send it with penstock infer"),
    (b"\x89PNG", 0, "a PNG picture, not a model: add a model first, then send it with penstock infer"),
    (b"GGUF", 0, "a language model (GGUF): Penstock serves vision models as ONNX files"),
    (b"TFL3", 4, "a TensorFlow Lite model: convert it to ONNX first"),
    (b"ftrt", 0, "a TensorRT engine: give the ONNX file that it was built from"),
    (b"\x89HDF", 0, "a Keras file (HDF5): convert it with tf2onnx, or keras' model.export(FILE, format='onnx')"),
    (b"<?xml", 0, "XML, perhaps OpenVINO's: give the ONNX file that it was made from"),
    (b"\x1f\x8b", 0, "compressed (gzip): unpack it first"),
    (b"<net ", 0, "OpenVINO's XML: give the ONNX file that it was made from"),
)
_TEXT_BYTES = 200  # at the start of a file
_WEB_PAGE = (b"<!doctype html", b"<html", b"<head")
_OTHER_SUFFIXES = {  # of formats without a signature
    ".engine": "a TensorRT engine: give the ONNX file that it was built from",
    ".plan": "a TensorRT engine: give the ONNX file that it was built from",
    ".bin": "a file of weights, not a model: give an ONNX file",
    ".pb": "a TensorFlow graph: convert it with tf2onnx",
}


def _other_format(data: bytes) -> str:
    """What a file that is not ONNX is, with what to do; empty if that is not known."""
    for begin, offset, what in _OTHER_FILES:
        if data.startswith(begin, offset):
            return what
    if data[:1000].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_WEB_PAGE):
        return "a web page, not the model: the download failed; download the file itself (the raw file's link)"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
        return "a file of weights (safetensors) without a network: export the model to ONNX"
    if data[:_TEXT_BYTES].isascii() and data[:_TEXT_BYTES].decode().replace("\n", "").replace("\r", "").isprintable():
        return "text, not an ONNX model: perhaps the error message of a download; read it, and download the file again"
    return ""


def _parse(path: Path, data: bytes) -> onnx.ModelProto:
    if what := _other_format(data):
        raise UnreadableModel(f"{path} is {what}")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError, ValueError):
        truncated = f"not an ONNX model, or truncated: its {len(data)} bytes cannot be parsed; export it again"
        raise UnreadableModel(f"{path} is {_OTHER_SUFFIXES.get(path.suffix.lower(), truncated)}") from None
    if not model.ir_version or not model.HasField("graph") or not model.opset_import:
        raise UnreadableModel(f"{path} is not an ONNX model: it has no graph, opset or IR version; export it again")
    return model


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    """Strings that are read from the file. protobuf gives bytes for text that is not UTF-8."""
    graph = model.graph
    yield from (model.producer_name, model.producer_version)
    for opset in model.opset_import:
        yield opset.domain
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (side.dim_param for side in value.type.tensor_type.shape.dim)
    for node in (*graph.node, *(node for function in model.functions for node in function.node)):
        yield from (node.op_type, node.domain, *node.input, *node.output)
    yield from (function.domain for function in model.functions)
    for tensor in _tensors(model):
        yield from (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))


def _check(path: Path, model: onnx.ModelProto) -> None:
    graph = model.graph
    bounds = (
        (len(graph.node), MAX_NODES, "operators"),
        (len(graph.output), MAX_TENSORS, "outputs"),
        (sum(len(entry.key) + len(entry.value) for entry in model.metadata_props), MAX_VALUE, "characters of metadata"),
    )
    for count, limit, what in bounds:
        if count > limit:
            raise UnreadableModel(f"{path} has {count} {what} (limit {limit})")
    for value in graph.output:
        if not value.name or len(value.name) > MAX_NAME:
            raise UnreadableModel(f"{path} has an output with no name, or with one of over {MAX_NAME} characters")


def _tensor(path: Path, value: onnx.ValueInfoProto) -> TensorFacts:
    if len(value.name) > MAX_NAME:
        raise UnreadableModel(f"{path} has an input with a name of over {MAX_NAME} characters")
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return TensorFacts(value.name, _DATATYPES.get(kind.elem_type), (), (), has_shape=False)
    if len(kind.shape.dim) > MAX_RANK:
        raise UnreadableModel(f"{path}: {value.name!r} has {len(kind.shape.dim)} dimensions (limit {MAX_RANK})")
    shape, axes = [], []
    for side in kind.shape.dim:
        is_fixed = side.HasField("dim_value") and side.dim_value > 0
        shape.append(side.dim_value if is_fixed else -1)
        axes.append("" if is_fixed else side.dim_param[:MAX_NAME])
    return TensorFacts(value.name, _DATATYPES.get(kind.elem_type), tuple(shape), tuple(axes))


def _producers(path: Path, graph: onnx.GraphProto, known: set[str]) -> dict[str, onnx.NodeProto]:
    """The node of each tensor. Raises UnreadableModel for a cycle, or a tensor that nothing makes."""
    nodes = list(graph.node)
    producers = {name: node for node in nodes for name in node.output if name}
    sources = [{name for name in node.input if name in producers} for node in nodes]
    waiting = [len(names) for names in sources]
    users: dict[str, list[int]] = {}
    for number, names in enumerate(sources):
        for name in names:
            users.setdefault(name, []).append(number)
    ready = deque(number for number, count in enumerate(waiting) if not count)
    done = 0
    while ready:
        done += 1
        for user in (user for name in set(nodes[ready.popleft()].output) for user in users.get(name, ())):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    if done < len(nodes):
        raise UnreadableModel(f"{path} has a graph with a cycle through {len(nodes) - done} operators")
    for value in graph.output:
        if value.name not in producers and value.name not in known:
            raise UnreadableModel(f"{path}: no operator makes the output {value.name!r}; the file is damaged")
    return producers


def _tail(name: str, producers: dict[str, onnx.NodeProto]) -> tuple[str, ...]:
    """Operator types before the output, nearest first, in breadth."""
    found: list[str] = []
    ready, seen = deque([name]), {name}
    while ready and len(found) < _TAIL_NODES:
        node = producers.get(ready.popleft())
        if node is None:
            continue
        found.append(node.op_type[:MAX_NAME])
        for source in node.input:
            if source not in seen:
                seen.add(source)
                ready.append(source)
    return tuple(found)


def _external(path: Path, model: onnx.ModelProto) -> tuple[str, ...]:
    """Locations of data in other files. Raises UnreadableModel for one that is not below the file's folder."""
    locations = {
        entry.value
        for tensor in _tensors(model)
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data
        for entry in tensor.external_data
        if entry.key == "location"
    }
    folder = path.resolve().parent
    for location in locations:
        is_plain = bool(location) and len(location) <= MAX_NAME and "\0" not in location
        if not is_plain or not (folder / location).resolve().is_relative_to(folder):
            raise UnreadableModel(f"{path} has external data in {location[:100]!r}, which is not below its folder")
    if len(locations) > MAX_TENSORS:
        raise UnreadableModel(f"{path} has external data in {len(locations)} files (limit {MAX_TENSORS})")
    return tuple(sorted(locations))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Of the graph, of graphs inside of operators, and of functions."""
    graphs: list[onnx.GraphProto] = [model.graph]
    nodes: list[onnx.NodeProto] = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        while graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes.extend(graph.node)
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                graphs.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
        nodes = []


def _stem(graph: onnx.GraphProto) -> tuple[int, int]:
    """Input channels of the first Conv, and the largest kernel that reads 1 or 3 channels; 0 if there is none."""
    sides: dict[str, Any] = {tensor.name: tensor.dims for tensor in graph.initializer}
    kernels = [
        sides[node.input[1]]
        for node in graph.node
        if node.op_type in ("Conv", "QLinearConv") and len(node.input) > 1 and len(sides.get(node.input[1], ())) == 4
    ]
    channels = int(kernels[0][1]) if kernels else 0
    return channels, max((int(dims[3]) for dims in kernels if dims[1] in (1, 3) and dims[0] > 1), default=0)
