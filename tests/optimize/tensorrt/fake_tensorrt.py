"""A stand-in for NVIDIA's `tensorrt`: the names, arguments and answers of the real Python API, and nothing else.

Modelled after the reference of TensorRT 10.x (docs.nvidia.com/deeplearning/tensorrt/10.16.1/_static/python-api and
python/src/infer/pyCore.cpp, python/src/parsers/pyOnnx.cpp of NVIDIA/TensorRT) and, for `weak=False`, the guide for
migrating from 10.x to 11.x, which removes BuilderFlag.FP16 and INT8. A "plan" holds the ONNX bytes; an engine
computes them by ONNX Runtime, with inputs and outputs at addresses of the fake driver. What only a GPU can show is not
shown by this.
"""

import ctypes
import enum
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

STREAM = 77  # what the fake driver gives out


def fake_tensorrt(version: str = "10.4.0.26", *, weak: bool = True, **faults: str) -> Any:
    """The module. faults: `builder` (no GPU), `parse`, `build`, `deserialize`, `run`, each the text that is logged.

    Or `nms`: an output's length is known after a run only; `int32`: outputs are of that type.
    """
    module = SimpleNamespace(__version__=version, built=[], faults=faults, has_plugins=False)
    module.init_libnvinfer_plugins = lambda logger, namespace: setattr(module, "has_plugins", namespace == "") or True
    module.ILogger = _ILogger
    module.BuilderFlag = enum.Enum("BuilderFlag", "FP16 INT8 TF32 REFIT" if weak else "TF32 REFIT")
    creation = {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1} if weak else {"STRONGLY_TYPED": 1}
    module.NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", creation)
    module.ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED NONE")
    module.LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON")
    module.TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
    module.DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 INT64")
    module.Builder = lambda logger: _Builder(module, logger)
    module.OnnxParser = lambda network, logger: _OnnxParser(module, network, logger)
    module.Runtime = lambda logger: _Runtime(module, logger)
    return module


class _ILogger:
    """Abstract in the real one, too: log(severity, msg) is the user's."""

    class Severity(enum.Enum):
        """With these names."""

        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def __init__(self) -> None:
        self.was_initialised = True


def _say(module: Any, logger: Any, fault: str) -> bool:
    """Whether that goes wrong here; the logger is told why."""
    assert logger.was_initialised, "ILogger.__init__ was not called"
    if fault in module.faults:
        logger.log(_ILogger.Severity.ERROR, f"  {module.faults[fault]}\n")
    return fault in module.faults


class _Builder:
    def __init__(self, module: Any, logger: Any) -> None:
        self._module, self._logger = module, logger
        if _say(module, logger, "builder"):
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def create_network(self, flags: int = 0) -> "_Network":
        assert isinstance(flags, int)
        return _Network(flags)

    def create_builder_config(self) -> "_BuilderConfig":
        return _BuilderConfig(self._module)

    def create_optimization_profile(self) -> "_Profile":
        return _Profile()

    def build_serialized_network(self, network: "_Network", config: "_BuilderConfig") -> memoryview | None:
        """An IHostMemory, which is a buffer; None where nothing could be built."""
        if _say(self._module, self._logger, "build"):
            return None
        self._logger.log(_ILogger.Severity.WARNING, "a warning of the builder")
        is_open = -1 in network.get_input(0).shape
        assert bool(config.profiles) == is_open, "dynamic axes need a profile, fixed ones take none"
        header = {
            "flags": sorted(flag.name for flag in config.flags),
            "creation": network.flags,
            "profile": [list(profile.shapes.values()) for profile in config.profiles],
            "verbosity": config.profiling_verbosity.name,
        }
        self._module.built.append(header)
        return memoryview(json.dumps(header).encode() + b"\n" + network.content)


class _Network:
    def __init__(self, flags: int) -> None:
        self.flags, self.content = flags, b""

    @property
    def num_inputs(self) -> int:
        return len(self._graph().input)

    def get_input(self, index: int) -> SimpleNamespace:
        """An ITensor: its name, and its Dims, which are a sequence."""
        value = self._graph().input[index]
        dims = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in value.type.tensor_type.shape.dim]
        return SimpleNamespace(name=value.name, shape=tuple(dims))

    def _graph(self) -> onnx.GraphProto:
        return onnx.ModelProto.FromString(self.content).graph


class _OnnxParser:
    def __init__(self, module: Any, network: _Network, logger: Any) -> None:
        self._module, self._network, self._logger = module, network, logger
        self.num_errors = 0

    def parse(self, model: bytes, path: str | None = None) -> bool:
        """A buffer. Nodes in any order would do for the real one; this one is stricter."""
        assert isinstance(model, bytes)
        assert self._module.has_plugins
        if _say(self._module, self._logger, "parse"):
            self.num_errors = 2
            return False
        onnx.checker.check_model(onnx.ModelProto.FromString(model))
        self._network.content = model
        return True

    def get_error(self, index: int) -> SimpleNamespace:
        """An IParserError, of which desc() is a method."""
        return SimpleNamespace(desc=lambda: f"{self._module.faults['parse']} ({index})")


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, Any, Any]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        """Dims or anything that becomes Dims."""
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))


class _BuilderConfig:
    __slots__ = ("_module", "flags", "profiles", "profiling_verbosity")  # as with pybind11, no other can be set

    def __init__(self, module: Any) -> None:
        self._module = module
        self.flags: set[Any] = set()
        self.profiles: list[_Profile] = []
        self.profiling_verbosity = module.ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_flag(self, flag: Any) -> None:
        assert isinstance(flag, self._module.BuilderFlag)
        self.flags.add(flag)

    def add_optimization_profile(self, profile: _Profile) -> int:
        """Its index, -1 where the shapes contradict each other."""
        for low, best, high in profile.shapes.values():
            if not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
                return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1


class _Runtime:
    def __init__(self, module: Any, logger: Any) -> None:
        self._module, self._logger = module, logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "_Engine | None":
        if _say(self._module, self._logger, "deserialize"):
            return None
        header, _, content = serialized_engine.partition(b"\n")
        return _Engine(self._module, self._logger, json.loads(header), content)


class _Engine:
    def __init__(self, module: Any, logger: Any, header: dict[str, Any], content: bytes) -> None:
        self.module, self.logger, self.header = module, logger, header
        self.graph = onnx.ModelProto.FromString(content).graph
        self.session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = self.session.get_inputs(), self.session.get_outputs()

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return str([*self.inputs, *self.outputs][index].name)

    def get_tensor_mode(self, name: str) -> Any:
        is_input = name in {item.name for item in self.inputs}
        return self.module.TensorIOMode.INPUT if is_input else self.module.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        """Floats alone, inputs and outputs stay what the config says; `int32` makes such outputs, as 8.x of INT64."""
        assert {item.type for item in (*self.inputs, *self.outputs)} == {"tensor(float)"}
        if "int32" in self.module.faults and name in {item.name for item in self.outputs}:
            return self.module.DataType.INT32
        return self.module.DataType.FLOAT

    def create_execution_context(self) -> "_Context":
        return _Context(self)

    def create_engine_inspector(self) -> SimpleNamespace:
        return SimpleNamespace(get_engine_information=self._information)

    def _information(self, format: Any) -> str:
        """As the inspector writes it: a Conv swallows the nodes behind it, a copy stands before the first layer."""
        assert format is self.module.LayerInformationFormat.JSON
        assert self.header["verbosity"] == "DETAILED"
        copy = {"Name": "Reformatting CopyNode for Input Tensor 0", "LayerType": "Reformat", "Outputs": [_half()]}
        layers: list[dict[str, Any]] = [copy | {"Metadata": ""}]
        for node in self.graph.node:
            if node.op_type in ("Relu", "BatchNormalization") and layers[-1]["LayerType"] == "CaskConvolution":
                layers[-1]["Name"] += f" + {node.name}"
                layers[-1]["Metadata"] += f"\x1f[ONNX Layer: {node.name}]"
                continue
            kind = "CaskConvolution" if node.op_type == "Conv" else node.op_type
            metadata = f"[ONNX Layer: {node.name}]"
            layers.append({"Name": node.name, "LayerType": kind, "Outputs": [_half()], "Metadata": metadata})
        return json.dumps({"Layers": layers, "Bindings": [item.name for item in (*self.inputs, *self.outputs)]})


def _half() -> dict[str, Any]:
    return {
        "Name": "x",
        "Format/Datatype": "Channel major FP16 format where channel % 8 == 0",
        "Dimensions": [1, 1, 1, 1],
    }


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._last: list[Any] = []

    def set_input_shape(self, name: str, shape: Any) -> bool:
        """False for a shape outside the profile."""
        for ((low, _, high),) in self._engine.header["profile"]:
            if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
                self._engine.logger.log(_ILogger.Severity.ERROR, f"{tuple(shape)} is outside the profile")
                return False
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of outputs: known as soon as the inputs' shapes are."""
        if name in self._shapes:
            return self._shapes[name]
        if "nms" in self._engine.module.faults:
            return (self._shapes[self._engine.inputs[0].name][0], -1)
        feed = {item.name: np.zeros(self._shapes[item.name], np.float32) for item in self._engine.inputs}
        return tuple(self._engine.session.run([name], feed)[0].shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert isinstance(memory, int)
        self._addresses[name] = memory
        return memory != 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Reads and writes at the addresses, as a kernel would."""
        assert stream_handle == STREAM
        if _say(self._engine.module, self._engine.logger, "run"):
            return False
        feed = {item.name: self._array(item.name, self._shapes[item.name]).copy() for item in self._engine.inputs}
        for item, array in zip(self._engine.outputs, self._engine.session.run(None, feed), strict=True):
            self._array(item.name, array.shape)[...] = array
        return True

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape))
        memory = (ctypes.c_float * count).from_address(self._addresses[name])
        return np.frombuffer(memory, np.float32, count).reshape(shape)
