"""The operating system, C library and Python, and the container around them."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from server.backends.triton_runtime import TritonUnavailable, check_platform, glibc_version
from server.doctor import cgroup
from server.doctor.finding import Finding, Status
from server.doctor.plan import Plan

PYTHONS = ((3, 11), (3, 12))
_MARKS = {"docker": "docker", "kubepods": "kubernetes", "libpod": "podman", "containerd": "containerd", "lxc": "lxc"}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """glibc: None for another C library. container: its kind, "" for none. cgroup_version: 2, 1, or 0 for none."""

    system: str
    kernel: str
    machine: str
    glibc: tuple[int, int] | None
    python: tuple[int, int, int]
    container: str
    cgroup_version: int
    needs_triton: bool


def probe(plan: Plan) -> HostFacts:
    """Asks the C library, /etc/os-release and /proc."""
    return HostFacts(
        system=_system(),
        kernel=platform.release(),
        machine=platform.machine(),
        glibc=glibc_version(),
        python=sys.version_info[:3],
        container=container_kind(),
        cgroup_version=cgroup.version(),
        needs_triton=plan.engine == "triton",
    )


def container_kind() -> str:
    """docker, kubernetes, …; "" where nothing tells of a container."""
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
    return next((kind for mark, kind in _MARKS.items() if mark in own), os.environ.get("container", ""))  # noqa: SIM112 - systemd-nspawn's and podman's word, in lower case


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def findings_of(facts: HostFacts) -> list[Finding]:
    """Whether Triton's wheel runs here, the Python, the container."""
    return [_wheel(facts), _python(facts), _container(facts)]


def _wheel(facts: HostFacts) -> Finding:
    library = "another C library" if facts.glibc is None else f"glibc {facts.glibc[0]}.{facts.glibc[1]}"
    found = f"{facts.system}, Linux {facts.kernel}, {facts.machine}, {library}"
    try:
        check_platform(facts.machine, facts.glibc)
    except TritonUnavailable as error:
        why, _, way_out = str(error).rpartition("; ")
        status = Status.WARNING if facts.needs_triton else Status.NOTE
        return Finding("host.system", status, f"{found}: {why}", way_out)
    return Finding("host.system", Status.OK, found)


def _python(facts: HostFacts) -> Finding:
    found = "Python " + ".".join(map(str, facts.python))
    if facts.python[:2] in PYTHONS:
        return Finding("host.python", Status.OK, found)
    advice = "rebuild the environment with Python 3.11 or 3.12: remove .venv and .venv-triton, then `make up`"
    return Finding("host.python", Status.PROBLEM, f"{found}: Triton's models need numpy 1.26 and 3.11 or 3.12", advice)


def _container(facts: HostFacts) -> Finding:
    version = f"cgroup v{facts.cgroup_version}" if facts.cgroup_version else "no cgroup"
    return Finding("host.container", Status.OK, f"{facts.container or 'no container'}, {version}")
