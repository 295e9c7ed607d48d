"""The interface of an engine: inference over tensors, relayed calls, and the description of its models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.protocol.call import A, Call, GrpcAnswer, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.inference import Datatype, InferRequest, InferResponse

UNMERGED = "unmerged"  # parameter in the config that the gateway returns: see ModelConfig.unmerged


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared tensor. shape: -1 where it varies; ModelMetadata has the batch dimension, ModelConfig not."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What KServe v2 tells of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.pbtxt says, as far as the gateway decides by it.

    max_batch_size: 0 where the model has no batch dimension. parameters: key → string_value. is_on_gpu: an instance
    group says KIND_GPU, as Triton's own answer does wherever it is so.
    has_priorities: its dynamic batcher has priority levels.
    unmerged: the result of the gateway's trial: why an execution may not have rows of several requests, pictures or
    frames; empty if it may, None before the trial.
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
        """Maximum number of pictures or frames in one execution; 0 if the model has no batch dimension."""
        return self.max_batch_size if self.unmerged == "" else min(self.max_batch_size, 1)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A row of the repository index. state: READY, LOADING, UNLOADING, UNAVAILABLE, or empty for never loaded."""

    name: str
    version: str
    state: str
    reason: str


class Relay(Protocol):
    """The part of an engine that takes calls as bytes: they are relayed untouched.

    Raises EngineUnavailable and DeadlineExceeded; whatever the engine answers, errors too, is an answer.
    """

    async def send(self, call: Call[A], *, deadline: float | None) -> A: ...

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """The answer as soon as its head is there."""
        ...

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> "GrpcStream":
        """A bidirectional gRPC call, open."""
        ...


class Engine(Relay, Protocol):
    """Inference over tensors, relayed calls, and the description of its models.

    Raises InferenceError only; EngineUnavailable if it cannot be reached.

    Cancelling an awaited call cancels the work where the engine can.
    """

    async def infer(self, request: InferRequest) -> InferResponse:
        """Keeps request.deadline. Raises DeadlineExceeded, ModelNotFound, InvalidRequest, EngineFailed."""
        ...

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata: ...

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig: ...

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        """Whether the engine, or one model, takes requests. False, not an error, where it cannot be reached."""
        ...

    async def repository_index(self) -> list[ModelState]: ...

    async def load(self, model_name: str) -> None:
        """Load or reload. Raises ModelNotReady with the engine's reason where it fails."""
        ...

    async def unload(self, model_name: str) -> None: ...

    async def metrics(self) -> bytes:
        """The engine's own metrics in Prometheus' text format; empty where it has none."""
        ...

    async def aclose(self) -> None: ...


class GrpcStream(Protocol):
    """One bidirectional call to the engine: serialised messages both ways. Sending and receiving go on side by side.

    Raises EngineUnavailable and DeadlineExceeded where the engine said nothing; how it ended the call is an answer.
    """

    async def send(self, message: bytes) -> None:
        """Returns when the engine's side has room for more."""
        ...

    async def half_close(self) -> None:
        """Nothing more will be sent; answers still come."""
        ...

    async def receive(self) -> bytes | None:
        """The next message in the engine's order; None when there will be no more."""
        ...

    async def end(self) -> GrpcAnswer:
        """How the engine ended the call: its code, details and trailing metadata. Call it after receive gave None."""
        ...

    def cancel(self) -> None:
        """End the call, and the engine's work for it a moment later at most. Harmless when it has ended."""
        ...
