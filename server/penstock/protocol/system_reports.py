"""JSON of the system endpoints: state of a stack, settings, findings of doctor, and audit log."""

from typing import Any

import msgspec

from penstock.log_file import LogLine


class ReplicaSummary(msgspec.Struct, frozen=True):
    """One of several Tritons. url: or "GPU 0". state: up, ejected, down or lost. ejections: since the start."""

    url: str
    state: str
    in_flight: int
    ejections: int


class EngineSummary(msgspec.Struct, frozen=True):
    """The engine. kind: triton, embedded, external, or module:Class of a user's.

    name: with its version; empty until it serves. reason: why it is not up. restarts: since the start of the stack.
    placements: with an engine for each of several cards, each model's cards and why it is there.
    """

    kind: str
    name: str
    is_up: bool
    reason: str
    restarts: int
    replicas: list[ReplicaSummary] = []
    placements: dict[str, str] = {}


class ProcessUsage(msgspec.Struct, frozen=True):
    """A process of the stack. role: such as up (the parent), gateway, worker 1, decoder, triton.

    rss_bytes: resident memory, with pages shared with other processes. cpu_seconds: user and system, of all threads.
    """

    pid: int
    role: str
    rss_bytes: int
    cpu_seconds: float
    age_s: float


class ModelSummary(msgspec.Struct, frozen=True):
    """A model. state: ready, unavailable or not loaded. reason: why it is not ready."""

    name: str
    state: str
    reason: str = ""


class ModelQueue(msgspec.Struct, frozen=True):
    """The queue of a model that the gateway batches.

    waiting: requests. in_flight: engine calls. wait_s: estimate for a new request of one row; null if not known.
    dropped: requests since the start, by reason.
    """

    model: str
    waiting: int
    rows: int
    in_flight: int
    wait_s: float | None
    dropped: dict[str, int]


class GpuProcess(msgspec.Struct, frozen=True):
    """A process with a context on the GPU. time_share: fraction of time, from 0 to 1, with running kernels."""

    pid: int
    name: str
    memory_bytes: int | None
    time_share: float | None
    is_mps_client: bool


class GpuSummary(msgspec.Struct, frozen=True):
    """One GPU. Shares are means over 10 s, from 0 to 1; null if the card does not measure them.

    lost: why the card cannot be used; empty if it can. kernel_running: nvidia-smi's utilization.
    """

    index: int
    name: str
    lost: str
    sm_activity: float | None
    kernel_running: float | None
    memory_used_bytes: int | None
    memory_bytes: int | None
    processes: list[GpuProcess]


class MpsSummary(msgspec.Struct, frozen=True):
    """CUDA's Multi-Process Service. unattached: GPU processes of the engine that do not use it.

    active_thread_percentage, pinned_memory: each client's share as set; 0 or "auto" and "" for the default.
    """

    clients: int
    unattached: int
    restarts: int
    recovery_s: float
    active_thread_percentage: float | str
    pinned_memory: str


VIDEO_FAULT_FILE = "video-fault"  # in a stack's run directory: why its video program cannot run, as one sentence


class SystemReport(msgspec.Struct, frozen=True):
    """The state of a stack. reason: why it is not ready. in_flight: requests. errors: the last ones in the log.

    mps: null without it. video_fault: why the stack's video program cannot run, such as a wrong settings file; else
    empty.
    """

    version: str
    uptime_s: float
    is_ready: bool
    reason: str
    workers: int
    in_flight: int
    engine: EngineSummary
    models: list[ModelSummary]
    queues: list[ModelQueue]
    processes: list[ProcessUsage]
    gpus: list[GpuSummary]
    mps: MpsSummary | None
    errors: list[LogLine]
    video_fault: str = ""


class SettingReport(msgspec.Struct, frozen=True):
    """An effective setting. origin: default, file, variable, flag, or start if it was chosen at startup.

    source: FILE:LINE, the variable or the flag; empty for default and start. value: null for none, "(hidden)" for
    secrets.
    """

    name: str
    value: Any
    default: Any
    origin: str
    source: str = ""


class SettingsReport(msgspec.Struct, frozen=True):
    """All effective settings."""

    settings: list[SettingReport]


class FindingReport(msgspec.Struct, frozen=True):
    """A finding of `penstock doctor`. status: ok, note, warning or problem. advice: what to do; may be empty."""

    id: str
    subject: str
    status: str
    found: str
    advice: str


class FindingsReport(msgspec.Struct, frozen=True):
    """Findings on the machine and the models. age_s: seconds since the checks ran."""

    findings: list[FindingReport]
    age_s: float


class LogReport(msgspec.Struct, frozen=True):
    """Log lines, oldest first. next: the position after them, for the parameter `after`."""

    lines: list[LogLine]
    next: str


class AuditLine(msgspec.Struct, frozen=True):
    """A line of the audit log. client: null without a key. outcome: ok, or the reason of the rejection."""

    time: str
    client: str | None
    address: str | None
    action: str
    target: str
    outcome: str


class AuditReport(msgspec.Struct, frozen=True):
    """Lines of the audit log, oldest first."""

    lines: list[AuditLine]
