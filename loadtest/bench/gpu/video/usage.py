"""What the processes of a run use: cores by kind, by process and by thread, from /proc; and the machine's own."""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.bench.gpu.penstock_up import STUB, TRITON

_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = (("deepstream_pipeline.sources", "decode process"), ("server.gpu.telemetry", "telemetry"))
_COMMAND_CHARACTERS = 60
_PROCESSOR = 36  # of the fields behind the name


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far. processes: by (kind, pid). threads: by (kind, pid, tid, the kernel's name of it).

    at_s: when it was read, monotonic.
    """

    at_s: float
    processes: Mapping[tuple[str, int], float]
    threads: Mapping[tuple[str, int, int, str], float]
    machine_s: float


def usage_of(programs: Iterable[int], stack: int | None) -> Usage:
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
    return Usage(time.monotonic(), processes, threads, busy_s())


def cores_by_kind(before: Usage, after: Usage) -> dict[str, float]:
    """Cores that each kind used in between; "machine" is everything on it, the bench too."""
    seconds = after.at_s - before.at_s
    found: dict[str, float] = {"machine": (after.machine_s - before.machine_s) / seconds}
    for (kind, pid), used in after.processes.items():
        spent = used - before.processes.get((kind, pid), used)
        found[kind] = found.get(kind, 0.0) + spent / seconds
    return {kind: round(cores, 4) for kind, cores in found.items()}


def busiest(before: Usage, after: Usage, most: int = 16) -> dict[str, list[list[object]]]:
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
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


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
    return "video helper" if is_video else f"gateway: {_words(command)}"


def _words(command: str) -> str:
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
