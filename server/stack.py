"""The composer of the whole stack: the small parent process that owns the engine's process and the gateway's.

Each is restarted when it dies; both are ended in order when the stack is told to stop.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from server.backends.reaper import RunDirectory, RunDirectoryRefused, claim_run_directory
from server.backends.shell_paths import is_special, plain_paths
from server.backends.triton_backoff import RestartBackoff
from server.backends.triton_ports import pick_free_ports
from server.backends.triton_process import TritonOptions, TritonProcess
from server.backends.triton_runtime import TritonUnavailable, default_environment, find_triton
from server.backends.triton_status import EngineState, EngineStatus
from server.core.address import authority
from server.local.control import ControlLine, EngineNews, GatewayReady, GatewayServes, RestartEngine
from server.logs import get_logger
from server.rest.listener import PortTaken, bind
from server.settings import Settings

log = get_logger("stack")
engine_log = get_logger("triton")
EXIT_CANNOT_START = 78
GATEWAY_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # decoders are started by exec; grpc's fork handlers only print warnings
    "GRPC_VERBOSITY": "ERROR",
}
MAX_FAILED_STARTS = 3  # of a gateway that has never served
GATEWAY_PROGRAM = (sys.executable, "-m", "server")
ENGINE_GRACE_S = 5.0  # once the gateway has drained, only a model that still loads keeps the engine
STOP_MARGIN_S = 5.0  # beyond the gateway's own grace, before it is killed


class CannotStart(Exception):
    """The stack cannot start. The message is one sentence with the fix."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a person is told once requests will be served."""

    http_url: str
    grpc_address: str
    metrics_url: str
    models: tuple[str, ...]
    unavailable: dict[str, str]


def resolve_ports(settings: Settings) -> Settings:
    """The settings with real port numbers, each tried now. Raises CannotStart where one is taken."""
    names = ["http_port", "grpc_port", "metrics_port"]
    if not settings.engine_is_external:
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

    Raises CannotStart where one is missing, where a model stands in two, or has a name that Triton cannot start.
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
    base = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
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


class GatewayProcess:
    """The gateway as a child: started, restarted with growing pauses when it dies, drained by SIGTERM."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        on_news: Callable[[object], None],
        *,
        program: Sequence[str] = GATEWAY_PROGRAM,
    ) -> None:
        self._settings_file = run_dir / "settings.json"
        self._settings_file.touch(mode=0o600)
        self._settings_file.write_text(settings.model_dump_json())
        self._program = program
        self._on_news = on_news
        self._process: asyncio.subprocess.Process | None = None
        self._line: ControlLine | None = None
        self._last_news: EngineNews | None = None
        self._stopping = asyncio.Event()
        self._has_served = False
        self.restarts = 0

    def tell(self, news: EngineNews) -> None:
        """The engine's state, now and for every later gateway process."""
        self._last_news = news
        if self._line is not None:
            self._line.send(replace(news, gateway_restarts=self.restarts))

    async def run(self) -> int:
        """Until stopped, or until it cannot start; its exit code."""
        backoff = RestartBackoff()
        while not self._stopping.is_set():
            backoff.live(time.monotonic())
            code = await self._run_once()
            if self._stopping.is_set():
                # It died of the signal itself: it did not listen for it yet, so it had accepted nothing.
                return 0 if code == -signal.SIGTERM else code
            if code == EXIT_CANNOT_START:
                return code
            self.restarts += 1
            if not self._has_served and self.restarts == MAX_FAILED_STARTS:
                log.error("gateway cannot start; the lines above say why", code=code, starts=self.restarts)
                return EXIT_CANNOT_START
            pause_s = backoff.next_delay_s(time.monotonic())
            log.error("gateway died; starting it again", code=code, pause_s=round(pause_s, 2), restarts=self.restarts)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        return 0

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                str(self._settings_file),
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | GATEWAY_ENVIRONMENT,
                start_new_session=True,
            )
        if self._stopping.is_set():  # told so while it was being made
            self._process.terminate()
        self._line = await ControlLine.over(ours)
        if self._last_news is not None:
            self._line.send(replace(self._last_news, gateway_restarts=self.restarts))
        reading = asyncio.create_task(self._read(self._line))
        code = await self._process.wait()
        reading.cancel()
        self._line.close()
        self._line = None
        return code

    async def _read(self, line: ControlLine) -> None:
        async for news in line.receive():
            self._has_served |= isinstance(news, GatewayServes)
            self._on_news(news)

    async def stop(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL when the patience is over. `run` then returns."""
        self._stopping.set()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            log.error("gateway did not stop in time; killed", patience_s=patience_s)
            self.kill()

    def kill(self) -> None:
        """At once, with its children."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Stack:
    """Run it once: `run` returns the exit code when everything has ended."""

    def __init__(self, settings: Settings, *, announce: Callable[[Announcement], None]) -> None:
        self._settings = settings
        self._announce = announce
        self._ports: GatewayServes | None = None
        self._stop_asked = asyncio.Event()
        self._is_hurried = False
        self._failure = ""
        self._run_dir = claim_run_dir()
        self._gateway = GatewayProcess(settings, self._run_dir.path, self._on_gateway_news)
        self._engine: TritonProcess | None = None
        self._engine_task: asyncio.Task[None] | None = None

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

    async def _until_stopped(self) -> int:
        gateway_task = asyncio.create_task(self._gateway.run())
        stop_task = asyncio.create_task(self._stop_asked.wait())
        watched: set[asyncio.Task[object]] = {gateway_task, stop_task, *filter(None, [self._engine_task])}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        await self._gateway.stop(self._settings.drain_delay_s + self._settings.grace_s + STOP_MARGIN_S)
        code = await gateway_task
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
        if self._settings.engine_is_external:
            self._gateway.tell(EngineNews(is_running=True, reason="", restarts=0))
            return
        environment = self._settings.engine_environment or default_environment(Path(sys.prefix))
        repositories = check_repositories(self._settings)
        try:
            launch = find_triton(environment=environment).prepare(self._run_dir.path)
        except TritonUnavailable as error:
            raise CannotStart(str(error)) from error
        options = TritonOptions(
            engine_id=self._run_dir.engine_id,
            repositories=plain_paths(repositories, self._run_dir.path / "repositories"),
            http_port=self._settings.engine_http_port,
            grpc_port=self._settings.engine_grpc_port,
            metrics_port=self._settings.engine_metrics_port,
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
        self._gateway.tell(EngineNews(is_running, status.reason or status.state.value, status.restarts))
        if status.state is EngineState.FAILED:
            self._failure = status.reason
            self._stop_asked.set()

    def _on_gateway_news(self, news: object) -> None:
        if isinstance(news, GatewayServes):
            self._ports = news
        elif isinstance(news, RestartEngine) and self._engine is not None:
            self._engine.restart(news.reason)
        elif isinstance(news, GatewayReady) and self._ports is not None:
            self._announce(announcement(self._settings.host, self._ports, news))

    def _on_signal(self) -> None:
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            return
        log.error("told to stop twice; ending at once, unfinished requests are cut")
        self._is_hurried = True
        self._gateway.kill()
        if self._engine_task is not None:
            self._engine_task.cancel()


def announcement(host: str, ports: GatewayServes, news: GatewayReady) -> Announcement:
    """The URLs as somebody on this machine types them."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return Announcement(
        f"http://{authority(shown, ports.http_port)}",
        authority(shown, ports.grpc_port),
        f"http://{authority(shown, ports.metrics_port)}/metrics",
        tuple(news.models),
        news.unavailable,
    )
