"""The host: operating system, Python, container, CPU, memory and process limits."""

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.doctor.finding import GIB, MIB, Finding, Severity, StackPlan, shown_bytes
from penstock.engines.ort_serving.threads import CGROUP_ROOT, available_cores, cgroup_folders, cgroup_quota
from penstock.engines.triton.environment import PYTHONS
from penstock.engines.triton.runtime import TritonUnavailable, check_platform, glibc_version

CGROUP_MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as the largest multiple of a page


def cgroup_version() -> int:
    """2 for the unified hierarchy, 1 for separate controllers, 0 for none."""
    if (CGROUP_MOUNT / "cgroup.controllers").exists():
        return 2
    return 1 if (CGROUP_MOUNT / "memory").is_dir() or (CGROUP_MOUNT / "cpu").is_dir() else 0


def memory_limit_bytes(root: Path = CGROUP_MOUNT, own: Path = OWN_CGROUP) -> int | None:
    """The smallest limit of this process's cgroup and its parents; None without a limit."""
    folders = cgroup_folders(root, own, "memory")
    limits = [limit for folder in folders if (limit := _cgroup_limit(folder)) is not None]
    return min(limits, default=None)


def _cgroup_limit(folder: Path) -> int | None:
    text = (_read_cgroup_file(folder / "memory.max") or _read_cgroup_file(folder / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _read_cgroup_file(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


_MARKS = {"docker": "docker", "kubepods": "kubernetes", "libpod": "podman", "containerd": "containerd", "lxc": "lxc"}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """glibc: None for another C library. container: its kind, or empty. cgroup_version: 0 for none."""

    system: str
    kernel: str
    machine: str
    glibc: tuple[int, int] | None
    python: tuple[int, int, int]
    container: str
    cgroup_version: int
    needs_triton: bool


def probe_host(plan: StackPlan) -> HostFacts:
    """Reads the C library's version, /etc/os-release and /proc."""
    return HostFacts(
        system=_system(),
        kernel=platform.release(),
        machine=platform.machine(),
        glibc=glibc_version(),
        python=sys.version_info[:3],
        container=container_kind(),
        cgroup_version=cgroup_version(),
        needs_triton=plan.engine == "triton",
    )


def container_kind() -> str:
    """docker, kubernetes, …; empty outside a container."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if Path("/run/.containerenv").exists():
        return "podman"
    if Path("/.dockerenv").exists():
        return "docker"
    try:
        own = Path("/proc/1/cgroup").read_text("utf-8", "replace")
    except OSError:
        own = ""
    return next((kind for mark, kind in _MARKS.items() if mark in own), os.environ.get("container", ""))  # noqa: SIM112 - podman and systemd-nspawn set it in lower case


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def host_findings(facts: HostFacts) -> list[Finding]:
    """Whether Triton's wheel runs here, the Python version, the container."""
    return [_wheel(facts), _python(facts), _container(facts)]


def _wheel(facts: HostFacts) -> Finding:
    library = "another C library" if facts.glibc is None else f"glibc {facts.glibc[0]}.{facts.glibc[1]}"
    found = f"{facts.system}, Linux {facts.kernel}, {facts.machine}, {library}"
    try:
        check_platform(facts.machine, facts.glibc)
    except TritonUnavailable as error:
        why, _, remedy = str(error).rpartition("; ")
        status = Severity.WARNING if facts.needs_triton else Severity.NOTE
        return Finding("host.system", status, f"{found}: {why}", remedy)
    return Finding("host.system", Severity.OK, found)


def _python(facts: HostFacts) -> Finding:
    found, version = "Python " + ".".join(map(str, facts.python)), ".".join(map(str, facts.python[:2]))
    if version in PYTHONS:
        return Finding("host.python", Severity.OK, found)
    found += f": Triton's models need numpy 1.26, so {' or '.join(sorted(PYTHONS))}"
    return Finding("host.python", Severity.NOTE, found, "penstock setup triton --python /path/to/python3.12")


def _container(facts: HostFacts) -> Finding:
    version = f"cgroup v{facts.cgroup_version}" if facts.cgroup_version else "no cgroup"
    return Finding("host.container", Severity.OK, f"{facts.container or 'no container'}, {version}")


_DOT_PRODUCT = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "i8mm": "I8MM",
    "asimddp": "dot product",
}
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """usable: cores by affinity and quota. quota: the cgroup's, in cores, or None. flags: the kernel's."""

    model: str
    installed: int
    affinity: int
    usable: int
    quota: float | None
    flags: tuple[str, ...]


def probe_processor(plan: StackPlan) -> ProcessorFacts:
    """Reads /proc/cpuinfo and the cgroup."""
    text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    lines = dict(_pair(line) for line in reversed(text.splitlines()) if ":" in line)  # the first core's values win
    return ProcessorFacts(
        model=lines.get("model name") or platform.machine(),
        installed=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        usable=available_cores(),
        quota=cgroup_quota(CGROUP_ROOT, Path("/proc/self/cgroup")),
        flags=tuple((lines.get("flags") or lines.get("Features") or "").split()),
    )


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def processor_findings(facts: ProcessorFacts) -> list[Finding]:
    """The usable cores, and the support for INT8."""
    return [_cores(facts), _int8(facts)]


def _cores(facts: ProcessorFacts) -> Finding:
    found = f"{facts.model}, {facts.usable} of {facts.installed} cores"
    if facts.quota is not None and facts.quota < facts.affinity:
        found += f" (the cgroup's quota is {facts.quota:g})"
    elif facts.affinity < facts.installed:
        found += " (affinity)"
    if facts.usable > 1:
        return Finding("cpu.cores", Severity.OK, found)
    advice = "gateway, decoders and engine share one core: give it two or more (docker run --cpus 2)"
    return Finding("cpu.cores", Severity.NOTE, found, advice)


def _int8(facts: ProcessorFacts) -> Finding:
    dot_product = [name for flag, name in _DOT_PRODUCT.items() if flag in facts.flags]
    vectors = [name for flag, name in _VECTORS.items() if flag in facts.flags]
    if dot_product:
        return Finding("cpu.int8", Severity.OK, f"{', '.join(dot_product + vectors)}: INT8 pays")
    if vectors:
        advice = "measure it before you use it: penstock models optimize NAME --int8 --calibrate DIR"
        return Finding("cpu.int8", Severity.NOTE, f"{', '.join(vectors)} without VNNI: INT8 gains little", advice)
    advice = "use a CPU with AVX2 (x86-64-v3) or better; a virtual machine may hide what its host has"
    return Finding("cpu.int8", Severity.WARNING, "neither AVX2 nor NEON: models run slowly", advice)


OWN_NEED_BYTES = GIB  # the stack with one small model takes 0.3 GiB on two cores; decoders and models come on top
_SWAPPING = 0.25


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """limit_bytes: the cgroup's, or None. inflight_bytes: limit for requests in flight, from the settings."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_bytes: int
    swap_used_bytes: int
    inflight_bytes: int


def probe_memory(plan: StackPlan) -> MemoryFacts:
    """Reads the kernel's memory statistics."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return MemoryFacts(
        memory.total, memory.available, memory_limit_bytes(), swap.total, swap.used, plan.max_inflight_bytes
    )


def memory_findings(facts: MemoryFacts) -> list[Finding]:
    """Whether requests in flight fit into memory, and whether this machine swaps."""
    usable = min(facts.available_bytes, facts.limit_bytes or facts.available_bytes)
    found = f"{shown_bytes(facts.available_bytes)} of {shown_bytes(facts.total_bytes)} available"
    if facts.limit_bytes is not None and facts.limit_bytes < facts.total_bytes:
        found += f", the cgroup allows {shown_bytes(facts.limit_bytes)}"
    return [_memory_size(facts, usable, found), _swap(facts)]


def _memory_size(facts: MemoryFacts, usable: int, found: str) -> Finding:
    if usable >= OWN_NEED_BYTES + facts.inflight_bytes:
        return Finding("memory.size", Severity.OK, found)
    found += f"; requests in flight alone may hold {shown_bytes(facts.inflight_bytes)}"
    fitting = max(GIB // 16, usable - OWN_NEED_BYTES)
    advice = f"give it more memory, or let fewer bytes in: PENSTOCK_MAX_INFLIGHT_BYTES={fitting} penstock up"
    return Finding("memory.size", Severity.WARNING, found, advice)


def _swap(facts: MemoryFacts) -> Finding:
    if not facts.swap_bytes:
        return Finding("memory.swap", Severity.OK, "no swap")
    found = f"{shown_bytes(facts.swap_used_bytes)} of {shown_bytes(facts.swap_bytes)} swap used"
    if facts.swap_used_bytes < _SWAPPING * facts.swap_bytes:
        return Finding("memory.swap", Severity.OK, found)
    return Finding("memory.swap", Severity.NOTE, found, "swapped pages break latency targets: find what fills memory")


FILES_A_REQUEST = 2  # the client's connection and the one to the engine
FILES_APART = 256  # listeners, logs, pipes, libraries
MIN_TASKS = 1024  # threads count; tritonserver has 98 on two cores
PINNED_BYTES = 64 * MIB

Limit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """(soft, hard) limits, -1 for unlimited. has_gpu: copies then need pinned memory."""

    files: Limit
    tasks: Limit
    core: Limit
    locked: Limit
    max_inflight_requests: int
    has_gpu: bool


def probe_limits(plan: StackPlan) -> LimitFacts:
    """Reads this process's limits, which the stack would inherit."""
    return LimitFacts(
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        tasks=resource.getrlimit(resource.RLIMIT_NPROC),
        core=resource.getrlimit(resource.RLIMIT_CORE),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        max_inflight_requests=plan.max_inflight_requests,
        has_gpu=Path("/dev/nvidiactl").exists(),
    )


def limit_findings(facts: LimitFacts) -> list[Finding]:
    """One finding per limit."""
    return [_files(facts), _tasks(facts), _core(facts), _locked(facts)]


def _files(facts: LimitFacts) -> Finding:
    soft, hard = facts.files
    needed = FILES_A_REQUEST * facts.max_inflight_requests + FILES_APART
    found = f"{_shown(soft)} open files (hard limit {_shown(hard)})"
    if _allows(hard, needed):  # `penstock up` raises the soft limit
        return Finding("limits.files", Severity.OK, found)
    found += f"; {facts.max_inflight_requests} requests in flight may need {needed}"
    fewer = max(1, (hard - FILES_APART) // FILES_A_REQUEST)
    advice = f"raise the hard limit (docker run --ulimit nofile={needed}), or PENSTOCK_MAX_INFLIGHT_REQUESTS={fewer}"
    return Finding("limits.files", Severity.WARNING, found, advice)


def _tasks(facts: LimitFacts) -> Finding:
    soft, _ = facts.tasks
    found = f"{_shown(soft)} processes and threads of this user"
    if _allows(soft, MIN_TASKS):
        return Finding("limits.tasks", Severity.OK, found)
    advice = f"engine, gateway, decoders and what they start count together: ulimit -u {MIN_TASKS}"
    return Finding("limits.tasks", Severity.WARNING, found, advice)


def _core(facts: LimitFacts) -> Finding:
    soft, _ = facts.core
    found = "no core files: a crash leaves its log only" if soft == 0 else f"core files of {_limit_text(soft)}"
    return Finding("limits.core", Severity.OK, found)


def _locked(facts: LimitFacts) -> Finding:
    soft, _ = facts.locked
    found = f"{_limit_text(soft)} of locked memory"
    if not facts.has_gpu or _allows(soft, PINNED_BYTES):
        return Finding("limits.locked", Severity.OK, found)
    advice = "copies to the GPU are fastest from pinned memory: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    return Finding("limits.locked", Severity.NOTE, found, advice)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _limit_text(limit: int) -> str:
    return "unlimited size" if limit == resource.RLIM_INFINITY else shown_bytes(limit)
