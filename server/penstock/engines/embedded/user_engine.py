"""Engines of users, named `module:Class`: completes a UserEngine to an Engine that answers KServe v2 calls."""

import asyncio
import operator
import time
from dataclasses import dataclass, field, replace

from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.config_pbtxt import config_from_proto, config_message
from penstock.engines.embedded.inference import version_number
from penstock.engines.embedded.relay import MAX_BODY_BYTES, InProcessRelay
from penstock.engines.embedded.shared_memory import SharedRegions
from penstock.engines.embedded.statistics import RunTimes, VersionCounters, VersionMetrics, metrics_page
from penstock.engines.model_io import RequestRules, rules_of
from penstock.logs import get_logger
from penstock.protocol.engine import ModelConfig, ModelMetadata, ModelState, UserEngine
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
)
from penstock.protocol.extensions import ExtensionError, load_extension
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor

METHODS = ("models", "infer", "aclose")
VERSION = "1"  # of each model
CLOSE_TIMEOUT_S = 2.0  # below the time that the gateway's parent process allows
log = get_logger("engine")


def load_engine_class(name: str) -> type[UserEngine]:
    """The class `module:Class`. Raises ExtensionError if it cannot be loaded, or lacks a method of UserEngine."""
    found = load_extension(name)
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        lack = f"it has no method {missing[0]}" if missing else "it is no class"
        raise ExtensionError(f"{lack}; an engine is a class with the methods {', '.join(METHODS)}")
    return found


@dataclass(slots=True)
class _Model:
    config: model_config_pb2.ModelConfig
    rules: RequestRules
    is_loaded: bool = False
    statistics: VersionCounters = field(default_factory=VersionCounters)


class CustomEngine(InProcessRelay):
    """The engine of the class `module:Class`. Use on one event loop. Each model has version 1."""

    def __init__(self, name: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Creates the user's object and reads its models. Raises ExtensionError."""
        super().__init__(self, max_body_bytes)
        self.regions = SharedRegions()
        self._is_closed = False
        engine_class = load_engine_class(name)
        try:
            self._engine = engine_class()
            self._models = {config.name: _model_of(config) for config in self._engine.models()}
        except (ExtensionError, KeyboardInterrupt):
            raise
        except BaseException as error:  # any code of the user, which may call sys.exit
            log.exception("an engine of a user cannot start", engine=name)
            raise ExtensionError(f"it cannot start ({type(error).__name__}: {error})") from error

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Engine. Cancellation and the deadline cancel the user's coroutine."""
        model = self._find(request.model_name, request.model_version)
        rows = model.rules.check(request)
        started = time.monotonic_ns()
        try:
            outputs = await self._outputs(model, request, rows)
        except (InferenceError, asyncio.CancelledError) as error:
            model.statistics.failed(error, time.monotonic_ns() - started)
            raise
        model.statistics.succeeded(rows, RunTimes(0, 0, time.monotonic_ns() - started, 0))
        return InferResponse(request.model_name, VERSION, outputs, request.id)

    async def _outputs(self, model: _Model, request: InferRequest, rows: int) -> tuple[Tensor, ...]:
        who = f"model {request.model_name!r}"
        try:
            async with asyncio.timeout(
                None if request.deadline is None else request.deadline - time.monotonic()
            ) as end:
                response = await self._engine.infer(request)
            given = {tensor.name: tensor for tensor in response.outputs}
            return tuple(_checked(given.get(name), model.rules, name, rows) for name in model.rules.wanted(request))
        except _WrongOutput as error:
            raise EngineFailed(f"{who}: its engine gave {error}") from None
        except (InferenceError, GeneratorExit):
            raise
        except BaseException as error:  # any code of the user, which may call sys.exit or await a cancelled future
            if _is_cancellation(error):
                raise
            if end.expired():
                raise DeadlineExceeded(f"{who} did not answer in time") from error
            log.exception("an inference failed in the engine", model=request.model_name)
            raise EngineFailed(f"{who}: {type(error).__name__} in the engine, see the gateway's log") from error

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        config = await self.model_config(model_name, model_version)
        return config.metadata((VERSION,), config.backend)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        return config_from_proto(self._find(model_name, model_version).config)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        try:
            self._find(model_name, model_version) if model_name else self._check_open()
        except (EngineUnavailable, InvalidRequest, ModelNotFound):
            return False
        return True

    async def repository_index(self) -> list[ModelState]:
        self._check_open()
        return [
            ModelState(name, VERSION if model.is_loaded else "", "READY" if model.is_loaded else "", "")
            for name, model in sorted(self._models.items())
        ]

    async def load(self, model_name: str, config_json: str | None = None) -> None:
        self._check_open()
        if config_json is not None:
            raise NotSupported("an engine of a user has the configs of its models; load without 'config'")
        if model_name not in self._models:
            raise ModelNotReady(f"model {model_name!r} cannot be loaded: the engine has no such model")
        self._models[model_name].is_loaded = True

    async def unload(self, model_name: str) -> None:
        self._check_open()
        if (model := self._models.get(model_name)) is not None:
            model.is_loaded = False

    async def metrics(self) -> bytes:
        return metrics_page(
            VersionMetrics(name, VERSION, model.statistics, 0)
            for name, model in sorted(self._models.items())
            if model.is_loaded
        )

    async def aclose(self) -> None:
        self._is_closed = True
        self.regions.unregister()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._engine.aclose()
        except BaseException as error:  # any code of the user
            if _is_cancellation(error):
                raise
            log.error("an engine of a user did not close", error=f"{type(error).__name__}: {error}")

    def config_message(self, model_name: str, version: str = "") -> model_config_pb2.ModelConfig:
        return self._find(model_name, version).config

    def statistics(self, model_name: str = "", version: str = "") -> list[service_pb2.ModelStatistics]:
        names = [model_name] if model_name else [name for name in sorted(self._models) if self._models[name].is_loaded]
        try:
            return [self._find(name, version).statistics.message(name, VERSION) for name in names]
        except ModelNotFound as error:
            raise InvalidRequest(error.message) from error

    def labels(self, model_name: str, version: str, _: str) -> tuple[str, ...]:
        self._find(model_name, version)
        return ()

    def _find(self, model_name: str, version: str) -> _Model:
        self._check_open()
        model = self._models.get(model_name)
        if model is None or not model.is_loaded:
            raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")
        if version_number(version) not in (None, int(VERSION)):
            raise ModelNotFound(f"Request for unknown model: '{model_name}' version {version} is not found")
        return model

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("the engine is closed")


def _is_cancellation(error: BaseException) -> bool:
    """Whether the current task was cancelled. A user's code may also raise CancelledError by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class _WrongOutput(Exception):
    """An output of the user's class is not as the config says. The message is what is wrong."""


def _checked(tensor: Tensor | None, rules: RequestRules, name: str, rows: int) -> Tensor:
    """The output with a copy of its bytes: they may be a view of an input, whose memory is reused after the inference.

    Raises _WrongOutput, and whatever the user's objects raise.
    """
    rule = rules.outputs[name]
    if tensor is None or tensor.datatype is not rule.datatype:
        found = "no output" if tensor is None else f"{tensor.datatype} as output"
        raise _WrongOutput(f"{found} {name!r}; its config has {rule.datatype}")
    shape = tuple(operator.index(size) for size in tensor.shape)
    wanted = ((rows,) if rules.max_batch_size else ()) + tuple(rule.dims)
    expected = [given if size == -1 else size for size, given in zip(wanted, shape, strict=False)]
    if len(shape) != len(wanted) or tuple(expected) != shape or min(shape, default=0) < 0:
        raise _WrongOutput(f"shape {list(shape)} as output {name!r}; {list(wanted)} is needed")
    if not isinstance(tensor.data, memoryview):
        raise _WrongOutput(f"{type(tensor.data).__name__} as data of output {name!r}; a memoryview is needed")
    checked = replace(tensor, shape=shape, data=memoryview(bytes(tensor.data)))
    if checked.datatype is not Datatype.BYTES and checked.data.nbytes != checked.declared_bytes:
        raise _WrongOutput(f"{checked.data.nbytes} bytes as output {name!r}; its shape needs {checked.declared_bytes}")
    if checked.datatype is Datatype.BYTES:
        try:
            checked.to_numpy()
        except InvalidRequest as error:
            raise _WrongOutput(f"elements that cannot be read: {error.message}") from None
    return checked


def _model_of(config: ModelConfig) -> _Model:
    """Raises ExtensionError for what an engine of a user cannot have."""
    flags = ("is_on_gpu", "is_decoupled", "has_sequence_batching", "has_dynamic_batching", "is_ensemble")
    if wrong := [flag for flag in flags if getattr(config, flag)]:
        raise ExtensionError(f"its model {config.name!r} has {wrong[0]}, which an engine of a user cannot have")
    message = config_message(config)
    return _Model(message, rules_of(message))
