"""Checks load requests of both protocols: rejects models that could run the client's code.

Repositories named at start are trusted. A model in a load request must be ONNX for ONNX Runtime; other kinds can
contain code, or name libraries, scripts or files of this machine. ONNX files are parsed without the onnx package:
protobuf needs gigabytes for 64 MB of empty nodes.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import PurePosixPath
from typing import TypeAlias

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.concurrency import in_thread
from penstock.protocol.call import A, Call, GrpcCall, HttpCall
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.protobuf import LENGTH, WireReader
from penstock.protocol.request_checks import check_inside_folder, quoted

MAX_FIELDS = 1_000_000  # about a second; the largest public models have a tenth of it
MAX_DEPTH = 40  # of nested graphs
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
    """operators, functions: (domain, name) of used operators and of defined functions."""

    operators: set[tuple[str, str]] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    external_names: set[str] = field(default_factory=set)  # external_data: paths relative to the ONNX file, and numbers


def read_header(content: bytes | mmap) -> OnnxHeader:
    """Raises InvalidRequest for a file that is not ONNX, is nested too deeply, or has too many fields."""
    header, reader = OnnxHeader(), WireReader(content, max_fields=MAX_FIELDS)
    numbers = {number for number, *_ in reader.fields()}
    if not {_IR_VERSION, _ANY_GRAPH} <= numbers:
        raise InvalidRequest("it is not an ONNX model: it has no ir_version and graph")
    _read_message(reader, header, _MODEL, (0, len(content)), 0)
    return header


def _read_message(reader: WireReader, header: OnnxHeader, kind: str, span: Span, depth: int) -> None:
    """Adds the message and its nested messages to the header, with all repetitions of singular fields."""
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
            _read_message(reader, header, inner[number], (start, end), depth + 1)
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
    """Location, offset, length and checksum. None may be a path outside the folder."""
    for number, wire_type, first, last in reader.fields(start, end):
        if number == _VALUE and wire_type == LENGTH:
            yield reader.text(first, last)


FLAG = "--allow-model-code"
REMEDY = f"put the model into a model repository of the gateway, or start the gateway with {FLAG}"
MAX_CONFIG_CHARACTERS = 1 << 20  # parsing that takes about a second
MAX_REASON = 500  # characters of the parser's message, which may quote a whole line
ONNX_SUFFIX = ".onnx"
_BACKENDS, _PLATFORMS = ("", "onnxruntime"), ("", "onnxruntime_onnx")
_RUNTIMES = ("", "model.py", "libtriton_onnxruntime.so")  # the backend's own; clients cannot send such files
_ONNX_DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft"))
# Operators of com.microsoft that open a compiled engine or run Python in the engine's process.
_CODE_OPERATORS = frozenset(("EPContext", "PythonOp", "PythonOpGrad", "TritonOp"))
# Parameters whose value is a file, folder or library, such as EXECUTION_ENV_PATH, TRITON_BATCH_STRATEGY_PATH,
# trt_engine_cache_path, session.collect_node_memory_stats_to_file.
_FILE_PARAMETER = re.compile(
    r"(?:^|[^a-z0-9])(?:dir|directory|env|file|filename|filepath|files|folder|libs?|library|libraries|module|paths?"
    r"|plugins?|prefix|script)(?![a-z0-9])"
)
# Options of ONNX Runtime's providers whose value is an address in the engine's process, or a file by another
# name than _FILE_PARAMETER knows:
# gpu_external_alloc, user_compute_stream, int8_calibration_table_name, load_config.
_UNSAFE_OPTION = re.compile(r"external|user_compute_stream|address|table_name|load_config")
# Folders beside a model from which providers load compiled kernels.
_ENGINE_FOLDERS = ("tensorrt-rtx", "tensorrt")
# Triton loads libtriton_BACKEND.so from a model's folder, and its Python backend loads model.py.
_CODE_SUFFIXES = re.compile(
    r"\.(?:bat|cubin|dll|dylib|engine|exe|fatbin|jar|joblib|pbtxt|pickle|pkl|plan|ptx|pt|pt2|pth|py[cdo]?"
    r"|savedmodel|sh|so|tar|tgz|trt|zip)"
    r"(?:[./]|$)"
)
_DATA_FOLDERS = ("warmup", "initial_state")  # Triton's folders for files that a config names without the folder


def check_model(
    config: model_config_pb2.ModelConfig | None, files: Mapping[str, bytes | mmap], *, allows_code: bool
) -> None:
    """Raises InvalidRequest, naming the field and the flag, for a model that must not be loaded.

    config: None for the repository's. files: contents by path relative to the model's folder. allows_code: allow every
    backend and file, but no path outside of the folder.
    """
    fields = _file_fields(config) if config is not None else []
    for what, name in (*fields, *(("a file", name) for name in files)):
        check_inside_folder(f"{what} in the request", name)
    problem = "" if allows_code or config is None else next(_code_in(config), "")
    if problem:
        raise InvalidRequest(f"the request has a model with {problem}, which can run code here; {REMEDY}")
    if not allows_code:
        _check_folders(files)
    weights = set(_check_onnx_files(files, allows_code=allows_code))
    if not allows_code:
        _check_file_kinds(files, weights | _named_files(fields))


def parse_config(text: str) -> model_config_pb2.ModelConfig:
    """The config of a load request, from JSON. Raises InvalidRequest if it is not a ModelConfig."""
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise InvalidRequest(
            f"the config in the load request has {len(text)} characters (limit {MAX_CONFIG_CHARACTERS})"
        )
    try:
        return json_format.Parse(text, model_config_pb2.ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        raise InvalidRequest(f"the config in the load request is not valid: {str(error)[:MAX_REASON]}") from error


def _file_fields(config: model_config_pb2.ModelConfig) -> list[tuple[str, str]]:
    fields = [("default_model_filename", config.default_model_filename)]
    fields += [(f"cc_model_filenames[{quoted(key)}]", name) for key, name in config.cc_model_filenames.items()]
    fields += [(f"output[{quoted(output.name)}].label_filename", output.label_filename) for output in config.output]
    fields += [
        (f"model_warmup[{quoted(sample.name)}].inputs[{quoted(name)}].input_data_file", tensor.input_data_file)
        for sample in config.model_warmup
        for name, tensor in sample.inputs.items()
    ]
    fields += [
        (f"sequence_batching.state[{quoted(state.input_name)}].initial_state.data_file", initial.data_file)
        for state in config.sequence_batching.state
        for initial in state.initial_state
    ]
    return [(what, name) for what, name in fields if name]


def _code_in(config: model_config_pb2.ModelConfig) -> Iterator[str]:
    """Fields that select something else than an ONNX model, or make the engine open a library or file."""
    names = (config.default_model_filename, *config.cc_model_filenames.values())
    found = [
        ("backend", [config.backend] if config.backend not in _BACKENDS else []),
        ("platform", [config.platform] if config.platform not in _PLATFORMS else []),
        ("runtime", [config.runtime] if config.runtime not in _RUNTIMES else []),
        ("ensemble_scheduling of", [step.model_name for step in config.ensemble_scheduling.step]),
        ("model_operations.op_library_filename", config.model_operations.op_library_filename),
        ("model_repository_agents", [agent.name for agent in config.model_repository_agents.agents]),
        ("default_model_filename", [name for name in names if name and not name.endswith(ONNX_SUFFIX)]),
        ("parameter", [name for name in _parameters(config) if _is_unsafe(name.lower())]),
    ]
    return (f"{field} {quoted(value)}" for field, values in found for value in values)


def _is_unsafe(parameter: str) -> bool:
    return bool(_FILE_PARAMETER.search(parameter) or _UNSAFE_OPTION.search(parameter))


def _parameters(config: model_config_pb2.ModelConfig) -> Iterator[str]:
    yield from config.parameters
    accelerators = config.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield from accelerator.parameters


def _check_onnx_files(files: Mapping[str, bytes | mmap], *, allows_code: bool) -> Iterator[str]:
    for name, content in files.items():
        if not name.endswith(ONNX_SUFFIX):
            continue
        try:
            header = read_header(content)
        except InvalidRequest as error:
            raise InvalidRequest(f"the file {quoted(name)} in the request cannot be loaded: {error.message}") from error
        for external in sorted(header.external_names - {""}):
            check_inside_folder(f"external data of {quoted(name)} in the request", external)
            yield str(PurePosixPath(name).parent / external)
        if not allows_code:
            _check_operators(header.operators - header.functions, name)


def _check_operators(operators: set[tuple[str, str]], name: str) -> None:
    for domain, operator in sorted(operators):
        if domain not in _ONNX_DOMAINS or operator in _CODE_OPERATORS:
            raise InvalidRequest(
                f"the file {quoted(name)} in the request needs the custom operator {quoted(f'{domain}:{operator}')}, "
                f"which can run code here; {REMEDY}"
            )


def _check_folders(files: Iterable[str]) -> None:
    for name in files:
        if any(folder in PurePosixPath(name).parts for folder in _ENGINE_FOLDERS):
            raise InvalidRequest(
                f"the file {quoted(name)} in the request is in a folder for compiled engines, which run on the GPU; "
                f"{REMEDY}"
            )


def _check_file_kinds(files: Mapping[str, bytes | mmap], expected: set[str]) -> None:
    for name in files:
        path = PurePosixPath(name)
        if _CODE_SUFFIXES.search(name.lower()) or not (path.suffix == ONNX_SUFFIX or name in expected):
            raise InvalidRequest(
                f"the file {quoted(name)} in the request is not an ONNX model, its external data, or a label or "
                f"warm-up file that the config names; {REMEDY}"
            )


def _named_files(fields: Iterable[tuple[str, str]]) -> set[str]:
    names = {name for what, name in fields if not what.startswith(("default_model", "cc_model"))}
    return names | {f"{folder}/{name}" for folder in _DATA_FOLDERS for name in names}


CONFIG, FILE_PREFIX = "config", "file:"


class _LoadBody(msgspec.Struct):
    parameters: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """allows_code: clients may load models that run code (--allow-model-code)."""

    allows_code: bool = False

    async def check(self, call: Call[A]) -> None:
        """Raises InvalidRequest for a load that is not allowed. The engine checks all other parameters."""
        if isinstance(call, HttpCall):
            await in_thread(len(call.body), self._check_http, call.body)
        elif isinstance(call, GrpcCall):
            await in_thread(len(call.message), self._check_grpc, call.message)

    def _check_http(self, body: bytes) -> None:
        try:
            given = msgspec.json.decode(body or b"{}", type=_LoadBody).parameters
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"malformed JSON in the load: {error}") from error
        config = given.get(CONFIG)
        files = {
            name.removeprefix(FILE_PREFIX): _decoded(name, text)
            for name, text in given.items()
            if name.startswith(FILE_PREFIX) and isinstance(text, str)
        }
        self._check(config if isinstance(config, str) else "", files)

    def _check_grpc(self, message: bytes) -> None:
        try:
            given = service_pb2.RepositoryModelLoadRequest.FromString(message).parameters
        except DecodeError as error:
            raise InvalidRequest("the message is not a RepositoryModelLoadRequest") from error
        config = given[CONFIG].string_param if CONFIG in given else ""
        files = {
            name.removeprefix(FILE_PREFIX): parameter.bytes_param
            for name, parameter in given.items()
            if name.startswith(FILE_PREFIX)
        }
        self._check(config, files)

    def _check(self, config_json: str, files: Mapping[str, bytes]) -> None:
        config = parse_config(config_json) if config_json else None
        check_model(config, files, allows_code=self.allows_code)


def _decoded(name: str, text: str) -> bytes:
    """A file's content. Raises InvalidRequest if it is not strict base64, because decoders differ in the rest."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the parameter {name[:80]!r} of the load is not base64: {error}") from error
