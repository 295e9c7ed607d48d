"""The seam between the gateway and an engine."""

from typing import Protocol

from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelConfig, ModelMetadata, ModelState
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream


class Backend(Protocol):
    """An engine. Raises of the InferenceError tree only; BackendUnavailable where it cannot be reached.

    Cancelling an awaited call cancels the work where the engine can.
    """

    async def infer(self, request: InferRequest) -> InferResponse:
        """Keeps request.deadline. Raises DeadlineExceeded, ModelNotFound, InvalidRequest, BackendFailed."""
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


class Relay(Protocol):
    """The way for bytes that the gateway does not own: passed on and back untouched.

    Raises BackendUnavailable and DeadlineExceeded; whatever the engine answers, errors too, is an answer.
    """

    async def http(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer: ...

    async def http_stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """The answer as soon as its head is there."""
        ...

    async def grpc(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer: ...

    async def grpc_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> "GrpcStream":
        """A bidirectional call, open."""
        ...


class GrpcStream(Protocol):
    """One bidirectional call to the engine: serialised messages both ways. Sending and receiving go on side by side.

    Raises BackendUnavailable and DeadlineExceeded where the engine said nothing; how it ended the call is an answer.
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
