"""Load while a fleet runs: the GPU, CPU by kind of program, the core that gets the GPU's interrupts."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import psutil

from loadtest.bench.gpu.programs import STUB, TRITON
from loadtest.bench.gpu.stretch import busy_cpu_s
from penstock.gateway.workers.interrupt_affinity import Interrupts, InterruptWatch
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable

_ACTIVITY = ("sm", "sm_occupancy", "tensor", "memory_bandwidth", "nvdec", "graphics_engine")
_PAUSE_S = 0.2


class CardMeter:
    """A context. Activity comes from the product's sampler, decoder utilisation and PCIe from NVML."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._sampler = Sampler() if is_gpu else None
        self._nvml: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        """Raises TelemetryUnavailable without a GPU."""
        if self._sampler is not None:
            self._sampler.__enter__()
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._sampler.__exit__(None, None, None)

    def during(self, seconds: float) -> dict[str, float]:
        """Waits that long. Means: shares from 0 to 1; PCIe in MB/s, each way."""
        begin_s = time.monotonic()
        samples: list[dict[str, float]] = []
        while (left_s := begin_s + seconds - time.monotonic()) > 0:
            if self._nvml is not None:
                samples.append(self._ask())
            time.sleep(max(min(left_s, _PAUSE_S, begin_s + seconds - time.monotonic()), 0.0))
        names = {name for sample in samples for name in sample}
        means = {name: sum(one.get(name, 0.0) for one in samples) / len(samples) for name in sorted(names)}
        return means | self._activity(begin_s, time.monotonic())

    def _ask(self) -> dict[str, float]:
        nvml, found = self._nvml, {}
        with suppress(nvml.NVMLError):
            found["decoder_utilisation"] = nvml.nvmlDeviceGetDecoderUtilization(self._handle)[0] / 100
        ways = {"pcie_to_card_mb_s": nvml.NVML_PCIE_UTIL_RX_BYTES, "pcie_to_host_mb_s": nvml.NVML_PCIE_UTIL_TX_BYTES}
        for name, way in ways.items():
            with suppress(nvml.NVMLError):
                found[name] = nvml.nvmlDeviceGetPcieThroughput(self._handle, way) / 1024
        return found

    def _activity(self, begin_s: float, end_s: float) -> dict[str, float]:
        if self._sampler is None:
            return {}
        try:
            card = self._sampler.mean(begin_s, end_s)[0]
        except (TelemetryUnavailable, IndexError):
            return {}
        shares = {name: getattr(card.activity, name) for name in _ACTIVITY} | {"util": card.kernel_running}
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(frozen=True, slots=True)
class MachineUsage:
    """So far. at_s: monotonic. cpu_s: by (kind, pid). machine_s: CPU of the whole machine.

    interrupts: of the GPU, by core. idle_s: of each core.
    """

    at_s: float
    cpu_s: Mapping[tuple[str, int], float]
    machine_s: float
    interrupts: Mapping[int, int]
    idle_s: Mapping[int, float]


def usage_of(programs: Iterable[int], stack: int) -> MachineUsage:
    """Of video programs and of `penstock up`, by their process ids, with their descendants."""
    cpu_s: dict[tuple[str, int], float] = {}
    for root, own in [*((pid, "video program") for pid in programs), (stack, "gateway")]:
        for process in _family(root):
            with suppress(psutil.Error):
                times = process.cpu_times()
                cpu_s[_kind_of(process, own), process.pid] = times.user + times.system
    idle_s = {core: times.idle + times.iowait for core, times in enumerate(psutil.cpu_times(percpu=True))}
    return MachineUsage(time.monotonic(), cpu_s, busy_cpu_s(), Interrupts().by_core(), idle_s)


def cores_by_kind(before: MachineUsage, after: MachineUsage) -> dict[str, float]:
    """Cores that each kind of process used; "machine" is everything, with the bench."""
    seconds = after.at_s - before.at_s
    found = {"machine": (after.machine_s - before.machine_s) / seconds}
    for (kind, pid), used in after.cpu_s.items():
        found[kind] = found.get(kind, 0.0) + (used - before.cpu_s.get((kind, pid), used)) / seconds
    return {kind: round(cores, 4) for kind, cores in found.items()}


def interrupted_between(before: MachineUsage, after: MachineUsage) -> dict[str, float]:
    """per_s: interrupts of the GPU. core: the one that got most. busy, others_busy: shares of time not idle.

    Empty without interrupts. The system may count an interrupt's time as idle of no process, so busy is all that is
    not idle.
    """
    seconds = after.at_s - before.at_s
    rates = InterruptWatch(before.at_s, before.interrupts).rates(after.at_s, after.interrupts)
    core = max(rates, key=lambda one: rates[one], default=-1)
    if core not in after.idle_s or not rates[core]:
        return {}
    busy = {one: 1 - min((idle - before.idle_s.get(one, 0.0)) / seconds, 1.0) for one, idle in after.idle_s.items()}
    others = [share for one, share in busy.items() if one != core]
    return {
        "per_s": sum(rates.values()),
        "core": core,
        "busy": busy[core],
        "others_busy": sum(others) / max(len(others), 1),
    }


def _family(root: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def _kind_of(process: psutil.Process, own: str) -> str:
    name = process.name()
    if name.startswith(TRITON):
        return "triton"
    if STUB.startswith(name):
        return "model instance"
    return "decode process" if "penstock_video.sources" in " ".join(process.cmdline()) else own
