"""A decoder process and its messages with the decode pool.

Only the pool starts it: `python -m penstock.vision.decoder_worker SOCKET_FD MEMORY_FD PARENT_PID MEMORY_LIMIT_BYTES
CPU_LIMIT_S`. Fixed-size messages go over a socket, bytes and pixels through a memory file. It decodes untrusted
pictures in C code, so it has no secrets, limited memory and CPU time, and dies with its parent.
"""

import contextlib
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, TypeVar

import cv2
import msgspec
import numpy as np
import numpy.typing as npt

from penstock.process import MemoryTrimmer, private_bytes, trim_memory
from penstock.process_limits import end_with_parent, limit_process
from penstock.protocol.errors import InferenceError, TooLarge, UndecodableImage, UnsupportedMedia
from penstock.protocol.inference import Array
from penstock.vision.decode import decode
from penstock.vision.preprocess import Geometry, least_decoded_size, prepare
from penstock.vision.spec import PrepareSpec

READY = b"R"
WIRE_BYTES = 2048  # of each message
_LENGTH_BYTES, _TEXT_CHARACTERS = 2, 400


class DecodeStatus(IntEnum):
    """Outcome of a job; each maps to the error that the client gets."""

    OK = 0
    UNDECODABLE = 1
    TOO_LARGE = 2
    UNSUPPORTED = 3
    BROKEN_WORKER = 4


_ERRORS: dict[DecodeStatus, type[InferenceError]] = {
    DecodeStatus.UNDECODABLE: UndecodableImage,
    DecodeStatus.TOO_LARGE: TooLarge,
    DecodeStatus.UNSUPPORTED: UnsupportedMedia,
    DecodeStatus.BROKEN_WORKER: InferenceError,
}


_NO_GEOMETRY = Geometry(0, 0, 0, 0, 0.0, 0.0)
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Message = TypeVar("Message", "DecodeJob", "DecodeReply")


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Decode and prepare the first size_bytes of the memory file. slab_bytes: space at slab_offset, or 0."""

    size_bytes: int
    max_pixels: int
    spec: PrepareSpec
    slab_offset: int = 0
    slab_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DecodeReply:
    """The array's shape and offset in the memory file, or the error. Times in seconds."""

    status: DecodeStatus
    shape: tuple[Size, Size, Size] = (0, 0, 0)
    offset: Size = 0
    geometry: Geometry = _NO_GEOMETRY
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    text: str = ""
    is_in_slab: bool = False  # the array is in the slab, not in the memory file
    needs_replacement: bool = False  # the process uses too much memory

    def error(self) -> InferenceError:
        """The error to raise for a failed job."""
        return _ERRORS[self.status](self.text)


def error_reply(error: InferenceError) -> DecodeReply:
    """A reply whose error() has the same class and text, up to _TEXT_CHARACTERS."""
    status = next((status for status, kind in _ERRORS.items() if type(error) is kind), DecodeStatus.BROKEN_WORKER)
    return DecodeReply(status, text=error.message[:_TEXT_CHARACTERS])


def to_wire(message: DecodeJob | DecodeReply) -> bytes:
    """WIRE_BYTES bytes: the length of the message, the message, zeros. Raises ValueError if it is longer."""
    packed = msgspec.msgpack.encode(message)
    if len(packed) > WIRE_BYTES - _LENGTH_BYTES:
        raise ValueError(f"a decoder message has {len(packed)} bytes (limit {WIRE_BYTES - _LENGTH_BYTES})")
    return (len(packed).to_bytes(_LENGTH_BYTES, "big") + packed).ljust(WIRE_BYTES, b"\0")


def from_wire(wire: bytes, kind: type[Message]) -> Message:
    """The inverse of to_wire. Raises ValueError, and RecursionError for deeply nested messages."""
    end = _LENGTH_BYTES + int.from_bytes(wire[:_LENGTH_BYTES], "big")
    return msgspec.msgpack.decode(wire[_LENGTH_BYTES:end], type=kind)


_ALIGNMENT = 4096
LARGE_PIXELS = 1_000_000
MAX_GROWTH_BYTES = 64 << 20  # compared with a new process


class _MemoryFile:
    """A mapping of the memory file, renewed when the file's size has changed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def view(self) -> memoryview:
        """The file's content, writable. Older views stay valid: they map the same pages."""
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes == 0:
            return memoryview(b"")
        if self._map is None or len(self._map) != size_bytes:
            self._map = mmap.mmap(self._fd, size_bytes)
        return memoryview(self._map)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array in the file at the offset; the file grows as needed."""
        count = int(np.prod(shape, dtype=np.int64))
        end = offset + count * np.dtype(dtype).itemsize
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)
        return np.frombuffer(self.view(), dtype, count, offset).reshape(shape)


class _Slab:
    """A mapping of the pool's slab."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def map(self, fd: int) -> None:
        """Replaces the mapping. Closes the descriptor."""
        try:
            self._view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        finally:
            os.close(fd)

    def array(self, job: DecodeJob, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array | None:
        """An array in the job's part of the slab, or None if it does not fit."""
        count = int(np.prod(shape, dtype=np.int64))
        if count * np.dtype(dtype).itemsize > job.slab_bytes:
            return None
        return np.frombuffer(self._view, dtype, count, job.slab_offset).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Memory:
    file: _MemoryFile
    slab: _Slab


def _run(job: DecodeJob, memory: _Memory) -> DecodeReply:
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
    return DecodeReply(DecodeStatus.OK, (depth, rows, columns), offset, geometry, *times, is_in_slab=is_in_slab)


def _run_safely(job: DecodeJob, memory: _Memory) -> DecodeReply:
    try:
        return _run(job, memory)
    except InferenceError as error:
        return error_reply(error)
    except MemoryError:
        return DecodeReply(DecodeStatus.TOO_LARGE, text="decoding the image needs more memory than a decoder may take")
    except Exception as error:  # noqa: BLE001  process root: the pool logs it, the next job may succeed
        return error_reply(InferenceError(f"the decoder failed: {type(error).__name__}: {error}"))


class MemoryGrowth:
    """Growth of the process's memory between jobs."""

    def __init__(self, measure: Callable[[], int] = private_bytes, trim: Callable[[], None] = trim_memory) -> None:
        self._measure = measure
        self._freed = MemoryTrimmer(measure, trim)
        self._limit_bytes = measure() + MAX_GROWTH_BYTES

    def is_too_much(self, reply: DecodeReply) -> bool:
        """Whether to replace the process after this job. Not measured for small images, which retain no memory."""
        if (
            reply.status is DecodeStatus.OK
            and reply.geometry.source_width * reply.geometry.source_height < LARGE_PIXELS
        ):
            return False
        self._freed.check()
        return self._measure() > self._limit_bytes


def _serve(channel: socket.socket, memory: _Memory, cpu_limit_s: float) -> None:
    """Runs jobs until the parent closes the socket. cpu_limit_s: CPU time of one job; SIGPROF ends it then."""
    channel.sendall(READY)
    wear = MemoryGrowth()
    while True:
        wire, fds, _, _ = socket.recv_fds(channel, WIRE_BYTES, 1, socket.MSG_WAITALL)
        if len(wire) < WIRE_BYTES:
            return
        for fd in fds:
            memory.slab.map(fd)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        reply = _run_safely(from_wire(wire, DecodeJob), memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(to_wire(replace(reply, needs_replacement=True) if wear.is_too_much(reply) else reply))


def main(arguments: list[str]) -> None:
    """Serves jobs until the parent closes its end."""
    socket_fd, memory_fd, parent_pid, memory_limit_bytes = (int(argument) for argument in arguments[:4])
    end_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the terminal's are for the parent
        signal.signal(number, signal.SIG_IGN)
    limit_process(memory_limit_bytes)
    cv2.setNumThreads(1)
    with socket.socket(fileno=socket_fd) as channel, contextlib.suppress(ConnectionError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libpng and OpenCV write about every corrupt image
        _serve(channel, _Memory(_MemoryFile(memory_fd), _Slab()), float(arguments[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
