"""Load while a fleet runs: GPU, decoders, engine, CPU by program, interrupts."""

import os
import re
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from loadtest.bench.gpu.programs import STUB, TRITON
from penstock.gateway.workers.interrupt_affinity import Interrupts, InterruptWatch
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable

_SAMPLE = re.compile(r"^nv_inference_(\w+?)(?:\{.*\})? (\S+)$", re.MULTILINE)
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """So far, of all models. waited_s, computed_s: each request's own, so that a batch's count once a request."""

    requests: float = 0.0
    rows: float = 0.0
    executions: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0


def ask_engine(url: str) -> EngineCounts:
    """By the metrics page there; nothing where it does not answer: the window counts without it."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            return counts_of(bytes(answer.read()).decode(errors="replace"))
    except (OSError, ValueError):
        return EngineCounts()


def counts_of(text: str) -> EngineCounts:
    """Of a metrics page."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    computed = sum(sums.get(f"compute_{part}_duration_us", 0.0) for part in ("input", "infer", "output"))
    return EngineCounts(
        requests=sums.get("request_success", 0.0),
        rows=sums.get("count", 0.0),
        executions=sums.get("exec_count", 0.0),
        waited_s=sums.get("queue_duration_us", 0.0) / 1e6,
        computed_s=computed / 1e6,
    )


def busy_between(before: EngineCounts, after: EngineCounts, seconds: float, instances: int) -> dict[str, float]:
    """busy: the share of the time in which an instance works, of all instances. {} where nothing was asked of them."""
    requests, executions = after.requests - before.requests, after.executions - before.executions
    if min(requests, executions, instances) < 1:
        return {}
    an_execution_s = (after.computed_s - before.computed_s) / requests
    return {
        "busy": an_execution_s * executions / seconds / instances,
        "instances": float(instances),
        "rows_an_execution": (after.rows - before.rows) / executions,
        "ms_an_execution": 1000 * an_execution_s,
        "queue_ms": 1000 * (after.waited_s - before.waited_s) / requests,
    }


def engine_text(engine: Mapping[str, float]) -> str:
    """Empty where nothing is known."""
    if not engine:
        return ""
    executions = f"{engine['rows_an_execution']:.1f} rows an execution of {engine['ms_an_execution']:.1f} ms"
    return f"Triton: {executions}, after {engine['queue_ms']:.1f} ms in its queue."


_ACTIVITY = ("sm", "sm_occupancy", "tensor", "memory_bandwidth", "nvdec", "graphics_engine")
_PAUSE_S = 0.2


class CardMeter:
    """A context. Activity comes from the product's own sampler, PCIe and NVML's decoder utilisation from here."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._sampler = Sampler() if is_gpu else None
        self._nvml: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        """Raises NoTelemetry where there should be a card and nothing can be read."""
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
        """Waits so long. Shares from 0 to 1; PCIe in MB/s, each way, the mean of NVML's samples of 20 ms."""
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
        with suppress(nvml.NVMLError):
            to_card = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            found["pcie_to_card_mb_s"] = to_card / 1024
        with suppress(nvml.NVMLError):
            to_host = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
            found["pcie_to_host_mb_s"] = to_host / 1024
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
class CoreLook:
    """counts: interrupts of the cards so far, by core. idle_s: of each core so far. at_s: monotonic."""

    at_s: float
    counts: Mapping[int, int]
    idle_s: Mapping[int, float]


def look_at_cores() -> CoreLook:
    """As it is now."""
    idle_s = {core: times.idle + times.iowait for core, times in enumerate(psutil.cpu_times(percpu=True))}
    return CoreLook(time.monotonic(), Interrupts().by_core(), idle_s)


def interrupted_between(before: CoreLook, after: CoreLook) -> dict[str, float]:
    """per_s: interrupts of the cards. core: the one that got most, its busy share, and the others' in the middle.

    The system may count the time of an interrupt as idle of no process: busy is all that is not idle. Empty if
    there were no interrupts.
    """
    seconds = after.at_s - before.at_s
    rates = InterruptWatch(before.at_s, before.counts).rates(after.at_s, after.counts)
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


_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = (("penstock_video.sources", "decode process"), ("penstock.gpu.telemetry", "telemetry"))
_COMMAND_CHARACTERS = 60
_PROCESSOR = 36  # of the fields behind the name


@dataclass(frozen=True, slots=True)
class FleetUsage:
    """CPU seconds so far. processes: by (kind, pid). threads: by (kind, pid, tid, the kernel's name of it).

    at_s: when it was read, monotonic.
    """

    at_s: float
    processes: Mapping[tuple[str, int], float]
    threads: Mapping[tuple[str, int, int, str], float]
    machine_s: float


def usage_of(programs: Iterable[int], stack: int | None) -> FleetUsage:
    """Of video programs and of `penstock up`, by their process ids, with all below them."""
    processes: dict[tuple[str, int], float] = {}
    threads: dict[tuple[str, int, int, str], float] = {}
    for root, own in [*((pid, "video program") for pid in programs), *([(stack, "")] if stack else [])]:
        for process in _family(root):
            with suppress(psutil.Error, OSError):
                kind = own if process.pid == root and own else _kind_of(process, is_video=bool(own))
                times = process.cpu_times()
                processes[kind, process.pid] = times.user + times.system
                if kind != "decode process":
                    for tid, name, seconds in _threads_of(process.pid):
                        threads[kind, process.pid, tid, name] = seconds
    return FleetUsage(time.monotonic(), processes, threads, busy_s())


def cores_by_kind(before: FleetUsage, after: FleetUsage) -> dict[str, float]:
    """Cores that each kind used in between; "machine" is everything on it, the bench too."""
    seconds = after.at_s - before.at_s
    found: dict[str, float] = {"machine": (after.machine_s - before.machine_s) / seconds}
    for (kind, pid), used in after.processes.items():
        spent = used - before.processes.get((kind, pid), used)
        found[kind] = found.get(kind, 0.0) + spent / seconds
    return {kind: round(cores, 4) for kind, cores in found.items()}


def busiest(before: FleetUsage, after: FleetUsage, most: int = 16) -> dict[str, list[list[object]]]:
    """Who used most, [what, cores]: processes; threads of all but decode processes, alone (with the core that each is
    on now) and by their names."""
    processes = {
        f"{kind}, pid {pid}": used - before.processes.get((kind, pid), used)
        for (kind, pid), used in after.processes.items()
    }
    threads: dict[str, float] = {}
    places: dict[str, Path] = {}
    for (kind, pid, tid, name), used in after.threads.items():
        what = f"{kind}, pid {pid}, {'main thread' if tid == pid else f'thread {tid} ({name})'}"
        threads[what] = used - before.threads.get((kind, pid, tid, name), used)
        places[what] = Path(f"/proc/{pid}/task/{tid}/stat")
    seconds = after.at_s - before.at_s
    names: dict[str, float] = {}
    for (kind, pid, tid, name), used in after.threads.items():
        what = f"{kind}: {'main thread' if tid == pid else name}"
        names[what] = names.get(what, 0.0) + used - before.threads.get((kind, pid, tid, name), used)
    return {
        "processes": _most(processes, seconds, most),
        "threads": [[what, cores, _core_of(places[str(what)])] for what, cores in _most(threads, seconds, most)],
        "threads_by_name": _most(names, seconds, most),
    }


def busy_s() -> float:
    """Seconds that the machine's cores were not idle."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)  # plain-english: ok


def decode_processes(program: int) -> list[int]:
    """Of a video program, those that used most first."""
    found = []
    for process in _family(program):
        with suppress(psutil.Error):
            if process.pid != program and _kind_of(process, is_video=True) == "decode process":
                times = process.cpu_times()
                found.append((times.user + times.system, process.pid))
    return [pid for _, pid in sorted(found, reverse=True)]


def _most(used: Mapping[str, float], seconds: float, most: int) -> list[list[object]]:
    order = sorted(used, key=lambda what: -used[what])[:most]
    return [[what, round(used[what] / seconds, 3)] for what in order]


def _core_of(stat: Path) -> int:
    """-1 for a thread that is over."""
    with suppress(OSError, ValueError, IndexError):
        return int(stat.read_text().rpartition(")")[2].split()[_PROCESSOR])
    return -1


def _family(root: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def _kind_of(process: psutil.Process, *, is_video: bool) -> str:
    name, command = process.name(), " ".join(process.cmdline())
    if name.startswith(TRITON):
        return "triton"
    if STUB.startswith(name):
        return "model instance"
    found = next((kind for word, kind in _KINDS if word in command), "")
    if found:
        return found
    return "video helper" if is_video else f"gateway: {_arguments(command)}"


def _arguments(command: str) -> str:
    """The module that a Python runs, else the command's end."""
    words = command.split()
    module = next((words[place + 1] for place, word in enumerate(words[:-1]) if word == "-m"), "")
    return module or command[-_COMMAND_CHARACTERS:] or "no command"


def _threads_of(pid: int) -> list[tuple[int, str, float]]:
    found = []
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError, ValueError, IndexError):
            head, _, rest = (folder / "stat").read_text().rpartition(")")
            words = rest.split()
            found.append((int(folder.name), head.partition("(")[2], (int(words[11]) + int(words[12])) / _TICKS))
    return found
