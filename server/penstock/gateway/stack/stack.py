"""The parent process, which starts and supervises the gateway and Triton."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from penstock.engines.call_options import CallTimeouts
from penstock.engines.run_directory import RunDirectory
from penstock.engines.triton.client import DiskLoads, SupervisedTriton
from penstock.engines.triton.endpoints import TritonListeners, answers_live
from penstock.engines.triton.instances import InstanceMonitor, InstanceReplacer
from penstock.engines.triton.runtime import TritonUnavailable, plain_paths
from penstock.engines.triton.supervisor import EngineState, EngineStatus, TritonOptions, TritonSupervisor
from penstock.gateway.settings_report import write_origins
from penstock.gateway.stack.console_process import console_process
from penstock.gateway.stack.model_processes import (
    Changed,
    EngineProcess,
    ModelGatewayProcess,
    ModelProcesses,
    ModelTritonProcess,
)
from penstock.gateway.stack.mps import MpsSharing, engine_observer
from penstock.gateway.stack.side_process import SideProcess
from penstock.gateway.stack.startup import (
    CannotStart,
    EngineChoice,
    check_repositories,
    choose_profiling,
    claim_run_dir,
)
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
    RestartEngine,
    RestartModel,
)
from penstock.gateway.workers.running_stacks import publish_stack, reachable_folder
from penstock.gateway.workers.worker_processes import AddressUnavailable, WorkerProcesses
from penstock.gpu.mps.control import MpsError
from penstock.gpu.mps.supervisor import EngineHandle, MpsState
from penstock.gpu.profiling import REPORT_GRACE_S
from penstock.gpu.telemetry.cards import process_name
from penstock.log_file import FOLDER as LOGS
from penstock.logs import get_logger, log_to_stack
from penstock.network import connectable_host, host_and_port, listen_hosts

log = get_logger("stack")
engine_log = get_logger("triton")
RENEWAL_SILENCE_S = 60.0  # from a Triton that reloads models on a busy machine, before it is abandoned
ENGINE_GRACE_S = 5.0  # after the gateway has drained, only a loading model delays the engine's stop
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


def log_engine(level: int, event: str, /, **fields: str | int) -> None:
    """Logs one line of Triton's log as ours."""
    engine_log.log(level, event, **fields)


class Stack:
    """Starts and supervises everything. Call `run` once."""

    def __init__(self, choice: EngineChoice, *, announce: Callable[[Announcement], None]) -> None:
        self._sharing: MpsSharing | None = None
        self._mps_state = MpsState()
        self._settings = choice.settings
        self._choice = choice
        self._triton = choice.triton
        self._engine_grace_s = min(choice.settings.grace_s, ENGINE_GRACE_S)
        self._announce = announce
        self._ports: GatewayServes | None = None
        self._stop_requested = asyncio.Event()
        self._is_hurried = False
        self._failure = ""
        self._run_dir = claim_run_dir()
        write_origins(self._run_dir.path, choice.origins)
        settings_json = self._settings.model_dump_json()
        has_workers = self._settings.worker_count > 1
        part = GatewayPart(arguments=(CORE,)) if has_workers else WHOLE_GATEWAY
        self._gateway = GatewayProcess(settings_json, self._run_dir.path, self._on_gateway_message, part=part)
        self._workers = self._new_workers(settings_json) if has_workers else None
        self._ready: GatewayReady | None = None
        self._status = EngineStatusMessage(is_running=False, reason="the engine is starting", restarts=0)
        self._engine: TritonSupervisor | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._renewal: InstanceReplacer | None = None
        self._renewal_task: asyncio.Task[None] | None = None
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
            self._start_engine()
            with console_process(self._settings) as console:
                video = video_process(self._settings, self._run_dir.path)
                self._beside += [each for each in (console, video) if each is not None]
                return await self._until_stopped()
        finally:
            if self._sharing is not None:
                await self._sharing.aclose()
            self._run_dir.release()

    async def _start_sharing(self) -> None:
        """Starts the MPS daemon before its clients, and adds it to the gateway's settings. Raises CannotStart."""
        if self._choice.mps is None:
            return
        sharing = self._sharing = MpsSharing(self._choice.mps, claim_run_dir)
        changes: dict[str, object] = {"mps_directory": sharing.directory}
        try:
            await self._until_shared(sharing)
        except MpsError as error:
            if sharing.is_must:
                raise CannotStart(str(error)) from error
            log.warning("without MPS", reason=str(error))
            await sharing.aclose()
            self._sharing, changes = None, {"mps": "off"}
        self._settings = self._settings.model_copy(update=changes)
        self._gateway.settle(self._settings.model_dump_json())

    async def _until_shared(self, sharing: MpsSharing) -> None:
        """Returns early if the stack is stopped. Raises MpsError."""
        engine = EngineHandle(
            observe=engine_observer(self._run_dir.engine_id, self._engine_status, self._serves),
            end=lambda reason, is_lost: self._engine is not None and self._engine.restart(reason, is_lost=is_lost),
            refuse=self._refuse,
            publish=self._on_mps_status,
        )
        starting = asyncio.create_task(sharing.start(engine))
        stop = asyncio.create_task(self._stop_requested.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if starting.done():
            starting.result()
        else:  # stopped meanwhile
            starting.cancel()
            await asyncio.wait({starting})

    def _own_process(self, model: str, run_dir: RunDirectory, changed: Changed) -> EngineProcess:
        if self._triton is None:
            return ModelGatewayProcess(model, self._settings, run_dir, changed)
        return ModelTritonProcess(self._triton, self._settings, run_dir, log_engine, changed)

    def _engine_status(self) -> EngineStatus | None:
        return self._engine.status if self._engine is not None else None

    async def _serves(self) -> bool:
        """Whether a client's readiness request succeeds."""
        if self._ports is None:
            return False
        url = f"http://{host_and_port(connectable_host(self._settings.host), self._ports.http_port)}"
        return await answers_live(url, READY_PROBE_S, question="ready")

    def _refuse(self, reason: str) -> None:
        self._failure = reason
        self._stop_requested.set()

    def _on_mps_status(self, message: MpsState) -> None:
        self._mps_state = message
        self._notify_gateway(self._status)

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
        mps_task = self._sharing.task if self._sharing is not None else None
        others = filter(None, [self._engine_task, workers_task, mps_task, self._renewal_task])
        watched: set[asyncio.Task[object]] = {gateway_task, stop_task, *others}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.wait({self._renewal_task})
        max_wait_s = self._settings.drain_delay_s + self._settings.grace_s + STOP_MARGIN_S
        code = 0
        await asyncio.gather(*(each.stop() for each in self._beside), *beside_tasks)
        if self._workers is not None and workers_task is not None:  # the core serves them until they have drained
            await self._workers.stop(max_wait_s)
            code = await workers_task
        await self._gateway.stop(max_wait_s)
        code = max(code, await gateway_task, key=abs)
        await self._own.stop(0.0 if self._is_hurried else self._engine_grace_s)
        if self._engine is not None and not self._is_hurried:
            await self._engine.stop(self._engine_grace_s)
        if self._engine_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._engine_task
        for task in filter(None, [mps_task, self._renewal_task]):
            if task.done() and not task.cancelled():
                task.result()  # it runs until cancelled, so this raises its error
        if self._failure:
            raise CannotStart(self._failure)
        log.info("stopped")
        return 1 if self._is_hurried else code

    def _start_engine(self) -> None:
        repositories = check_repositories(self._settings) if self._settings.engine_has_files else ()
        profiling = choose_profiling(self._choice, self._run_dir.engine_id)
        if self._triton is None:
            self._notify_gateway(EngineStatusMessage(is_running=True, reason="", restarts=0))
            return
        try:
            launch = self._triton.prepare(self._run_dir.path)
        except TritonUnavailable as error:
            raise CannotStart(str(error)) from error
        gate = None
        if self._sharing is not None:
            launch, gate = self._sharing.shared(launch), self._sharing.until_clients_may_start
        if profiling is not None:
            if profiling.report is not None:
                self._engine_grace_s = REPORT_GRACE_S
            log.info("the engine is profiled", report=str(profiling.report or "none: NVTX ranges alone"))
            environment = {**launch.env, **profiling.environment}
            launch = replace(launch, argv=(*profiling.prefix, *launch.argv), env=environment)
        listeners = TritonListeners(reachable_folder(self._run_dir.path), *self._settings.engine_ports)
        options = TritonOptions(
            engine_id=self._run_dir.engine_id,
            repositories=plain_paths(repositories, self._run_dir.path / "repositories"),
            listeners=listeners,
            trace_file=self._settings.trace_file and self._settings.trace_file.absolute(),
        )
        log.info(
            "engine process",
            program=launch.argv[0],
            http=listeners.http_url,
            grpc=listeners.grpc_address,
            metrics=listeners.metrics_url,
        )
        self._engine = TritonSupervisor(
            launch, options, emit=log_engine, on_status=self._on_engine_status, before_start=gate
        )
        self._engine_task = asyncio.create_task(self._engine.run())
        self._renewal = InstanceReplacer(
            InstanceMonitor(process_name),
            SupervisedTriton(
                http_url=listeners.http_url,
                grpc_address=listeners.grpc_address,
                max_connections=1,
                timeouts=CallTimeouts(keepalive_timeout_s=RENEWAL_SILENCE_S),
                disk=DiskLoads(repositories, self._run_dir.path / "labels"),
            ),
            engine_pid=self._running_engine,
            restart=self._engine.restart,
            has_room=self._sharing.plan.has_room_beside if self._sharing is not None else lambda _: True,
            renewed=lambda: self._notify_gateway(self._status),
        )
        self._renewal_task = asyncio.create_task(self._renewal.run())

    def _running_engine(self) -> int | None:
        status = self._engine_status()
        return status.pid if status is not None and status.state is EngineState.RUNNING else None

    def _on_engine_status(self, status: EngineStatus) -> None:
        is_running = status.state is EngineState.RUNNING
        self._notify_gateway(EngineStatusMessage(is_running, status.reason or status.state.value, status.restarts))
        if status.state is EngineState.FAILED:
            self._refuse(status.reason)

    def _on_gateway_message(self, message: object) -> None:
        if isinstance(message, GatewayServes) and self._workers is not None:
            self._ports = GatewayServes(self._settings.http_port, self._settings.grpc_port, message.metrics_port)
        elif isinstance(message, GatewayServes):
            self._ports = message
        elif isinstance(message, RestartEngine):
            self._restart_engine(message.reason)
        elif isinstance(message, RestartModel):
            if self._renewal is not None and message.model not in self._own.folders:
                self._renewal.restart_model(
                    message.model, message.reason, message.generation, is_moved=message.has_own_engine
                )
            if message.has_own_engine:
                self._own.restart(message.model, message.reason)
        elif isinstance(message, GatewayReady):
            self._ready = message
            self._announce_when_ready()

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
            mps = str(self._sharing.directory) if self._sharing is not None else ""
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
        mps = self._mps_state
        self._gateway.tell(
            msgspec.structs.replace(
                message,
                front_restarts=restarts,
                mps_clients=mps.clients,
                mps_beside=mps.beside,
                mps_restarts=mps.restarts,
                mps_recovery_s=mps.recovery_s,
                own_engines=self._own.folders,
                model_generations=self._renewal.generations if self._renewal is not None else {},
            )
        )

    def _restart_engine(self, reason: str) -> None:
        """Restarts our Triton, or the gateway with the embedded engine. External engines are not restarted."""
        max_wait_s = min(self._settings.grace_s, SICK_GRACE_S) + STOP_MARGIN_S
        if self._engine is not None:
            self._engine.restart(reason)
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
        if self._engine_task is not None:
            self._engine_task.cancel()


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
