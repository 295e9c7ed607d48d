"""The ways to an engine: what the engine's thread asks of each."""

from typing import Protocol

from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelConfig
from server.core.slab import Slab


class Line(Protocol):
    """Made and called inside the engine's event loop. Raises of the InferenceError tree only."""

    @property
    def is_up(self) -> bool:
        """Whether the engine answers, as far as is known."""
        ...

    @property
    def reason(self) -> str:
        """Why it does not; empty while it does."""
        ...

    @property
    def slab(self) -> Slab | None:
        """Memory that the engine reads without being sent the bytes."""
        ...

    async def run(self) -> None:
        """Connects and looks, again and again, for ever; ends by cancellation only."""
        ...

    async def until_up(self) -> None:
        """Returns when the engine has answered once."""
        ...

    async def config(self, model_name: str, version: str) -> ModelConfig:
        """Of a ready model."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Cancelling it gives the request up."""
        ...

    async def aclose(self) -> None:
        """After run has ended."""
        ...
