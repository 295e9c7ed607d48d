"""Becomes tritonserver, bound to die with the process that started it.

Run as a script, `python -I -S triton_launch.py PARENT_PID BINARY ARGUMENT...`. The bond (PR_SET_PDEATHSIG) outlives
execve, so even `kill -9` of the parent takes Triton along. It is a program of its own because the alternative,
`preexec_fn`, runs Python between fork and exec, which may deadlock in a process that has threads.

The kernel ties the bond to the parent's *thread*: start Triton from a thread that lives as long as the process.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
LIBRARY_PATH_VARIABLE = "PENSTOCK_ENGINE_LD_LIBRARY_PATH"


def main(arguments: list[str]) -> int:
    """Does not return where all goes well; 127 where the binary cannot be executed, 125 where the parent is gone."""
    parent_pid, binary, *rest = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return _refuse(126, f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent_pid):
        return _refuse(125, f"process {parent_pid}, which started this, is gone")
    environ = dict(os.environ)
    library_path = environ.pop(LIBRARY_PATH_VARIABLE, None)
    if library_path is not None:
        environ["LD_LIBRARY_PATH"] = library_path
    try:
        os.execve(binary, [binary, *rest], environ)
    except OSError as error:
        return _refuse(127, f"{binary} cannot be executed: {error.strerror}")


def _refuse(code: int, why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
