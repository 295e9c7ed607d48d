"""Which processes hold a card: their memory, the share of time in which their kernels ran, and a name for each.

NVML gives process ids of the host; in a container with process ids of its own a name may be unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
_STUB = "triton_python_backend_stub"
_STUB_NAME_AT = 8  # of its arguments, see StubLauncher::Launch in triton-inference-server/python_backend
_MOST_PERCENT = 100  # NVML answers with rubbish beyond it where a process has just ended


@dataclass(frozen=True, slots=True)
class Held:
    """memory_bytes: None where NVML may not say it, as under some hypervisors."""

    memory_bytes: int | None
    is_mps_client: bool


def processes_of(nvml: Any, device: Any) -> dict[int, Held]:
    """By process id: those with a compute context of their own, and the clients of MPS."""
    found: dict[int, Held] = {}
    for ask, is_mps_client in (
        (nvml.nvmlDeviceGetComputeRunningProcesses, False),
        (nvml.nvmlDeviceGetMPSComputeRunningProcesses, True),
    ):
        try:
            processes = ask(device)
        except nvml.NVMLError:  # older drivers know no MPS clients; a container may see no process
            continue
        for process in processes:
            found[process.pid] = Held(process.usedGpuMemory, is_mps_client)
    return found


def time_shares(nvml: Any, device: Any, seen_us: int) -> tuple[dict[int, float], int]:
    """By process id, and the time of the newest sample: hand it in next time. Idle processes are not among them."""
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(device, seen_us)
    except nvml.NVMLError:  # no sample since then, or a card or driver that takes none
        return {}, seen_us
    shares: dict[int, list[float]] = {}
    for sample in samples:
        if sample.timeStamp > seen_us and sample.smUtil <= _MOST_PERCENT:
            shares.setdefault(sample.pid, []).append(sample.smUtil / 100)
    newest = max((sample.timeStamp for sample in samples), default=seen_us)
    return {pid: sum(each) / len(each) for pid, each in shares.items()}, max(newest, seen_us)


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """For a metric's label: few, and the same after a restart."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        return name_of(words) or (proc / str(pid) / "comm").read_text("utf-8", "replace").strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def name_of(words: Sequence[str]) -> str:
    """Of a command line: the model instance of one of Triton's Python stubs, else the program; empty for none."""
    program = words[0].rpartition("/")[2]
    if program == _STUB and len(words) > _STUB_NAME_AT:
        return words[_STUB_NAME_AT]
    return program.partition(" ")[0]
