"""Calls TensorRT-RTX: parses an ONNX file, builds the engine, and writes it as an EPContext model."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import tensorrt_rtx_bindings as trt
from onnx import helper

from penstock.engines.ort_serving.config import OrtLoadError
from penstock.engines.ort_serving.half import converted_to_fp16
from penstock.engines.ort_serving.placement import Precision
from penstock.engines.ort_serving.tensorrt_rtx import PROVIDER
from penstock.gpu.tensorrt import capability_text
from penstock.models.inspect.facts import ModelFacts
from penstock.models.tensorrt_rtx.build import (
    BuildRequest,
    BuiltEngine,
    CannotBuild,
    OnPhase,
    Shape,
    failure_reason,
    why_not_as_wished,
)
from penstock.models.tensorrt_rtx.layers import LOG_BEGIN, OnnxNode, read_layers

_MAX_REASON = 300
_MAX_NAME = 4096  # characters
_SHOWN_STEPS = 50  # of a phase; others would send a message a node
_NO_OPERATOR = (trt.ErrorCode.UNSUPPORTED_NODE, trt.ErrorCode.UNSUPPORTED_GRAPH)
_NO_PLUGIN = "Plugin not found"
_ZERO_POINT = "Non-zero zero point"
IR_VERSION = 10


class _Log(trt.ILogger):  # type: ignore[misc]
    """Collects the layers and the errors of a build."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ""
        self.errors: list[str] = []

    def log(self, severity: Any, text: str) -> None:
        """Called by the builder."""
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(text)
        elif text.startswith(LOG_BEGIN):
            self.layers += text


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Hands on the builder's phases."""

    def __init__(self, on_phase: OnPhase) -> None:
        super().__init__()
        self._on_phase = on_phase
        self._counts: dict[str, int] = {}

    def phase_start(self, phase: str, _parent: str | None, count: int) -> None:
        """Called by the builder."""
        self._counts[phase] = count
        self._on_phase(phase, 0, count)

    def phase_finish(self, phase: str) -> None:
        """Called by the builder."""
        self._counts.pop(phase, None)

    def step_complete(self, phase: str, step: int) -> bool:
        """Called by the builder; False would stop it."""
        count = self._counts.get(phase, 0)
        if count <= _SHOWN_STEPS:
            self._on_phase(phase, step + 1, count)
        return True


def build(request: BuildRequest, facts: ModelFacts, part: Path, on_phase: OnPhase) -> BuiltEngine:
    """Builds the engine and writes the file `part`. Raises CannotBuild, OSError."""
    started = time.monotonic()
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    content = _content(request, facts.sha256)
    graph = onnx.load_from_string(content).graph
    _check_names(request, graph)
    _parse(request, content, network, log)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    major, minor = request.architecture
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that layers name their ONNX nodes
    if request.precision is not Precision.TF32:
        config.clear_flag(trt.BuilderFlag.TF32)  # it is set by default
    config.progress_monitor = _Monitor(on_phase)
    shapes = {tensor.name: _shapes(request, tensor) for tensor in _inputs(network)}
    if why := why_not_as_wished(request, shapes):
        raise CannotBuild(f"{request.model}: {why}")
    profile = builder.create_optimization_profile()
    for name, (least, greatest) in shapes.items():
        profile.set_shape(name, least, greatest, greatest)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CannotBuild(f"{_what(request)}: {failure_reason(log.errors)}")
    if plan.nbytes > request.limits.engine_bytes:
        raise CannotBuild(f"{_what(request)}: it has {plan.nbytes} bytes (limit {request.limits.engine_bytes})")
    part.write_bytes(_context_model(request, graph, bytes(plan), facts.sha256))
    return BuiltEngine(
        request.architecture,
        request.precision,
        trt.__version__,
        facts.sha256,
        plan.nbytes,
        time.monotonic() - started,
        shapes,
        read_layers(log.layers, _nodes(graph)),
    )


def _what(request: BuildRequest) -> str:
    return (
        f"{request.model}: TensorRT-RTX {trt.__version__} builds no engine for {capability_text(request.architecture)}"
    )


def _content(request: BuildRequest, sha256: str) -> bytes:
    """The ONNX file in the precision of the request. sha256: of the file that was inspected."""
    path = Path(request.model)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CannotBuild(f"{request.model} was changed while it was read: build it again")
    if request.precision is not Precision.FP16:
        return content
    try:
        return converted_to_fp16(path)
    except OrtLoadError as error:
        raise CannotBuild(f"{request.model} cannot be converted to FP16: {error}") from error


def _check_names(request: BuildRequest, graph: onnx.GraphProto) -> None:
    """Raises CannotBuild for names that would break the builder's log into other lines, or fill memory."""
    names = [text for node in graph.node for text in (node.name, node.op_type, *node.input, *node.output)]
    names += [value.name for value in (*graph.input, *graph.output)]
    if any(len(name) > _MAX_NAME or not name.isprintable() for name in names):
        raise CannotBuild(
            f"{request.model} has names with control characters, or of over {_MAX_NAME} characters: rename its "
            "operators and tensors"
        )


def _parse(request: BuildRequest, content: bytes, network: Any, log: _Log) -> None:
    parser = trt.OnnxParser(network, log)
    if parser.parse(content):
        return
    error = parser.get_error(0) if parser.num_errors else None
    if error is None:
        raise CannotBuild(f"{_what(request)}: {failure_reason(log.errors)}")
    node = f"operator {error.node_operator()} (node {error.node_name() or error.node()!r})"
    if error.code() in _NO_OPERATOR or _NO_PLUGIN in error.desc():
        raise CannotBuild(f"{_what(request)}: it does not support {node}, or not with these attributes")
    if _ZERO_POINT in error.desc():
        raise CannotBuild(f"{_what(request)}: {node} has a zero point, as of INT8 for CPUs: build the float model")
    raise CannotBuild(f"{_what(request)}: {node}: {' '.join(error.desc().split())[:_MAX_REASON]}")


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(number) for number in range(network.num_inputs)]


def _shapes(request: BuildRequest, tensor: Any) -> tuple[Shape, Shape]:
    """Minimum and maximum shape of an input. A dynamic first dimension is the batch."""
    declared = tuple(tensor.shape)
    known = request.sides.get(tensor.name, ())
    sides = known if len(known) == len(declared) else declared
    whole = [side if side > 0 else given for side, given in zip(declared, sides, strict=True)]
    if request.size is not None and len(whole) == 4:
        first = 1 if whole[3] in (1, 3) else 2  # NHWC, else NCHW
        for number, side in zip((first, first + 1), request.size, strict=True):
            whole[number] = whole[number] if whole[number] > 0 else side
    if any(side < 1 for side in whole[1:]):
        text = ", ".join(map(str, declared))
        raise CannotBuild(
            f"{request.model}: its input {tensor.name!r} [{text}] has dynamic dimensions: give --input-size WxH"
        )
    if not whole or whole[0] > 0:
        return tuple(whole), tuple(whole)
    return (1, *whole[1:]), (request.max_batch, *whole[1:])


def _nodes(graph: onnx.GraphProto) -> Sequence[OnnxNode]:
    return [OnnxNode(node.name or f"node_of_{next(iter(node.output), '')}", node.op_type) for node in graph.node]


def _context_model(request: BuildRequest, graph: onnx.GraphProto, plan: bytes, sha256: str) -> bytes:
    """An ONNX file with the engine in an EPContext node, as the plug-in writes it itself."""
    architecture = "".join(map(str, request.architecture))
    partition = f"{sha256[:16]}_{architecture}_{request.precision.value}"  # names the plug-in's cache of kernels
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    node = helper.make_node(
        "EPContext",
        [value.name for value in inputs],
        [value.name for value in graph.output],
        name=partition,
        domain="com.microsoft",
        main_context=0,
        embed_mode=1,
        ep_cache_context=plan,
        ep_sdk_version=trt.__version__,
        hardware_architecture=architecture,
        onnx_model_filename=Path(request.model).name,
        partition_name=partition,
        source=PROVIDER,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    engine = helper.make_graph([node], "engine", inputs, list(graph.output))
    model = helper.make_model(engine, opset_imports=imports, ir_version=IR_VERSION, producer_name="penstock")
    return bytes(model.SerializeToString())
