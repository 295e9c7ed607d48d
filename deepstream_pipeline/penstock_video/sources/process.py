"""Decode processes: start, socket, kill and reap, and the selector that waits for all of them."""

import errno
import os
import selectors
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

import msgspec

from penstock_video.sources.protocol import DOWN, MESSAGE_BYTES, UP, Release, Start, decode_up, encode
from penstock_video.sources.ring import Ring, RingSize, new_ring

MAX_WAITING = 64  # messages for a process that does not read
_AT_ONCE = 64  # messages read from one process before the others' turn


class BrokenPromise(Exception):
    """The process sent an invalid message, or does not read. The text is for display."""


Pictures = tuple[str, int, int]


class ProcessLink(ABC):
    """One run of one source, in its own or a shared process. Not thread-safe.

    ring: its frames, mapped as long as arrays of it exist. pidfd: readable once the run is over, -1 if unsupported.
    is_lost: it ended with a shared process, and not by its own known fault. pictures: codec, width and height, if they
    are known.
    """

    pidfd = -1
    is_lost = False
    pictures: Pictures | None = None

    def __init__(self, start: Start, name: str) -> None:
        """`_theirs`, the other end of the socket, and `_ring_fd` are for the process; `_handed_over` closes them."""
        if len(encode(start)) > MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, "the address, or what the network wants, is too long for one message")
        size = RingSize(start.ring_frames, start.slot_bytes)
        self._ring_fd = new_ring(size, name)
        with ExitStack() as opened:
            self.ring = Ring(self._ring_fd, size)
            opened.callback(self.ring.close)
            self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.pop_all()
        self.socket.setblocking(False)
        self._waiting: deque[bytes] = deque([encode(start)])
        self._released: list[int] = []
        self.has_hung_up = False

    def _handed_over(self) -> None:
        """Closes descriptors that the process owns now. The ring stays mapped."""
        self._theirs.close()
        self.ring.close()

    @property
    @abstractmethod
    def pid(self) -> int:
        """The ID of its process."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whether it runs, hangs or is stopped. Its messages are no longer read."""

    def kill_untrusted(self) -> None:
        """Ends the process after an invalid message."""
        self.kill()

    @abstractmethod
    def exit_text(self) -> str | None:
        """How it ended, such as "was ended by SIGSEGV"; None while it runs."""

    @abstractmethod
    def is_reaped(self, timeout_s: float) -> bool:
        """Whether it ended within the time; then only this end is left."""

    def close(self) -> None:
        """Closes its descriptors, once. The ring is unmapped with its last array."""
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    @property
    def is_behind(self) -> bool:
        """Whether messages wait to be read by it."""
        return bool(self._waiting or self._released)

    def send(self, record: DOWN) -> None:
        """Queues a message without waiting; `flush` sends the rest. Raises BrokenPromise if too much waits."""
        if len(self._waiting) >= MAX_WAITING:
            raise BrokenPromise("its process does not read its messages")
        self._waiting.append(encode(record))
        self.flush()

    def release(self, slots: list[int]) -> None:
        """Frees these slots, in one message with others that wait."""
        self._released += slots
        self.flush()

    def flush(self) -> None:
        """Sends waiting messages, as far as possible now."""
        if not self._waiting and not self._released:
            return
        try:
            self._send_waiting()
        except (BrokenPipeError, ConnectionResetError):  # its end is detected elsewhere
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
        """Received messages, a bounded number; ends with None if it hung up. Raises BrokenPromise."""
        for _ in range(_AT_ONCE):
            try:
                message = self.socket.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # raised once, if it left our messages unread; its own can still be read
                continue
            if not message:
                self.has_hung_up = True
                yield None
                return
            yield _decoded(message)

    def ask_to_end(self) -> None:
        """Closes its socket: it finishes its writes and ends."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


def _decoded(message: bytes) -> UP:
    if len(message) > MESSAGE_BYTES:
        raise BrokenPromise("its process sent a message that is too long")
    try:
        record: UP = decode_up(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenPromise(f"its process sent what is no message: {error}") from error
    return record


_STDERR_TAIL_BYTES = 65_536


class ChildProcess:
    """A running process. Raises OSError if it cannot be started, without leaving anything.

    Its arguments end with our process ID and the descriptors, which it inherits. Standard error goes to a pipe that is
    read after its end and drops what does not fit. It has its own session: the parent handles Ctrl-C.
    """

    def __init__(
        self, command: tuple[str, ...], descriptors: tuple[int, ...], environ: Mapping[str, str] | None = None
    ) -> None:
        """environ: on top of this process's."""
        self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._process = subprocess.Popen(
                (*command, str(os.getpid()), *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **environ} if environ else None,
            )
        except BaseException:
            os.close(self._stderr)
            raise
        finally:
            os.close(stderr)
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kills it and its children, whether it runs, hangs or is stopped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_text(self) -> str | None:
        """How it ended, such as "was ended by SIGSEGV", with its last output once; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {_signal_name(-status)}"
        words = self._last_words()
        return f"ended with status {status}" + (f": {words}" if words else "")

    def is_reaped(self, timeout_s: float) -> bool:
        """Reaps it; returns whether it ended within the time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def close(self) -> None:
        """Closes its descriptor, once."""
        os.close(self._stderr)

    def _last_words(self) -> str:
        with suppress(BlockingIOError):
            lines = os.read(self._stderr, _STDERR_TAIL_BYTES).decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""


class DecodeProcess(ProcessLink):
    """A source's own process, running once constructed. Raises OSError, without leaving anything."""

    def __init__(self, command: tuple[str, ...], start: Start, name: str) -> None:
        super().__init__(start, name)
        try:
            self._running = ChildProcess(command, (self._theirs.fileno(), self._ring_fd))
        except BaseException:
            self.socket.close()
            raise
        finally:
            self._handed_over()
        self.pidfd = _pidfd(self._running.pid)
        self.flush()

    @property
    def pid(self) -> int:
        return self._running.pid

    def kill(self) -> None:
        self._running.kill()

    def exit_text(self) -> str | None:
        return self._running.exit_text()

    def is_reaped(self, timeout_s: float) -> bool:
        return self._running.is_reaped(timeout_s)

    def close(self) -> None:
        super().close()
        self._running.close()


def _pidfd(pid: int) -> int:
    """A descriptor that is readable once the process has ended; -1 if unsupported."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


Owner = TypeVar("Owner")
_POLL_S = 0.1  # for the end of a process, if the system has no pidfd


class WakeUp:
    """Wakes a thread that waits for its descriptor. Thread-safe, also after `close`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_set = False

    def ring(self) -> None:
        if self._is_set:  # already set, and the data was queued before it was set
            return
        with self._lock:
            if self.descriptor >= 0:
                self._is_set = True
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Call it before reading the queued data."""
        if not self._is_set:
            return
        with self._lock:  # not between another thread's two steps, whose write would then wake the reader for ever
            with suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            self._is_set = False

    def close(self) -> None:
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1


class ProcessSelector(Generic[Owner]):
    """Waits for processes between their `connect` and `cut`. Not thread-safe."""

    def __init__(self, wake_up: WakeUp) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake_up.descriptor, selectors.EVENT_READ)
        self._interest: dict[ProcessLink, int] = {}
        self._without_pidfd: dict[ProcessLink, Owner] = {}

    def connect(self, process: ProcessLink, owner: Owner) -> None:
        self._interest[process] = selectors.EVENT_READ
        self._selector.register(process.socket, selectors.EVENT_READ, (owner, process, True))
        if process.pidfd >= 0:
            self._selector.register(process.pidfd, selectors.EVENT_READ, (owner, process, False))
        else:
            self._without_pidfd[process] = owner

    def update(self, process: ProcessLink, *, is_receiving: bool) -> None:
        """Selects its socket for reading if is_receiving, and for writing if messages are waiting."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.is_behind else 0)
        if not is_receiving or process.has_hung_up:
            wanted = 0
        before = self._interest.get(process)
        if before is None or before == wanted:
            return
        self._interest[process] = wanted
        if not wanted:
            self._selector.unregister(process.socket)
        elif not before:
            raise RuntimeError("a process cannot be registered again after it was unregistered")
        else:
            self._selector.modify(process.socket, wanted, self._selector.get_key(process.socket).data)

    def poll(self, process: ProcessLink, owner: Owner) -> None:
        """Makes `wait` return soon: the end is visible, but the process cannot be reaped yet."""
        if process not in self._without_pidfd:
            self._selector.unregister(process.pidfd)
            self._without_pidfd[process] = owner

    def cut(self, process: ProcessLink) -> None:
        """Unregisters a process. Call it before its descriptors are closed."""
        if self._interest.pop(process, 0):
            self._selector.unregister(process.socket)
        if self._without_pidfd.pop(process, None) is None and process.pidfd >= 0:
            self._selector.unregister(process.pidfd)

    def wait(self, timeout_s: float) -> list[tuple[Owner, ProcessLink, bool]]:
        """(owner, process, whether its socket is ready; otherwise it ended). Empty if only the wake-up was set."""
        timeout_s = min(timeout_s, _POLL_S) if self._without_pidfd else timeout_s
        events = [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]
        events += [(owner, process, False) for process, owner in self._without_pidfd.items()]
        return events

    def close(self) -> None:
        self._selector.close()
