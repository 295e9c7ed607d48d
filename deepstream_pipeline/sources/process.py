"""One decode process: started without a shell, talked to without waiting, ended for good, and reaped."""

import errno
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec

from deepstream_pipeline.sources.messages import (
    DOWN,
    MESSAGE_BYTES,
    UP,
    Release,
    Start,
    decode_up,
    encode,
)
from deepstream_pipeline.sources.ring import Ring, RingSize, new_ring

MAX_WAITING = 64  # messages for a process that does not read
_AT_ONCE = 64  # messages taken of one process before the others have their turn
_LAST_WORDS_BYTES = 65_536


class BrokenPromise(Exception):
    """The process sent what it must not, or does not read. The text is for people."""


class DecodeProcess:
    """It runs from the moment that this is made. Raises OSError where it cannot be started, and leaves nothing then.

    Its standard error goes to a pipe that nobody reads while it runs and that loses what does not fit. ring: its
    frames, alive for as long as arrays of it are. Of one thread.
    """

    def __init__(self, command: tuple[str, ...], start: Start, name: str) -> None:
        if len(encode(start)) > MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, "the address, or what the network wants, is too long for one message")
        size = RingSize(start.ring_frames, start.slot_bytes)
        with ExitStack() as opened:
            ring_fd = new_ring(size, name)
            self.ring = Ring(ring_fd, size)
            opened.callback(self.ring.close)
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(self.socket.close)
            self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, self._stderr)
            try:
                self._process = _spawn(command, theirs.fileno(), ring_fd, stderr)
            finally:
                theirs.close()
                os.close(stderr)
            opened.pop_all()
        self.ring.close()  # its memory is mapped; a descriptor less for each source
        self.socket.setblocking(False)
        self.pidfd = _pidfd(self._process.pid)
        self._waiting: deque[bytes] = deque()
        self._released: list[int] = []
        self.has_hung_up = False
        self.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_behind(self) -> bool:
        """Whether messages wait for it to read."""
        return bool(self._waiting or self._released)

    def send(self, record: DOWN) -> None:
        """Never waits: what it does not take now goes with `flush`. Raises BrokenPromise where too much waits."""
        if len(self._waiting) >= MAX_WAITING:
            raise BrokenPromise("its process does not read what it is told")
        self._waiting.append(encode(record))
        self.flush()

    def release(self, slots: list[int]) -> None:
        """These slots may be written again; in one message with others that wait."""
        self._released += slots
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it is taken now."""
        try:
            self._send_waiting()
        except (BrokenPipeError, ConnectionResetError):  # that it is gone we hear elsewhere
            self._waiting.clear()
            self._released = []

    def _send_waiting(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                self.socket.send(self._waiting[0])
                self._waiting.popleft()
            if self._released:
                self.socket.send(encode(Release(tuple(self._released))))
                self._released = []

    def receive(self) -> Iterator[UP | None]:
        """What it sent so far, a bounded number at once; None, last, where it hung up. Raises BrokenPromise."""
        for _ in range(_AT_ONCE):
            try:
                message = self.socket.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once, where it left what we sent unread: what it sent is still there
                continue
            if not message:
                self.has_hung_up = True
                yield None
                return
            yield _decoded(message)

    def ask_to_end(self) -> None:
        """It sees its socket's end, finishes what it writes, and ends."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """It, and whatever it started, whether it runs, hangs or is stopped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def exit_text(self) -> str | None:
        """How it ended, as "was ended by SIGSEGV", reaped; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {_signal_name(-status)}"
        words = self._last_words()
        return f"ended with status {status}" + (f": {words}" if words else "")

    def is_reaped(self, timeout_s: float) -> bool:
        """Whether it is over within the time; its state is taken from the system then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def close(self) -> None:
        """Its descriptors, once. The ring's memory goes with the last array of it."""
        self.socket.close()
        os.close(self._stderr)
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def _last_words(self) -> str:
        with suppress(BlockingIOError):
            lines = os.read(self._stderr, _LAST_WORDS_BYTES).decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""


def _spawn(command: tuple[str, ...], socket_fd: int, ring_fd: int, stderr: int) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C in a terminal is for the parent, which ends its children in order."""
    return subprocess.Popen(
        (*command, str(socket_fd), str(ring_fd)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(socket_fd, ring_fd),
        start_new_session=True,
    )


def _pidfd(pid: int) -> int:
    """A descriptor that is readable once the process is over; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _decoded(message: bytes) -> UP:
    if len(message) > MESSAGE_BYTES:
        raise BrokenPromise("its process sent a message that is too long")
    try:
        record: UP = decode_up(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenPromise(f"its process sent what is no message: {error}") from error
    return record


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
