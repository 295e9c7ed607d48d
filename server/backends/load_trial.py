"""Tries a newly loaded model before clients use it. A model that always fails becomes unavailable, with the reason."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from server.backends.canary import canary_request
from server.backends.row_checks import noise_request
from server.core.backend import Backend
from server.core.errors import BackendFailed, InvalidRequest, OutOfMemory
from server.core.infer import InferRequest
from server.core.model import ModelConfig

TRIAL_ID = "penstock-load-trial"
See: TypeAlias = Callable[[ModelConfig, float], Awaitable[str]]


class Tried(NamedTuple):
    """What a trial found. failure: why the model cannot serve; empty if it can. unmerged: see ModelConfig."""

    failure: str = ""
    unmerged: str | None = None


class LoadTrial:
    """Called with the config of a loaded model whose canary was answered, or that has none.

    Raises InferenceError if the engine did not answer: try again later.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        see: See,
        try_rows: Callable[[ModelConfig], Awaitable[str | None]],
        execution_timeout_s: Callable[[ModelConfig], float],
    ) -> None:
        """see: sends a picture through the path of `/image` if the model takes pictures; returns why it fails, or "".

        Its argument is the model's execution time-out in seconds, which limits each inference of the trial.
        try_rows: returns ModelConfig.unmerged. This does not affect whether the model serves.
        """
        self._backend = backend
        self._see = see
        self._try_rows = try_rows
        self._execution_timeout_s = execution_timeout_s

    async def __call__(self, config: ModelConfig) -> Tried:
        timeout_s = self._execution_timeout_s(config)
        why = await self._why_unanswered(config, timeout_s) or await self._see(config, timeout_s)
        if why:
            return Tried(f"its trial at load failed: {why}")
        return Tried(unmerged=await self._try_rows(config))

    async def _why_unanswered(self, config: ModelConfig, timeout_s: float) -> str:
        """Tries zeros, and noise if zeros fail. A model without a canary is not tried."""
        request = canary_request(config, deadline=time.monotonic() + timeout_s)
        if request is None:
            return ""
        why = await self._failure(config, replace(request, id=TRIAL_ID))
        if not why:
            return ""
        noise = noise_request(config, deadline=time.monotonic() + timeout_s)
        return why if noise is None or await self._failure(config, noise) else ""

    async def _failure(self, config: ModelConfig, request: InferRequest) -> str:
        try:
            response = await self._backend.infer(request)
        except (InvalidRequest, OutOfMemory):  # the input is not valid for this model, or memory is short now
            return ""
        except BackendFailed as error:  # the client's message already names the model
            return error.message.removeprefix(f"model {config.name!r} failed: ").removeprefix(
                f"model {config.name!r}: "
            )
        answered = {tensor.name for tensor in response.outputs}
        missing = [spec.name for spec in config.outputs if spec.name not in answered]
        return f"its answer lacks the output {missing[0]!r}" if missing else ""
