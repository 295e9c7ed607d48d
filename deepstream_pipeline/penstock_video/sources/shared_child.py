"""A decode process with several cameras: `python -m penstock_video.sources.shared_child CARD PINNED FD_CONTROL`.

Its control socket delivers cameras, each as three descriptors: socket, ring, and a pipe for a byte when it is over. No
argument or variable has an address. The process ends with its control socket, and may be killed at any time. PINNED: 1
to reserve a free core, 0 for none.
"""

import os
import socket
import sys

from penstock.gateway.workers.interrupt_affinity import Interrupts
from penstock_video.sources.child import settle
from penstock_video.sources.core_pinning import OwnCore, pin_to_own_core


def main(arguments: list[str]) -> int:
    """Exit code: 0 after a regular end. A camera's errors are sent over its socket, as Ended."""
    if len(arguments) != 3 or not all(word.isdecimal() for word in arguments) or arguments[1] not in ("0", "1"):
        sys.stderr.write("this is a part of `penstock video`, which starts it with a card, 0 or 1, and a descriptor\n")
        return 2
    settle()
    core = _own_core() if arguments[1] == "1" else None  # before libraries start threads, which should be on it
    from penstock_video.decode.nvdec_errors import watch_stdout  # after the variable is set, because this imports numpy
    from penstock_video.sources.shared_work import SharedGpu, serve

    with socket.socket(fileno=int(arguments[2])) as control:
        status = serve(control, SharedGpu(int(arguments[0]), watch_stdout(), core).run)
    sys.stderr.flush()
    os._exit(status)  # does not wait for the driver's threads, and hanging ones


def _own_core() -> OwnCore | None:
    interrupts = Interrupts()
    core = pin_to_own_core(interrupts)
    if core is not None:
        core.keep_off(interrupts)
    return core


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
