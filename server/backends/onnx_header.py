"""Reads which operators and external files an ONNX file uses, but not its weights.

The file is not parsed with the onnx package: protobuf builds an object for every message in it, and 64 MB of empty
nodes become gigabytes. This reader builds no objects, stops at a fixed number of fields, and can read a mapped file.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap
from typing import TypeAlias

from server.core.errors import InvalidRequest
from server.core.wire import LENGTH, WireReader

MAX_FIELDS = 1_000_000  # about a second; the largest public models have a tenth of it
MAX_DEPTH = 40  # of graphs in graphs
Span: TypeAlias = tuple[int, int]

_MODEL, _GRAPH, _NODE, _FUNCTION, _TRAINING = "ModelProto", "GraphProto", "NodeProto", "FunctionProto", "TrainingInfo"
_ATTRIBUTE, _TENSOR, _SPARSE = "AttributeProto", "TensorProto", "SparseTensorProto"
_MESSAGES = {  # fields of each message that contain further messages, from onnx.proto
    _MODEL: {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {},
}
_NAME_AND_DOMAIN = {_NODE: (4, 7), _FUNCTION: (1, 10)}  # fields of op_type or name, and of domain
_EXTERNAL_DATA, _VALUE = 13, 2  # of TensorProto, and of its StringStringEntryProto
_IR_VERSION, _ANY_GRAPH = 1, 7


@dataclass(slots=True)
class OnnxHeader:
    """operators, functions: (domain, name) of the operators that its nodes use, and of the functions that it defines.

    external_names: the values of external_data entries: paths relative to the ONNX file's folder, and numbers.
    """

    operators: set[tuple[str, str]] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    external_names: set[str] = field(default_factory=set)


def read_header(content: bytes | mmap) -> OnnxHeader:
    """Raises InvalidRequest for a file that is not ONNX, is nested too deeply, or has too many fields."""
    header, reader = OnnxHeader(), WireReader(content, max_fields=MAX_FIELDS)
    numbers = {number for number, *_ in reader.fields()}
    if not {_IR_VERSION, _ANY_GRAPH} <= numbers:
        raise InvalidRequest("it is not an ONNX model: it has no ir_version and graph")
    _read(reader, header, _MODEL, (0, len(content)), 0)
    return header


def _read(reader: WireReader, header: OnnxHeader, kind: str, span: Span, depth: int) -> None:
    """Adds what the message and its nested messages contain to the header.

    Every repetition of a singular field is added: parsers differ in which one they use.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"it nests messages more than {MAX_DEPTH} deep")
    inner = _MESSAGES[kind]
    name_field, domain_field = _NAME_AND_DOMAIN.get(kind, (0, 0))
    names: set[str] = set()
    domains: set[str] = set()
    for number, wire_type, start, end in reader.fields(*span):
        if wire_type != LENGTH:
            continue
        if number in inner:
            _read(reader, header, inner[number], (start, end), depth + 1)
        elif number == name_field:
            names.add(reader.text(start, end))
        elif number == domain_field:
            domains.add(reader.text(start, end))
        elif kind == _TENSOR and number == _EXTERNAL_DATA:
            header.external_names.update(_values(reader, start, end))
    if name_field:
        known = header.operators if kind == _NODE else header.functions
        known.update((domain, name) for domain in domains or {""} for name in names or {""})


def _values(reader: WireReader, start: int, end: int) -> Iterator[str]:
    """Location, offset, length and checksum. None of them may look like a path outside the folder."""
    for number, wire_type, first, last in reader.fields(start, end):
        if number == _VALUE and wire_type == LENGTH:
            yield reader.text(first, last)
