"""Runs the telemetry process for the gateway, restarts it, and stores its last messages."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.gpu.telemetry.health import CardHealth
from penstock.gpu.telemetry.messages import CardLoad, TelemetryMessage
from penstock.gpu.telemetry.sampler import FIRST_LINE_S, PROGRAM, STOP_S, TelemetryUnavailable, mean_loads
from penstock.logs import get_logger
from penstock.metric_table import Readings

AUTO, OFF = "auto", "off"
_DRIVER_FILES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")))


def checked_source(text: str) -> str:
    """The value of `gpu_metrics`. Raises ValueError with the allowed values."""
    if text in (AUTO, OFF) or _is_address(text):
        return text
    raise ValueError("it takes auto, off, or a dcgm-exporter's http://host:9400/metrics")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or unmatched brackets
        return False


def has_driver(files: tuple[Path, ...] = _DRIVER_FILES) -> bool:
    """Whether NVIDIA's driver, or Windows' driver in WSL, is installed here."""
    return any(file.exists() for file in files)


log = get_logger("gpu")
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """Options of the telemetry process."""

    dcgm_url: str = ""  # of a dcgm-exporter to read instead of GPM
    interval_s: float = 1.0
    window_s: float = 10.0  # for means
    silent_s: float = 15.0  # without a message, the process is replaced: it hangs in the driver
    first_s: float = FIRST_LINE_S
    restart_delay_s: float = 5.0  # if cards are known
    no_gpu_delay_s: float = 60.0  # if none are


class TelemetryReader:
    """Run `run()` as one task; use all other members on the same event loop."""

    def __init__(
        self,
        options: TelemetryOptions,
        health: CardHealth,
        *,
        program: Sequence[str] = PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        dcgm = ("--dcgm", options.dcgm_url) if options.dcgm_url else ()
        self._command = (*program, "--interval", str(options.interval_s), *dcgm)
        self._clock = clock
        self._lines: deque[TelemetryMessage] = deque(maxlen=max(2, int(options.window_s / options.interval_s) + 2))
        self._reasons: dict[int, str] = {}
        self._why = ""
        self.health = health
        self.observed: Callable[[], None] = lambda: None  # set by a composer; called after each message

    def loads(self) -> tuple[CardLoad, ...]:
        """Each card's means over window_s; empty without measurements."""
        now = self._clock()
        try:
            return mean_loads(tuple(self._lines), now - self._options.window_s, now)
        except TelemetryUnavailable:
            return ()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._listen()
            await asyncio.sleep(self._options.restart_delay_s if self.health.cards else self._options.no_gpu_delay_s)

    async def _listen(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            self._log_reason(f"{sys.executable} cannot be started: {error}")
            return
        try:
            await self._follow(process)
        finally:
            await _end(process)
        await process.wait()  # if it hangs in the kernel, another process would hang, too

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        max_wait_s = self._options.first_s
        while True:
            try:
                async with asyncio.timeout(max_wait_s):
                    text = await process.stdout.readline()
            except TimeoutError:
                self._log_reason(f"NVML has not answered for {max_wait_s:g} s: the driver hangs")
                return
            if not text:
                return
            with contextlib.suppress(msgspec.MsgspecError):
                line = msgspec.json.decode(text, type=TelemetryMessage)
                self.health.observe(line)
                self._publish(line)
                self.observed()
                if line.cards:
                    self._lines.append(line)
            max_wait_s = self._options.silent_s

    def _publish(self, line: TelemetryMessage) -> None:
        """Logs the cards once, and changes of their state."""
        for xid in line.xids:
            log.warning("the driver reports an error of a GPU", gpu=xid.gpu, xid=xid.number)
        for index, reason in self.health.cards.items():
            before = self._reasons.get(index)
            if reason and reason != before:
                log.error("GPU is lost", gpu=index, reason=reason)
            elif before:
                log.info("GPU is back", gpu=index)
            self._reasons[index] = reason
        first = next(iter(line.cards), None)
        self._log_reason(line.why or (first.why_no_activity if first is not None else ""))

    def _log_reason(self, why: str) -> None:
        if why and why != self._why:
            log.info("no GPU activity to show", reason=why)
        self._why = why


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its input, then kills it. Does not wait long, because a process may hang in the kernel."""
    if process.stdin is not None:
        process.stdin.close()
    for is_forced in (False, True):
        if is_forced:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            continue
        return


_ACTIVITIES = {
    "gpu_sm_activity": "sm",
    "gpu_sm_occupancy": "sm_occupancy",
    "gpu_tensor_activity": "tensor",
    "gpu_memory_bandwidth_activity": "memory_bandwidth",
    "gpu_nvdec_activity": "nvdec",
    "gpu_nvjpg_activity": "nvjpg",
}


def telemetry_metrics(telemetry: TelemetryReader | None) -> dict[str, Callable[[], Readings]]:
    """Functions by metric name; empty without telemetry. Unmeasured values have no series."""
    if telemetry is None:
        return {}
    readers: dict[str, Callable[[], Readings]] = {
        name: lambda figure=figure: _activity(telemetry.loads(), figure)  # type: ignore[misc]
        for name, figure in _ACTIVITIES.items()
    }
    health = telemetry.health
    readers["gpu_kernel_running_share"] = lambda: {
        (str(card.index),): card.kernel_running for card in telemetry.loads() if card.kernel_running is not None
    }
    readers["gpu_process_memory_bytes"] = lambda: _by_process(telemetry.loads(), "memory_bytes")
    readers["gpu_process_time_share"] = lambda: _by_process(telemetry.loads(), "time_share")
    readers["gpu_info"] = lambda: {(str(index), uuid): 1.0 for uuid, index in health.uuids.items()}
    readers["gpu_up"] = lambda: {(str(index),): float(not reason) for index, reason in health.cards.items()}
    readers["gpu_xid_errors_total"] = lambda: {(str(gpu), str(xid)): count for (gpu, xid), count in health.xids.items()}
    return readers


def _activity(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    shares = {(str(card.index), card.source): getattr(card.activity, figure) for card in cards}
    return {(index, source): share for (index, source), share in shares.items() if source and share is not None}


def _by_process(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    sums: dict[tuple[str, ...], float] = {}
    for card in cards:
        for process in card.processes:
            if (value := getattr(process, figure)) is not None:
                key = str(card.index), process.name
                sums[key] = sums.get(key, 0.0) + value
    return sums
