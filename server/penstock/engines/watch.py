"""State of the engine and its models: probes the engine, loads models, runs canaries, reports readiness."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.engines.failures import CircuitBreaker, Silence, SilenceAction
from penstock.engines.model_checks import CheckOptions, ModelChecks
from penstock.engines.model_health import Cause, KnownModel
from penstock.engines.probes import TrialResult, answers_within
from penstock.logs import get_logger
from penstock.protocol.engine import Engine, ModelConfig, ModelState
from penstock.protocol.errors import EngineUnavailable, InferenceError

log = get_logger("engine")
NOT_LOADED, UNLOADED = "not loaded", "unloaded"  # the second is Triton's text
LOADING = "loading models"  # reason of an engine that answers and is not up yet
GREETING_S = 5.0  # a model with a slower first canary does not delay the others
SILENCE_CUT_S, SILENCE_RESTART_S = 5.0, 30.0  # see penstock.engines.failures.Silence
SUSPICION_PAUSE_S = 0.02  # many calls fail together; one check is enough


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of the watch. Intervals in seconds."""

    wanted: tuple[str, ...] | None = None  # models to load at start; None for all in the repository
    loads: bool = True  # may load models (our engine in explicit mode); else only watches
    probe_interval_s: float = 1.0
    down_interval_s: float = 0.2
    canary_interval_s: float = 5.0
    execution_timeout_s: Callable[[ModelConfig], float] = lambda _: 30.0  # of a model by its config
    canary_failures: int = 3
    late_calls: int = 5  # consecutive, until a liveness probe (see penstock.engines.failures)
    liveness_timeout_s: float = 1.0
    loads_at_once: int = 1  # each starts an interpreter in Triton, which takes seconds of a core
    try_model: Callable[[ModelConfig], Awaitable[TrialResult]] | None = None  # see CheckOptions


@dataclass(slots=True)
class _EngineSnapshot:
    is_up: bool = False
    reason: str = "the engine has not answered yet"
    models: dict[str, KnownModel] = field(default_factory=dict)


class EngineWatch:
    """Run `run()` as one task; use all other members on the same event loop."""

    def __init__(
        self,
        backend: Engine,
        options: WatchOptions,
        *,
        ask_restart: Callable[[str], None] | None = None,
        restart_model: Callable[[str, str, int], None] | None = None,
        refuse: Callable[[ModelConfig], str] | None = None,
    ) -> None:
        """refuse: why a model with that config is not served, or empty. restart_model: see CheckOptions.

        The attribute `hindrance`, which a composer may set, returns why the engine cannot serve though it answers;
        `who_is_left_out` returns `left_out`.
        """
        self._backend = backend
        self._options = options
        self._ask_restart = ask_restart
        self._refuse = refuse
        self._seen = _EngineSnapshot()
        self._checks = ModelChecks(
            backend,
            CheckOptions(
                options.canary_interval_s,
                options.canary_failures,
                options.execution_timeout_s,
                restart_model,
                self._restart_sick,
                options.try_model,
            ),
            self._config_of,
            self._show,
            self._rows_tried,
        )
        self._silence = Silence(cut_s=SILENCE_CUT_S, restart_s=SILENCE_RESTART_S)
        self._circuit = CircuitBreaker(failures=options.late_calls)
        self._liveness_task: asyncio.Task[None] | None = None
        self._cuts: list[Callable[[str], None]] = []
        self._added: set[str] = set()
        self._removed: set[str] = set()
        self._wake = asyncio.Event()
        self._greetings = 0
        self.hindrance: Callable[[], str] = lambda: ""
        self.who_is_left_out: Callable[[], Mapping[str, str]] = dict
        self.first_ready = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._seen.is_up

    @property
    def reason(self) -> str:
        return "" if self._seen.is_up else self._seen.reason

    @property
    def left_out(self) -> Mapping[str, str]:
        return self.who_is_left_out() if self._seen.is_up else {}

    @property
    def generation(self) -> int:
        return self._greetings

    def unavailable(self) -> dict[tuple[str, ...], float]:
        """1 for each unavailable model, by (model, cause)."""
        return {(known.name, known.unavailable.value): 1.0 for known in self.models.values() if known.unavailable}

    def hangs(self) -> dict[tuple[str, ...], float]:
        """How often each model hung, by (model,)."""
        return {(name,): float(count) for name, count in self._checks.hangs.items()}

    @property
    def models(self) -> Mapping[str, KnownModel]:
        return self._seen.models

    def when_silent(self, cut: Callable[[str], None]) -> None:
        self._cuts.append(cut)

    def mark_down(self, reason: str) -> None:
        """The engine has died: marks it down at once and checks again soon."""
        self._set_down(reason)
        self._wake.set()

    def suspect(self) -> None:
        """A call could not reach the engine: probes it now."""
        self._wake.set()

    def note_generations(self, generations: Mapping[str, int]) -> None:
        self._checks.note_generations(generations)

    def note_late(self, model_name: str = "", waited_s: float = 0.0, *, is_waiting: bool = False) -> None:
        if self._seen.is_up and self._checks.late(model_name, waited_s, is_waiting=is_waiting):
            self._wake.set()
        if is_waiting or not self._seen.is_up:  # a waiting call is evidence about its model only
            return
        now = time.monotonic()
        self._circuit.failed(now)
        if self._circuit.is_probe_due(now) and self._liveness_task is None:
            self._liveness_task = asyncio.create_task(self._check_liveness())

    @property
    def openings(self) -> int:
        """How often the engine was marked down because calls and a probe went unanswered."""
        return self._circuit.openings

    def note_served(self, model_name: str) -> None:
        self._circuit.failures = 0
        self._checks.served(model_name)

    def note_failed(self, model_name: str) -> None:
        self._circuit.failures = 0
        if self._checks.failed(model_name):
            self._wake.set()

    def mark_unavailable(self, model_name: str, cause: Cause, reason: str) -> None:
        """Makes the model unavailable; with Cause.TRIAL until it is reloaded. reason: for clients."""
        self._checks.mark(model_name, cause, reason)

    async def note_loaded(self, model_name: str) -> None:
        """A client loaded a model: it is wanted from now on, also after a restart."""
        self._added.add(model_name)
        self._removed.discard(model_name)
        served = self._checks.serves(model_name)
        self._checks.forget(model_name)
        await self._learn(model_name)
        await self._checks.try_loaded(model_name, served=served)

    def note_unloaded(self, model_name: str) -> None:
        """A client unloaded a model: it is not wanted any more."""
        self._removed.add(model_name)
        self._added.discard(model_name)
        self._checks.forget(model_name)
        known = self._seen.models.get(model_name)
        if known is not None:
            self._seen.models[model_name] = KnownModel(model_name, False, UNLOADED, known.config)

    def is_left_out(self, known: KnownModel) -> bool:
        """Whether it intentionally does not serve: not wanted, unloaded, or never loaded by its operator."""
        if known.is_ready or known.name in self._removed:
            return not known.is_ready
        if self._options.wanted is not None:
            return known.name not in self._added.union(self._options.wanted)
        return known.reason in (NOT_LOADED, UNLOADED)

    async def find(self, model_name: str) -> ModelConfig:
        """The config of a ready model. Raises ModelNotFound, ModelRefused, ModelUnavailable."""
        known = self._seen.models.get(model_name)
        if known is None or known.config is None or not (known.is_ready or known.is_withheld):
            known = self._judged(model_name, await self._backend.model_config(model_name))
            self._seen.models[model_name] = known
        known.require_served()
        assert known.config is not None
        return known.config

    async def run(self) -> None:
        """Probes until cancelled."""
        try:
            await self._run()
        finally:
            self._checks.reset()
            if self._liveness_task is not None:
                self._liveness_task.cancel()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except InferenceError as error:
                self._set_down(str(error))
            interval_s = self._options.probe_interval_s if self._seen.is_up else self._options.down_interval_s
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
                await asyncio.sleep(SUSPICION_PAUSE_S)

    def _set_down(self, reason: str) -> None:
        if self._seen.is_up:
            log.warning("engine is down", reason=reason)
            self._checks.reset()
        self._seen.is_up, self._seen.reason = False, reason

    async def _check_liveness(self) -> None:
        try:
            is_answered = await answers_within(self._options.liveness_timeout_s, self._backend)
        finally:
            self._liveness_task = None
        if is_answered or self._circuit.is_refuted:
            self._circuit.probe_answered(time.monotonic())
        else:
            self._circuit.probe_unanswered(time.monotonic())
            late, liveness_timeout_s = self._options.late_calls, self._options.liveness_timeout_s
            self.mark_down(
                f"{late} calls in a row were not answered in time, nor was a probe within {liveness_timeout_s:g} s"
            )

    @property
    def has_model_on_gpu(self) -> bool:
        """Whether a model that serves, or did, runs on a GPU."""
        return any(known.config is not None and known.config.is_on_gpu for known in self._seen.models.values())

    async def _look(self) -> None:
        if reason := self.hindrance():
            raise EngineUnavailable(reason)
        if not await self._backend.ready():
            self._set_down(self._seen.reason if not self._seen.is_up else "the engine does not answer")
            self._answer_silence(self._silence.probe_missed(time.monotonic()))
            return
        self._silence.answered()
        self._circuit.probe_answered(time.monotonic())
        if not self._seen.is_up:
            await self._greet()
            return
        await self._refresh()
        self._checks.run_due()

    def _answer_silence(self, due: SilenceAction) -> None:
        if due is SilenceAction.CUT:
            for cut in self._cuts:
                cut(self._seen.reason)
        elif due is SilenceAction.RESTART and self._ask_restart is not None:
            self._ask_restart(self._seen.reason)

    async def _greet(self) -> None:
        """The engine is new or back: loads the wanted models, runs their canaries, then marks it up."""
        self._seen.reason = LOADING
        index = await self._backend.repository_index()
        names = self._wanted(row.name for row in index)
        if self._options.loads:
            loaded = {row.name for row in index if row.state == "READY"}
            await self._load_all([name for name in names if name not in loaded])
        for name, known in self._seen.models.items():  # a config may have changed while the engine was away
            self._seen.models[name] = replace(known, is_ready=False, is_refused=False, unavailable=None)
        await self._refresh()
        outcomes = await self._checks.run_all(self._ready_names(), GREETING_S)
        if any(outcome is False for outcome in outcomes) and not any(outcome is True for outcome in outcomes):
            raise EngineUnavailable(
                "the engine answers but no canary inference succeeded (the log says why; a model that cannot take "
                "zeros says canary: off in its parameters)"
            )
        self._seen.is_up, self._seen.reason = True, ""
        self._greetings += 1
        log.info("engine is ready", models=",".join(self._ready_names()))
        self.first_ready.set()

    def _wanted(self, names: Iterable[str]) -> list[str]:
        wanted = set(names) if self._options.wanted is None else set(self._options.wanted)
        return sorted((wanted | self._added) - self._removed)

    async def _load_all(self, names: Iterable[str]) -> None:
        at_once = asyncio.Semaphore(self._options.loads_at_once)

        async def load(name: str) -> None:
            async with at_once:
                await self._load(name)

        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(load(name))
        except* EngineUnavailable as group_of_errors:
            raise group_of_errors.exceptions[0] from None

    async def _load(self, model_name: str) -> None:
        try:
            await self._backend.load(model_name)
        except EngineUnavailable:
            raise
        except InferenceError as error:
            log.error("model cannot be loaded; the others are served", model=model_name, reason=str(error))
            self._seen.models[model_name] = KnownModel(model_name, False, str(error))

    async def _refresh(self) -> None:
        rows: dict[str, list[ModelState]] = {}
        for row in await self._backend.repository_index():
            rows.setdefault(row.name, []).append(row)
        for name in set(self._seen.models) - set(rows):
            del self._seen.models[name]
            self._checks.forget(name)
        for name, versions in rows.items():
            known = self._seen.models.get(name)
            is_ready = any(row.state == "READY" for row in versions)
            is_judged = known is not None and (known.is_ready or known.is_withheld)
            if is_ready and not is_judged:
                await self._learn(name)
            elif not is_ready and (known is None or (is_judged and known.unavailable is not Cause.HANG)):
                reason = next((row.reason for row in versions if row.reason), NOT_LOADED)
                self._seen.models[name] = KnownModel(name, False, reason, known.config if known else None)
                self._checks.forget(name)

    async def _learn(self, model_name: str) -> None:
        try:
            config = await self._backend.model_config(model_name)
        except EngineUnavailable:
            raise
        except InferenceError as error:
            self._seen.models[model_name] = KnownModel(model_name, False, str(error))
            return
        known = self._judged(model_name, config)
        if known.is_refused:
            log.error("model is not served; the others are", model=model_name, reason=known.reason)
        self._seen.models[model_name] = known

    def _judged(self, model_name: str, config: ModelConfig) -> KnownModel:
        refusal = self._refuse(config) if self._refuse is not None else ""
        if not refusal:
            self._checks.loaded(model_name)
        return KnownModel(model_name, not refusal, refusal, config, is_refused=bool(refusal))

    def _ready_names(self) -> list[str]:
        return sorted(name for name, known in self._seen.models.items() if known.is_ready)

    def _config_of(self, model_name: str) -> ModelConfig | None:
        known = self._seen.models.get(model_name)
        return known.config if known is not None and not known.is_refused else None

    def _show(self, model_name: str) -> None:
        known, why = self._seen.models.get(model_name), self._checks.unavailable(model_name)
        if known is not None and (known.is_ready or known.unavailable is not None):
            reason, cause = (why.reason, why.cause) if why is not None else ("", None)
            self._seen.models[model_name] = replace(known, is_ready=why is None, reason=reason, unavailable=cause)

    def _rows_tried(self, config: ModelConfig) -> None:
        known = self._seen.models.get(config.name)
        if known is not None:
            self._seen.models[config.name] = replace(known, config=config)

    def _restart_sick(self, reason: str) -> None:
        self._set_down(reason)
        if self._ask_restart is not None:
            self._ask_restart(reason)
