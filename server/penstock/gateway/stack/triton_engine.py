"""One Triton of the stack, the MPS daemon of its card, and the replacement of its lost instances."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.engines.call_options import CallTimeouts
from penstock.engines.run_directory import RunDirectory
from penstock.engines.triton.client import DiskLoads, SupervisedTriton
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.instances import InstanceMonitor, InstanceReplacer
from penstock.engines.triton.model_facts import FactsByModel, ModelFacts
from penstock.engines.triton.runtime import Launch, TritonUnavailable, plain_paths
from penstock.engines.triton.supervisor import EngineState, EngineStatus, TritonOptions, TritonSupervisor
from penstock.gateway.card_engines import CardEngine
from penstock.gateway.stack.mps import MpsSharing, engine_observer
from penstock.gateway.stack.startup import CannotStart, EngineChoice, EnginePlan, choose_profiling, claim_run_dir
from penstock.gateway.workers.running_stacks import reachable_folder
from penstock.gpu.mps.control import VISIBLE_CARDS, MpsError
from penstock.gpu.mps.supervisor import EngineHandle, MpsState
from penstock.gpu.profiling import REPORT_GRACE_S
from penstock.gpu.telemetry.cards import process_name
from penstock.logs import get_logger

log = get_logger("stack")
engine_log = get_logger("triton")
RENEWAL_SILENCE_S = 60.0  # from a Triton that reloads models on a busy machine, before it is abandoned
ENGINE_GRACE_S = 5.0  # after the gateway has drained, only a loading model delays the engine's stop
RETRY_S = 30.0  # before a card's engine that failed is started again, while others serve


def log_engine(level: int, event: str, /, **fields: str | int) -> None:
    """Logs one line of Triton's log as ours."""
    engine_log.log(level, event, **fields)


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Functions that an engine calls. changed: its status, its models' processes or its MPS changed. refuse: ends the
    stack with a reason. serves: whether clients' requests succeed."""

    changed: Callable[[], None]
    refuse: Callable[[str], None]
    serves: Callable[[], Awaitable[bool]]


class StackEngine:
    """Call `start_sharing`, `start`, `stop` and `aclose`, in this order. Use it on one event loop."""

    def __init__(self, plan: EnginePlan, choice: EngineChoice, run_dir: RunDirectory, hooks: EngineHooks) -> None:
        self.card = plan.card
        self.label = plan.card.label if plan.card is not None else ""
        self.status = EngineStatus(EngineState.STARTING)
        self.mps_state = MpsState()
        self.sharing: MpsSharing | None = None
        self._index = plan.index
        self._mps = plan.mps
        self._choice = choice
        self._run_dir = run_dir
        self._hooks = hooks
        self._grace_s = min(choice.settings.grace_s, ENGINE_GRACE_S)
        self._supervisor: TritonSupervisor | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewal: InstanceReplacer | None = None
        self._renewal_task: asyncio.Task[None] | None = None
        self._has_card = asyncio.Event()
        self._has_card.set()
        self._began_without_card = False
        self._facts: ModelFacts | None = None

    @property
    def place(self) -> CardEngine:
        """Its entry for the gateway. Only for an engine with a card of its own, after `start_sharing`."""
        assert self.card is not None
        mps = str(self.sharing.directory) if self.sharing is not None else ""
        return CardEngine(self.label, self.card.uuid, str(self._run_dir.path), mps, self.card.memory_bytes)

    @property
    def generations(self) -> dict[str, int]:
        """How often each model's processes were replaced."""
        return self._renewal.generations if self._renewal is not None else {}

    @property
    def facts(self) -> FactsByModel:
        """How each model's instances run, by Triton's log."""
        return self._facts.by_model(self.card.index if self.card else None) if self._facts is not None else {}

    def tasks(self) -> Iterator["asyncio.Task[None]"]:
        """Tasks that run until the engine is stopped, or it failed for good."""
        yield from filter(None, (self._task, self._renewal_task, self.sharing.task if self.sharing else None))

    # Start

    async def start_sharing(self) -> None:
        """Starts the card's MPS daemon, if the plan has one. Without it: raises CannotStart if MPS is a must."""
        if self._mps is None:
            return
        sharing = MpsSharing(self._mps, claim_run_dir)
        handle = EngineHandle(
            observe=engine_observer(self._run_dir.engine_id, lambda: self.status, self._hooks.serves),
            end=lambda reason, is_lost: self.restart(reason, is_lost=is_lost),
            refuse=self._hooks.refuse,
            publish=self._publish_mps,
        )
        self.sharing = sharing
        try:
            await sharing.start(handle)
        except MpsError as error:
            if sharing.is_must:
                raise CannotStart(str(error)) from error
            log.warning("without MPS", reason=str(error))
            await sharing.aclose()
            self.sharing = None

    def start(self, repositories: Sequence[Path]) -> None:
        """Starts its tasks. Raises CannotStart."""
        assert self._choice.triton is not None
        try:
            launch = self._choice.triton.prepare(self._run_dir.path)
        except TritonUnavailable as error:
            raise CannotStart(str(error)) from error
        if self.card is not None:
            launch = replace(launch, env={**launch.env, VISIBLE_CARDS: self.card.uuid})
        if self.sharing is not None:
            launch = self.sharing.shared(launch)
        launch = self._profiled(launch)
        settings = self._choice.settings
        listeners = TritonListeners(reachable_folder(self._run_dir.path), *settings.engine_ports_of(self._index))
        options = TritonOptions(
            engine_id=self._run_dir.engine_id,
            repositories=plain_paths(tuple(repositories), self._run_dir.path / "repositories"),
            listeners=listeners,
            trace_file=self._trace_file(),
        )
        log.info(
            "engine process",
            program=launch.argv[0],
            http=listeners.http_url,
            grpc=listeners.grpc_address,
            metrics=listeners.metrics_url,
            **({"card": self.label} if self.label else {}),
        )
        self._task = asyncio.create_task(self._supervise(launch, options))
        self._renewal = self._replacer(listeners, repositories)
        self._renewal_task = asyncio.create_task(self._renewal.run())

    def _profiled(self, launch: Launch) -> Launch:
        profiling = choose_profiling(self._choice, self._run_dir.engine_id)
        if profiling is None:
            return launch
        if profiling.report is not None:
            self._grace_s = REPORT_GRACE_S
        log.info("the engine is profiled", report=str(profiling.report or "none: NVTX ranges alone"))
        environment = {**launch.env, **profiling.environment}
        return replace(launch, argv=(*profiling.prefix, *launch.argv), env=environment)

    def _trace_file(self) -> Path | None:
        """Each of several engines has its own file."""
        file = self._choice.settings.trace_file
        if file is None or self.card is None:
            return file and file.absolute()
        return file.absolute().with_name(f"{file.stem}-{self.label.replace(' ', '-').lower()}{file.suffix}")

    def _replacer(self, listeners: TritonListeners, repositories: Sequence[Path]) -> InstanceReplacer:
        control = SupervisedTriton(
            http_url=listeners.http_url,
            grpc_address=listeners.grpc_address,
            max_connections=1,
            timeouts=CallTimeouts(keepalive_timeout_s=RENEWAL_SILENCE_S),
            disk=DiskLoads(repositories, self._run_dir.path / "labels", has_one_card=self.card is not None),
        )
        return InstanceReplacer(
            InstanceMonitor(process_name),
            control,
            engine_pid=lambda: self.status.pid if self.status.state is EngineState.RUNNING else None,
            restart=self.restart,
            has_room=self.sharing.plan.has_room_beside if self.sharing is not None else lambda _: True,
            renewed=self._hooks.changed,
        )

    async def _supervise(self, launch: Launch, options: TritonOptions) -> None:
        """Runs Triton. One of several that cannot be started is tried again, while the others serve."""
        while True:
            emit = partial(log_engine, card=self.label) if self.label else log_engine
            self._facts = facts = ModelFacts(emit, self._hooks.changed)
            supervisor = TritonSupervisor(
                launch, options, emit=facts, on_status=self._on_status, before_start=self._until_it_may_start
            )
            self._supervisor = supervisor
            await supervisor.run()
            if supervisor.status.state is not EngineState.FAILED or self.card is None:
                return
            await asyncio.sleep(RETRY_S)

    async def _until_it_may_start(self) -> None:
        await self._has_card.wait()
        if self.sharing is not None:
            await self.sharing.until_clients_may_start()

    def _on_status(self, status: EngineStatus) -> None:
        self.status = status
        self._hooks.changed()

    def _publish_mps(self, state: MpsState) -> None:
        self.mps_state = state
        self._hooks.changed()

    # While it runs

    def restart(self, reason: str, *, is_lost: bool = False) -> bool:
        """See TritonSupervisor.restart."""
        return self._supervisor is not None and self._supervisor.restart(reason, is_lost=is_lost)

    def restart_model(self, model: str, reason: str, generation: int, *, is_moved: bool) -> None:
        """See InstanceReplacer.restart_model."""
        if self._renewal is not None:
            self._renewal.restart_model(model, reason, generation, is_moved=is_moved)

    def note_card(self, lost: str) -> None:
        """Ends Triton while its card is lost, and starts it when it is back. lost: the reason, or empty."""
        if lost and self._has_card.is_set():
            self._has_card.clear()
            log.error("an engine is stopped until its GPU is back", card=self.label, reason=lost)
            self._began_without_card = not self.restart(lost, is_lost=True)
        elif not lost and not self._has_card.is_set():
            self._has_card.set()
            log.info("a GPU is back; its engine starts", card=self.label)
            if self._began_without_card:
                self.restart("its GPU is back", is_lost=True)

    # End

    async def stop_renewal(self) -> None:
        """Replaces no more instances."""
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.wait({self._renewal_task})

    async def stop(self, *, is_hurried: bool) -> None:
        """Ends Triton. is_hurried: it was killed already."""
        if self._supervisor is not None and not is_hurried:
            await self._supervisor.stop(self._grace_s)
        if self._task is not None:
            if self.status.state is EngineState.FAILED:
                self._task.cancel()  # it waits for its next try
            with suppress(asyncio.CancelledError):
                await self._task

    def kill(self) -> None:
        """Ends Triton at once."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stops the MPS daemon of its own. Call it last."""
        if self.sharing is not None:
            await self.sharing.aclose()
        self._run_dir.release()
