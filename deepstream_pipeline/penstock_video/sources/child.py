"""A source's decode process: `python -m penstock_video.sources.child FD_SOCKET FD_RING`.

The first message of its socket says what to open (no argument or variable contains a user or password). The process
writes decoded frames into the ring, and ends when its socket is closed. It may be killed at any moment: nothing of it
outlives it but a recording's .part, which is playable.

Who starts it does so from a thread that lives as long as its children should: Linux kills them when that thread is
over (PR_SET_PDEATHSIG), so that none is orphaned, whatever happens to the parent.
"""

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_HEAP_BYTES = 32 * 2**20  # of one piece: glibc takes no more


def main(arguments: list[str]) -> int:
    """0 where it ended in order and said so; what was wrong is said over the socket, as Ended."""
    if len(arguments) != 2 or not all(word.isdecimal() for word in arguments):
        sys.stderr.write("this is a part of `penstock video`, which starts it with two descriptors\n")
        return 2
    settle()
    from penstock_video.sources.child_work import serve  # after the variable: this imports numpy

    with socket.socket(fileno=int(arguments[0])) as link:
        return serve(link, int(arguments[1]))


def settle() -> None:
    """Of a decode process, before it imports numpy: whose child it is, and how it uses its machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _keep_memory(library)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start a thread for each core, and use none


def _keep_memory(library: ctypes.CDLL) -> None:
    """A picture's megabytes, freed and asked for with each frame, are not given back to the system in between.

    Measured with 1280 x 720, two conversions a frame: 1.7 -> 0.4 ms for the second one, whose pages the kernel would
    clear anew each time. Only glibc has this.
    """
    with suppress(AttributeError):
        library.mallopt(_M_MMAP_THRESHOLD, _MOST_HEAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _MOST_HEAP_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
