"""Runs the canaries of an engine's models, and restarts models that hang or fail. `ModelHealth` decides."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.engines.model_health import Cause, ModelHealth, Unavailable
from penstock.engines.probes import TrialResult, canary_request
from penstock.logs import get_logger
from penstock.protocol.engine import Engine, ModelConfig
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError, ModelNotFound, Overloaded

log = get_logger("engine")
TRIALS_S = 10.0  # maximum wait of a start or load for trials; a load first waits until the model answers or hangs
STARTING = "it was loaded, and its first inference has no answer yet"
OWN_STALL_S = 1.0  # if the event loop was blocked longer, the answer may only have been read late


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of the model checks."""

    interval_s: float
    failures: int  # consecutive canary failures that make a model unavailable
    execution_timeout_s: Callable[[ModelConfig], float]
    restart_model: Callable[[str, str, int], None] | None  # model, reason, hangs so far; None for a remote engine
    restart_engine: Callable[[str], None]  # the argument: the reason
    try_model: Callable[[ModelConfig], Awaitable[TrialResult]] | None = None  # trial after the first canary


class ModelChecks:
    """Schedules canaries and trials. Use on one event loop."""

    def __init__(
        self,
        backend: Engine,
        options: CheckOptions,
        config_of: Callable[[str], ModelConfig | None],  # of a loaded model, else None
        changed: Callable[[str], None],  # called when a model becomes unavailable or available
        rows_tried: Callable[[ModelConfig], None],  # called with the new config after a trial of rows
    ) -> None:
        self._backend = backend
        self._options = options
        self._config_of = config_of
        self._on_change = changed
        self._rows_tried = rows_tried
        self._health = ModelHealth(limit=options.failures, interval_s=options.interval_s, changed=self._changed)
        self._since: dict[str, float] = {}
        self.hangs: dict[str, int] = {}  # by model, since the start
        self._canaries: set[asyncio.Task[bool | None]] = set()
        self._untried: set[str] = set()
        self._trials: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()
        self._generations: dict[str, int] = {}

    def loaded(self, model_name: str) -> None:
        """The model was loaded or reloaded."""
        self._health.loaded(model_name, time.monotonic())
        self._since.pop(model_name, None)
        self._end_trial(model_name)
        if self._options.try_model is not None:
            self._untried.add(model_name)

    def note_generations(self, generations: Mapping[str, int]) -> None:
        """Updates how often each model's processes were replaced. A canary of an earlier process does not count."""
        for name, generation in generations.items():
            if generation != self._generations.get(name, 0):
                self._health.renewed(name, time.monotonic())
        self._generations = dict(generations)

    def forget(self, model_name: str) -> None:
        """The model was unloaded."""
        self._health.forget(model_name)
        self._since.pop(model_name, None)
        self._end_trial(model_name)

    def reset(self) -> None:
        """The engine is down; all state is dropped."""
        self._health.reset()
        self._since.clear()
        for canary in self._canaries:
            canary.cancel()
        for name in (*self._untried, *self._trials):
            self._end_trial(name)

    def unavailable(self, model_name: str) -> Unavailable | None:
        """Why the model cannot serve; None if it can."""
        why = self._health.unavailable(model_name)
        if why is None and model_name in self._starting:
            return Unavailable(Cause.STARTING, STARTING, time.monotonic())
        return why

    def serves(self, model_name: str) -> bool:
        """Whether the model has passed its trial, and can serve."""
        is_tried = model_name not in self._untried and model_name not in self._trials
        return is_tried and self._health.is_known(model_name) and self.unavailable(model_name) is None

    def mark(self, model_name: str, cause: Cause, reason: str) -> None:
        """Makes the model unavailable; with Cause.TRIAL until the next load."""
        self._health.mark(model_name, cause, reason, time.monotonic())

    def served(self, model_name: str) -> None:
        """A client's inference succeeded."""
        self._health.served(model_name, time.monotonic())

    def failed(self, model_name: str) -> bool:
        """A client's valid inference failed in the engine. Returns whether a canary is due."""
        return self._health.call_failed(model_name, time.monotonic())

    def late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> bool:
        """A client's call had no answer for waited_s. Returns whether a canary is due. is_waiting: it still waits."""
        now, config = time.monotonic(), self._config_of(model_name)
        if config is None:
            return False
        timeout_s = self._options.execution_timeout_s(config)
        if is_waiting and (config.is_decoupled or waited_s < timeout_s / 2):
            return False
        if not is_waiting and self._health.call_hung(model_name, waited_s, timeout_s, now):
            self._end_hang(model_name)
            return False
        return self._health.call_late(model_name, waited_s, now)

    def run_due(self) -> None:
        """Starts the canaries and trials that are due. Does not block."""
        self._start_trials()
        self._start(self._health.due(time.monotonic()))

    async def run_all(self, model_names: Sequence[str], max_wait_s: float) -> list[bool | None]:
        """Whether each model's canary passed, or None. Once one has passed, waits max_wait_s at most for the rest."""
        now = time.monotonic()
        for name in model_names:
            self._health.loaded(name, now)
            self._health.begun(name, now)
        tasks = self._start(model_names)
        if not tasks:
            return []
        done, pending = await asyncio.wait(tasks, timeout=max_wait_s)
        if pending and not any(_outcome(task) for task in done):
            done, pending = await asyncio.wait(tasks)
        for name, task in zip(model_names, tasks, strict=True):
            if task in pending:
                self._set_starting(name)
                task.add_done_callback(partial(self._end_starting, name))
        await self.try_all()
        return [_outcome(task) for task in tasks]

    async def try_all(self) -> None:
        """Waits for the trials of newly loaded models, at most TRIALS_S."""
        self._start_trials()
        if self._trials:
            await asyncio.wait(self._trials.values(), timeout=TRIALS_S)

    async def try_loaded(self, model_name: str, *, served: bool) -> None:
        """Waits for the trial of a model that a client loaded. If it did not serve before, it is STARTING meanwhile."""
        self._start_trials()
        trial, config = self._trials.get(model_name), self._config_of(model_name)
        if trial is None or config is None:
            return
        if not served:
            self._set_starting(model_name)
        try:
            await asyncio.wait((trial,), timeout=max(TRIALS_S, self._options.execution_timeout_s(config) + OWN_STALL_S))
        finally:
            self._end_starting(model_name)

    def _set_starting(self, model_name: str) -> None:
        self._starting.add(model_name)
        self._on_change(model_name)

    def _end_starting(self, model_name: str, _: object = None) -> None:
        self._starting.discard(model_name)
        self._on_change(model_name)

    def _start_trials(self) -> None:
        for name in self._untried - set(self._trials):
            if not self._health.may_hang(name) and (config := self._config_of(name)) is not None:
                self._untried.discard(name)
                if self._health.needs_proof(name):
                    self._health.begun(name, time.monotonic())
                self._trials[name] = asyncio.create_task(self._try(name, config))

    async def _try(self, model_name: str, config: ModelConfig) -> None:
        """A trial's task. A model without an answer hangs; it is tried again after its restart."""
        assert self._options.try_model is not None
        try:
            if self._health.needs_proof(model_name):
                await self._probe(model_name)
            if self._health.unavailable(model_name) is not None:
                self._untried.add(model_name)
                tried = TrialResult()
            else:
                tried = await self._options.try_model(config)
            if tried.failure:
                self.mark(model_name, Cause.TRIAL, tried.failure)
            elif tried.unmerged is not None:
                self._rows_tried(replace(config, unmerged=tried.unmerged))
        except InferenceError:  # the engine did not answer: retried at the next check
            self._untried.add(model_name)
        except Exception:
            log.exception("a trial failed unexpectedly", model=model_name)
        del self._trials[model_name]  # a cancelled task was removed before

    def _end_trial(self, model_name: str) -> None:
        self._untried.discard(model_name)
        if (trial := self._trials.pop(model_name, None)) is not None:
            trial.cancel()

    def _start(self, model_names: Iterable[str]) -> list["asyncio.Task[bool | None]"]:
        tasks = [asyncio.create_task(self._probe(name)) for name in model_names]
        for task in tasks:
            self._canaries.add(task)
            task.add_done_callback(self._canaries.discard)
        return tasks

    async def _probe(self, model_name: str) -> bool | None:
        """Whether the model's canary passed; None if it has none, or was only late."""
        config = self._config_of(model_name)
        timeout_s = self._options.execution_timeout_s(config) if config is not None else 0.0
        started = time.monotonic()
        request = canary_request(config, deadline=started + timeout_s) if config is not None else None
        if request is None:
            self._health.skipped(model_name)
            return None
        try:
            await self._backend.infer(request)
        except DeadlineExceeded as error:
            return self._late(model_name, timeout_s, started, error)
        except InferenceError as error:
            log.warning("canary inference failed", model=model_name, reason=error.message)
            if isinstance(error, EngineUnavailable | ModelNotFound | Overloaded):  # not the model's fault
                self._health.over(model_name, started, time.monotonic())
            elif self._health.failed(model_name, error.message, started, time.monotonic()):
                self._restart(model_name)
            return False
        self._health.passed(model_name, started, time.monotonic())
        return True

    def _late(self, model_name: str, timeout_s: float, started: float, error: DeadlineExceeded) -> bool | None:
        now = time.monotonic()
        if now - started > timeout_s + OWN_STALL_S:
            self._health.over(model_name, started, now)
            return None
        if not self._health.late(model_name, timeout_s, started, now):
            return None
        log.warning("canary inference failed", model=model_name, reason=error.message)
        self._end_hang(model_name)
        return False

    def _end_hang(self, model_name: str) -> None:
        self.hangs[model_name] = self.hangs.get(model_name, 0) + 1
        self._restart(model_name)

    def _restart(self, model_name: str) -> None:
        """Restarts the model alone, or the engine if none of its models can serve."""
        why = self._health.unavailable(model_name)
        if reason := self._health.sick_reason(model_name):
            self._options.restart_engine(reason)
        elif why is not None and self._options.restart_model is not None:
            self._options.restart_model(model_name, why.reason, self.hangs.get(model_name, 0))

    def _changed(self, model_name: str) -> None:
        now, why = time.monotonic(), self._health.unavailable(model_name)
        if why is not None:
            self._since[model_name] = now
            log.error("model is unavailable", model=model_name, cause=why.cause.value, reason=why.reason)
        else:
            seconds = round(now - self._since.pop(model_name, now), 3)
            log.info("model is available again", model=model_name, seconds=seconds)
        self._on_change(model_name)


def _outcome(task: "asyncio.Task[bool | None]") -> bool | None:
    return task.result() if task.done() and not task.cancelled() else None
