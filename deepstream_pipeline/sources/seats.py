"""Processes that decode several cameras each, and a camera's seat in one of them.

A process is a fault domain: where it dies, its cameras end together and begin anew. A camera that merely fails leaves
its seat, and costs nobody. One whose thread does not end in time costs its neighbours their process: a thread that
hangs in a driver cannot be ended alone.
"""

import os
import socket
import time
from contextlib import ExitStack, suppress

from deepstream_pipeline.sources.choice import ALONE, LOSSES_WITHIN_S
from deepstream_pipeline.sources.line import Line
from deepstream_pipeline.sources.messages import Start
from deepstream_pipeline.sources.options import SourcesOptions
from deepstream_pipeline.sources.process import DecodeProcess, Running
from deepstream_pipeline.sources.snapshot import ProcessSnapshot

CAMERA = b"camera"  # the message that brings a camera's descriptors: its socket, its ring, and its end-pipe to write to
LEAVE_MARGIN_S = 3.0  # of a camera's thread, after the longest that it may wait for its stream
_ALL_LEFT_S = 4.0  # of a process of whose cameras none is wanted any more: its end costs nobody
_IDLE_S = 5.0  # cameras that are opened anew find the process that they had
_END_S = 5.0  # of a process without cameras that was asked to end
_REAP_S = 0.5


class DecodeHost:
    """A process with several cameras, from the moment that this is made. Raises OSError where it cannot be started.

    seats: of which something is left, here or there. is_open: whether another may be taken in it.
    """

    def __init__(self, command: tuple[str, ...], places: int, company: str) -> None:
        self.places = places
        self._company, self._began_at = company, time.monotonic()
        self.seats: set[Seat] = set()
        self.idle_since = time.monotonic()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._running = Running(command, (theirs.fileno(),))
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        self.control.setblocking(False)
        self._fault = ""  # for which we killed it
        self._asked_at: float | None = None
        self._exit: tuple[str, int] | None = None
        self.is_condemned = False

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_open(self) -> bool:
        return not self._fault and self._asked_at is None and self.exit_text() is None

    @property
    def company(self) -> str:
        """Of whom cameras may be in it. One that lives on after another's death is as any other."""
        is_past = self._company != ALONE and time.monotonic() - self._began_at >= LOSSES_WITHIN_S
        return "" if is_past else self._company

    def has_room(self, places: int, company: str) -> bool:
        """Whether a camera may be taken in it that wants such a one."""
        return self.places == places and len(self.seats) < places and self.company == company and self.is_open

    def exit_text(self) -> str | None:
        """How it ended, and with how many; None while it runs."""
        if self._exit is None and (how := self._running.exit_text()) is not None:
            self._exit = (f"{how} ({self._fault})" if self._fault else how), len(self.seats) - 1
        if self._exit is None:
            return None
        how, others = self._exit
        return how + (f", with {others} other camera{'s' * (others > 1)}" if others > 0 else "")

    def kill(self, fault: str) -> None:
        """It, with all its cameras."""
        self._fault = self._fault or fault
        self._running.kill()

    def condemn(self) -> None:
        """One of its cameras broke a promise: the others lose it for that one's fault."""
        self.is_condemned = True
        self.kill("a camera of it broke its promises")

    def ask_to_end(self, now: float) -> None:
        """It takes no more cameras, and ends when those it has are over."""
        if self._asked_at is None:
            self._asked_at = now
            self.control.shutdown(socket.SHUT_RDWR)

    def look(self, now: float) -> bool:
        """What time brings: who hangs is killed, who idles is asked to end. Whether anything of it is left."""
        if self.exit_text() is not None:
            return bool(self.seats)
        left_s = [seat.left_for_s(now) for seat in self.seats]
        if any(seat.is_overdue(now) for seat in self.seats) or (left_s and min(left_s) >= _ALL_LEFT_S):
            self.kill("the thread of a camera did not end")
        elif not self.seats and now - self.idle_since >= _IDLE_S:
            self.ask_to_end(now)
            if self._asked_at is not None and now - self._asked_at >= _END_S:
                self.kill("it did not end")
        return True

    def is_reaped(self, timeout_s: float) -> bool:
        return self._running.is_reaped(timeout_s)

    def close(self) -> None:
        """Its descriptors, once."""
        self.control.close()
        self._running.close()


class Seat(Line):
    """A camera in a process that several share, from the moment that this is made. Raises OSError where it does not
    take it, and leaves nothing then."""

    def __init__(self, host: DecodeHost, start: Start, name: str) -> None:
        super().__init__(start, name)
        self._host = host
        self._how: str | None = None
        self._leave_s = max(start.open_timeout_s, start.read_timeout_s) + LEAVE_MARGIN_S
        self._left_at: float | None = None
        with ExitStack() as opened, ExitStack() as handed_over:
            opened.callback(self.socket.close)
            handed_over.callback(self._handed_over)
            self.pidfd, end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, self.pidfd)
            handed_over.callback(os.close, end)
            socket.send_fds(host.control, [CAMERA], [self._theirs.fileno(), self._ring_fd, end])
            opened.pop_all()
        host.seats.add(self)
        self.flush()

    @property
    def pid(self) -> int:
        return self._host.pid

    def left_for_s(self, now: float) -> float:
        """How long it has been left; 0 while it is wanted, and once it is over."""
        return 0.0 if self._left_at is None or self.exit_text() is not None else now - self._left_at

    def is_overdue(self, now: float) -> bool:
        """Whether it was left, and had its time."""
        return self.left_for_s(now) >= self._leave_s

    def kill(self) -> None:
        """It is left: its thread sees its socket's end, or is ended with the whole process."""
        if self._left_at is None:
            self._left_at = time.monotonic()
            with suppress(OSError):  # the other end is gone
                self.socket.shutdown(socket.SHUT_RDWR)

    def condemn(self) -> None:
        self._host.condemn()

    def exit_text(self) -> str | None:
        if self._how is None:
            self._how = self._seen_end()
        return self._how

    def is_reaped(self, timeout_s: float) -> bool:
        return self.exit_text() is not None or self._host.is_reaped(timeout_s)

    def close(self) -> None:
        super().close()
        self._host.seats.discard(self)
        self._host.idle_since = time.monotonic()

    def _seen_end(self) -> str | None:
        """Its thread's last word is a byte; where there is none, the process went, and is waited for."""
        try:
            status = os.read(self.pidfd, 1)
        except BlockingIOError:
            return None
        if status:
            return f"ended with status {status[0]}"
        how = self._host.exit_text()
        self.is_lost = how is not None and not self._host.is_condemned
        return how


class DecodeHosts:
    """Where sources are decoded: each in a process of its own by the CPU, several to a process by a card. Of one
    thread, but for `processes`."""

    def __init__(self, options: SourcesOptions) -> None:
        self.options = options
        self._hosts: list[DecodeHost] = []

    def line(self, start: Start, name: str, *, company: str) -> Line:
        """A run of it, as start.decoder says. company: as DecoderChoice has it. Raises OSError where none begins."""
        gpu = self.options.gpu
        if start.decoder == "cpu" or gpu is None:
            return DecodeProcess(self.options.command, start, name)
        places = 1 if company == ALONE else gpu.cameras_per_process
        for host in self._hosts:
            if host.has_room(places, company):
                with suppress(BrokenPipeError):  # it died a moment ago
                    return Seat(host, start, name)
        host = DecodeHost((*gpu.command, str(gpu.device), str(int(gpu.has_pinned_processes))), places, company)
        self._hosts.append(host)
        return Seat(host, start, name)

    def tick(self, now: float) -> None:
        """What time brings; each second or so."""
        for host in list(self._hosts):
            if not host.look(now):
                self._hosts.remove(host)
                host.close()

    def processes(self) -> tuple[ProcessSnapshot, ...]:
        """Those with several cameras. From any thread."""
        return tuple(ProcessSnapshot(host.pid, "nvdec", len(host.seats)) for host in self._hosts)

    def kill(self) -> None:
        """There is no time left."""
        for host in self._hosts:
            host.kill("the program ends")

    def close(self, timeout_s: float) -> None:
        """No process is left, but one that cannot be killed. Their seats were closed before."""
        until = time.monotonic() + timeout_s
        for host in self._hosts:
            host.ask_to_end(time.monotonic())
        late = [host for host in self._hosts if not host.is_reaped(max(until - time.monotonic(), 0.0))]
        for host in late:
            host.kill("the program ends")
        until = time.monotonic() + _REAP_S
        for host in late:
            host.is_reaped(max(until - time.monotonic(), 0.0))
        for host in self._hosts:
            host.close()
        self._hosts = []
