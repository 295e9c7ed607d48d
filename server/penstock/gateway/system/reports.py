"""SystemReports: responses of the system endpoints. Slow reads run in threads or processes, shared by all clients."""

import asyncio
import os
import re
import stat
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from penstock import VERSION
from penstock.engines.model_health import KnownModel
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.system.examination import Examination
from penstock.gateway.system.processes import process_usage
from penstock.gateway.thread_slots import ThreadSlots
from penstock.gpu.telemetry.messages import CardLoad
from penstock.log_file import LogFilter, LogLine, LogPage, LogPosition, lines_after, newest_lines
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.system_reports import (
    VIDEO_FAULT_FILE,
    AuditLine,
    AuditReport,
    EngineSummary,
    FindingReport,
    FindingsReport,
    GpuProcess,
    GpuSummary,
    ModelQueue,
    ModelSummary,
    MpsSummary,
    ProcessUsage,
    SettingReport,
    SettingsReport,
    SystemReport,
)

T = TypeVar("T")
USAGE_AGE_S, FINDINGS_AGE_S = 1.0, 30.0
READ_TIMEOUT_S = 10.0  # for reading a log, including the wait for other clients
MAX_LINES = 1000
MAX_MODELS = 1000
ERRORS = 10
MAX_FAULT_CHARACTERS = 2000
_NO_DETAILS = "the video program cannot run; the reason requires the role admin"
AUDIT_BYTES = 1 << 20  # read from the end of the audit log
_DURATION = re.compile(r"([1-9][0-9]{0,6})(s|m|h|d)")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSources:
    """Functions that read the gateway's state in the event loop. log_folder: the stack's; None if it has none."""

    workers: int
    readiness: Callable[[], str]  # why it is not ready
    in_flight: Callable[[], int]
    engine: Callable[[], EngineSummary]
    models: Callable[[], Mapping[str, KnownModel]]
    is_left_out: Callable[[KnownModel], bool]
    queues: Callable[[], Mapping[str, QueueStatistics]]
    gpus: Callable[[], tuple[CardLoad, ...]]
    lost_gpus: Callable[[], Mapping[int, str]]
    mps: Callable[[], MpsSummary | None]
    settings: Callable[[], list[SettingReport]]
    examination: Examination
    log_folder: Path | None = None
    audit_log: Path | None = None


class RecentResult(Generic[T]):
    """Shares the result or error of one call between all clients for max_age_s."""

    def __init__(self, call: Callable[[], Awaitable[T]], max_age_s: float) -> None:
        self._call, self._max_age_s = call, max_age_s
        self._task: asyncio.Task[T] | None = None
        self._ended_at = 0.0

    @property
    def age_s(self) -> float:
        """Time since the last call ended."""
        return time.monotonic() - self._ended_at

    async def get(self) -> T:
        """Raises what the call raises."""
        if self._task is None or (self._task.done() and self.age_s > self._max_age_s):
            self._task = asyncio.ensure_future(self._call())
            self._task.add_done_callback(self._ended)
        return await asyncio.shield(self._task)

    def _ended(self, task: "asyncio.Future[T]") -> None:
        self._ended_at = time.monotonic()
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: all clients may have disconnected


class SystemReports:
    """Create it inside the running loop."""

    def __init__(self, sources: SystemSources) -> None:
        self._sources = sources
        self._usage = RecentResult(self._read_usage, USAGE_AGE_S)
        self._findings = RecentResult(sources.examination.run, FINDINGS_AGE_S)
        self._threads = ThreadSlots(1, what="the log was read", others="the logs that are read before it")
        self._errors: deque[LogLine] = deque(maxlen=ERRORS)
        self._errors_end = LogPosition()

    async def system(self, *, has_details: bool) -> SystemReport:
        """The state of the stack. has_details: whether errors include their fields."""
        sources = self._sources
        processes, errors, video_fault = await self._usage.get()
        reason = sources.readiness()
        return SystemReport(
            version=VERSION,
            uptime_s=processes[0].age_s if processes else 0.0,
            is_ready=not reason,
            reason=reason,
            workers=sources.workers,
            in_flight=sources.in_flight(),
            engine=sources.engine(),
            models=[self._model(known) for _, known in sorted(sources.models().items())[:MAX_MODELS]],
            queues=[_queue(name, queue) for name, queue in sorted(sources.queues().items())[:MAX_MODELS]],
            processes=processes,
            gpus=_gpus(sources.gpus(), sources.lost_gpus()),
            mps=sources.mps(),
            errors=errors if has_details else [msgspec.structs.replace(line, fields={}) for line in errors],
            video_fault=video_fault if has_details or not video_fault else _NO_DETAILS,
        )

    def settings(self) -> SettingsReport:
        """All effective settings."""
        return SettingsReport(self._sources.settings())

    async def findings(self) -> FindingsReport:
        """Findings of doctor, at most FINDINGS_AGE_S old, and of models. Raises DeadlineExceeded, InferenceError."""
        of_machine = await self._findings.get()
        of_models = [
            FindingReport(
                f"models.{known.name}", "models", "warning", f"{known.name}: {known.reason}", _load_advice(known.name)
            )
            for known in self._sources.models().values()
            if not known.is_ready and not self._sources.is_left_out(known)
        ]
        return FindingsReport([*of_machine, *of_models[:MAX_MODELS]], round(self._findings.age_s, 1))

    async def logs(self, wanted: LogFilter, after: LogPosition | None, limit: int, *, client: str) -> LogPage:
        """The newest lines, or those after a position. Raises DeadlineExceeded, NotSupported."""
        folder = self._sources.log_folder
        if folder is None:
            raise NotSupported(
                "this gateway has no run directory, so its log is on standard error only; start it with `penstock up`"
            )

        def read() -> LogPage:
            if after is None:
                return newest_lines(folder, wanted, limit)
            return lines_after(folder, after, wanted, limit)

        return await self._threads.run(read, client=client, deadline=time.monotonic() + READ_TIMEOUT_S)

    async def audit(self, limit: int, *, client: str) -> AuditReport | None:
        """The newest lines of the audit log; None without one. Raises DeadlineExceeded, NotSupported."""
        path = self._sources.audit_log
        if path is None:
            return None
        until = time.monotonic() + READ_TIMEOUT_S
        return await self._threads.run(lambda: read_audit_log(path, limit), client=client, deadline=until)

    def _model(self, known: KnownModel) -> ModelSummary:
        if known.is_ready:
            return ModelSummary(known.name, "ready")
        return ModelSummary(
            known.name, "not loaded" if self._sources.is_left_out(known) else "unavailable", known.reason
        )

    async def _read_usage(self) -> tuple[list[ProcessUsage], list[LogLine], str]:
        return await asyncio.to_thread(lambda: (process_usage(os.getppid()), self._read_errors(), self._video_fault()))

    def _video_fault(self) -> str:
        if self._sources.log_folder is None:
            return ""
        with suppress(OSError):
            file = self._sources.log_folder.parent / VIDEO_FAULT_FILE
            return file.read_text(encoding="utf-8", errors="replace")[:MAX_FAULT_CHARACTERS]
        return ""

    def _read_errors(self) -> list[LogLine]:
        """The last errors. Reads only the lines since the last call."""
        if (folder := self._sources.log_folder) is not None:
            while (page := lines_after(folder, self._errors_end, LogFilter("error"), MAX_LINES)).lines:
                self._errors.extend(page.lines)
                self._errors_end = page.next
            self._errors_end = page.next
        return list(self._errors)


def _load_advice(model_name: str) -> str:
    return f"fix the cause, then run: penstock models load {model_name}"


def _queue(name: str, queue: QueueStatistics) -> ModelQueue:
    return ModelQueue(name, queue.depth, queue.rows, queue.in_flight, queue.wait_s, dict(queue.dropped))


def _gpus(cards: tuple[CardLoad, ...], lost: Mapping[int, str]) -> list[GpuSummary]:
    """All known GPUs. A lost GPU may have no load figures."""
    loads = {card.index: card for card in cards}
    return [_gpu(loads.get(index, CardLoad(index)), lost.get(index, "")) for index in sorted({*loads, *lost})]


def _gpu(card: CardLoad, lost: str) -> GpuSummary:
    processes = [
        GpuProcess(one.pid, one.name, one.memory_bytes, one.time_share, one.is_mps_client) for one in card.processes
    ]
    activity, used = card.activity.sm, card.memory_used_bytes
    return GpuSummary(card.index, card.name, lost, activity, card.kernel_running, used, card.memory_bytes, processes)


def read_audit_log(path: Path, limit: int) -> AuditReport:
    """The newest lines. Raises NotSupported if the file cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotSupported(f"the audit log {path} cannot be read ({error.strerror})") from error
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise NotSupported(f"the audit log {path} is not a regular file, so it cannot be read")
        begin = max(0, status.st_size - AUDIT_BYTES)
        opened.seek(begin)
        lines = opened.read(AUDIT_BYTES).split(b"\n")[bool(begin) :]
    found: deque[AuditLine] = deque(maxlen=limit)
    for line in lines:
        with suppress(msgspec.DecodeError):  # an incomplete line, or one of another program
            found.append(msgspec.json.decode(line, type=AuditLine))
    return AuditReport(list(found))


def log_time(text: str, now: datetime) -> str:
    """Converts ISO 8601, or a duration before now such as 10m, to the log's time format. Raises InvalidRequest."""
    duration = _DURATION.fullmatch(text)
    try:
        if duration:
            moment = now - timedelta(seconds=int(duration[1]) * _UNITS_S[duration[2]])
        else:
            moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"since is {text[:40]!r}; it must be a duration such as 30s, 10m, 2h or 1d, or a time such as "
            "2026-11-29T03:00:00Z"
        ) from None
