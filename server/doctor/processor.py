"""The CPU: its cores as far as we may use them, and whether INT8 pays on it."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from server.backends.ort_serving.threads import CGROUP_ROOT, available_cores, cgroup_quota
from server.doctor.finding import Finding, Status
from server.doctor.plan import Plan

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
    """usable: cores by affinity and quota. quota: the cgroup's, in cores; None without one. flags: the kernel's."""

    model: str
    installed: int
    affinity: int
    usable: int
    quota: float | None
    flags: tuple[str, ...]


def probe(plan: Plan) -> ProcessorFacts:
    """Reads /proc/cpuinfo and the cgroup."""
    text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    lines = dict(_pair(line) for line in reversed(text.splitlines()) if ":" in line)  # the first core's lines win
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


def findings_of(facts: ProcessorFacts) -> list[Finding]:
    """Cores, and what INT8 brings."""
    return [_cores(facts), _int8(facts)]


def _cores(facts: ProcessorFacts) -> Finding:
    found = f"{facts.model}, {facts.usable} of {facts.installed} cores"
    if facts.quota is not None and facts.quota < facts.affinity:
        found += f" (the cgroup's quota is {facts.quota:g})"
    elif facts.affinity < facts.installed:
        found += " (affinity)"
    if facts.usable > 1:
        return Finding("cpu.cores", Status.OK, found)
    advice = "gateway, decoders and engine share one core: give it two or more (docker run --cpus 2)"
    return Finding("cpu.cores", Status.NOTE, found, advice)


def _int8(facts: ProcessorFacts) -> Finding:
    dot_product = [name for flag, name in _DOT_PRODUCT.items() if flag in facts.flags]
    vectors = [name for flag, name in _VECTORS.items() if flag in facts.flags]
    if dot_product:
        return Finding("cpu.int8", Status.OK, f"{', '.join(dot_product + vectors)}: INT8 pays")
    if vectors:
        advice = "measure it before you use it: penstock models optimize NAME --int8 --calibrate DIR"
        return Finding("cpu.int8", Status.NOTE, f"{', '.join(vectors)} without VNNI: INT8 gains little", advice)
    advice = "use a CPU with AVX2 (x86-64-v3) or better; a virtual machine may hide what its host has"
    return Finding("cpu.int8", Status.WARNING, "neither AVX2 nor NEON: models run slowly", advice)
