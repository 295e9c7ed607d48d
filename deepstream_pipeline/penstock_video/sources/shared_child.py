"""A decode process with several cameras: `python -m penstock_video.sources.shared_child CARD PINNED PARENT FD_CONTROL`.

Its control socket delivers cameras, each as three descriptors: socket, ring, and a pipe for a byte when it is over. No
argument or variable has an address. The process ends with its control socket, and may be killed at any time. PINNED: 1
to reserve a free core, 0 for none. PARENT: the process ID of the program.
"""

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock_video.sources.child import settle

if TYPE_CHECKING:
    from penstock_video.sources.core_pinning import OwnCore


def main(arguments: list[str]) -> int:
    """Exit code: 0 after a regular end. A camera's errors are sent over its socket, as Ended."""
    if len(arguments) != 4 or not all(word.isdecimal() for word in arguments) or arguments[1] not in ("0", "1"):
        sys.stderr.write(
            "this is a part of `penstock video`, which starts it with a GPU, 0 or 1, its process ID and a descriptor\n"
        )
        return 2
    settle(int(arguments[2]))
    core = _own_core() if arguments[1] == "1" else None  # before libraries start threads, which should be on it
    from penstock_video.sources.shared_work import SharedGpu  # after the variable is set, because this imports numpy

    with socket.socket(fileno=int(arguments[3])) as control:
        status = serve(control, SharedGpu(int(arguments[0]), core).run)
    sys.stderr.flush()
    os._exit(status)  # does not wait for the driver's threads, and hanging ones


RunCamera = Callable[[socket.socket, int], int]  # called with socket and ring descriptor, which it owns then
_DESCRIPTORS = 3
_MESSAGE_BYTES = 64
_LAST_S = 10.0  # for the remaining cameras when the control socket ends


def serve(control: socket.socket, run: RunCamera) -> int:
    """Runs cameras until the control socket is closed and every camera ended or timed out. Returns the exit status."""
    gc.freeze()  # long-lived objects need no collection at each camera's end
    cameras: list[Camera] = []
    while (descriptors := _next_camera(control)) is not None:
        cameras = [camera for camera in cameras if camera.is_alive()]
        if len(descriptors) != _DESCRIPTORS:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        camera = Camera(run, *descriptors)
        if camera.begin():
            cameras.append(camera)
    until = time.monotonic() + _LAST_S
    for camera in cameras:
        camera.join(max(until - time.monotonic(), 0.0))
    return 1 if any(camera.is_alive() for camera in cameras) else 0


class Camera(threading.Thread):
    """One run of one source. Always sends its end, closes its descriptors and frees its memory."""

    def __init__(self, run: RunCamera, socket_fd: int, ring_fd: int, end_fd: int) -> None:
        super().__init__(name="camera", daemon=True)
        self._run_camera = run
        self._descriptors = socket_fd, ring_fd, end_fd

    def begin(self) -> bool:
        """Starts the thread; returns whether it runs. If the system cannot start it, this camera ends."""
        try:
            self.start()
        except RuntimeError as error:
            sys.stderr.write(f"a camera got no thread: {error}\n")
            socket_fd, ring_fd, _ = self._descriptors
            os.close(socket_fd)
            os.close(ring_fd)
            self._tell_end(1)
            return False
        return True

    def run(self) -> None:
        socket_fd, ring_fd, _ = self._descriptors
        status = 1
        try:
            with socket.socket(fileno=socket_fd) as link:
                status = self._run_camera(link, ring_fd)
        except Exception as error:  # noqa: BLE001 - the thread's root: its text may hold an address with its password
            last = traceback.extract_tb(error.__traceback__)[-1]
            sys.stderr.write(f"a camera ended by {type(error).__name__} in {last.filename}:{last.lineno}\n")
        finally:
            gc.collect()  # frees the ring and packets, which are in reference cycles, at once
            self._tell_end(status)

    def _tell_end(self, status: int) -> None:
        _, _, end_fd = self._descriptors
        with suppress(OSError):  # the parent has closed it
            os.write(end_fd, bytes([status & 0xFF]))
        os.close(end_fd)


def _next_camera(control: socket.socket) -> list[int] | None:
    """The next camera's descriptors; None at the socket's end."""
    try:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return list(descriptors) if message or descriptors else None


def _own_core() -> "OwnCore | None":
    from penstock.gateway.workers.interrupt_affinity import Interrupts  # imports a lot, so only if it is needed
    from penstock_video.sources.core_pinning import pin_to_own_core

    interrupts = Interrupts()
    core = pin_to_own_core(interrupts)
    if core is not None:
        core.keep_off(interrupts)
    return core


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
