"""One decoder process, as seen by its parent."""

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from penstock.protocol.inference import Array
from penstock.protocol.shared_memory import Lease
from penstock.vision.decoder_worker import READY, WIRE_BYTES, DecodeJob, DecodeReply, DecodeStatus, from_wire, to_wire
from penstock.vision.preprocess import NUMPY_OF, Geometry
from penstock.vision.spec import PrepareSpec

_CHUNK_BYTES = 4 << 20  # large images are copied in steps, to not block the event loop
_MAX_IDLE_BYTES = 8 << 20  # a larger memory file is truncated after its image
_START_TIMEOUT_S = 20.0
# One thread each: parallelism comes from the processes. malloc retains blocks up to 16 MiB: returning them to the
# kernel after each image costs 435 page faults (640 x 480: 2.70 instead of 1.83 ms).
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no imports from the working directory, where another user may write
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# What Python needs to find its libraries; no secrets, which a compromised decoder could read.
_INHERITED = {"PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR"}


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image as a network's input, without batch axis. Times in seconds."""

    array: Array
    geometry: Geometry
    decode_s: float
    preprocess_s: float
    lease: Lease | None = None  # shared memory of the array, to be released by the caller


class DecoderDied(Exception):
    """The process ended, or was killed for an invalid reply, before it answered."""


class _ReplyReader(asyncio.Protocol):
    """The socket's protocol: one reply at a time; `gone` completes when the process closes its end."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._size_bytes = 0

    def expect(self, size_bytes: int) -> asyncio.Future[bytes]:
        """The next size_bytes received. Fails with DecoderDied if the process ends first."""
        self._answer = asyncio.get_running_loop().create_future()
        self._size_bytes = size_bytes
        if self.gone.done():
            self._answer.set_exception(DecoderDied())
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._answer is not None and not self._answer.done() and len(self._buffer) >= self._size_bytes:
            answer = bytes(self._buffer[: self._size_bytes])
            del self._buffer[: self._size_bytes]
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(DecoderDied())
        self._answer = None
        if not self.gone.done():
            self.gone.set_result(None)


class DecoderProcess:
    """A running decoder process, which prepares one image at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        line: _ReplyReader,
        transport: asyncio.WriteTransport,
        channel: socket.socket,
        memory_fd: int,
    ) -> None:
        self._process = process
        self._line = line
        self._transport = transport
        self._channel = channel
        self._memory_fd = memory_fd
        self._slab_region = ""
        self.needs_replacement = False  # it reported that it uses too much memory

    @classmethod
    async def start(cls, memory_limit_bytes: int, cpu_limit_s: float) -> Self:
        """A ready process; it dies with the thread that calls this. Raises OSError, DecoderDied or TimeoutError."""
        ours, theirs = socket.socketpair()
        with theirs:
            transport, line = await asyncio.get_running_loop().create_unix_connection(_ReplyReader, sock=ours)
            with contextlib.ExitStack() as on_error:
                on_error.callback(transport.close)
                memory_fd = os.memfd_create("penstock-decoder", os.MFD_CLOEXEC)
                on_error.callback(os.close, memory_fd)
                process = _spawn(theirs.fileno(), memory_fd, memory_limit_bytes, cpu_limit_s)
                on_error.pop_all()
        decoder = cls(process, line, transport, ours, memory_fd)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await line.expect(len(READY))
        except BaseException:
            await decoder.aclose()
            raise
        return decoder

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        return self._line.gone.done()

    async def prepare(
        self, data: bytes | memoryview, spec: PrepareSpec, max_pixels: int, lease: Lease | None = None
    ) -> PreparedImage:
        """One prepared image. Raises the decoder's error, DecoderDied, or OSError if memory is short.

        lease: where the array is written if it fits; then the result owns it.
        """
        try:
            await self._write(memoryview(data))
            reply = self._understand(await self._ask(DecodeJob(len(data), max_pixels, spec), lease), spec, max_pixels)
            self.needs_replacement = reply.needs_replacement
            if reply.status is not DecodeStatus.OK:
                raise reply.error()  # not in a variable: see penstock.vision.decode_pool
            if reply.is_in_slab:
                array = self._lying_in(lease, reply, spec)
                return PreparedImage(array, reply.geometry, reply.decode_s, reply.preprocess_s, lease)
            array = await self._read(reply, spec)
        finally:
            self._shrink()
        return PreparedImage(array, reply.geometry, reply.decode_s, reply.preprocess_s)

    def _ask(self, job: DecodeJob, lease: Lease | None) -> asyncio.Future[bytes]:
        """The reply. prepare() must not store it in a variable: see penstock.vision.decode_pool."""
        answer = self._line.expect(WIRE_BYTES)
        self._send(job, lease)
        return answer

    def _send(self, job: DecodeJob, lease: Lease | None) -> None:
        """Sends the slab's descriptor, too, if the slab has changed."""
        if lease is None:
            self._transport.write(to_wire(job))
            return
        place = lease.place
        wire = to_wire(replace(job, slab_offset=place.offset, slab_bytes=lease.view.nbytes))
        if place.region == self._slab_region:
            self._transport.write(wire)
            return
        try:
            socket.send_fds(self._channel, [wire], [lease.descriptor])  # the transport has nothing buffered
        except OSError:  # it ended, or no longer reads
            self.kill()
            raise DecoderDied from None
        self._slab_region = place.region

    def _lying_in(self, lease: Lease | None, reply: DecodeReply, spec: PrepareSpec) -> Array:
        dtype = np.dtype(NUMPY_OF[spec.datatype])
        size_bytes = math.prod(reply.shape) * dtype.itemsize
        if lease is None or size_bytes > lease.view.nbytes:
            self.kill()
            raise DecoderDied
        return np.frombuffer(lease.view[:size_bytes], dtype).reshape(reply.shape)

    def _understand(self, wire: bytes, spec: PrepareSpec, max_pixels: int) -> DecodeReply:
        """The reply. An image may have compromised the process, so an impossible reply kills it."""
        try:
            reply = from_wire(wire, DecodeReply)
        except (ValueError, RecursionError):
            self.kill()
            raise DecoderDied from None
        if math.prod(reply.shape) > 3 * max(max_pixels, spec.width * spec.height):
            self.kill()
            raise DecoderDied
        return reply

    async def _write(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            position += os.pwrite(self._usable_fd(), data[position : position + _CHUNK_BYTES], position)
            if position < len(data):
                await asyncio.sleep(0)

    async def _read(self, reply: DecodeReply, spec: PrepareSpec) -> Array:
        """A copy, because the process reuses its memory file for the next image."""
        array = np.empty(reply.shape, NUMPY_OF[spec.datatype])
        view = array.reshape(-1).view(np.uint8).data
        position = 0
        while position < len(view):
            chunk = view[position : position + _CHUNK_BYTES]
            count = os.preadv(self._usable_fd(), [chunk], reply.offset + position)
            if count == 0:
                self.kill()
                raise DecoderDied
            position += count
            if position < len(view):
                await asyncio.sleep(0)
        return array

    def _shrink(self) -> None:
        if not self.is_gone and os.fstat(self._memory_fd).st_size > _MAX_IDLE_BYTES:
            os.ftruncate(self._memory_fd, 0)

    def _usable_fd(self) -> int:
        """Raises DecoderDied if aclose() has closed the memory file in between."""
        if self.is_gone:
            raise DecoderDied
        return self._memory_fd

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    async def ended(self) -> int:
        """Waits for its end. Returns the exit status; a negative signal number if killed."""
        await asyncio.shield(self._line.gone)
        self.kill()  # its end of the socket is closed, so it is of no more use
        return await asyncio.to_thread(self._process.wait)

    async def aclose(self) -> None:
        """Ends the process and frees its memory. May be called again."""
        self.kill()
        self._line.connection_lost(None)
        self._transport.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
        await asyncio.to_thread(self._process.wait)


def _spawn(socket_fd: int, memory_fd: int, memory_limit_bytes: int, cpu_limit_s: float) -> subprocess.Popen[bytes]:
    """Does not use asyncio's subprocess, which may lose the exit status of a process that is killed while it dies."""
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}
    arguments = [str(number) for number in (socket_fd, memory_fd, os.getpid(), memory_limit_bytes, cpu_limit_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.vision.decoder_worker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(socket_fd, memory_fd),
        env={**inherited, **_ENVIRONMENT},
    )
