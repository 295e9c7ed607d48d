"""Decides which models from load requests may be loaded: none that can run the sender's code. Pure.

The operator trusts the model repositories named at start. A model in a load request must be an ONNX model for ONNX
Runtime: every other kind can contain code, or names a library, a script or a file of this machine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from mmap import mmap
from pathlib import PurePosixPath

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from server.backends.onnx_header import read_header
from server.core.errors import InvalidRequest
from server.core.model_files import check_inside_folder, shown

FLAG = "--allow-model-code"
WAY_OUT = f"put the model into a model repository of the gateway, or start the gateway with {FLAG}"
MAX_CONFIG_CHARACTERS = 1 << 20  # the parser is slow: about a second
MAX_REASON = 500  # characters of the parser's message, which may quote a whole line
ONNX_SUFFIX = ".onnx"
_BACKENDS, _PLATFORMS = ("", "onnxruntime"), ("", "onnxruntime_onnx")
_RUNTIMES = ("", "model.py", "libtriton_onnxruntime.so")  # the backend's own; no client can send such files
_ONNX_DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft"))
# Operators of com.microsoft that open a compiled engine or run Python in the engine's process.
_CODE_OPERATORS = frozenset(("EPContext", "PythonOp", "PythonOpGrad", "TritonOp"))
# Words in the name of a parameter whose value is a file, a folder or a library: EXECUTION_ENV_PATH,
# TRITON_BATCH_STRATEGY_PATH, trt_engine_cache_path, session.collect_node_memory_stats_to_file and their like.
_FILE_WORDS = re.compile(
    r"(?:^|[^a-z0-9])(?:dir|directory|env|file|filename|filepath|files|folder|libs?|library|libraries|module|paths?"
    r"|plugins?|prefix|script)(?![a-z0-9])"
)
# Triton loads libtriton_BACKEND.so from a model's folder, and its Python backend loads model.py.
_CODE_SUFFIXES = re.compile(
    r"\.(?:bat|cubin|dll|dylib|engine|exe|fatbin|jar|joblib|pbtxt|pickle|pkl|plan|ptx|pt|pt2|pth|py[cdo]?"
    r"|savedmodel|sh|so|tar|tgz|trt|zip)"
    r"(?:[./]|$)"
)
_DATA_FOLDERS = ("warmup", "initial_state")  # Triton's names, of files that a config names without the folder


def check_model(
    config: model_config_pb2.ModelConfig | None,
    files: Mapping[str, bytes | mmap],
    *,
    allows_code: bool,
    source: str = "the request",
) -> None:
    """Raises InvalidRequest, naming the field and the flag, for a model that the request may not load.

    config: from the request; None to use the repository's. files: contents by name, relative to the model's folder;
    only ONNX files are read. allows_code: whether every backend and file is allowed; paths outside the model's folder
    never are. source: of the model, for the message.
    """
    fields = _file_fields(config) if config is not None else []
    for what, name in (*fields, *(("a file", name) for name in files)):
        check_inside_folder(f"{what} in {source}", name)
    problem = "" if allows_code or config is None else next(_code_in(config), "")
    if problem:
        raise InvalidRequest(f"{source} has a model with {problem}, which can run code here; {WAY_OUT}")
    weights = set(_check_onnx_files(files, allows_code=allows_code, source=source))
    if not allows_code:
        _check_file_kinds(files, weights | _named_files(fields), source)


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
    """Every field that names a file of the model, by its path in the config."""
    fields = [("default_model_filename", config.default_model_filename)]
    fields += [(f"cc_model_filenames[{shown(key)}]", name) for key, name in config.cc_model_filenames.items()]
    fields += [(f"output[{shown(output.name)}].label_filename", output.label_filename) for output in config.output]
    fields += [
        (f"model_warmup[{shown(sample.name)}].inputs[{shown(name)}].input_data_file", tensor.input_data_file)
        for sample in config.model_warmup
        for name, tensor in sample.inputs.items()
    ]
    fields += [
        (f"sequence_batching.state[{shown(state.input_name)}].initial_state.data_file", initial.data_file)
        for state in config.sequence_batching.state
        for initial in state.initial_state
    ]
    return [(what, name) for what, name in fields if name]


def _code_in(config: model_config_pb2.ModelConfig) -> Iterator[str]:
    """Each field that selects something other than an ONNX model, or makes the engine open a library or a file."""
    names = (config.default_model_filename, *config.cc_model_filenames.values())
    found = [
        ("backend", [config.backend] if config.backend not in _BACKENDS else []),
        ("platform", [config.platform] if config.platform not in _PLATFORMS else []),
        ("runtime", [config.runtime] if config.runtime not in _RUNTIMES else []),
        ("ensemble_scheduling of", [step.model_name for step in config.ensemble_scheduling.step]),
        ("model_operations.op_library_filename", config.model_operations.op_library_filename),
        ("model_repository_agents", [agent.name for agent in config.model_repository_agents.agents]),
        ("default_model_filename", [name for name in names if name and not name.endswith(ONNX_SUFFIX)]),
        ("parameter", [name for name in _parameters(config) if _FILE_WORDS.search(name.lower())]),
    ]
    return (f"{field} {shown(value)}" for field, values in found for value in values)


def _parameters(config: model_config_pb2.ModelConfig) -> Iterator[str]:
    """The names of the model's parameters, and of its accelerators'."""
    yield from config.parameters
    accelerators = config.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield from accelerator.parameters


def _check_onnx_files(files: Mapping[str, bytes | mmap], *, allows_code: bool, source: str) -> Iterator[str]:
    """Checks the ONNX files. Yields the names of their external data in the model's folder."""
    for name, content in files.items():
        if not name.endswith(ONNX_SUFFIX):
            continue
        try:
            header = read_header(content)
        except InvalidRequest as error:
            raise InvalidRequest(f"the file {shown(name)} in {source} cannot be loaded: {error.message}") from error
        for external in sorted(header.external_names - {""}):
            check_inside_folder(f"external data of {shown(name)} in {source}", external)
            yield str(PurePosixPath(name).parent / external)
        if not allows_code:
            _check_operators(header.operators - header.functions, name, source)


def _check_operators(operators: set[tuple[str, str]], name: str, source: str) -> None:
    for domain, operator in sorted(operators):
        if domain not in _ONNX_DOMAINS or operator in _CODE_OPERATORS:
            raise InvalidRequest(
                f"the file {shown(name)} in {source} needs the custom operator {shown(f'{domain}:{operator}')}, "
                f"which can run code here; {WAY_OUT}"
            )


def _check_file_kinds(files: Mapping[str, bytes | mmap], expected: set[str], source: str) -> None:
    for name in files:
        path = PurePosixPath(name)
        if _CODE_SUFFIXES.search(name.lower()) or not (path.suffix == ONNX_SUFFIX or name in expected):
            raise InvalidRequest(
                f"the file {shown(name)} in {source} is not an ONNX model, its external data, or a label or warm-up "
                f"file that the config names; {WAY_OUT}"
            )


def _named_files(fields: Iterable[tuple[str, str]]) -> set[str]:
    names = {name for what, name in fields if not what.startswith(("default_model", "cc_model"))}
    return names | {f"{folder}/{name}" for folder in _DATA_FOLDERS for name in names}
