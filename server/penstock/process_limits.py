"""Limits for child processes that read untrusted files: end with the parent, memory, CPU time, file size."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ = "500"  # the kernel kills this process before its parent


def end_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends. Exits with code 1 if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def limit_process(memory_bytes: int, *, cpu_s: int | None = None, file_bytes: int | None = None) -> None:
    """Limits this process and raises its OOM score. Limits that the process has already are not raised.

    memory_bytes: of private memory; allocations beyond it fail. cpu_s: of all threads; then SIGXCPU, a second later
    SIGKILL. file_bytes: of one file; writes beyond it end in SIGXFSZ, or in EFBIG if that is ignored.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, memory_bytes)
    if cpu_s is not None:
        _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    if file_bytes is not None:
        _limit(resource.RLIMIT_FSIZE, file_bytes)
    with contextlib.suppress(OSError):  # not writable everywhere; then the kernel's default applies
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)


@contextlib.contextmanager
def limited_memory(memory_bytes: int) -> Iterator[None]:
    """Limits how much the private memory of this process can grow during the block; allocations beyond it fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    found = re.search(rb"VmData:\s*(\d+) kB", Path("/proc/self/status").read_bytes())
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if found is not None:
        limits.append(int(found[1]) * 1024 + memory_bytes)
    if limits:
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _limit(limit: int, soft: int, hard: int | None = None) -> None:
    hard = soft if hard is None else hard
    inherited = resource.getrlimit(limit)[1]
    if inherited != resource.RLIM_INFINITY:
        hard = min(hard, inherited)
    resource.setrlimit(limit, (min(soft, hard), hard))
