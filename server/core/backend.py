"""The seam between the gateway and an engine."""

from typing import Protocol

from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelConfig, ModelMetadata, ModelState
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall


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

    async def grpc(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer: ...
