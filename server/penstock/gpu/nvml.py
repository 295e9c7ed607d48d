"""This machine's GPUs by NVML. Runs in a child process, because a call into a broken driver may hang."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TypeVar

import msgspec

_REAP_S = 1.0  # a killed process that hangs in the driver is not awaited; it is reaped at the next start

T = TypeVar("T")


class ChildProcessFailed(Exception):
    """The process gave no result; the text has the reason. is_late: it timed out."""

    def __init__(self, detail: str, *, is_late: bool = False) -> None:
        super().__init__(detail)
        self.is_late = is_late


def run_json_child(
    program: Sequence[str], kind: type[T], timeout_s: float, environ: Mapping[str, str] | None = None
) -> T:
    """The JSON object that the program prints. Blocks for at most timeout_s + 1 s. Raises ChildProcessFailed.

    environ: on top of this process's.
    """
    pipe, env = subprocess.PIPE, {**os.environ, **environ} if environ else None
    try:
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env)
    except OSError as error:
        raise ChildProcessFailed(str(error)) from error
    try:
        output, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_REAP_S)
        for stream in filter(None, (child.stdout, child.stderr)):
            stream.close()
        raise ChildProcessFailed(f"{timeout_s:g} s", is_late=True) from None
    try:
        return msgspec.json.decode(output, type=kind)
    except msgspec.DecodeError:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise ChildProcessFailed(last[0] if last else f"the process ended with {child.returncode}") from None


READ_TIMEOUT_S = 10.0  # NVML's first call after boot takes seconds without the persistence daemon
_PROGRAM = (sys.executable, "-P", "-m", "penstock.gpu.nvml")
# FP32 cores of an SM by compute capability, from the CUDA C++ Programming Guide.
_CORES_OF_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_NEWER_CORES_OF_SM = 128  # 6.1 and 6.2, and from 8.6 on


class NvmlOutcome(StrEnum):
    """Result of the NVML query."""

    ANSWERED = "answered"
    NO_BINDING = "nvidia-ml-py is not installed"
    NO_LIBRARY = "libnvidia-ml.so.1 is not here"
    NO_DRIVER = "the driver is not loaded"
    MISMATCH = "the driver's library and its kernel module differ in version"
    NO_PERMISSION = "no permission"
    TIMED_OUT = "no answer in time"
    FAILED = "failed"


class GpuDevice(msgspec.Struct, frozen=True):
    """One GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    used_bytes: int  # includes the driver's reserve
    compute_mode: str = "DEFAULT"  # NVML's name without its prefix
    mig: bool | None = None  # None if the card does not support it
    processes: tuple[int, ...] = ()  # visible process ids with a compute context
    uuid: str = ""  # "GPU-…"
    sm_count: int = 0  # streaming multiprocessors; 0 if unknown


class NvmlReading(msgspec.Struct, frozen=True):
    """cuda: the newest CUDA version of the driver itself, such as (13, 0); None if unknown. detail: the error, or which
    cards do not answer."""

    outcome: NvmlOutcome
    detail: str = ""
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[GpuDevice, ...] = ()


def read_cards(timeout_s: float = READ_TIMEOUT_S) -> NvmlReading:
    """Reads all GPUs. Blocks for at most timeout_s + 1 s. Failures are in the outcome."""
    try:
        return run_json_child(_PROGRAM, NvmlReading, timeout_s)
    except ChildProcessFailed as error:
        return NvmlReading(NvmlOutcome.TIMED_OUT if error.is_late else NvmlOutcome.FAILED, str(error))


def query_nvml() -> NvmlReading:
    """Reads NVML in this process; may hang."""
    try:
        import pynvml as nvml
    except ImportError:
        return NvmlReading(NvmlOutcome.NO_BINDING)
    outcomes = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: NvmlOutcome.NO_LIBRARY,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: NvmlOutcome.NO_DRIVER,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: NvmlOutcome.MISMATCH,
        nvml.NVML_ERROR_NO_PERMISSION: NvmlOutcome.NO_PERMISSION,
    }
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        cards, silent = _answering(range(nvml.nvmlDeviceGetCount()))
        return NvmlReading(
            NvmlOutcome.ANSWERED,
            "; ".join(f"GPU {index} does not answer: {error}" for index, error in silent.items()),
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            cards=cards,
        )
    except nvml.NVMLError as error:
        return NvmlReading(outcomes.get(error.value, NvmlOutcome.FAILED), str(error))


def _answering(indexes: Iterable[int]) -> tuple[tuple[GpuDevice, ...], dict[int, str]]:
    """The cards that answer, and the error of each other one. Raises NVMLError if none answers."""
    import pynvml as nvml

    cards, silent, last = [], {}, None
    for index in indexes:
        try:
            cards.append(_gpu_device(index))
        except nvml.NVMLError as error:
            silent[index], last = str(error), error
    if last is not None and not cards:
        raise last
    return tuple(cards), silent


def _gpu_device(index: int) -> GpuDevice:
    import pynvml as nvml

    modes = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "DEFAULT",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "EXCLUSIVE_THREAD",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "PROHIBITED",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "EXCLUSIVE_PROCESS",
    }
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # cards before Ampere have none
        mig = None
    try:
        processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # a container may not see them
        processes = ()
    try:
        sm_count = nvml.nvmlDeviceGetNumGpuCores(handle) // _CORES_OF_SM.get((major, minor), _NEWER_CORES_OF_SM)
    except nvml.NVMLError:
        sm_count = 0
    return GpuDevice(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        capability=(major, minor),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        compute_mode=modes.get(nvml.nvmlDeviceGetComputeMode(handle), "unknown"),
        mig=mig,
        processes=processes,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        sm_count=sm_count,
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(query_nvml()))
