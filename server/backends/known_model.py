"""A model as last seen in the engine, and whether calls to it may pass."""

from dataclasses import dataclass

from server.backends.model_health import Cause
from server.core.errors import ModelRefused, ModelUnavailable
from server.core.model import ModelConfig


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as last seen. config is None for a model that never loaded; reason says why it is not ready.

    is_refused: the gateway does not serve it, because its options are not valid.
    unavailable: the cause for which the gateway does not serve it until it recovers. reason is shown to clients.
    """

    name: str
    is_ready: bool
    reason: str = ""
    config: ModelConfig | None = None
    is_refused: bool = False
    unavailable: Cause | None = None

    @property
    def is_withheld(self) -> bool:
        """Whether the engine serves it, but the gateway does not."""
        return self.is_refused or self.unavailable is not None

    @property
    def error(self) -> ModelRefused | ModelUnavailable | None:
        """The error for its clients; None if it is not withheld."""
        if self.is_refused:
            return ModelRefused(self.reason)
        if self.unavailable is not None:
            wait_s = None if self.unavailable is Cause.TRIAL else 1.0  # only another load ends a failed trial
            return ModelUnavailable(f"model {self.name!r} is unavailable: {self.reason}", retry_after_s=wait_s)
        return None

    def require_served(self) -> None:
        """Raises its error. A model that only client calls can judge still gets them."""
        error = self.error
        if error is not None and self.unavailable is not Cause.TRAFFIC:
            raise error
