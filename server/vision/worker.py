"""A decoder process: `python -m server.vision.worker SOCKET_FD MEMORY_FD PARENT_PID MEMORY_LIMIT_BYTES`.

Started by the decode pool only. It decodes what strangers send, in C code with a history of memory bugs, so it holds
nothing worth having, may take a bounded amount of memory, dies with its parent, and is killed rather than trusted.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from server.core.errors import InferenceError
from server.core.tensor import Array
from server.vision.decode import decode
from server.vision.preprocess import least_decoded_size, prepare
from server.vision.protocol import READY, Job, Reply, Status, reply_to

_PR_SET_PDEATHSIG = 1
_ALIGNMENT = 4096


class _MemoryFile:
    """The memory file as this side sees it: mapped, and mapped anew when its size has changed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def view(self) -> memoryview:
        """All of it, writable. Older views stay valid: they are other mappings of the same pages."""
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes == 0:
            return memoryview(b"")
        if self._map is None or len(self._map) != size_bytes:
            self._map = mmap.mmap(self._fd, size_bytes)
        return memoryview(self._map)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array that lies in the file at the offset; the file grows as it must."""
        count = int(np.prod(shape, dtype=np.int64))
        end = offset + count * np.dtype(dtype).itemsize
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)
        return np.frombuffer(self.view(), dtype, count, offset).reshape(shape)


def _run(job: Job, memory: _MemoryFile) -> Reply:
    started = time.perf_counter()
    data = memory.view()[: job.size_bytes]
    decoded = decode(data, job.spec.color, max_pixels=job.max_pixels, at_least=least_decoded_size(job.spec))
    decoded_at = time.perf_counter()
    offset = -(-job.size_bytes // _ALIGNMENT) * _ALIGNMENT
    array, geometry = prepare(decoded, job.spec, lambda shape, dtype: memory.array(offset, shape, dtype))
    depth, rows, columns = array.shape
    finished = time.perf_counter()
    return Reply(Status.OK, (depth, rows, columns), offset, geometry, decoded_at - started, finished - decoded_at)


def _answer(job: Job, memory: _MemoryFile) -> Reply:
    try:
        return _run(job, memory)
    except InferenceError as error:
        return reply_to(error)
    except MemoryError:
        return Reply(Status.TOO_LARGE, text="decoding the image needs more memory than a decoder may take")
    except Exception as error:  # noqa: BLE001  the process's root: the pool logs it, the next job may be fine
        return Reply(Status.BROKEN_WORKER, text=f"the decoder failed: {type(error).__name__}: {error}")


def _serve(channel: socket.socket, memory: _MemoryFile) -> None:
    channel.sendall(READY)
    while len(wire := channel.recv(Job.WIRE_SIZE, socket.MSG_WAITALL)) == Job.WIRE_SIZE:
        channel.sendall(_answer(Job.unpack(wire), memory).pack())


def _confine(parent_pid: int, memory_limit_bytes: int) -> None:
    """Die with the parent, leave signals of the terminal to it, and be the first that the OOM killer looks at."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before it could be watched
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    with contextlib.suppress(OSError):  # not everywhere writable; then the kernel's own choice stands
        Path("/proc/self/oom_score_adj").write_text("500")


def main(arguments: list[str]) -> None:
    """Serve jobs until the parent closes its end."""
    socket_fd, memory_fd, parent_pid, memory_limit_bytes = (int(argument) for argument in arguments)
    _confine(parent_pid, memory_limit_bytes)
    cv2.setNumThreads(1)
    with socket.socket(fileno=socket_fd) as channel, contextlib.suppress(ConnectionError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libpng and OpenCV complain there about every broken image
        _serve(channel, _MemoryFile(memory_fd))


if __name__ == "__main__":
    main(sys.argv[1:])
