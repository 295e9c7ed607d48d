"""The interface of an engine: inference over tensors, relayed calls, and the description of its models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.protocol.call import A, Call, GrpcAnswer, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.inference import Datatype, InferRequest, InferResponse

UNMERGED = "unmerged"  # parameter that the gateway adds to the config: see ModelConfig.unmerged


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared tensor. shape: -1 for variable; has the batch dimension in ModelMetadata, not in ModelConfig."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model by KServe v2."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parts of config.pbtxt that the gateway uses.

    max_batch_size: 0 without batch dimension. parameters: key → string_value. is_on_gpu: an instance group has
    KIND_GPU. has_priorities: its dynamic batcher has priority levels. unmerged: why requests are not merged, by the
    gateway's trial; empty if they may be, None before the trial.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    instance_count: int = 1
    is_decoupled: bool = False
    has_dynamic_batching: bool = False
    has_sequence_batching: bool = False
    is_ensemble: bool = False
    is_on_gpu: bool = False
    unmerged: str | None = None
    has_priorities: bool = False

    @property
    def merged_rows(self) -> int:
        """Maximum number of images or frames in one execution; 0 without batch dimension."""
        return self.max_batch_size if self.unmerged == "" else min(self.max_batch_size, 1)

    def metadata(self, versions: tuple[str, ...], platform: str) -> ModelMetadata:
        """The model's metadata: the tensors with the batch dimension."""
        batch = (-1,) if self.max_batch_size else ()
        inputs = tuple(TensorSpec(spec.name, spec.datatype, (*batch, *spec.shape)) for spec in self.inputs)
        outputs = tuple(TensorSpec(spec.name, spec.datatype, (*batch, *spec.shape)) for spec in self.outputs)
        return ModelMetadata(self.name, versions, platform, inputs, outputs)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A row of the repository index. state: READY, LOADING, UNLOADING, UNAVAILABLE, or "" for never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Relay(Protocol):
    """The part of an engine that relays calls. Returns its errors; raises EngineUnavailable, DeadlineExceeded."""

    async def send(self, call: Call[A], *, deadline: float | None) -> A: ...

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """The response as soon as its head has arrived."""
        ...

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> "GrpcStream":
        """An open bidirectional gRPC call."""
        ...


class Engine(Relay, Protocol):
    """An engine. Raises InferenceError only. Cancelling an awaited call cancels the work if the engine can."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Result by request.deadline. Raises DeadlineExceeded, ModelNotFound, InvalidRequest, EngineFailed."""
        ...

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata: ...

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig: ...

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        """Whether the engine, or one model, accepts requests. False if it is unreachable."""
        ...

    async def repository_index(self) -> list[ModelState]: ...

    async def load(self, model_name: str) -> None:
        """Loads or reloads. Raises ModelNotReady with the engine's reason."""
        ...

    async def unload(self, model_name: str) -> None: ...

    async def metrics(self) -> bytes:
        """The engine's metrics in Prometheus' text format; empty if it has none."""
        ...

    async def aclose(self) -> None: ...


class UserEngine(Protocol):
    """The part of an engine that a user writes, see docs/extend.md. Its class is called without arguments."""

    def models(self) -> Sequence[ModelConfig]:
        """The models. Called once, at start."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """As Engine.infer, on the gateway's event loop: long work belongs in a thread."""
        ...

    async def aclose(self) -> None: ...


class GrpcStream(Protocol):
    """A bidirectional call to the engine, concurrent both ways. Raises EngineUnavailable, DeadlineExceeded."""

    async def send(self, message: bytes) -> None:
        """Returns when the engine's side has room for more."""
        ...

    async def half_close(self) -> None:
        """Ends sending; responses may still arrive."""
        ...

    async def receive(self) -> bytes | None:
        """The next message in the engine's order; None after the last one."""
        ...

    async def end(self) -> GrpcAnswer:
        """The engine's status, details and trailing metadata. Call it after receive returned None."""
        ...

    def cancel(self) -> None:
        """Ends the call, and soon the engine's work on it. May be called again."""
        ...
