"""One decoder process, seen from its parent."""

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from penstock.protocol.inference import Array
from penstock.protocol.shared_memory import Lease
from penstock.vision.decoder_worker import READY, DecodeJob, DecodeReply, DecodeStatus
from penstock.vision.preprocess import NUMPY_OF, Geometry
from penstock.vision.spec import PrepareSpec

_CHUNK_BYTES = 4 << 20  # a large image is copied in steps, so that the event loop breathes
_MAX_IDLE_BYTES = 8 << 20  # a memory file larger than this is emptied after its image
_START_TIMEOUT_S = 20.0
# One thread: the processes are the parallelism. malloc keeps what an ordinary image needs: giving it back to the kernel
# each time costs 435 page faults an image (640 x 480: 2.70 → 1.83 ms); what is larger than 16 MiB is given back.
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # nothing is imported from the working directory, where another user may write
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# What Python needs to find itself and its libraries, and nothing that a stolen process could tell: no tokens.
_INHERITED = {"PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR"}


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image as a network's input: array without batch axis. Times in seconds.

    lease: what the array lies in, the caller's to release; without one the array is the caller's own.
    """

    array: Array
    geometry: Geometry
    decode_s: float
    preprocess_s: float
    lease: Lease | None = None


class DecoderDied(Exception):
    """The process ended, or spoke nonsense and was ended, before it answered."""


class _ReplyReader(asyncio.Protocol):
    """The socket: one answer awaited at a time, and word when the process is gone."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._size_bytes = 0

    def expect(self, size_bytes: int) -> asyncio.Future[bytes]:
        """The next size_bytes that come; DecoderDied where they do not."""
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
    """A running decoder process. start() gives one that is ready; prepare() one image at a time."""

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
        self.needs_replacement = False  # whether it reported that it uses too much memory

    @classmethod
    async def start(cls, memory_limit_bytes: int, cpu_limit_s: float) -> Self:
        """cpu_limit_s: CPU time of one image; SIGPROF ends a process that uses more.

        Raises OSError if no process can be created, DecoderDied or TimeoutError if it does not start.

        To be called on the thread that lives as long as the program: the process dies with the thread that began it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            transport, line = await asyncio.get_running_loop().create_unix_connection(_ReplyReader, sock=ours)
            try:
                memory_fd = os.memfd_create("penstock-decoder", os.MFD_CLOEXEC)
                with _closed_on_error(memory_fd):
                    process = _spawn(theirs.fileno(), memory_fd, memory_limit_bytes, cpu_limit_s)
            except OSError:
                transport.close()
                raise
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
        """Whether it has ended, as far as is known."""
        return self._line.gone.done()

    async def prepare(
        self, data: bytes | memoryview, spec: PrepareSpec, max_pixels: int, lease: Lease | None = None
    ) -> PreparedImage:
        """Raises what the decoder refused the image with, DecoderDied where it ended over it.

        OSError where there is no memory for the bytes. lease: where the array goes if it fits; it is the answer's then.
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
        """The answer. prepare() must not store it in a variable: see penstock.vision.decode_pool."""
        answer = self._line.expect(DecodeReply.WIRE_SIZE)
        self._send(job, lease)
        return answer

    def _send(self, job: DecodeJob, lease: Lease | None) -> None:
        """With the slab's descriptor where it is another slab than the last one."""
        if lease is None:
            self._transport.write(job.pack())
            return
        place = lease.place
        wire = replace(job, slab_offset=place.offset, slab_bytes=lease.view.nbytes).pack()
        if place.region == self._slab_region:
            self._transport.write(wire)
            return
        try:
            socket.send_fds(self._channel, [wire], [lease.descriptor])  # the transport has nothing under way
        except OSError:  # it ended, or reads no more
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
        """What came may come from a process that an image has taken over: an impossible reply ends it."""
        try:
            reply = DecodeReply.unpack(wire)
        except ValueError:
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
        """A copy: the next image may come at once, and an array may wait long for its batch."""
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
        """The memory file's, which aclose() may have closed while a large image was between two steps."""
        if self.is_gone:
            raise DecoderDied
        return self._memory_fd

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()

    async def ended(self) -> int:
        """Waits for its end; the exit status, negative for a signal's number."""
        await asyncio.shield(self._line.gone)
        self.kill()  # its end of the line is closed: whatever is left of it is of no use
        return await asyncio.to_thread(self._process.wait)

    async def aclose(self) -> None:
        """Leaves no process and no memory behind. May be called again."""
        self.kill()
        self._line.connection_lost(None)
        self._transport.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
        await asyncio.to_thread(self._process.wait)


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except OSError:
        os.close(fd)
        raise


def _spawn(socket_fd: int, memory_fd: int, memory_limit_bytes: int, cpu_limit_s: float) -> subprocess.Popen[bytes]:
    """Not asyncio's subprocess: it may lose the exit status of a process that is killed while it dies."""
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}
    arguments = [str(number) for number in (socket_fd, memory_fd, os.getpid(), memory_limit_bytes, cpu_limit_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.vision.decoder_worker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(socket_fd, memory_fd),
        env={**inherited, **_ENVIRONMENT},
    )
