"""A gateway process as its parent sees it, and the control connection: one JSON object per line over a socketpair."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.engines.ort_serving.placement import EngineFacts
from penstock.engines.triton.supervisor import RestartBackoff
from penstock.logs import PROCESS_VARIABLE, get_logger

SICK_GRACE_S = 5.0  # for running requests when a gateway ends because its embedded engine is unhealthy
MAX_LINE_BYTES = 4 << 20  # GatewayReady lists every model that cannot be served, with its reason


class EngineStatusMessage(msgspec.Struct, frozen=True, tag=True):
    """Parent → gateway. is_running: whether the engine's process answered the probe.

    mps_…: client processes, GPU processes without MPS, restarts because of MPS, and the last recovery time.
    own_engines: run directory of each model's dedicated engine process; "" while it starts. model_generations: how
    often a model's processes were replaced.
    """

    is_running: bool
    reason: str
    restarts: int
    gateway_restarts: int = 0
    front_restarts: int = 0
    mps_clients: int = 0
    mps_beside: int = 0
    mps_restarts: int = 0
    mps_recovery_s: float = 0.0
    own_engines: dict[str, str] = {}
    model_generations: dict[str, int] = {}
    facts: dict[str, tuple[EngineFacts, ...]] = {}

    @staticmethod
    def readers(message: "Callable[[], EngineStatusMessage]", *, has_mps: bool) -> dict[str, Callable[[], float]]:
        """Functions that read the metrics on the parent's processes, and on the MPS daemon if there is one."""
        found: dict[str, Callable[[], float]] = {
            "engine_restarts_total": lambda: message().restarts,
            "front_restarts_total": lambda: message().front_restarts,
            "gateway_restarts_total": lambda: message().gateway_restarts,
        }
        if has_mps:
            found |= {
                "mps_clients": lambda: message().mps_clients,
                "mps_unattached_processes": lambda: message().mps_beside,
                "mps_restarts_total": lambda: message().mps_restarts,
                "mps_recovery_seconds": lambda: message().mps_recovery_s,
            }
        return found


class GatewayServes(msgspec.Struct, frozen=True, tag=True):
    """Gateway → parent: the listeners are open, on these ports."""

    http_port: int
    grpc_port: int
    metrics_port: int


class GatewayReady(msgspec.Struct, frozen=True, tag=True):
    """Gateway → parent: models that serve, and unavailable ones with the reason. not_ready: why health checks fail."""

    engine: str
    models: list[str]
    unavailable: dict[str, str]
    not_ready: str = ""


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the core has reported that the engine is up."""

    index: int


class RestartEngine(msgspec.Struct, frozen=True, tag=True):
    """Gateway → parent: the engine runs but cannot work. card: label of the one engine of several; empty for all."""

    reason: str
    card: str = ""


class LostCards(msgspec.Struct, frozen=True, tag=True):
    """Gateway → parent: the cards that are lost now, and why, by label. Sent at each change."""

    reasons: dict[str, str]


class RestartModel(msgspec.Struct, frozen=True, tag=True):
    """Gateway → parent: restart this model. generation: of the processes to restart; see EngineStatusMessage."""

    model: str
    reason: str
    generation: int = 0
    has_own_engine: bool = False  # whether to start a new engine process for it


ControlMessage = (
    EngineStatusMessage | GatewayServes | GatewayReady | WorkerReady | RestartEngine | RestartModel | LostCards
)
_DECODER: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)


class ControlConnection:
    """One end of the connection. Reading ends when the other end closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "ControlConnection":
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=MAX_LINE_BYTES))

    def send(self, message: ControlMessage) -> None:
        """Never blocks. Drops the message if the connection is closed."""
        if not self._writer.is_closing():
            text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False)
            self._writer.write(text.encode(errors="replace") + b"\n")  # a folder's name may be no UTF-8

    async def receive(self) -> AsyncIterator[ControlMessage]:
        try:
            async for line in self._reader:
                yield _DECODER.decode(line)
        except ConnectionError:
            return

    def close(self) -> None:
        self._writer.close()


log = get_logger("stack")
EXIT_CANNOT_START = 78
GATEWAY_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # decoders are started by exec; grpc's fork handlers only print warnings
    "PYTHONSAFEPATH": "1",  # also for its children: nothing is imported from the working directory
    "GRPC_VERBOSITY": "NONE",  # its lines would break our log format; errors are raised as exceptions
}
MAX_FAILED_STARTS = 3  # of a gateway that has never served
CORE, FRONT = "core", "front-"  # names of the gateway's parts, in its arguments
GATEWAY_PROGRAM = (sys.executable, "-m", "penstock.gateway")


@dataclass(frozen=True, slots=True)
class GatewayPart:
    """A process of the gateway. name: for the log. died: called when it has ended, before it is restarted."""

    name: str = "gateway"
    arguments: tuple[str, ...] = ()
    died: Callable[[], None] = lambda: None


WHOLE_GATEWAY = GatewayPart()


class GatewayProcess:
    """The gateway as a child process: restarted with backoff when it dies, drained by SIGTERM.

    settings_json: written to run_dir, readable by its user only. part: which process, if there are several.
    """

    def __init__(
        self,
        settings_json: str,
        run_dir: Path,
        on_message: Callable[[object], None],
        *,
        program: Sequence[str] = GATEWAY_PROGRAM,
        part: GatewayPart = WHOLE_GATEWAY,
    ) -> None:
        self._settings_file = run_dir / "settings.json"
        self._settings_file.touch(mode=0o600)
        self.settle(settings_json)
        self._program = program
        self._part = part
        self._on_message = on_message
        self._process: asyncio.subprocess.Process | None = None
        self._line: ControlConnection | None = None
        self._last_status: EngineStatusMessage | None = None
        self._stopping = asyncio.Event()
        self._renewal: asyncio.Task[None] | None = None
        self._has_served = False
        self.restarts = 0

    def settle(self, settings_json: str) -> None:
        """Settings for its next start, and for every other part with that run_dir."""
        self._settings_file.write_text(settings_json)

    def tell(self, message: EngineStatusMessage) -> None:
        """Sends the engine's state to this and every later gateway process."""
        self._last_status = message
        if self._line is not None:
            self._line.send(msgspec.structs.replace(message, gateway_restarts=self.restarts))

    async def run(self) -> int:
        """Runs until stopped, or until it cannot start. Returns its exit code."""
        backoff = RestartBackoff()
        while not self._stopping.is_set():
            backoff.live(time.monotonic())
            code, was_requested = await self._run_once()
            self._part.died()
            if self._stopping.is_set():
                # Killed before it could handle the signal: it had accepted no request.
                return 0 if code == -signal.SIGTERM else code
            if code == EXIT_CANNOT_START:
                return code
            pause_s = backoff.next_delay_s(time.monotonic())
            if was_requested:
                log.info(
                    f"{self._part.name} ended as requested; starting it again", code=code, pause_s=round(pause_s, 2)
                )
            elif self._count_death(code, pause_s):
                return EXIT_CANNOT_START
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        return 0

    def _count_death(self, code: int, pause_s: float) -> bool:
        """Returns whether to give up, since it has never served."""
        self.restarts += 1
        if not self._has_served and self.restarts == MAX_FAILED_STARTS:
            log.error(f"{self._part.name} cannot start; the lines above say why", code=code, starts=self.restarts)
            return True
        log.error(
            f"{self._part.name} died; starting it again", code=code, pause_s=round(pause_s, 2), restarts=self.restarts
        )
        return False

    async def _run_once(self) -> tuple[int, bool]:
        """Its exit code, and whether `renew` requested its end."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                str(self._settings_file),
                str(theirs.fileno()),
                *self._part.arguments,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | GATEWAY_ENVIRONMENT | {PROCESS_VARIABLE: self._part.name},
                start_new_session=True,
            )
        if self._stopping.is_set():  # set while it was being started
            self._process.terminate()
        self._line = await ControlConnection.over(ours)
        if self._last_status is not None:
            self._line.send(msgspec.structs.replace(self._last_status, gateway_restarts=self.restarts))
        reading = asyncio.create_task(self._read(self._line))
        code = await self._process.wait()
        reading.cancel()
        self._line.close()
        self._line = None
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            await renewal
        return code, renewal is not None

    async def _read(self, line: ControlConnection) -> None:
        async for message in line.receive():
            self._has_served |= isinstance(message, GatewayServes)
            self._on_message(message)

    def renew(self, max_wait_s: float) -> bool:
        """Restarts it gracefully. Returns False if it is ending already."""
        process = self._process
        if self._renewal is not None or process is None or process.returncode is not None:
            return False
        self._renewal = asyncio.create_task(self._end(process, max_wait_s))
        return True

    def cut_off(self) -> None:
        """Kills a hanging process and its children at once; it is then restarted."""
        if self._process is not None:
            _kill_with_children(self._process)

    async def stop(self, max_wait_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after max_wait_s. `run` then returns."""
        self._stopping.set()
        if self._process is not None:
            await self._end(self._process, max_wait_s)

    async def _end(self, process: asyncio.subprocess.Process, max_wait_s: float) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(max_wait_s):
                await process.wait()
        except TimeoutError:
            log.error(f"{self._part.name} did not stop in time; killed", max_wait_s=max_wait_s)
            _kill_with_children(process)

    def kill(self) -> None:
        self._stopping.set()
        if self._process is not None:
            _kill_with_children(self._process)


def _kill_with_children(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
