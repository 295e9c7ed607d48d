"""What the shell lets a process have: files, processes, core files, locked memory."""

import resource
from dataclasses import dataclass
from pathlib import Path

from server.doctor.finding import MIB, Finding, Status, shown_bytes
from server.doctor.plan import Plan

FILES_A_REQUEST = 2  # the caller's connection and the one to the engine
FILES_APART = 256  # listeners, logs, pipes, libraries
MIN_TASKS = 1024  # threads count; tritonserver alone has 98 on two cores
PINNED_BYTES = 64 * MIB

Limit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """(soft, hard) each, -1 for unlimited. has_gpu: memory is pinned for its copies then."""

    files: Limit
    tasks: Limit
    core: Limit
    locked: Limit
    max_inflight_requests: int
    has_gpu: bool


def probe(plan: Plan) -> LimitFacts:
    """Asks the kernel; the stack would inherit these."""
    return LimitFacts(
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        tasks=resource.getrlimit(resource.RLIMIT_NPROC),
        core=resource.getrlimit(resource.RLIMIT_CORE),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        max_inflight_requests=plan.max_inflight_requests,
        has_gpu=Path("/dev/nvidiactl").exists(),
    )


def findings_of(facts: LimitFacts) -> list[Finding]:
    """One finding a limit."""
    return [_files(facts), _tasks(facts), _core(facts), _locked(facts)]


def _files(facts: LimitFacts) -> Finding:
    soft, hard = facts.files
    needed = FILES_A_REQUEST * facts.max_inflight_requests + FILES_APART
    found = f"{_shown(soft)} open files (hard limit {_shown(hard)})"
    if _allows(hard, needed):  # `penstock up` raises the soft one
        return Finding("limits.files", Status.OK, found)
    found += f"; {facts.max_inflight_requests} requests in flight may need {needed}"
    fewer = max(1, (hard - FILES_APART) // FILES_A_REQUEST)
    advice = f"raise the hard limit (docker run --ulimit nofile={needed}), or PENSTOCK_MAX_INFLIGHT_REQUESTS={fewer}"
    return Finding("limits.files", Status.WARNING, found, advice)


def _tasks(facts: LimitFacts) -> Finding:
    soft, _ = facts.tasks
    found = f"{_shown(soft)} processes and threads of this user"
    if _allows(soft, MIN_TASKS):
        return Finding("limits.tasks", Status.OK, found)
    advice = f"engine, gateway, decoders and what they start count together: ulimit -u {MIN_TASKS}"
    return Finding("limits.tasks", Status.WARNING, found, advice)


def _core(facts: LimitFacts) -> Finding:
    soft, _ = facts.core
    found = "no core files: a crash leaves its log only" if soft == 0 else f"core files of {_size(soft)}"
    return Finding("limits.core", Status.OK, found)


def _locked(facts: LimitFacts) -> Finding:
    soft, _ = facts.locked
    found = f"{_size(soft)} of locked memory"
    if not facts.has_gpu or _allows(soft, PINNED_BYTES):
        return Finding("limits.locked", Status.OK, found)
    advice = "copies to the GPU are fastest from pinned memory: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    return Finding("limits.locked", Status.NOTE, found, advice)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _size(limit: int) -> str:
    return "unlimited size" if limit == resource.RLIM_INFINITY else shown_bytes(limit)
