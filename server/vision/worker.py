"""A decoder process: `python -m server.vision.worker SOCKET_FD MEMORY_FD PARENT_PID MEMORY_LIMIT_BYTES CPU_LIMIT_S`.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from server.core.errors import InferenceError
from server.core.tensor import Array
from server.freed_memory import FreedMemory, give_back, private_bytes
from server.vision.decode import decode
from server.vision.preprocess import least_decoded_size, prepare
from server.vision.protocol import READY, Job, Reply, Status, reply_to

_PR_SET_PDEATHSIG = 1
_ALIGNMENT = 4096
LARGE_PIXELS = 1_000_000
WORN_BYTES = 64 << 20  # growth compared with a new process


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


class _Slab:
    """The slab as this side sees it, which is all of it; the descriptor is not kept."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def map(self, fd: int) -> None:
        """Another slab from now on. Closes the descriptor."""
        try:
            self._view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        finally:
            os.close(fd)

    def array(self, job: Job, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array | None:
        """An array at the job's room; None where it does not fit."""
        count = int(np.prod(shape, dtype=np.int64))
        if count * np.dtype(dtype).itemsize > job.slab_bytes:
            return None
        return np.frombuffer(self._view, dtype, count, job.slab_offset).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where images come from, and where arrays go."""

    file: _MemoryFile
    slab: _Slab


def _run(job: Job, memory: _Memory) -> Reply:
    started = time.perf_counter()
    data = memory.file.view()[: job.size_bytes]
    decoded = decode(data, job.spec.color, max_pixels=job.max_pixels, at_least=least_decoded_size(job.spec))
    decoded_at = time.perf_counter()
    offset = -(-job.size_bytes // _ALIGNMENT) * _ALIGNMENT
    is_in_slab = False

    def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        nonlocal is_in_slab
        array = memory.slab.array(job, shape, dtype)
        is_in_slab = array is not None
        return memory.file.array(offset, shape, dtype) if array is None else array

    array, geometry = prepare(decoded, job.spec, allocate)
    depth, rows, columns = array.shape
    times = decoded_at - started, time.perf_counter() - decoded_at
    return Reply(Status.OK, (depth, rows, columns), offset, geometry, *times, is_in_slab=is_in_slab)


def _answer(job: Job, memory: _Memory) -> Reply:
    try:
        return _run(job, memory)
    except InferenceError as error:
        return reply_to(error)
    except MemoryError:
        return Reply(Status.TOO_LARGE, text="decoding the image needs more memory than a decoder may take")
    except Exception as error:  # noqa: BLE001  the process's root: the pool logs it, the next job may be fine
        return Reply(Status.BROKEN_WORKER, text=f"the decoder failed: {type(error).__name__}: {error}")


class Wear:
    """How much memory the process retains between jobs."""

    def __init__(self, measure: Callable[[], int] = private_bytes, trim: Callable[[], None] = give_back) -> None:
        self._measure = measure
        self._freed = FreedMemory(measure, trim)
        self._limit_bytes = measure() + WORN_BYTES

    def is_too_much(self, reply: Reply) -> bool:
        """Whether to replace the process after this job. Not measured for small images, which retain no memory."""
        if reply.status is Status.OK and reply.geometry.source_width * reply.geometry.source_height < LARGE_PIXELS:
            return False
        self._freed.check()
        return self._measure() > self._limit_bytes


def _serve(channel: socket.socket, memory: _Memory, cpu_limit_s: float) -> None:
    """cpu_limit_s: CPU time of one job; SIGPROF ends the process if it uses more."""
    channel.sendall(READY)
    wear = Wear()
    while True:
        wire, fds, _, _ = socket.recv_fds(channel, Job.WIRE_SIZE, 1, socket.MSG_WAITALL)
        if len(wire) < Job.WIRE_SIZE:
            return
        for fd in fds:
            memory.slab.map(fd)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        reply = _answer(Job.unpack(wire), memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(replace(reply, is_worn=True).pack() if wear.is_too_much(reply) else reply.pack())


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
    socket_fd, memory_fd, parent_pid, memory_limit_bytes = (int(argument) for argument in arguments[:4])
    _confine(parent_pid, memory_limit_bytes)
    cv2.setNumThreads(1)
    with socket.socket(fileno=socket_fd) as channel, contextlib.suppress(ConnectionError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libpng and OpenCV complain there about every broken image
        _serve(channel, _Memory(_MemoryFile(memory_fd), _Slab()), float(arguments[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
