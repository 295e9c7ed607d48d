"""A decode process with several cameras: `python -m penstock_video.sources.shared_child CARD PINNED FD_CONTROL`.

Over its control socket come cameras, each as three descriptors: its socket, its ring, and a pipe into which a byte is
written when it is over. What it is to open stands in no argument and no variable. The process ends where its control
socket does, and its parent may kill it at any moment; Linux does so when the thread that started it is over. PINNED is
1 where it takes a core for itself, where one is free, and 0 where it may run on all of them.
"""

import os
import socket
import sys

from penstock.gateway.workers.interrupt_affinity import Interrupts
from penstock_video.sources.child import settle
from penstock_video.sources.core_pinning import OwnCore, pin_to_own_core


def main(arguments: list[str]) -> int:
    """0 where it ended in order; what was wrong with a camera is said over that one's socket, as Ended."""
    if len(arguments) != 3 or not all(word.isdecimal() for word in arguments) or arguments[1] not in ("0", "1"):
        sys.stderr.write("this is a part of `penstock video`, which starts it with a card, 0 or 1, and a descriptor\n")
        return 2
    settle()
    core = _own_core() if arguments[1] == "1" else None  # before libraries start threads, which are to be on it
    from penstock_video.decode.nvdec_errors import watch_stdout  # after the variable that is set: numpy comes
    from penstock_video.sources.shared_work import SharedGpu, serve

    with socket.socket(fileno=int(arguments[2])) as control:
        status = serve(control, SharedGpu(int(arguments[0]), watch_stdout(), core).run)
    sys.stderr.flush()
    os._exit(status)  # the driver's own threads, and what hangs, are not waited for


def _own_core() -> OwnCore | None:
    interrupts = Interrupts()
    core = pin_to_own_core(interrupts)
    if core is not None:
        core.keep_off(interrupts)
    return core


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
