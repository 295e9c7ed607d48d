"""What NVML says of this machine's cards, asked from a process of its own: a call into a sick driver may never return.

`python -m server.gpu.nvml` asks and prints one JSON object; `read_cards` runs that with a deadline.
"""

import sys
from enum import StrEnum

import msgspec

from server.gpu.child_answer import NoAnswer, ask_child

READ_TIMEOUT_S = 10.0  # the first call after boot initialises every card; seconds without the persistence daemon
_PROGRAM = (sys.executable, "-P", "-m", "server.gpu.nvml")


class NvmlOutcome(StrEnum):
    """How far NVML came."""

    ANSWERED = "answered"
    NO_BINDING = "nvidia-ml-py is not installed"
    NO_LIBRARY = "libnvidia-ml.so.1 is not here"
    NO_DRIVER = "the driver is not loaded"
    MISMATCH = "the driver's library and its kernel module differ in version"
    NO_PERMISSION = "no permission"
    TIMED_OUT = "no answer in time"
    FAILED = "failed"


class Card(msgspec.Struct, frozen=True):
    """One GPU. used_bytes: with what the driver reserves. compute_mode: NVML's name without its prefix, "DEFAULT".

    mig: None where the card has none.
    processes: process ids with a compute context, as far as NVML shows them here.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    used_bytes: int
    compute_mode: str = "DEFAULT"
    mig: bool | None = None
    processes: tuple[int, ...] = ()


class Reading(msgspec.Struct, frozen=True):
    """cuda: the newest version that the driver carries by itself, (13, 0); None where it did not say."""

    outcome: NvmlOutcome
    detail: str = ""
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()


def read_cards(timeout_s: float = READ_TIMEOUT_S) -> Reading:
    """Blocks for timeout_s, and a second, at most; whatever goes wrong is in the outcome."""
    try:
        return ask_child(_PROGRAM, Reading, timeout_s)
    except NoAnswer as error:
        return Reading(NvmlOutcome.TIMED_OUT if error.is_late else NvmlOutcome.FAILED, str(error))


def ask_nvml() -> Reading:
    """Asks in this process; may block for ever."""
    try:
        import pynvml as nvml
    except ImportError:
        return Reading(NvmlOutcome.NO_BINDING)
    outcomes = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: NvmlOutcome.NO_LIBRARY,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: NvmlOutcome.NO_DRIVER,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: NvmlOutcome.MISMATCH,
        nvml.NVML_ERROR_NO_PERMISSION: NvmlOutcome.NO_PERMISSION,
    }
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Reading(
            NvmlOutcome.ANSWERED,
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            cards=tuple(_card(index) for index in range(nvml.nvmlDeviceGetCount())),
        )
    except nvml.NVMLError as error:
        return Reading(outcomes.get(error.value, NvmlOutcome.FAILED), str(error))


def _card(index: int) -> Card:
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
    return Card(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        capability=(major, minor),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        compute_mode=modes.get(nvml.nvmlDeviceGetComputeMode(handle), "unknown"),
        mig=mig,
        processes=processes,
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ask_nvml()))
