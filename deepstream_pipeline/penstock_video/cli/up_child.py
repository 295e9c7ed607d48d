"""`penstock up` as a child process that is stopped when its parent dies."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The exit code where it could not begin, else that of `penstock ARGUMENT…`, by SystemExit."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # it drains, and ends what it started
    if os.getppid() != parent:  # it died before the bond was made
        return 1
    sys.argv = ["penstock", *sys.argv[2:]]
    runpy.run_module("penstock.cli.main", run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
