"""Memory: what there is, what the container may use, swap."""

from dataclasses import dataclass

import psutil

from server.doctor import cgroup
from server.doctor.finding import GIB, Finding, Status, shown_bytes
from server.doctor.plan import Plan

OWN_NEED_BYTES = (
    GIB  # the stack with one small model takes 0.3 GiB on two cores; a decoder a core and models come on top
)
_SWAPPING = 0.25


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """limit_bytes: the cgroup's, None without one. inflight_bytes: what requests in flight may hold, by settings."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_bytes: int
    swap_used_bytes: int
    inflight_bytes: int


def probe(plan: Plan) -> MemoryFacts:
    """Asks the kernel."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return MemoryFacts(
        memory.total, memory.available, cgroup.memory_limit_bytes(), swap.total, swap.used, plan.max_inflight_bytes
    )


def findings_of(facts: MemoryFacts) -> list[Finding]:
    """Whether the requests that the gateway takes at once fit, and whether this machine swaps."""
    usable = min(facts.available_bytes, facts.limit_bytes or facts.available_bytes)
    found = f"{shown_bytes(facts.available_bytes)} of {shown_bytes(facts.total_bytes)} available"
    if facts.limit_bytes is not None and facts.limit_bytes < facts.total_bytes:
        found += f", the cgroup allows {shown_bytes(facts.limit_bytes)}"
    return [_size(facts, usable, found), _swap(facts)]


def _size(facts: MemoryFacts, usable: int, found: str) -> Finding:
    if usable >= OWN_NEED_BYTES + facts.inflight_bytes:
        return Finding("memory.size", Status.OK, found)
    found += f"; requests in flight alone may hold {shown_bytes(facts.inflight_bytes)}"
    fitting = max(GIB // 16, usable - OWN_NEED_BYTES)
    advice = f"give it more memory, or let fewer bytes in: PENSTOCK_MAX_INFLIGHT_BYTES={fitting} penstock up"
    return Finding("memory.size", Status.WARNING, found, advice)


def _swap(facts: MemoryFacts) -> Finding:
    if not facts.swap_bytes:
        return Finding("memory.swap", Status.OK, "no swap")
    found = f"{shown_bytes(facts.swap_used_bytes)} of {shown_bytes(facts.swap_bytes)} swap used"
    if facts.swap_used_bytes < _SWAPPING * facts.swap_bytes:
        return Finding("memory.swap", Status.OK, found)
    return Finding("memory.swap", Status.NOTE, found, "swapped pages break latency targets: find what fills memory")
