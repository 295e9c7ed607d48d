"""Runs `penstock models add` for the gateway, in a process that limits itself before it reads the file."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NICE = 10  # the models that are served come first


def main(arguments: list[str]) -> int:
    """The command's exit code. arguments: the parent's process id, bytes of memory, seconds of CPU, bytes of a file it
    may write; then those of `penstock models add`.
    """
    parent, memory_bytes, cpu_s, file_bytes = map(int, arguments[:4])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the gateway died before prctl
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        most = min(most, hard) if (hard := resource.getrlimit(limit)[1]) != resource.RLIM_INFINITY else most
        resource.setrlimit(limit, (most, most))
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # not writable everywhere; then the kernel's default applies
        Path("/proc/self/oom_score_adj").write_text("500")
    from penstock.cli.main import main as run_command  # after the limits, as its imports are large

    sys.argv = ["penstock", "models", "add", *arguments[4:]]
    return run_command()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
