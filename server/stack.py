"""The composer of the whole stack: the small parent process that owns the gateway's process, and Triton's.

Each is restarted when it dies; both are ended in order when the stack is told to stop. The embedded engine has no
process of its own: it lives and is restarted with the gateway.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from server.access.keys import KeyRefused, KeyRing, key_of_hashed
from server.access.rules import AccessFileError, AccessRules, NoKeysYet, read_access_file
from server.backends.reaper import RunDirectory, RunDirectoryRefused, claim_run_directory
from server.backends.shell_paths import is_special, plain_paths
from server.backends.triton_ports import pick_free_ports
from server.backends.triton_process import TritonOptions, TritonProcess
from server.backends.triton_runtime import TritonRuntime, TritonUnavailable, default_environment, find_triton
from server.backends.triton_status import EngineState, EngineStatus
from server.core.address import authority
from server.local.control import SICK_GRACE_S, EngineNews, GatewayReady, GatewayServes, RestartEngine
from server.local.front_processes import AddressHeld, FrontProcesses
from server.local.gateway_process import CORE, WHOLE, GatewayProcess, Part
from server.local.running import run_folders, tell_running
from server.logs import get_logger
from server.rest.listener import PortTaken, bind
from server.settings import Settings

log = get_logger("stack")
engine_log = get_logger("triton")
ENGINE_GRACE_S = 5.0  # once the gateway has drained, only a model that still loads keeps the engine
STOP_MARGIN_S = 5.0  # beyond the gateway's own grace, before it is killed


class CannotStart(Exception):
    """The stack cannot start. The message is one sentence with the fix."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a person is told once requests will be served. engine: which one serves. workers: 1 for one process."""

    engine: str
    http_url: str
    grpc_address: str
    metrics_url: str
    models: tuple[str, ...]
    unavailable: dict[str, str]
    workers: int = 1


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """settings: with the engine said outright, never `auto`. triton: the one to start, None where none is."""

    settings: Settings
    triton: TritonRuntime | None = None


def check_access(settings: Settings) -> None:
    """Raises CannotStart where strangers could do everything or nobody anything, and where keys cannot be read."""
    if settings.is_exposed:
        raise CannotStart(
            f"{settings.host} can be reached from other machines, and there are no API keys: make one with `penstock "
            "keys new NAME --file access.toml` and give --access-file access.toml, or say what all may do with "
            "--anonymous infer,read"
        )
    if not settings.has_keys and not settings.anonymous_roles:
        raise CannotStart(
            "nobody may do anything: --anonymous is none and there are no API keys; set PENSTOCK_API_KEYS to "
            "NAME:ROLE+ROLE:SECRET (PENSTOCK_API_KEY, without an S, is what a client sends), or give --access-file"
        )
    try:
        rules = _rules_at_start(settings.access_file) if settings.access_file is not None else AccessRules()
        KeyRing((*map(key_of_hashed, settings.api_keys), *rules.keys))
    except (AccessFileError, KeyRefused) as error:
        raise CannotStart(str(error)) from error


def _rules_at_start(file: Path) -> AccessRules:
    """The file's; none of a file that waits for its first key, which counts once it is in. Raises AccessFileError."""
    try:
        return read_access_file(file)
    except NoKeysYet as error:
        log.warning(f"nobody has a key: {error}")
        return AccessRules()


def choose_engine(settings: Settings) -> EngineChoice:
    """Decided here, once for every process of the stack. Raises CannotStart where Triton is asked for and absent."""
    if settings.engine_is_external or settings.engine_is_embedded:
        return EngineChoice(settings)
    environment = settings.engine_environment or default_environment(Path(sys.prefix))
    try:
        triton = find_triton(environment=environment)
    except TritonUnavailable as error:
        if settings.engine == "triton":
            raise CannotStart(str(error)) from error
        log.info(f"engine: embedded, since {error}")
        return EngineChoice(settings.model_copy(update={"engine": "embedded"}))
    return EngineChoice(settings.model_copy(update={"engine": "triton"}), triton)


def resolve_ports(settings: Settings) -> Settings:
    """The settings with real port numbers, each tried now. Raises CannotStart where one is taken."""
    names = ["http_port", "grpc_port", "metrics_port"]
    if settings.engine_has_process:
        names += ["engine_http_port", "engine_grpc_port", "engine_metrics_port"]
    held: list[socket.socket] = []
    ports: dict[str, int] = {}
    try:
        for name in names:
            host = "127.0.0.1" if name.startswith("engine") else settings.host
            port = getattr(settings, name) or pick_free_ports("127.0.0.1", 1)[0]
            listener = bind(host, port, flag="--" + name.replace("_", "-"))
            held.append(listener)
            ports[name] = listener.getsockname()[1]
    except PortTaken as error:
        raise CannotStart(str(error)) from error
    finally:
        for listener in held:
            listener.close()
    return settings.model_copy(update=ports)


def check_repositories(settings: Settings) -> tuple[Path, ...]:
    """The model repositories that can be read.

    Raises CannotStart where one is missing, where a model stands in two, or has a name that Triton cannot start: the
    same repository is to run on every engine.
    """
    home = settings.home_path / "models"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("no folder for pulled models; only shipped ones are served", path=str(home), reason=error.strerror)
    owners: dict[str, Path] = {}
    repositories = tuple(path for path in settings.repositories if path != home or home.is_dir())
    for repository in repositories:
        try:
            names = sorted(
                item.name for item in repository.iterdir() if item.is_dir() and not item.name.startswith(".")
            )
        except OSError as error:
            raise CannotStart(
                f"the model repository {repository} cannot be read ({error.strerror}); "
                "give an existing folder with --model-repository"
            ) from error
        for name in names:
            if is_special(name):
                raise CannotStart(
                    f"Triton cannot start a model whose folder is named {name!r}, as the one in {repository}; "
                    "rename it, with no spaces and none of a shell's signs"
                )
            if name in owners:
                raise CannotStart(
                    f"the model {name!r} stands in {owners[name]} and in {repository}; remove one, names must be unique"
                )
            owners[name] = repository
    unknown = set(settings.models or ()) - set(owners)
    if unknown and not settings.engine_is_external:
        raise CannotStart(
            f"no model {min(unknown)!r} in {', '.join(map(str, repositories))}; "
            f"there are {', '.join(sorted(owners)) or 'none'}"
        )
    return repositories


def claim_run_dir() -> RunDirectory:
    """A private folder for this run; what a killed former stack left is cleared away. Raises CannotStart."""
    base = run_folders()
    try:
        run_dir, swept = claim_run_directory(base)
    except (OSError, RunDirectoryRefused) as error:
        raise CannotStart(f"no folder for this run under {base} ({error}); set TMPDIR to one that is yours") from error
    for found in swept:
        if found.killed or found.regions:
            log.warning(
                "cleared away what a killed stack left", processes=len(found.killed), regions=len(found.regions)
            )
    return run_dir


def log_engine(level: int, event: str, /, **fields: str | int) -> None:
    """One line of Triton's log, as one of ours."""
    engine_log.log(level, event, **fields)


class Stack:
    """Run it once: `run` returns the exit code when everything has ended."""

    def __init__(self, choice: EngineChoice, *, announce: Callable[[Announcement], None]) -> None:
        self._settings = choice.settings
        self._triton = choice.triton
        self._announce = announce
        self._ports: GatewayServes | None = None
        self._stop_asked = asyncio.Event()
        self._is_hurried = False
        self._failure = ""
        self._run_dir = claim_run_dir()
        settings_json = choice.settings.model_dump_json()
        has_fronts = choice.settings.worker_count > 1
        part = Part(arguments=(CORE,)) if has_fronts else WHOLE
        self._gateway = GatewayProcess(settings_json, self._run_dir.path, self._on_gateway_news, part=part)
        self._fronts = self._new_fronts(settings_json) if has_fronts else None
        self._ready: GatewayReady | None = None
        self._news = EngineNews(is_running=False, reason="the engine is starting", restarts=0)
        self._engine: TritonProcess | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._embedded_restarts = 0

    async def run(self) -> int:
        """0 when what was accepted was answered; 1 when something was cut. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._start_engine()
            return await self._until_stopped()
        finally:
            self._run_dir.release()

    def _new_fronts(self, settings_json: str) -> FrontProcesses:
        settings = self._settings
        addresses = (settings.host, settings.http_port), (settings.host, settings.grpc_port)
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
        watched: set[asyncio.Task[object]] = {gateway_task, stop_task, *filter(None, [self._engine_task, fronts_task])}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        patience_s = self._settings.drain_delay_s + self._settings.grace_s + STOP_MARGIN_S
        code = 0
        if self._fronts is not None and fronts_task is not None:  # the core serves them until they have drained
            await self._fronts.stop(patience_s)
            code = await fronts_task
        await self._gateway.stop(patience_s)
        code = max(code, await gateway_task, key=abs)
        if self._engine is not None and not self._is_hurried:
            await self._engine.stop(min(self._settings.grace_s, ENGINE_GRACE_S))
        if self._engine_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._engine_task
        if self._failure:
            raise CannotStart(self._failure)
        log.info("stopped")
        return 1 if self._is_hurried else code

    def _start_engine(self) -> None:
        repositories = () if self._settings.engine_is_external else check_repositories(self._settings)
        if self._triton is None:
            self._tell_gateway(EngineNews(is_running=True, reason="", restarts=0))
            return
        try:
            launch = self._triton.prepare(self._run_dir.path)
        except TritonUnavailable as error:
            raise CannotStart(str(error)) from error
        options = TritonOptions(
            engine_id=self._run_dir.engine_id,
            repositories=plain_paths(repositories, self._run_dir.path / "repositories"),
            http_port=self._settings.engine_http_port,
            grpc_port=self._settings.engine_grpc_port,
            metrics_port=self._settings.engine_metrics_port,
            trace_file=self._settings.trace_file and self._settings.trace_file.absolute(),
        )
        log.info(
            "engine process",
            program=launch.argv[0],
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
        )
        self._engine = TritonProcess(launch, options, emit=log_engine, on_status=self._on_engine_status)
        self._engine_task = asyncio.create_task(self._engine.run())

    def _on_engine_status(self, status: EngineStatus) -> None:
        is_running = status.state is EngineState.RUNNING
        self._tell_gateway(EngineNews(is_running, status.reason or status.state.value, status.restarts))
        if status.state is EngineState.FAILED:
            self._failure = status.reason
            self._stop_asked.set()

    def _on_gateway_news(self, news: object) -> None:
        if isinstance(news, GatewayServes) and self._fronts is not None:
            self._ports = GatewayServes(self._settings.http_port, self._settings.grpc_port, news.metrics_port)
        elif isinstance(news, GatewayServes):
            self._ports = news
        elif isinstance(news, RestartEngine):
            self._restart_engine(news.reason)
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
        told = announcement(self._settings.host, self._ports, ready)
        try:
            tell_running(self._run_dir.path, told.http_url, told.grpc_address)
        except OSError as error:
            log.warning("other programs of this host will not find this stack", reason=error.strerror)
        self._announce(replace(told, workers=self._settings.worker_count))

    def _tell_gateway(self, news: EngineNews) -> None:
        self._news = news
        restarts = self._fronts.restarts if self._fronts is not None else 0
        self._gateway.tell(replace(news, front_restarts=restarts))

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


def announcement(host: str, ports: GatewayServes, news: GatewayReady) -> Announcement:
    """The URLs as somebody on this machine types them."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return Announcement(
        news.engine,
        f"http://{authority(shown, ports.http_port)}",
        authority(shown, ports.grpc_port),
        f"http://{authority(shown, ports.metrics_port)}/metrics",
        tuple(news.models),
        news.unavailable,
    )
