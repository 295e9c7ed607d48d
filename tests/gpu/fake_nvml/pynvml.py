"""Stands in for nvidia-ml-py: the calls that telemetry makes, answered from a JSON file that a test may rewrite.

The file's path is in FAKE_NVML. {"cards": [{"uuid", "name", "util", "gpm": {metric id: percent}, "gpm_error",
"used", "total", "cores", "capability", "compute_mode", "processes": [[pid, bytes]], "mps_processes": [[pid, bytes]],
"shares": [[pid, µs, percent]], "error", "open_error"}], "xids": [[card, number]], "init_error"}. Each process reports
an Xid once. Names, values and what is raised when are those of nvidia-ml-py 13.615 and of NVML's reference.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_UNKNOWN = 999
NVML_COMPUTEMODE_DEFAULT = 0
NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
NVML_COMPUTEMODE_PROHIBITED = 2
NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
NVML_DEVICE_MIG_ENABLE = 1
NVML_GPM_METRIC_GRAPHICS_UTIL = 1
NVML_GPM_METRIC_SM_UTIL = 2
NVML_GPM_METRIC_SM_OCCUPANCY = 3
NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
NVML_GPM_METRIC_DRAM_BW_UTIL = 10
NVML_GPM_METRIC_NVDEC_0_UTIL = 30
NVML_GPM_METRIC_NVJPG_0_UTIL = 40
NVML_GPM_METRIC_MAX = 477
NVML_GPM_METRICS_GET_VERSION = 1
nvmlEventTypeXidCriticalError = 8
_WORDS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    15: "GPU is lost",
    16: "GPU requires restart",
    999: "Unknown Error",
}
_reported: list[Any] = []


class NVMLError(Exception):
    """As the real one: its value is NVML's number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _WORDS.get(self.value, f"NVML Error with code {self.value}")


class NVMLError_NotSupported(NVMLError):
    """Raised where a card has no utilisation."""

    def __init__(self) -> None:
        super().__init__(NVML_ERROR_NOT_SUPPORTED)


def _state() -> dict[str, Any]:
    state: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return state


def _card(index: int) -> dict[str, Any]:
    card: dict[str, Any] = _state()["cards"][index]
    if "error" in card:
        raise NVMLError(card["error"])
    return card


def nvmlInit() -> None:
    if "init_error" in _state():
        raise NVMLError(_state()["init_error"])


def nvmlSystemGetDriverVersion() -> str:
    return "580.95.05"


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlDeviceGetCudaComputeCapability(device: int) -> tuple[int, int]:
    major, minor = _card(device).get("capability", (9, 0))
    return major, minor


def nvmlDeviceGetNumGpuCores(device: int) -> int:
    return int(_card(device).get("cores", 16896))


def nvmlDeviceGetComputeMode(device: int) -> int:
    return int(_card(device).get("compute_mode", NVML_COMPUTEMODE_DEFAULT))


def nvmlDeviceGetMigMode(device: int) -> tuple[int, int]:
    _card(device)
    raise NVMLError_NotSupported


def nvmlDeviceGetCount() -> int:
    return len(_state()["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    card = _state()["cards"][index]
    if "open_error" in card:
        raise NVMLError(card["open_error"])
    return index


def nvmlDeviceGetIndex(device: int) -> int:
    return device


def nvmlDeviceGetUUID(device: int) -> str:
    return str(_state()["cards"][device]["uuid"])


def nvmlDeviceGetName(device: int) -> str:
    return str(_state()["cards"][device].get("name", "NVIDIA H200"))


def nvmlDeviceGetMemoryInfo(device: int) -> SimpleNamespace:
    card = _card(device)
    return SimpleNamespace(used=card.get("used", 0), total=card.get("total", 1 << 30))


def nvmlDeviceGetUtilizationRates(device: int) -> SimpleNamespace:
    card = _card(device)
    if card.get("util") is None:
        raise NVMLError_NotSupported
    return SimpleNamespace(gpu=card["util"])


def nvmlDeviceGetComputeRunningProcesses(device: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _card(device).get("processes", ())]


def nvmlDeviceGetMPSComputeRunningProcesses(device: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _card(device).get("mps_processes", ())]


def nvmlDeviceGetProcessUtilization(device: int, seen_us: int) -> list[SimpleNamespace]:
    samples = [
        SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=percent)
        for pid, at_us, percent in _card(device).get("shares", ())
        if at_us > seen_us
    ]
    if not samples:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return samples


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(device: int, types: int, events: list[int]) -> None:
    assert types == nvmlEventTypeXidCriticalError
    events.append(device)


def nvmlEventSetWait_v2(events: list[int], timeout_ms: int) -> SimpleNamespace:
    for card, number in _state().get("xids", ()):
        if card in events and (card, number) not in _reported:
            _reported.append((card, number))
            return SimpleNamespace(device=card, eventData=number)
    raise NVMLError(NVML_ERROR_TIMEOUT)


def nvmlGpmQueryDeviceSupport(device: int) -> SimpleNamespace:
    card = _card(device)
    if "gpm_error" in card:
        raise NVMLError(card["gpm_error"])
    return SimpleNamespace(isSupportedDevice=int("gpm" in card))


def nvmlGpmSampleAlloc() -> dict[str, Any]:
    return {}


def nvmlGpmSampleGet(device: int, sample: dict[str, Any]) -> dict[str, Any]:
    """A copy of the counters: here, which card, and how many samples were taken of it before."""
    _reported.append(("sample", device))
    sample.update(device=device, number=_reported.count(("sample", device)), gpm=_card(device)["gpm"])
    return sample


def c_nvmlGpmMetricsGet_t() -> SimpleNamespace:
    metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(NVML_GPM_METRIC_MAX)]
    return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)


def nvmlGpmMetricsGet(asked: SimpleNamespace) -> SimpleNamespace:
    """Figures are of the time between two samples: the last one, and the one before it."""
    assert asked.version == NVML_GPM_METRICS_GET_VERSION
    assert asked.sample2["number"] - asked.sample1["number"] == 1
    for metric in asked.metrics[: asked.numMetrics]:
        percent = asked.sample2["gpm"].get(str(metric.metricId))
        metric.nvmlReturn = NVML_SUCCESS if percent is not None else NVML_ERROR_NOT_SUPPORTED
        metric.value = float("nan") if percent is None else percent
    return asked
