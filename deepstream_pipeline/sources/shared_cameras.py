"""The cameras of a process that several share: a thread for each, from its descriptors' coming to its last byte."""

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import cv2

RunCamera = Callable[[socket.socket, int], int]  # told its socket, and its ring's descriptor, which it takes over
_DESCRIPTORS = 3
_MESSAGE_BYTES = 64
_LAST_S = 10.0  # for the cameras that are left when the control socket ends


def serve(control: socket.socket, run: RunCamera) -> int:
    """Run what comes, until the control socket ends and every camera is over, or its time. The exit status."""
    cv2.setNumThreads(1)
    gc.freeze()  # what lives as long as the process is not looked through with each camera's end
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
    """One run of one source. Whatever happens in it, its end is told, its descriptors closed, its memory free."""

    def __init__(self, run: RunCamera, socket_fd: int, ring_fd: int, end_fd: int) -> None:
        super().__init__(name="camera", daemon=True)
        self._run_camera = run
        self._descriptors = socket_fd, ring_fd, end_fd

    def begin(self) -> bool:
        """Whether it runs. Where the system has no thread left, it is over, and the others go on."""
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
            gc.collect()  # its ring and its packets hang on what knows each other: megabytes, for who knows how long
            self._tell_end(status)

    def _tell_end(self, status: int) -> None:
        _, _, end_fd = self._descriptors
        with suppress(OSError):  # nobody looks any more
            os.write(end_fd, bytes([status & 0xFF]))
        os.close(end_fd)


def _next_camera(control: socket.socket) -> list[int] | None:
    """Its descriptors; None at the socket's end."""
    try:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return list(descriptors) if message or descriptors else None
