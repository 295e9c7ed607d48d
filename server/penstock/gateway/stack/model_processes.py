"""Engine processes of models that hung: one per model, restarted when it hangs again."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.engines.run_directory import RunDirectory
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.log_parser import Emit
from penstock.engines.triton.runtime import TritonRuntime, TritonUnavailable, plain_paths
from penstock.engines.triton.supervisor import EngineState, TritonOptions, TritonSupervisor
from penstock.gateway.settings import Settings
from penstock.gateway.stack.startup import CannotStart
from penstock.gateway.workers.gateway_process import (
    CORE,
    GatewayPart,
    GatewayProcess,
    GatewayReady,
    RestartEngine,
    RestartModel,
)
from penstock.gateway.workers.running_stacks import reachable_folder
from penstock.logs import get_logger

log = get_logger("stack")
RESTART_DELAY_S = 30.0  # pause after several failed starts
Changed = Callable[[bool], None]


class EngineProcess(Protocol):
    """Runs one engine until it is stopped or cannot be started."""

    def run(self) -> Coroutine[None, None, object]: ...

    def end_hang(self, reason: str) -> None:
        """Kills the process, which is then restarted."""

    async def stop(self, grace_s: float) -> None: ...


class ModelTritonProcess(TritonSupervisor):
    """A Triton for one model. changed: called with True when it runs, with False when it ended."""

    def __init__(
        self, runtime: TritonRuntime, settings: Settings, run_dir: RunDirectory, emit: Emit, changed: Changed
    ) -> None:
        options = TritonOptions(
            engine_id=run_dir.engine_id,
            repositories=plain_paths(
                tuple(path for path in settings.repositories if path.is_dir()), run_dir.path / "repositories"
            ),
            listeners=TritonListeners(reachable_folder(run_dir.path)),
        )
        super().__init__(
            runtime.prepare(run_dir.path),
            options,
            emit=emit,
            on_status=lambda status: changed(status.state is EngineState.RUNNING),
        )

    def end_hang(self, reason: str) -> None:
        self.restart(reason, is_lost=True)


class ModelGatewayProcess(GatewayProcess):
    """The embedded engine for one model: a core without workers, on Unix sockets in its run directory."""

    def __init__(self, model: str, settings: Settings, run_dir: RunDirectory, changed: Changed) -> None:
        own = {
            **{"engine": "embedded", "models": (model,), "required_models": None, "workers": 2, "decoders": 1},
            **{"host": "127.0.0.1", "metrics_port": 0, "gpu_metrics": "off", "slab_bytes": 0},
            **{"audit_log": None, "otlp_endpoint": ""},
        }
        part = GatewayPart(f"engine of {model}", (CORE,), died=lambda: changed(False))
        super().__init__(settings.model_copy(update=own).model_dump_json(), run_dir.path, self._on_message, part=part)
        self._changed = changed

    def _on_message(self, message: object) -> None:
        if isinstance(message, GatewayReady):
            self._changed(True)
        elif isinstance(message, RestartModel | RestartEngine):
            self.end_hang(message.reason)

    def end_hang(self, reason: str) -> None:
        log.error("killed the engine process of a model", reason=reason)
        self.cut_off()


@dataclass(slots=True)
class _ModelProcess:
    """run_dir, process: set when its folder exists."""

    run_dir: RunDirectory | None = None
    process: EngineProcess | None = None
    is_running: bool = False


class ModelProcesses:
    """make: creates a model's process in a run directory. changed: called when `folders` has changed."""

    def __init__(
        self,
        make: Callable[[str, RunDirectory, Changed], EngineProcess],
        claim: Callable[[], RunDirectory],
        changed: Callable[[], None],
    ) -> None:
        self._make = make
        self._claim = claim
        self._changed = changed
        self._own: dict[str, _ModelProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def folders(self) -> dict[str, str]:
        """Run directories of the processes by model; "" while a process starts."""
        return {
            name: str(own.run_dir.path) if own.run_dir and own.is_running else "" for name, own in self._own.items()
        }

    def restart(self, model: str, reason: str) -> None:
        own = self._own.get(model)
        if own is not None and own.process is not None and own.is_running:
            own.process.end_hang(reason)
        elif own is None and not self._is_stopping:
            log.warning("starting an engine process for a model that hung", model=model, reason=reason)
            self._own[model] = _ModelProcess()
            self._tasks.append(asyncio.create_task(self._run(model, self._own[model])))
            self._changed()

    async def stop(self, grace_s: float) -> None:
        """Stops all processes for good."""
        self._is_stopping = True
        await asyncio.gather(*(own.process.stop(grace_s) for own in self._own.values() if own.process is not None))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for own in self._own.values():
            if own.run_dir is not None:
                own.run_dir.release()

    async def _run(self, model: str, own: _ModelProcess) -> None:
        while not self._is_stopping:
            try:
                own.run_dir = own.run_dir or self._claim()
                own.process = own.process or self._make(model, own.run_dir, partial(self._note, own))
                await own.process.run()
            except (CannotStart, TritonUnavailable, OSError) as error:
                log.error("cannot start an engine process for a model that hung", model=model, reason=str(error))
            if not self._is_stopping:
                await asyncio.sleep(RESTART_DELAY_S)

    def _note(self, own: _ModelProcess, is_running: bool) -> None:
        if own.is_running != is_running:
            own.is_running = is_running
            self._changed()
