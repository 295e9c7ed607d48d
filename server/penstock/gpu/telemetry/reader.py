"""TelemetryReader: runs the telemetry process for the gateway, restarts it, and keeps its last messages.

Also the setting `gpu_metrics`, which names the source, and the Prometheus values of each GPU.
"""

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
    """The setting. Raises ValueError, with what it takes, for anything else."""
    if text in (AUTO, OFF) or _is_address(text):
        return text
    raise ValueError("it takes auto, off, or a dcgm-exporter's http://host:9400/metrics")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not match
        return False


def has_driver(files: tuple[Path, ...] = _DRIVER_FILES) -> bool:
    """Whether NVIDIA's driver, or Windows' driver in WSL, is installed here."""
    return any(file.exists() for file in files)


log = get_logger("gpu")
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """dcgm_url: of a dcgm-exporter to be read instead of GPM, empty for none. Figures are means over window_s.

    silent_s: without a word, the process hangs in the driver and is replaced. again_s: before the next one is started
    where cards were seen, absent_s where none were.
    """

    dcgm_url: str = ""
    interval_s: float = 1.0
    window_s: float = 10.0
    silent_s: float = 15.0
    first_s: float = FIRST_LINE_S
    restart_delay_s: float = 5.0
    no_gpu_delay_s: float = 60.0


class TelemetryReader:
    """Run `run()` as one task; every other member may be called from the same event loop at any time."""

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

    def loads(self) -> tuple[CardLoad, ...]:
        """Each card's means over the last ten seconds; empty without measurements in them."""
        now = self._clock()
        try:
            return mean_loads(tuple(self._lines), now - self._options.window_s, now)
        except TelemetryUnavailable:
            return ()

    async def run(self) -> None:
        """For ever. Ends by cancellation only."""
        while True:
            await self._listen()
            await asyncio.sleep(self._options.restart_delay_s if self.health.cards else self._options.no_gpu_delay_s)

    async def _listen(self) -> None:
        """One process, from its start to its end."""
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
        await process.wait()  # one that hangs in the kernel: another beside it would hang there, too

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
                self._take(msgspec.json.decode(text, type=TelemetryMessage))
            max_wait_s = self._options.silent_s

    def _take(self, line: TelemetryMessage) -> None:
        self.health.observe(line)
        self._publish(line)
        if line.cards:
            self._lines.append(line)

    def _publish(self, line: TelemetryMessage) -> None:
        """The log: what cards there are, once; what became of them, when it changes."""
        for xid in line.xids:
            log.warning("the driver reports an error of a card", gpu=xid.gpu, xid=xid.number)
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
    """Its input closed, then by force; not even that ends one that hangs in the kernel: it is not waited for long."""
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
    """By metric name; empty without telemetry. An unmeasured value has no series, not a 0."""
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
    readers["gpu_up"] = lambda: {(str(index),): float(not reason) for index, reason in health.cards.items()}
    readers["gpu_xid_errors_total"] = lambda: {(str(gpu), str(xid)): count for (gpu, xid), count in health.xids.items()}
    return readers


def _activity(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    shares = {(str(card.index), card.source): getattr(card.activity, figure) for card in cards}
    return {(index, source): share for (index, source), share in shares.items() if source and share is not None}


def _by_process(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    """Of several processes of one name, their sum."""
    sums: dict[tuple[str, ...], float] = {}
    for card in cards:
        for process in card.processes:
            if (value := getattr(process, figure)) is not None:
                key = str(card.index), process.name
                sums[key] = sums.get(key, 0.0) + value
    return sums
