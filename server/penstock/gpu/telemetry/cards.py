"""Reads all GPUs by NVML.

GPM activity (Hopper and later) covers the time between two samples of hardware counters. Where dcgm-exporter reads the
same counters, use it instead. Process ids are the host's, so names may be unknown in a container.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad, ProcessLoad, TelemetryMessage, Xid

_UNITS = 8  # maximum number of decoders that are queried; cards answer for those that they have


class GpmMeter:
    """GPM activity of one card. Raises pynvml.NVMLError if the card or the user's permissions do not allow it."""

    def __init__(self, device: Any) -> None:
        import pynvml as nvml

        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._device = device
        self._nvml = nvml
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(device, self._older)
        nvdec, nvjpg = nvml.NVML_GPM_METRIC_NVDEC_0_UTIL, nvml.NVML_GPM_METRIC_NVJPG_0_UTIL
        self._of_figure: dict[str, tuple[int, ...]] = {
            "sm": (nvml.NVML_GPM_METRIC_SM_UTIL,),
            "sm_occupancy": (nvml.NVML_GPM_METRIC_SM_OCCUPANCY,),
            "tensor": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,),
            "memory_bandwidth": (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,),
            "graphics_engine": (nvml.NVML_GPM_METRIC_GRAPHICS_UTIL,),
            "nvdec": tuple(range(nvdec, nvdec + _UNITS)),
            "nvjpg": tuple(range(nvjpg, nvjpg + _UNITS)),
        }

    def read(self) -> Activity:
        """Activity since the last call, or since construction."""
        self._nvml.nvmlGpmSampleGet(self._device, self._newer)
        shares = self._shares()
        self._older, self._newer = self._newer, self._older
        return Activity(**{name: _mean([shares[one] for one in ids]) for name, ids in self._of_figure.items()})

    def _shares(self) -> dict[int, float | None]:
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        ids = [one for several in self._of_figure.values() for one in several]
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
        query.sample1, query.sample2 = self._older, self._newer
        for metric, one in zip(query.metrics, ids, strict=False):
            metric.metricId = one
        nvml.nvmlGpmMetricsGet(query)
        return {
            metric.metricId: _share(metric.value) if metric.nvmlReturn == nvml.NVML_SUCCESS else None
            for metric in query.metrics[: len(ids)]
        }


def _share(percent: float) -> float | None:
    """From 0 to 1; None if the card lacks the counter (NaN)."""
    return min(1.0, max(0.0, percent / 100)) if math.isfinite(percent) else None


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


UNKNOWN = "unknown"
_STUB = "triton_python_backend_stub"
_STUB_NAME_AT = 8  # index in its arguments, see StubLauncher::Launch in triton-inference-server/python_backend
_MOST_PERCENT = 100  # NVML returns invalid values for processes that have just ended


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """memory_bytes: None if NVML does not report it, as under some hypervisors."""

    memory_bytes: int | None
    is_mps_client: bool


def gpu_processes(nvml: Any, device: Any) -> dict[int, ProcessMemory]:
    """Processes with a compute context, and clients of MPS, by process id."""
    found: dict[int, ProcessMemory] = {}
    for ask, is_mps_client in (
        (nvml.nvmlDeviceGetComputeRunningProcesses, False),
        (nvml.nvmlDeviceGetMPSComputeRunningProcesses, True),
    ):
        try:
            processes = ask(device)
        except nvml.NVMLError:  # older drivers have no MPS clients; a container may not see processes
            continue
        for process in processes:
            found[process.pid] = ProcessMemory(process.usedGpuMemory, is_mps_client)
    return found


def time_shares(nvml: Any, device: Any, after_us: int) -> tuple[dict[int, float], int]:
    """GPU time shares by process id, without idle processes; and the newest sample's time for the next call."""
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(device, after_us)
    except nvml.NVMLError:  # no new sample, or not supported
        return {}, after_us
    shares: dict[int, list[float]] = {}
    for sample in samples:
        if sample.timeStamp > after_us and sample.smUtil <= _MOST_PERCENT:
            shares.setdefault(sample.pid, []).append(sample.smUtil / 100)
    newest = max((sample.timeStamp for sample in samples), default=after_us)
    return {pid: sum(each) / len(each) for pid, each in shares.items()}, max(newest, after_us)


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """The process's name as metric label: bounded, and stable over restarts."""
    try:
        arguments = (proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        return command_name(arguments) or (proc / str(pid) / "comm").read_text("utf-8", "replace").strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def command_name(arguments: Sequence[str]) -> str:
    """The model instance of Triton's Python stub, else the program's name; empty for none."""
    program = arguments[0].rpartition("/")[2]
    if program == _STUB and len(arguments) > _STUB_NAME_AT:
        return arguments[_STUB_NAME_AT]
    return program.partition(" ")[0]


NOT_SUPPORTED = "this GPU has no GPM (Hopper and later have); a dcgm-exporter reports SM activity from Volta on"
NOT_PERMITTED = "this user may not read the GPU's counters (RmProfilingAdminOnly of the driver); a dcgm-exporter may"
_MOST_EVENTS = 100  # per line: limits a card that floods the driver's log


class Cards:
    """All cards of the driver, opened. with_gpm: whether to read activity. Raises pynvml.NVMLError."""

    def __init__(self, *, with_gpm: bool = True) -> None:
        import pynvml as nvml

        nvml.nvmlInit()
        self._nvml = nvml
        self._cards = [_Card(index, with_gpm=with_gpm) for index in range(nvml.nvmlDeviceGetCount())]
        self._events = self._watched_events()
        self._read_at_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._cards)

    def read(self) -> TelemetryMessage:
        """Values since the last call, or since construction. A card that fails is reported as lost."""
        now = time.monotonic()
        seconds, self._read_at_s = now - self._read_at_s, now
        return TelemetryMessage(now, seconds, tuple(card.read() for card in self._cards), self._xids(), has_nvml=True)

    def _watched_events(self) -> Any | None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for card in self._cards:
            card.watch(events)
        return events

    def _xids(self) -> tuple[Xid, ...]:
        nvml = self._nvml
        found: list[Xid] = []
        while self._events is not None and len(found) < _MOST_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                found.append(Xid(nvml.nvmlDeviceGetIndex(event.device), event.eventData))
            except nvml.NVMLError:  # no more events; or the card is lost, which its own reading reports
                break
        return tuple(found)


class _Card:
    """One card by its index. `read` reports failures."""

    def __init__(self, index: int, *, with_gpm: bool) -> None:
        import pynvml as nvml

        self._nvml = nvml
        self._index = index
        self._device: Any = None
        self._gpm: GpmMeter | None = None
        self._why_no_activity = self._lost = self._uuid = self._name = ""
        self._names: dict[int, str] = {}
        self._newest_us = 0
        self._find()
        if with_gpm and self._device is not None:
            self._open_gpm()

    def _find(self) -> None:
        nvml = self._nvml
        try:
            self._device = nvml.nvmlDeviceGetHandleByIndex(self._index)
            self._uuid, self._name = nvml.nvmlDeviceGetUUID(self._device), nvml.nvmlDeviceGetName(self._device)
        except nvml.NVMLError as error:
            self._device = None
            if error.value == nvml.NVML_ERROR_NO_PERMISSION:
                self._why_no_activity = str(error)
            else:
                self._lost = str(error)

    def _open_gpm(self) -> None:
        nvml = self._nvml
        known = {nvml.NVML_ERROR_NOT_SUPPORTED: NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION: NOT_PERMITTED}
        known[nvml.NVML_ERROR_FUNCTION_NOT_FOUND] = NOT_SUPPORTED  # a driver older than GPM
        try:
            self._gpm = GpmMeter(self._device)
        except nvml.NVMLError as error:
            self._why_no_activity = known.get(error.value, str(error))

    def watch(self, events: Any) -> None:
        """Subscribes to the card's driver errors, if card and user allow it."""
        nvml = self._nvml
        try:
            if self._device is not None:
                nvml.nvmlDeviceRegisterEvents(self._device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return

    def read(self) -> CardLoad:
        """Values since the last call. A lost card stays lost until NVML is initialised again."""
        nvml = self._nvml
        if self._device is None:
            return self._silent()
        try:
            return self._load()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                self._device, self._lost = None, str(error)
            else:  # such as "Unknown Error": lost if it cannot be found again
                self._find()
                return self._silent(str(error))
        return self._silent()

    def _silent(self, why: str = "") -> CardLoad:
        why = self._why_no_activity or why
        return CardLoad(self._index, self._uuid, self._name, why_no_activity=why, lost=self._lost)

    def _load(self) -> CardLoad:
        nvml, device = self._nvml, self._device
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        activity = self._gpm.read() if self._gpm is not None else Activity()
        return CardLoad(
            self._index,
            self._uuid,
            self._name,
            kernel_running=self._utilization(),
            source=ActivitySource.GPM if self._gpm is not None else None,
            activity=activity,
            why_no_activity=self._why_no_activity,
            memory_used_bytes=memory.used,
            memory_bytes=memory.total,
            processes=self._processes(),
        )

    def _utilization(self) -> float | None:
        try:
            share: float = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        except self._nvml.NVMLError_NotSupported:  # a card with MIG
            return None
        return share

    def _processes(self) -> tuple[ProcessLoad, ...]:
        shares, self._newest_us = time_shares(self._nvml, self._device, self._newest_us)
        found = gpu_processes(self._nvml, self._device)
        self._names = {pid: self._names.get(pid) or process_name(pid) for pid in found}  # read once per process
        return tuple(
            ProcessLoad(pid, self._names[pid], memory.memory_bytes, shares.get(pid), memory.is_mps_client)
            for pid, memory in sorted(found.items())
        )
