"""An ONNX Runtime session with the options of the model's configuration, and runs through it."""

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from .config import Config, OnnxTensorSpec, OrtLoadError, OrtRequestError, Signature, read_signature
from .memory import CHECK_EVERY_S, LONG_RUN_S, MemoryLimit, is_out_of_memory
from .threads import ThreadBudget

CLIENT_ERRORS = (ort_state.InvalidArgument, ValueError)
ORT_ERRORS = (
    *CLIENT_ERRORS,
    ort_state.EngineError,
    ort_state.EPFail,
    ort_state.Fail,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoModel,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    RuntimeError,
    TypeError,
    MemoryError,
)
CPU_ONLY = ["CPUExecutionProvider"]
MAX_NUMBER = 1024  # of threads: ONNX Runtime's memory grows with the square; 100,000 take minutes and gigabytes
SEVERITY_ERROR, SEVERITY_FATAL = 3, 4  # a failed run is reported in the response, so it is not logged, too
GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}  # Triton's optimization.graph.level; all other numbers mean all


def model_path(version_dir: Path, config: Config) -> Path:
    """The ONNX file of a version; in a folder of that name, model.onnx. Raises OrtLoadError."""
    name = config.get("default_model_filename") or "model.onnx"
    if os.path.isabs(name) or os.path.normpath(os.path.join("1", name)).startswith(".."):
        raise OrtLoadError(f"default_model_filename is '{name}'; it must name a file inside the model's folder")
    path = version_dir / name
    path = path / "model.onnx" if path.is_dir() else path
    if not path.is_file():
        raise OrtLoadError(f"there is no file {path}")
    return path


def open_for_reading(path: Path, config: Config) -> ort.InferenceSession:
    """A session for reading its tensors: not optimized, one thread."""
    return open_session(path, new_options(config), ["CPUExecutionProvider"])


def new_options(config: Config) -> ort.SessionOptions:
    """No optimization, one thread, the configuration's custom operators."""
    options = ort.SessionOptions()
    _register_operators(options, config)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = SEVERITY_ERROR
    return options


def open_session(source: Path | bytes, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    """The session of one instance. source: the file, or its content. Raises OrtLoadError if it cannot be opened."""
    is_file = isinstance(source, Path)
    try:
        content = str(source) if is_file else source
        return ort.InferenceSession(content, sess_options=options, providers=providers, enable_fallback=0)
    except ORT_ERRORS as error:
        what = str(source) if is_file else "the converted model"
        raise OrtLoadError(f"ONNX Runtime {ort.__version__} cannot open {what}: {ort_error_text(error)}") from None


def session_options(config: Config, budget: ThreadBudget) -> ort.SessionOptions:
    """Session options from the parameters, named as in NGC's backend; default threads from the budget."""
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_ERROR
    options.graph_optimization_level = _graph_level(config)
    options.execution_mode = _execution_mode(config)
    options.intra_op_num_threads = _whole_number(config, "intra_op_thread_count") or budget.threads
    options.inter_op_num_threads = _whole_number(config, "inter_op_thread_count") or budget.threads
    options.enable_cpu_mem_arena = _flag(config, "enable_mem_arena", default=True)
    options.enable_mem_pattern = _flag(config, "enable_mem_pattern", default=True)
    for key, value in {**budget.spinning, **_session_entries(config)}.items():
        try:
            options.add_session_config_entry(key, value)
        except ORT_ERRORS as error:
            raise OrtLoadError(f"parameter {key} cannot be '{value}': {ort_error_text(error)}") from None
    _register_operators(options, config)
    return options


def _register_operators(options: ort.SessionOptions, config: Config) -> None:
    for library in (config.get("model_operations") or {}).get("op_library_filename", []):
        try:
            options.register_custom_ops_library(library)
        except ORT_ERRORS as error:
            raise OrtLoadError(f"the operator library {library} cannot be loaded: {ort_error_text(error)}") from None


def _session_entries(config: Config) -> dict[str, str]:
    return {key: parameter(config, key) for key in config.get("parameters", {}) if key.startswith("session.")}


def describe(config: Config, options: ort.SessionOptions, budget: ThreadBudget) -> str:
    """The instance's options, for the log."""
    entries = " ".join(f"{key}={value}" for key, value in {**budget.spinning, **_session_entries(config)}.items())
    return (
        f"intra_op_threads={options.intra_op_num_threads} cores={budget.cores} instances={budget.instances} "
        f"onnxruntime={ort.__version__} {entries}"
    )


def parameter(config: Config, key: str) -> str:
    """A parameter's string value; empty if missing."""
    return str(config.get("parameters", {}).get(key, {}).get("string_value", ""))


def _graph_level(config: Config) -> ort.GraphOptimizationLevel:
    level = int((config.get("optimization", {}).get("graph") or {}).get("level", 0))
    return GRAPH_LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


def _execution_mode(config: Config) -> ort.ExecutionMode:
    mode = _whole_number(config, "execution_mode")
    if mode not in (0, 1):
        raise OrtLoadError(f"parameter execution_mode is {mode}: say 0 (sequential) or 1 (parallel)")
    return ort.ExecutionMode.ORT_PARALLEL if mode else ort.ExecutionMode.ORT_SEQUENTIAL


def _whole_number(config: Config, key: str) -> int:
    text = parameter(config, key) or "0"
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_NUMBER)) or int(text) > MAX_NUMBER:
        raise OrtLoadError(f"parameter {key} is '{text}': say a whole number up to {MAX_NUMBER}")
    return int(text)


def _flag(config: Config, key: str, *, default: bool) -> bool:
    text = parameter(config, key).lower()
    if text in ("1", "true", "0", "false", ""):
        return text in ("1", "true") if text else default
    raise OrtLoadError(f"parameter {key} is '{text}': say 1 or 0")


class OrtModel:
    """One open session. Thread-safe like the session."""

    def __init__(self, session: Any, signature: Signature, config: Config, memory: MemoryLimit | None = None) -> None:
        """session: ort.InferenceSession, or a CudaSession. memory: of the process; it applies to the CPU only."""
        self._session = session
        self._config = config
        self._run_options = self.run_options()
        inputs = (*signature.inputs, *signature.overridable)
        self._text_inputs = [spec.name for spec in inputs if spec.data_type == "TYPE_STRING"]
        self._scalar_inputs = [spec.name for spec in inputs if not spec.dims]
        self._output_dims = {
            entry["name"]: (entry.get("reshape") or {}).get("shape", entry["dims"])
            for entry in config.get("output", [])
        }

        self.memory = memory if session.get_providers() == CPU_ONLY else None
        if self.memory is not None:
            self.memory.add(self)

    def run_options(self) -> ort.RunOptions:
        """Options of a run by the configuration. Setting `terminate` ends the run at its next node."""
        return _run_options(self._config)

    def run(self, names: Sequence[str], inputs: Mapping[str, Any], options: ort.RunOptions | None = None) -> list[Any]:
        """The outputs `names`, in that order. Raises OrtRequestError with ONNX Runtime's reason."""
        memory = self.memory
        if memory is not None:
            memory.check(CHECK_EVERY_S)
        started = time.monotonic()
        try:
            arrays = self._session.run(list(names), self._to_ort(inputs), options or self._run_options)
        except ORT_ERRORS as error:
            if memory is not None and is_out_of_memory(error):
                memory.release()
            raise OrtRequestError(ort_error_text(error), is_client_error=isinstance(error, CLIENT_ERRORS)) from None
        if memory is not None and time.monotonic() - started > LONG_RUN_S:
            memory.check()
        return [self._from_ort(name, array) for name, array in zip(names, arrays, strict=True)]

    def release_memory(self) -> None:
        """Returns unused memory of the session's arena to the system."""
        release_arena(self._session)

    def close(self) -> None:
        """Frees the memory of a GPU after the running calls. Returns at once."""
        if hasattr(self._session, "close"):
            self._session.close()

    def _to_ort(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        feed = dict(inputs)
        for name in self._text_inputs:
            if name in feed:
                feed[name] = _decoded(name, feed[name])
        for name in self._scalar_inputs:
            if isinstance(feed.get(name), np.ndarray) and feed[name].size == 1:
                feed[name] = feed[name].reshape(())
        return feed

    def _from_ort(self, name: str, array: Any) -> Any:
        """Gives a scalar the configuration's shape, as NGC's backend does; the engine applies a reshape."""
        return array.reshape(self._output_dims[name]) if array.ndim == 0 else array


def release_arena(session: ort.InferenceSession) -> None:
    """Frees the parts of the session's arena that no run uses: ONNX Runtime does that at the end of a run.

    This run ends before its first node.
    """
    options = ort.RunOptions()
    options.terminate = True
    options.log_severity_level = SEVERITY_FATAL
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with contextlib.suppress(*ORT_ERRORS):
        session.run(None, {spec.name: _smallest(spec) for spec in read_signature(session).inputs}, options)


_DTYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "STRING": "object"}  # others by their own names


def _smallest(spec: OnnxTensorSpec) -> Any:
    """Zeros of the input's shape, 1 for each dynamic dimension."""
    kind = spec.data_type.removeprefix("TYPE_")
    return np.zeros([max(dim, 1) for dim in spec.dims], _DTYPES.get(kind, kind.lower()))


def _run_options(config: Config) -> ort.RunOptions:
    options = ort.RunOptions()
    options.log_severity_level = SEVERITY_FATAL
    shrinkage = parameter(config, "memory.enable_memory_arena_shrinkage")
    if shrinkage:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrinkage)
    return options


def _decoded(name: str, array: Any) -> Any:
    """As str: ONNX Runtime's Python API would use the repr of bytes."""
    try:
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.ravel()]
    except UnicodeDecodeError:
        raise OrtRequestError(f"input '{name}' holds bytes that are not UTF-8", is_client_error=True) from None
    decoded = np.empty(len(texts), dtype=object)
    decoded[:] = texts
    return decoded.reshape(array.shape)


def ort_error_text(error: BaseException) -> str:
    """ONNX Runtime's reason on one line, without prefix and source locations."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    node = r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)' Status Message: "
    text = re.sub(node, lambda found: f"{found[1]} node '{found[2]}': ", text)
    text = re.sub(r"/\S+\.(?:cc|cpp|h|cu|cuh):\d+ ", "", text)
    text = re.sub(r"void\* onnxruntime::.*(?=Failed to allocate|Available memory)", "", text)
    return " ".join(text.split()) or type(error).__name__
