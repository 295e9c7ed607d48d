"""What figures belong to: this machine as it is found, and whether a target speaks of such a machine.

`python -m penstock_load.hardware` prints the names of the GPUs as JSON: read_machine asks it with a deadline, for a
call into a sick driver may never return.
"""

import importlib.metadata
import ipaddress
import math
import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from penstock_load.results import Machine

NVML_TIMEOUT_S = 10.0  # the first call after boot initialises every card; seconds without the persistence daemon
GIT_TIMEOUT_S = 5.0
MEASURED_WITH = ("aiohttp", "grpcio", "locust", "numpy", "uvloop")
CGROUP_ROOT = Path("/sys/fs/cgroup")
GIB = float(1 << 30)
_ASK_NVML = (sys.executable, "-P", "-m", "penstock_load.hardware")


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a target speaks of. gpu: one card, by a name such as "V100"; "": any or none. cores: of the CPU; 0: any."""

    gpu: str = ""
    cores: int = 0

    def __str__(self) -> str:
        cores = f"{self.cores} cores" if self.cores else ""
        card = f"{'an' if self.gpu[:1] in 'AHL' else 'a'} {self.gpu}" if self.gpu else ""
        return " with ".join(filter(None, (card, cores))) or "any"


ANY = Hardware()


def describe(machine: Machine) -> str:
    """The hardware in a line: "2 × Tesla V100-SXM2-16GB, AMD EPYC, 16 cores"."""
    cards = [f"{machine.gpus.count(name)} × {name}" for name in dict.fromkeys(machine.gpus)]
    return ", ".join([*cards, machine.cpu, "1 core" if machine.cores == 1 else f"{machine.cores} cores"])


def matches(wanted: Hardware, found: Machine | str) -> bool:
    """Whether the machine, or what a person says of it ("1 × V100, 16 cores"), is what the target speaks of.

    A figure of one card is not one of two, nor of a slice of a card (vGPU, MIG); the cores must be as many.
    """
    cards = " , ".join(found.gpus) if isinstance(found, Machine) else found
    cores = found.cores if isinstance(found, Machine) else _declared_cores(found)
    has_card = not wanted.gpu or _cards(wanted.gpu, cards) == 1
    return has_card and (not wanted.cores or cores == wanted.cores)


def _cards(name: str, text: str) -> int:
    """How many cards of that name the text counts. P4 is in "Tesla P4" and "3 × P4", not in P40, L4 or "GRID P4-2Q"."""
    count, maker = r"(?:\b(\d{1,2})\s*[x×*]?\s+|\b(\d{1,2})[x×*])?", r"(?:(?:NVIDIA|Tesla|GRID)\s+)*"
    is_slice = r"-\d+[abcq]\b|[^,]{0,30}\bMIG\b"
    pattern = rf"{count}{maker}(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])(?!{is_slice})"
    found = re.finditer(pattern, text, re.IGNORECASE)
    return sum(int(match[1] or match[2] or 1) for match in found)


def _declared_cores(text: str) -> int:
    found = re.search(r"(\d+)[\s-]*(?:cores?|vcpus?|cpus?)\b", text, re.IGNORECASE)
    return int(found[1]) if found else 0


def is_local(url: str) -> bool:
    """Whether the address is this machine's. Names are not looked up: all but localhost and our own are elsewhere."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or str(address) in own_addresses()


def own_addresses() -> set[str]:
    """The addresses of this machine's interfaces, without their zones."""
    interfaces = psutil.net_if_addrs().values()
    return {one.address.partition("%")[0] for addresses in interfaces for one in addresses}


def read_machine() -> Machine:
    """This machine. Blocks for NVML_TIMEOUT_S at most; a GPU that cannot be asked is not among gpus."""
    return Machine(
        cpu=_cpu_name(),
        cores=_cores(),
        memory_gib=round(_memory_bytes() / GIB, 1),
        gpus=_gpu_names(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=(("Python", platform.python_version()), *_versions(("penstock", *MEASURED_WITH))),
    )


def checkout_commit(folder: Path) -> str:
    """The commit of the git checkout that the folder is in, with "+" after it if files differ; "" if unknown.

    Blocks for GIT_TIMEOUT_S at most.
    """
    git = ("git", "-C", str(folder), "--no-optional-locks", "-c", "core.fsmonitor=false")
    try:
        read, state = (
            subprocess.run([*git, *words], capture_output=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL)
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (subprocess.TimeoutExpired, OSError):
        return ""
    commit = read.stdout.decode("ascii", "replace").strip()
    return f"{commit}{'+' if state.stdout.strip() else ''}" if read.returncode == 0 else ""


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(CGROUP_ROOT, Path("/proc/self/cgroup"))
    return affinity if quota is None else min(affinity, max(1, math.ceil(quota)))


def cpu_quota(root: Path, own_cgroup: Path) -> float | None:
    """The smallest CPU quota, in cores, of this process's cgroup and those above it; None without a limit."""
    quotas = []
    for folder in _cgroups(root, own_cgroup, controller="cpu"):
        words = _read(folder / "cpu.max").split()  # version 2; version 1 has two files
        words = words or (_read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")).split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_bytes() -> int:
    limits = [
        int(text)
        for folder in _cgroups(CGROUP_ROOT, Path("/proc/self/cgroup"), controller="memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name).strip()).isdecimal()
    ]
    return min([psutil.virtual_memory().total, *limits])


def _cgroups(root: Path, own_cgroup: Path, *, controller: str) -> list[Path]:
    """Version 2 has one line, `0::/a/b`; version 1's controllers have folders and lines of their own."""
    folders = []
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / controller if controller in controllers.split(",") else root
        if top != root or not controllers:
            own = top.joinpath(*Path(path).parts[1:])
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return folders or [root, root / controller]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _versions(names: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return found


def _gpu_names() -> tuple[str, ...]:
    try:
        asked = subprocess.run(_ASK_NVML, capture_output=True, timeout=NVML_TIMEOUT_S, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(asked.stdout, type=tuple[str, ...])
    except (subprocess.TimeoutExpired, OSError, msgspec.DecodeError):
        return ()


def ask_nvml() -> tuple[str, ...]:
    """The names of the GPUs, asked in this process; may block for ever. Empty without a card, driver or binding."""
    try:
        import pynvml as nvml
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(nvml.nvmlDeviceGetName(handle) for handle in handles)
    except nvml.NVMLError:
        return ()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ask_nvml()))
