"""Reads a PyTorch archive, TorchScript or a program of torch.export, as an ONNX model without weights.

The archive is a zip. Only its directory and JSON are read; its pickles and its code are never loaded.
"""

import io
import json
import lzma
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import onnx
from onnx import TensorProto

from penstock.models.inspect.facts import FileFormat, UnreadableModel
from penstock.models.inspect.metadata import metadata_of

ARCHIVE = b"PK\x03\x04"
MAX_ENTRIES = 100_000
MAX_JSON_BYTES, MAX_METADATA_BYTES = 64 << 20, 1 << 20
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError)
_METADATA = "extra/config.txt"  # Ultralytics'
_DATATYPES = {  # of torch's ScalarType
    1: TensorProto.UINT8,
    2: TensorProto.INT8,
    3: TensorProto.INT16,
    4: TensorProto.INT32,
    5: TensorProto.INT64,
    6: TensorProto.FLOAT16,
    7: TensorProto.FLOAT,
    8: TensorProto.DOUBLE,
    12: TensorProto.BOOL,
    13: TensorProto.BFLOAT16,
    28: TensorProto.UINT16,
    34: TensorProto.UINT32,
    35: TensorProto.UINT64,
}
_OPERATORS = {  # the recognition rules read ONNX's names
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
    "sigmoid": "Sigmoid",
    "nms": "NonMaxSuppression",
    "conv2d": "Conv",
    "convolution": "Conv",
}
_SYMBOL = re.compile(r"(?:Symbol\(')?([A-Za-z_]\w*)(?:'.*)?", re.DOTALL)
EXPORT_ONNX = "export it to ONNX, for Ultralytics with: yolo export model=best.pt format=onnx"
EXPORT = (
    "torch.export.save(torch.export.export(model.eval(), (torch.zeros(2, 3, 640, 640),), "
    "dynamic_shapes=({0: torch.export.Dim('rows')},)), 'model.pt2')"
)


class _Name(msgspec.Struct):
    name: str = ""


class _Expression(msgspec.Struct):
    expr_str: str = ""


class _Side(msgspec.Struct):
    as_int: int | None = None
    as_expr: _Expression | None = None


class _TensorMeta(msgspec.Struct):
    dtype: int = 0
    sizes: list[_Side] = []


class _Argument(msgspec.Struct):
    name: str = ""  # of a parameter or buffer
    as_tensor: _Name | None = None
    as_tensors: list[_Name] = []

    @property
    def tensors(self) -> list[str]:
        return [one.name for one in (*([self.as_tensor] if self.as_tensor else []), *self.as_tensors)]


class _Holder(msgspec.Struct):
    arg: _Argument = msgspec.field(default_factory=_Argument)


class _InputSpec(msgspec.Struct):
    user_input: _Holder | None = None
    parameter: _Holder | None = None


class _OutputSpec(msgspec.Struct):
    user_output: _Holder | None = None


class _Signature(msgspec.Struct):
    input_specs: list[_InputSpec]
    output_specs: list[_OutputSpec]


class _Node(msgspec.Struct):
    target: str
    inputs: list[_Holder] = []
    outputs: list[_Argument] = []


class _Graph(msgspec.Struct):
    nodes: list[_Node]
    tensor_values: dict[str, _TensorMeta]


class _GraphModule(msgspec.Struct):
    graph: _Graph
    signature: _Signature


class _Program(msgspec.Struct):
    graph_module: _GraphModule
    torch_version: str = ""


def read_archive(path: Path, data: bytes) -> tuple[FileFormat, onnx.ModelProto]:
    """The file's format, and its inputs, outputs and operators as an ONNX model. TorchScript declares no outputs.

    Raises UnreadableModel with one sentence.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(path, archive)
    except (*_ZIP_ERRORS, TypeError) as error:
        what = " ".join(str(error).split())[:200]
        raise UnreadableModel(f"{path} is not a PyTorch archive, or is damaged: {what}; export it again") from None


def _read(path: Path, archive: zipfile.ZipFile) -> tuple[FileFormat, onnx.ModelProto]:
    if len(archive.infolist()) > MAX_ENTRIES:
        raise UnreadableModel(f"{path} has {len(archive.infolist())} entries (limit {MAX_ENTRIES})")
    entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
    metadata = _metadata(archive, entries)
    program = next((name for name in entries if re.fullmatch(r"models/[^/]+\.json", name)), "")
    if program:
        model = _model_of(_decoded(path, _content(archive, entries[program], MAX_JSON_BYTES)))
        file_format = FileFormat.PT2
    elif "constants.pkl" in entries and any(name.startswith("code/") for name in entries):
        model, file_format = _torchscript(metadata), FileFormat.TORCHSCRIPT
    else:
        raise UnreadableModel(f"{path} is {_other(entries)}")
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    return file_format, model


def _other(entries: dict[str, zipfile.ZipInfo]) -> str:
    if "data.pkl" in entries:
        return f"a PyTorch checkpoint, a pickle: {EXPORT_ONNX}"
    if any(name.startswith("data/aotinductor/") for name in entries):
        return f"compiled by AOTInductor: give the program before compilation, from {EXPORT}"
    if any("serialized_exported_program" in one.filename for one in entries.values()):
        return "a program exported by PyTorch before 2.8: export it again with PyTorch 2.8 or newer"
    return "a zip without a PyTorch program, perhaps of Keras: export the model to ONNX"


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit_bytes: int) -> bytes:
    """The entry's bytes; never more than the limit are unpacked, whatever its directory declares."""
    with archive.open(entry) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"{entry.filename[:100]!r} has more than {limit_bytes} bytes")
    return data


def _metadata(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> dict[str, str]:
    """Ultralytics' metadata in the form of an ONNX file: values as Python literals. Empty if malformed."""
    if _METADATA not in entries:
        return {}
    try:
        found: Any = json.loads(_content(archive, entries[_METADATA], MAX_METADATA_BYTES))
        pairs = found.items() if isinstance(found, dict) else ()
        return {key: value if isinstance(value, str) else repr(value) for key, value in pairs}
    except (ValueError, RecursionError):
        return {}


def _decoded(path: Path, data: bytes) -> _Program:
    try:
        return msgspec.json.decode(data, type=_Program)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableModel(f"{path}: the program's JSON is malformed: {str(error)[:200]}; export it again") from None


def _model_of(program: _Program) -> onnx.ModelProto:
    """Raises TypeError, ValueError for values that no ONNX model can hold."""
    graph, signature = program.graph_module.graph, program.graph_module.signature
    model = onnx.ModelProto(producer_name="PyTorch", producer_version=program.torch_version)
    for number, holder in enumerate(one.user_input for one in signature.input_specs if one.user_input is not None):
        name = next(iter(holder.arg.tensors), f"input{number} (no tensor)")
        _declare(model.graph.input.add(), name, graph.tensor_values.get(name))
    for spec in signature.input_specs:
        if spec.parameter is not None and spec.parameter.arg.name in graph.tensor_values:
            sides = graph.tensor_values[spec.parameter.arg.name].sizes
            model.graph.initializer.add(name=spec.parameter.arg.name, dims=[side.as_int or 0 for side in sides])
    for node in graph.nodes:
        operator = (node.target.split(".") * 2)[-2].strip("_")  # of torch.ops.aten.conv2d.default
        model.graph.node.add(
            op_type=_OPERATORS.get(operator, operator),
            input=[name for holder in node.inputs for name in holder.arg.tensors],
            output=[name for argument in node.outputs for name in argument.tensors],
        )
    for result in (one.user_output for one in signature.output_specs if one.user_output is not None):
        for name in result.arg.tensors:
            _declare(model.graph.output.add(), name, graph.tensor_values.get(name))
    return model


def _declare(value: onnx.ValueInfoProto, name: str, meta: _TensorMeta | None) -> None:
    value.name = name
    if meta is None:
        return
    value.type.tensor_type.elem_type = _DATATYPES.get(meta.dtype, 0)
    value.type.tensor_type.shape.SetInParent()
    for side in meta.sizes:
        dim = value.type.tensor_type.shape.dim.add()
        if side.as_int is not None:
            dim.dim_value = side.as_int
        elif side.as_expr is not None:
            symbol = _SYMBOL.fullmatch(side.as_expr.expr_str)
            dim.dim_param = symbol[1] if symbol else side.as_expr.expr_str


def _torchscript(metadata: dict[str, str]) -> onnx.ModelProto:
    """One picture input of the metadata's size. The archive itself declares no shapes."""
    model = onnx.ModelProto(producer_name="TorchScript")
    value = model.graph.input.add(name="input0")
    value.type.tensor_type.elem_type = TensorProto.FLOAT
    for side in ("batch", 3, *(metadata_of(metadata).imgsz or ("height", "width"))):
        if isinstance(side, int):
            value.type.tensor_type.shape.dim.add(dim_value=side)
        else:
            value.type.tensor_type.shape.dim.add(dim_param=side)
    return model
