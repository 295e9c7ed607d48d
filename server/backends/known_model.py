"""A model as last seen in the engine, and whether calls to it may pass."""

from dataclasses import dataclass

from server.backends.model_health import Cause
from server.core.errors import ModelRefused, ModelUnavailable
from server.core.model import ModelConfig


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as last seen. config is None for a model that never loaded; reason says why it is not ready.

    is_refused: the engine would serve it, and the gateway does not, for what its config says.
    unavailable: the same, until it recovers, for this cause; reason is for clients.
    """

    name: str
    is_ready: bool
    reason: str = ""
    config: ModelConfig | None = None
    is_refused: bool = False
    unavailable: Cause | None = None

    @property
    def is_withheld(self) -> bool:
        """Whether the engine would serve it and the gateway does not."""
        return self.is_refused or self.unavailable is not None

    @property
    def error(self) -> ModelRefused | ModelUnavailable | None:
        """The error for its clients; None if it is not withheld."""
        if self.is_refused:
            return ModelRefused(self.reason)
        if self.unavailable is not None:
            return ModelUnavailable(f"model {self.name!r} is unavailable: {self.reason}")
        return None

    def require_served(self) -> None:
        """Raises its error. Calls to a model that only calls can judge go through."""
        error = self.error
        if error is not None and self.unavailable is not Cause.TRAFFIC:
            raise error
