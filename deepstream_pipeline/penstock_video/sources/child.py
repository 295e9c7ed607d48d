"""A source's decode process: `python -m penstock_video.sources.child PARENT FD_SOCKET FD_RING`.

PARENT is the process ID of the program. The first message of its socket says what to open, so that no argument or
variable contains a password. It may be killed at any time; only a recording's playable .part file remains. Start it in
a thread that lives as long as its children: Linux kills them when that thread ends (PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_HEAP_BYTES = 32 * 2**20  # glibc's maximum for one allocation


def main(arguments: list[str]) -> int:
    """Exit code: 0 after a regular end. Errors are sent over the socket, as Ended."""
    if len(arguments) != 3 or not all(word.isdecimal() for word in arguments):
        sys.stderr.write(
            "this is a part of `penstock video`, which starts it with its process ID and two descriptors\n"
        )
        return 2
    settle(int(arguments[0]))
    from penstock_video.sources.child_work import serve  # after the variable is set, because this imports numpy

    with socket.socket(fileno=int(arguments[1])) as link:
        return serve(link, int(arguments[2]))


def settle(parent_pid: int) -> None:
    """Prepares a decode process before it imports numpy: signals, memory and threads. Exits if its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before prctl, so no signal will come
        sys.exit("the program that started this decode process has ended")
    _keep_memory(library)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy starts an unused thread for each core


def _keep_memory(library: ctypes.CDLL) -> None:
    """Reuses large freed buffers (glibc only), since the kernel would clear new pages for each frame: 1.7 -> 0.4 ms for
    a conversion at 1280 x 720."""
    with suppress(AttributeError):
        library.mallopt(_M_MMAP_THRESHOLD, _MOST_HEAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _MOST_HEAP_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
