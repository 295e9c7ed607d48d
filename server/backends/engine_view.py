"""What those who serve requests know of the engine, whoever looks at it: this process, or another one that tells."""

from collections.abc import Callable, Mapping
from typing import Protocol

from server.backends.known_model import KnownModel
from server.core.model import ModelConfig


class EngineView(Protocol):
    """The engine and its models as last seen. server.backends.watch.EngineWatch is one."""

    @property
    def is_up(self) -> bool:
        """Whether it answers and its canary inference succeeds."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not up; empty while it is."""
        ...

    @property
    def generation(self) -> int:
        """How often it came up: what was only in its memory may be gone since this last changed."""
        ...

    @property
    def models(self) -> Mapping[str, KnownModel]: ...

    def when_silent(self, cut: Callable[[str], None]) -> None:
        """Whom to tell, with the reason, that calls in flight will not be answered any more."""
        ...

    def suspect(self) -> None:
        """A call could not reach the engine."""
        ...

    def note_late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> None:
        """A call ended after waited_s without an answer from the engine. is_waiting: it has not ended."""
        ...

    def note_failed(self, model_name: str) -> None:
        """A client's inference failed in the engine, and the request was valid."""
        ...

    def note_served(self, model_name: str) -> None:
        """A client's inference succeeded."""
        ...

    async def note_loaded(self, model_name: str) -> None:
        """A client had the engine load a model."""
        ...

    def note_unloaded(self, model_name: str) -> None:
        """A client had the engine unload a model."""
        ...

    async def find(self, model_name: str) -> ModelConfig:
        """The config of a ready model. Raises ModelNotFound, ModelRefused."""
        ...
