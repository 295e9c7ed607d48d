"""The composer of the whole stack: the small parent process that owns the gateway's process, and Triton's.

Each is restarted when it dies; both are ended in order when the stack is told to stop. The embedded engine has no
process of its own: it lives and is restarted with the gateway.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.backends.disk_loads import DiskLoads
from server.backends.lost_instances import InstanceRenewal, InstanceSight
from server.backends.own_triton import OwnTriton
from server.backends.patience import Patience
from server.backends.reaper import RunDirectory
from server.backends.shell_paths import plain_paths
from server.backends.triton_listeners import TritonListeners
from server.backends.triton_ports import answers_live
from server.backends.triton_process import TritonOptions, TritonProcess
from server.backends.triton_runtime import Launch, TritonUnavailable
from server.backends.triton_status import EngineState, EngineStatus
from server.card_sharing import CardSharing, engine_eyes
from server.choices import (
    CannotStart,
    EngineChoice,
    check_access,
    check_repositories,
    choose_engine,
    choose_profiling,
    choose_sharing,
    claim_run_dir,
    resolve_ports,
)
from server.core.address import authority
from server.gpu.mps.errors import MpsError
from server.gpu.mps.supervisor import EngineHandle, MpsNews
from server.gpu.profiling import REPORT_GRACE_S, Profiling
from server.gpu.telemetry.processes import process_name
from server.local.control import SICK_GRACE_S, EngineNews, GatewayReady, GatewayServes, RestartEngine, RestartModel
from server.local.front_processes import AddressHeld, FrontProcesses
from server.local.gateway_process import CORE, WHOLE, GatewayProcess, Part
from server.local.running import tell_running
from server.local.socket_folder import reachable
from server.logs import get_logger
from server.loopback import listen_hosts
from server.own_processes import Changed, EngineProcess, OwnGatewayProcess, OwnProcesses, OwnTritonProcess

__all__ = [
    "Announcement",
    "CannotStart",
    "EngineChoice",
    "Stack",
    "announcement",
    "check_access",
    "choose_engine",
    "choose_sharing",
    "resolve_ports",
]

log = get_logger("stack")
engine_log = get_logger("triton")
RENEWAL_SILENCE_S = 60.0  # of a Triton that loads a dead model anew on a busy machine, before it is given up
ENGINE_GRACE_S = 5.0  # once the gateway has drained, only a model that still loads keeps the engine
STOP_MARGIN_S = 5.0  # beyond the gateway's own grace, before it is killed
READY_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class Announcement:
    """Printed at start. engine: its name and version. workers: number of processes. not_ready: see GatewayReady."""

    engine: str
    http_url: str
    grpc_address: str
    metrics_url: str
    models: tuple[str, ...]
    unavailable: dict[str, str]
    workers: int = 1
    not_ready: str = ""


def log_engine(level: int, event: str, /, **fields: str | int) -> None:
    """One line of Triton's log, as one of ours."""
    engine_log.log(level, event, **fields)


class Stack:
    """Run it once: `run` returns the exit code when everything has ended."""

    def __init__(self, choice: EngineChoice, *, announce: Callable[[Announcement], None]) -> None:
        self._sharing: CardSharing | None = None
        self._mps_news = MpsNews()
        self._settings = choice.settings
        self._choice = choice
        self._triton = choice.triton
        self._engine_grace_s = min(choice.settings.grace_s, ENGINE_GRACE_S)
        self._announce = announce
        self._ports: GatewayServes | None = None
        self._stop_asked = asyncio.Event()
        self._is_hurried = False
        self._failure = ""
        self._run_dir = claim_run_dir()
        settings_json = self._settings.model_dump_json()
        has_fronts = self._settings.worker_count > 1
        part = Part(arguments=(CORE,)) if has_fronts else WHOLE
        self._gateway = GatewayProcess(settings_json, self._run_dir.path, self._on_gateway_news, part=part)
        self._fronts = self._new_fronts(settings_json) if has_fronts else None
        self._ready: GatewayReady | None = None
        self._news = EngineNews(is_running=False, reason="the engine is starting", restarts=0)
        self._engine: TritonProcess | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._renewal: InstanceRenewal | None = None
        self._renewal_task: asyncio.Task[None] | None = None
        self._embedded_restarts = 0
        self._own = OwnProcesses(self._own_process, claim_run_dir, lambda: self._tell_gateway(self._news))

    async def run(self) -> int:
        """0 when what was accepted was answered; 1 when something was cut. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._start_sharing()
            if self._stop_asked.is_set():
                return 0
            self._start_engine()
            return await self._until_stopped()
        finally:
            if self._sharing is not None:
                await self._sharing.aclose()
            self._run_dir.release()

    async def _start_sharing(self) -> None:
        """The MPS daemon, before anything that would be its client, and the gateway told of it. Raises CannotStart."""
        if self._choice.mps is None:
            return
        sharing = self._sharing = CardSharing(self._choice.mps, claim_run_dir)
        told: dict[str, object] = {"mps_directory": sharing.directory}
        try:
            await self._until_shared(sharing)
        except MpsError as error:
            if sharing.is_must:
                raise CannotStart(str(error)) from error
            log.warning("without MPS", reason=str(error))
            await sharing.aclose()
            self._sharing, told = None, {"mps": "off"}
        self._settings = self._settings.model_copy(update=told)
        self._gateway.settle(self._settings.model_dump_json())

    async def _until_shared(self, sharing: CardSharing) -> None:
        """Or until it is told to stop. Raises MpsError."""
        engine = EngineHandle(
            look=engine_eyes(self._run_dir.engine_id, self._engine_status, self._serves),
            end=lambda reason, is_lost: self._engine is not None and self._engine.restart(reason, is_lost=is_lost),
            refuse=self._refuse,
            tell=self._on_mps_news,
        )
        starting = asyncio.create_task(sharing.start(engine))
        stop = asyncio.create_task(self._stop_asked.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if starting.done():
            starting.result()
        else:  # told to stop meanwhile
            starting.cancel()
            await asyncio.wait({starting})

    def _own_process(self, model: str, run_dir: RunDirectory, changed: Changed) -> EngineProcess:
        if self._triton is None:
            return OwnGatewayProcess(model, self._settings, run_dir, changed)
        return OwnTritonProcess(self._triton, self._settings, run_dir, log_engine, changed)

    def _engine_status(self) -> EngineStatus | None:
        return self._engine.status if self._engine is not None else None

    async def _serves(self) -> bool:
        """As a user sees it."""
        if self._ports is None:
            return False
        url = f"http://{authority(_shown(self._settings.host), self._ports.http_port)}"
        return await answers_live(url, READY_PROBE_S, question="ready")

    def _refuse(self, reason: str) -> None:
        self._failure = reason
        self._stop_asked.set()

    def _on_mps_news(self, news: MpsNews) -> None:
        self._mps_news = news
        self._tell_gateway(self._news)

    def _new_fronts(self, settings_json: str) -> FrontProcesses:
        settings = self._settings
        ports = settings.http_port, settings.grpc_port
        addresses = tuple((host, port) for host in listen_hosts(settings.host) for port in ports)
        try:
            fronts = FrontProcesses(settings_json, self._run_dir.path, addresses, settings.worker_count)
        except AddressHeld as error:
            self._run_dir.release()
            raise CannotStart(f"{error}; choose another port with --http-port or --grpc-port") from error
        fronts.on_change = self._on_fronts
        return fronts

    async def _until_stopped(self) -> int:
        gateway_task = asyncio.create_task(self._gateway.run())
        fronts_task = asyncio.create_task(self._fronts.run()) if self._fronts is not None else None
        stop_task = asyncio.create_task(self._stop_asked.wait())
        mps_task = self._sharing.task if self._sharing is not None else None
        others = filter(None, [self._engine_task, fronts_task, mps_task, self._renewal_task])
        watched: set[asyncio.Task[object]] = {gateway_task, stop_task, *others}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.wait({self._renewal_task})
        patience_s = self._settings.drain_delay_s + self._settings.grace_s + STOP_MARGIN_S
        code = 0
        if self._fronts is not None and fronts_task is not None:  # the core serves them until they have drained
            await self._fronts.stop(patience_s)
            code = await fronts_task
        await self._gateway.stop(patience_s)
        code = max(code, await gateway_task, key=abs)
        await self._own.stop(0.0 if self._is_hurried else self._engine_grace_s)
        if self._engine is not None and not self._is_hurried:
            await self._engine.stop(self._engine_grace_s)
        if self._engine_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._engine_task
        for task in filter(None, [mps_task, self._renewal_task]):
            if task.done() and not task.cancelled():
                task.result()  # it should run until it is told to end
        if self._failure:
            raise CannotStart(self._failure)
        log.info("stopped")
        return 1 if self._is_hurried else code

    def _start_engine(self) -> None:
        repositories = () if self._settings.engine_is_external else check_repositories(self._settings)
        profiling = choose_profiling(self._choice, self._run_dir.engine_id)
        if self._triton is None:
            self._tell_gateway(EngineNews(is_running=True, reason="", restarts=0))
            return
        try:
            launch = self._triton.prepare(self._run_dir.path)
        except TritonUnavailable as error:
            raise CannotStart(str(error)) from error
        gate = None
        if self._sharing is not None:
            launch, gate = self._sharing.shared(launch), self._sharing.until_clients_may_start
        if profiling is not None:
            launch = self._profiled(launch, profiling)
        listeners = TritonListeners(reachable(self._run_dir.path), *self._settings.engine_ports)
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
        self._engine = TritonProcess(
            launch, options, emit=log_engine, on_status=self._on_engine_status, before_start=gate
        )
        self._engine_task = asyncio.create_task(self._engine.run())
        self._renewal = InstanceRenewal(
            InstanceSight(process_name),
            OwnTriton(
                http_url=listeners.http_url,
                grpc_address=listeners.grpc_address,
                max_connections=1,
                patience=Patience(keepalive_timeout_s=RENEWAL_SILENCE_S),
                disk=DiskLoads(repositories, self._run_dir.path / "labels"),
            ),
            engine_pid=self._running_engine,
            restart=self._engine.restart,
            has_room=self._sharing.has_room_beside if self._sharing is not None else lambda _: True,
            renewed=lambda: self._tell_gateway(self._news),
        )
        self._renewal_task = asyncio.create_task(self._renewal.run())

    def _running_engine(self) -> int | None:
        status = self._engine_status()
        return status.pid if status is not None and status.state is EngineState.RUNNING else None

    def _profiled(self, launch: Launch, profiling: Profiling) -> Launch:
        if profiling.report is not None:
            self._engine_grace_s = REPORT_GRACE_S
        log.info("the engine is profiled", report=str(profiling.report or "none: NVTX ranges alone"))
        return replace(launch, argv=(*profiling.prefix, *launch.argv), env={**launch.env, **profiling.environment})

    def _on_engine_status(self, status: EngineStatus) -> None:
        is_running = status.state is EngineState.RUNNING
        self._tell_gateway(EngineNews(is_running, status.reason or status.state.value, status.restarts))
        if status.state is EngineState.FAILED:
            self._refuse(status.reason)

    def _on_gateway_news(self, news: object) -> None:
        if isinstance(news, GatewayServes) and self._fronts is not None:
            self._ports = GatewayServes(self._settings.http_port, self._settings.grpc_port, news.metrics_port)
        elif isinstance(news, GatewayServes):
            self._ports = news
        elif isinstance(news, RestartEngine):
            self._restart_engine(news.reason)
        elif isinstance(news, RestartModel):
            if self._renewal is not None and news.model not in self._own.folders:
                self._renewal.restart_model(news.model, news.reason, news.generation, is_moved=news.has_own_engine)
            if news.has_own_engine:
                self._own.restart(news.model, news.reason)
        elif isinstance(news, GatewayReady):
            self._ready = news
            self._announce_when_ready()

    def _on_fronts(self) -> None:
        """One is ready, or has died."""
        self._tell_gateway(self._news)
        self._announce_when_ready()

    def _announce_when_ready(self) -> None:
        """Once for each process that said so, when its fronts, if it has any, know it."""
        if self._ready is None or self._ports is None or (self._fronts is not None and not self._fronts.are_ready):
            return
        ready, self._ready = self._ready, None
        told = announcement(self._settings.host, self._ports, ready, has_tls=self._settings.tls_cert is not None)
        try:
            mps = str(self._sharing.directory) if self._sharing is not None else ""
            tell_running(self._run_dir.path, told.http_url, told.grpc_address, mps)
        except OSError as error:
            log.warning("other programs of this host will not find this stack", reason=error.strerror)
        self._announce(replace(told, workers=self._settings.worker_count))

    def _tell_gateway(self, news: EngineNews) -> None:
        self._news = news
        restarts = self._fronts.restarts if self._fronts is not None else 0
        mps = self._mps_news
        self._gateway.tell(
            replace(
                news,
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
        """Somebody else's engine is left alone; the embedded one is started again with the gateway that holds it."""
        patience_s = min(self._settings.grace_s, SICK_GRACE_S) + STOP_MARGIN_S
        if self._engine is not None:
            self._engine.restart(reason)
        elif self._settings.engine_is_embedded and self._gateway.renew(patience_s):
            self._embedded_restarts += 1
            log.error(
                "embedded engine is sick; restarting the gateway", reason=reason, restarts=self._embedded_restarts
            )
            self._tell_gateway(EngineNews(is_running=True, reason="", restarts=self._embedded_restarts))

    def _on_signal(self) -> None:
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            return
        log.error("told to stop twice; ending at once, unfinished requests are cut")
        self._is_hurried = True
        self._gateway.kill()
        if self._fronts is not None:
            self._fronts.kill()
        if self._engine_task is not None:
            self._engine_task.cancel()


def announcement(host: str, ports: GatewayServes, news: GatewayReady, *, has_tls: bool = False) -> Announcement:
    """The URLs as somebody on this machine types them."""
    shown, scheme = _shown(host), "https" if has_tls else "http"
    return Announcement(
        news.engine,
        f"{scheme}://{authority(shown, ports.http_port)}",
        authority(shown, ports.grpc_port),
        f"{scheme}://{authority(shown, ports.metrics_port)}/metrics",
        tuple(news.models),
        news.unavailable,
        not_ready=news.not_ready,
    )


def _shown(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
