"""The parent process, which starts and supervises the gateway and Triton."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.engines.run_directory import RunDirectory
from penstock.engines.torch_serving.slab_pictures import FILE_NAME
from penstock.engines.triton.endpoints import answers_live
from penstock.engines.triton.model_facts import merged_facts
from penstock.engines.triton.supervisor import EngineState
from penstock.gateway.card_engines import CardEngines, write_card_engines
from penstock.gateway.settings_report import write_origins
from penstock.gateway.stack.console_process import console_process
from penstock.gateway.stack.model_processes import (
    Changed,
    EngineProcess,
    ModelGatewayProcess,
    ModelProcesses,
    ModelTritonProcess,
)
from penstock.gateway.stack.side_process import SideProcess
from penstock.gateway.stack.startup import (
    CannotStart,
    EngineChoice,
    check_repositories,
    choose_profiling,
    claim_run_dir,
)
from penstock.gateway.stack.triton_engine import ENGINE_GRACE_S, EngineHooks, StackEngine, log_engine
from penstock.gateway.stack.video_process import video_process
from penstock.gateway.workers.gateway_process import (
    CORE,
    SICK_GRACE_S,
    WHOLE_GATEWAY,
    EngineStatusMessage,
    GatewayPart,
    GatewayProcess,
    GatewayReady,
    GatewayServes,
    LostCards,
    RestartEngine,
    RestartModel,
)
from penstock.gateway.workers.running_stacks import publish_stack
from penstock.gateway.workers.worker_processes import AddressUnavailable, WorkerProcesses
from penstock.log_file import FOLDER as LOGS
from penstock.logs import get_logger, log_to_stack
from penstock.network import connectable_host, host_and_port, listen_hosts

log = get_logger("stack")
STOP_MARGIN_S = 5.0  # beyond the gateway's own grace period, before it is killed
READY_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class Announcement:
    """Printed at start. engine: name and version. workers: number of processes. not_ready: see GatewayReady.

    console_url: empty without a console."""

    engine: str
    http_url: str
    grpc_address: str
    metrics_url: str
    models: tuple[str, ...]
    unavailable: dict[str, str]
    workers: int = 1
    not_ready: str = ""
    console_url: str = ""


class Stack:
    """Starts and supervises everything. Call `run` once."""

    def __init__(self, choice: EngineChoice, *, announce: Callable[[Announcement], None]) -> None:
        self._settings = choice.settings
        self._announce = announce
        self._ports: GatewayServes | None = None
        self._stop_requested = asyncio.Event()
        self._is_hurried = False
        self._failure = ""
        self._run_dir = claim_run_dir()
        self._triton = choice.triton and replace(choice.triton, slab_file=self._run_dir.path.absolute() / FILE_NAME)
        self._choice = replace(choice, triton=self._triton)
        write_origins(self._run_dir.path, choice.origins)
        settings_json = self._settings.model_dump_json()
        has_workers = self._settings.worker_count > 1
        part = GatewayPart(arguments=(CORE,)) if has_workers else WHOLE_GATEWAY
        self._gateway = GatewayProcess(settings_json, self._run_dir.path, self._on_gateway_message, part=part)
        self._workers = self._new_workers(settings_json) if has_workers else None
        self._ready: GatewayReady | None = None
        self._status = EngineStatusMessage(is_running=False, reason="the engine is starting", restarts=0)
        self._engines: tuple[StackEngine, ...] = ()
        self._embedded_restarts = 0
        self._beside: list[SideProcess] = []
        self._own = ModelProcesses(self._own_process, claim_run_dir, lambda: self._notify_gateway(self._status))

    async def run(self) -> int:
        """Exit code: 0 if every accepted request was answered, otherwise 1. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        log_to_stack(self._run_dir.path / LOGS)
        try:
            await self._start_sharing()
            if self._stop_requested.is_set():
                return 0
            self._start_engines()
            with console_process(self._settings) as console:
                video = video_process(self._settings, self._run_dir.path)
                self._beside += [each for each in (console, video) if each is not None]
                return await self._until_stopped()
        finally:
            for engine in self._engines:
                await engine.aclose()
            self._run_dir.release()

    async def _start_sharing(self) -> None:
        """Starts the MPS daemons before their clients, and writes for the gateway what there is. Raises CannotStart."""
        if self._triton is None:
            return
        hooks = EngineHooks(self._on_engine, self._refuse, self._serves)
        plans = self._choice.engine_plans
        folders = [self._run_dir] if len(plans) == 1 else [claim_run_dir() for _ in plans]
        self._engines = tuple(
            StackEngine(plan, self._choice, folder, hooks) for plan, folder in zip(plans, folders, strict=True)
        )
        await self._until_shared()
        if len(plans) > 1:
            places = tuple(each.place for each in self._engines)
            choice = self._choice
            write_card_engines(self._run_dir.path, CardEngines(places, dict(choice.homes), dict(choice.placements)))
        if all(plan.mps is None for plan in plans):
            return
        shared = [each.sharing.directory for each in self._engines if each.sharing is not None]
        changes: dict[str, object] = {"mps_directory": shared[0]} if len(plans) == 1 and shared else {}
        self._settings = self._settings.model_copy(update=changes if shared else {"mps": "off"})
        self._gateway.settle(self._settings.model_dump_json())

    async def _until_shared(self) -> None:
        """Returns early if the stack is stopped. Raises CannotStart."""
        starting = {asyncio.create_task(each.start_sharing()) for each in self._engines}
        stop = asyncio.create_task(self._stop_requested.wait())
        pending: set[asyncio.Task[object]] = {*starting, stop}
        while pending & starting and not stop.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done & starting):
                break
        for task in (stop, *starting):
            task.cancel()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _own_process(self, model: str, run_dir: RunDirectory, changed: Changed) -> EngineProcess:
        if self._triton is None:
            return ModelGatewayProcess(model, self._settings, run_dir, changed)
        return ModelTritonProcess(self._triton, self._settings, run_dir, log_engine, changed)

    async def _serves(self) -> bool:
        """Whether a client's readiness request succeeds."""
        if self._ports is None:
            return False
        url = f"http://{host_and_port(connectable_host(self._settings.host), self._ports.http_port)}"
        return await answers_live(url, READY_PROBE_S, question="ready")

    def _refuse(self, reason: str) -> None:
        self._failure = reason
        self._stop_requested.set()

    def _new_workers(self, settings_json: str) -> WorkerProcesses:
        settings = self._settings
        ports = settings.http_port, settings.grpc_port
        addresses = tuple((host, port) for host in listen_hosts(settings.host) for port in ports)
        try:
            workers = WorkerProcesses(settings_json, self._run_dir.path, addresses, settings.worker_count)
        except AddressUnavailable as error:
            self._run_dir.release()
            raise CannotStart(f"{error}; choose another port with --http-port or --grpc-port") from error
        workers.on_change = self._on_workers
        return workers

    async def _until_stopped(self) -> int:
        gateway_task = asyncio.create_task(self._gateway.run())
        workers_task = asyncio.create_task(self._workers.run()) if self._workers is not None else None
        beside_tasks = [asyncio.create_task(each.run()) for each in self._beside]
        stop_task = asyncio.create_task(self._stop_requested.wait())
        engine_tasks = [task for each in self._engines for task in each.tasks()]
        watched: set[asyncio.Task[object]] = {gateway_task, stop_task, *filter(None, [workers_task]), *engine_tasks}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        await asyncio.gather(*(each.stop_renewal() for each in self._engines))
        max_wait_s = self._settings.drain_delay_s + self._settings.grace_s + STOP_MARGIN_S
        code = 0
        await asyncio.gather(*(each.stop() for each in self._beside), *beside_tasks)
        if self._workers is not None and workers_task is not None:  # the core serves them until they have drained
            await self._workers.stop(max_wait_s)
            code = await workers_task
        await self._gateway.stop(max_wait_s)
        code = max(code, await gateway_task, key=abs)
        await self._own.stop(0.0 if self._is_hurried else min(self._settings.grace_s, ENGINE_GRACE_S))
        await asyncio.gather(*(each.stop(is_hurried=self._is_hurried) for each in self._engines))
        for task in engine_tasks:
            if task.done() and not task.cancelled():
                task.result()  # it runs until cancelled, so this raises its error
        if self._failure:
            raise CannotStart(self._failure)
        log.info("stopped")
        return 1 if self._is_hurried else code

    def _start_engines(self) -> None:
        repositories = check_repositories(self._settings) if self._settings.engine_has_files else ()
        if self._triton is None:
            choose_profiling(self._choice, self._run_dir.engine_id)  # raises CannotStart: there is no Triton
            self._notify_gateway(EngineStatusMessage(is_running=True, reason="", restarts=0))
            return
        for engine in self._engines:
            engine.start(repositories)

    def _on_engine(self) -> None:
        """The state of an engine changed: one that runs is enough, and the reason is of one that does not."""
        states = [each.status for each in self._engines]
        is_running = any(status.state is EngineState.RUNNING for status in states)
        idle = next((status for status in states if status.state is not EngineState.RUNNING), states[0])
        reason = (idle.reason or idle.state.value) if not is_running else ""
        self._notify_gateway(EngineStatusMessage(is_running, reason, sum(status.restarts for status in states)))
        if all(status.state is EngineState.FAILED for status in states):
            self._refuse(idle.reason)

    def _on_gateway_message(self, message: object) -> None:
        if isinstance(message, GatewayServes) and self._workers is not None:
            self._ports = GatewayServes(self._settings.http_port, self._settings.grpc_port, message.metrics_port)
        elif isinstance(message, GatewayServes):
            self._ports = message
        elif isinstance(message, RestartEngine):
            self._restart_engine(message)
        elif isinstance(message, LostCards):
            for engine in self._engines:
                engine.note_card(message.reasons.get(engine.label, ""))
        elif isinstance(message, RestartModel):
            self._restart_model(message)
        elif isinstance(message, GatewayReady):
            self._ready = message
            self._announce_when_ready()

    def _restart_model(self, message: RestartModel) -> None:
        if message.model not in self._own.folders:
            for engine in self._engines:
                engine.restart_model(message.model, message.reason, message.generation, is_moved=message.has_own_engine)
        if message.has_own_engine:
            self._own.restart(message.model, message.reason)

    def _on_workers(self) -> None:
        self._notify_gateway(self._status)
        self._announce_when_ready()

    def _announce_when_ready(self) -> None:
        """Announces once for each `ready` message, when all workers are ready."""
        if self._ready is None or self._ports is None or (self._workers is not None and not self._workers.are_ready):
            return
        ready, self._ready = self._ready, None
        shown = announcement(self._settings.host, self._ports, ready, has_tls=self._settings.tls_cert is not None)
        try:
            shared = self._engines[0].sharing if len(self._engines) == 1 else None  # a daemon has its own card only
            mps = str(shared.directory) if shared is not None else ""
            publish_stack(self._run_dir.path, shown.http_url, shown.grpc_address, mps, self._settings.home_path)
        except OSError as error:
            log.warning("other programs of this host will not find this stack", reason=error.strerror)
        console_url = ""
        if self._settings.console == "on":
            scheme = shown.http_url.partition(":")[0]
            host = host_and_port(connectable_host(self._settings.host), self._settings.console_port)
            console_url = self._settings.console_url or f"{scheme}://{host}/"
        self._announce(replace(shown, workers=self._settings.worker_count, console_url=console_url))

    def _notify_gateway(self, message: EngineStatusMessage) -> None:
        self._status = message
        restarts = self._workers.restarts if self._workers is not None else 0
        mps = [each.mps_state for each in self._engines]
        self._gateway.tell(
            msgspec.structs.replace(
                message,
                front_restarts=restarts,
                mps_clients=sum(each.clients for each in mps),
                mps_beside=sum(each.beside for each in mps),
                mps_restarts=sum(each.restarts for each in mps),
                mps_recovery_s=max((each.recovery_s for each in mps), default=0.0),
                own_engines=self._own.folders,
                facts=merged_facts([each.facts for each in self._engines]),
                model_generations=merged_generations([each.generations for each in self._engines]),
            )
        )

    def _restart_engine(self, message: RestartEngine) -> None:
        """Restarts our Triton, or the gateway with the embedded engine. External engines are not restarted."""
        reason, max_wait_s = message.reason, min(self._settings.grace_s, SICK_GRACE_S) + STOP_MARGIN_S
        if self._engines:
            for engine in self._engines:
                if message.card in ("", engine.label):
                    engine.restart(reason)
        elif self._settings.engine_is_embedded and self._gateway.renew(max_wait_s):
            self._embedded_restarts += 1
            log.error(
                "embedded engine is sick; restarting the gateway", reason=reason, restarts=self._embedded_restarts
            )
            self._notify_gateway(EngineStatusMessage(is_running=True, reason="", restarts=self._embedded_restarts))

    def _on_signal(self) -> None:
        if not self._stop_requested.is_set():
            self._stop_requested.set()
            return
        log.error("second stop signal; ending at once, unfinished requests are cut")
        self._is_hurried = True
        self._gateway.kill()
        for each in (*self._beside, *([self._workers] if self._workers is not None else ())):
            each.kill()
        for engine in self._engines:
            engine.kill()


def merged_generations(of_engines: Sequence[dict[str, int]]) -> dict[str, int]:
    """The lowest by model: processes are new when they are new in each engine."""
    models = set().union(*of_engines) if of_engines else set()
    return {model: min(each.get(model, 0) for each in of_engines) for model in sorted(models)}


def announcement(host: str, ports: GatewayServes, message: GatewayReady, *, has_tls: bool = False) -> Announcement:
    """The announcement, with URLs that a client on this machine can use."""
    shown, scheme = connectable_host(host), "https" if has_tls else "http"
    return Announcement(
        message.engine,
        f"{scheme}://{host_and_port(shown, ports.http_port)}",
        host_and_port(shown, ports.grpc_port),
        f"{scheme}://{host_and_port(shown, ports.metrics_port)}/metrics",
        tuple(message.models),
        message.unavailable,
        not_ready=message.not_ready,
    )
