"""Which decoder a source gets, and decode processes that several cameras share."""

import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from penstock_video.sources.decoder_cards import CARD_GONE_FOR_S, DecoderCards
from penstock_video.sources.options import ProcessSnapshot, SourcesOptions
from penstock_video.sources.pace import start_offset_s
from penstock_video.sources.process import ChildProcess, DecodeProcess, Pictures, ProcessLink
from penstock_video.sources.protocol import Start
from penstock_video.types import DecoderKind

CAMERA = b"camera"  # the message with a camera's descriptors: its socket, its ring, and the pipe for its end
LEAVE_MARGIN_S = 3.0  # for a camera's thread, beyond its longest wait for its stream
_ALL_LEFT_S = 4.0  # for a process all of whose cameras are stopped: its end harms no camera
_IDLE_S = 5.0  # so that reopened cameras find their process
_END_S = 5.0  # for a process without cameras to end
_REAP_S = 0.5


CPU_FOR_S = 3600.0  # after this, a newly opened stream tries the GPU again
LOSSES, LOSSES_WITHIN_S = 2, 60.0
ALONE_FOR_S = 600.0
ALONE = "alone"


class DecoderChoice:
    """Chooses the decoder of one source. absence: why no GPU decodes. refusal: why the wish cannot be met, or ""."""

    def __init__(self, wish: DecoderKind, absence: str | None) -> None:
        is_refused = wish is DecoderKind.NVDEC and absence is not None
        self.refusal = f"decoder nvdec: {absence}; choose auto or cpu" if is_refused else ""
        self.may_use_cpu = wish is not DecoderKind.NVDEC
        self._is_cpu_only = wish is DecoderKind.CPU or absence is not None
        self._cpu_until = self._alone_until = -1.0
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._lost = ""  # the process that was lost last

    def kind(self, now: float) -> DecoderKind:
        """The decoder of a new process: cpu or nvdec."""
        is_cpus = self._is_cpu_only or (self.may_use_cpu and now < self._cpu_until)
        return DecoderKind.CPU if is_cpus else DecoderKind.NVDEC

    def company(self, now: float) -> str:
        """Sources with the same company may share a process. ALONE: the source gets its own process."""
        if now < self._alone_until:
            return ALONE
        return self._lost if self._losses and now - self._losses[-1] < LOSSES_WITHIN_S else ""

    def needs_cpu(self, now: float) -> None:
        """Records that NVDEC cannot decode the stream."""
        self._cpu_until = now + CPU_FOR_S

    def has_no_card(self, now: float) -> None:
        """Records that the GPU is unavailable or full."""
        self._cpu_until = max(self._cpu_until, now + CARD_GONE_FOR_S)

    def lost_process(self, now: float, name: str) -> None:
        """Records that a shared process died; this source may be the cause."""
        self._lost = name
        self._losses.append(now)
        if len(self._losses) == LOSSES and now - self._losses[0] <= LOSSES_WITHIN_S:
            self._alone_until = now + ALONE_FOR_S

    def broke_promise(self, now: float) -> None:
        """Records that this source ended the process."""
        self._alone_until = now + ALONE_FOR_S


def fitness(members: Sequence[Pictures | None], pictures: Pictures | None, places: int) -> int:
    """How well a process with a free place fits a source, lowest best: 0 if it may share a decoder with one of the
    members, 1 if one more source fits beside it, else 2. Unknown pictures may share with any."""
    alike = sum(pictures is None or one in (None, pictures) for one in members)
    if alike % 2:
        return 0
    return 1 if places - len(members) > 1 else 2


class DecodeHost:
    """A running process for several cameras. Raises OSError if it cannot be started. members: not closed yet.

    card: position among several cards, or None. environ: see ChildProcess."""

    def __init__(
        self,
        command: tuple[str, ...],
        places: int,
        company: str,
        *,
        card: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.places, self.card = places, card
        self._company, self._began_at = company, time.monotonic()
        self.members: set[SharedDecodeProcess] = set()
        self.idle_since = time.monotonic()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._running = ChildProcess(command, (theirs.fileno(),), environ)
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        self.control.setblocking(False)
        self._fault = ""  # why we killed it
        self._asked_at: float | None = None
        self._exit: tuple[str, int] | None = None
        self.is_killed_as_untrusted = False

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_open(self) -> bool:
        return not self._fault and self._asked_at is None and self.exit_text() is None

    @property
    def company(self) -> str:
        """Which cameras it may have. A process that survived a loss for long accepts any."""
        is_past = self._company != ALONE and time.monotonic() - self._began_at >= LOSSES_WITHIN_S
        return "" if is_past else self._company

    @property
    def pictures(self) -> list[Pictures | None]:
        """Of its members."""
        return [member.pictures for member in self.members]

    def has_room(self, places: int, company: str) -> bool:
        """Whether it has room for such a camera."""
        return self.places == places and len(self.members) < places and self.company == company and self.is_open

    def exit_text(self) -> str | None:
        """How it ended, and with how many other cameras; None while it runs."""
        if self._exit is None and (how := self._running.exit_text()) is not None:
            self._exit = (f"{how} ({self._fault})" if self._fault else how), len(self.members) - 1
        if self._exit is None:
            return None
        how, others = self._exit
        return how + (f", with {others} other camera{'s' * (others > 1)}" if others > 0 else "")

    def kill(self, fault: str) -> None:
        self._fault = self._fault or fault
        self._running.kill()

    def kill_untrusted(self) -> None:
        """Kills it after an invalid message of one camera; the others count as lost."""
        self.is_killed_as_untrusted = True
        self.kill("a camera of it broke its promises")

    def ask_to_end(self, now: float) -> None:
        """Takes no more cameras, and ends after its last one."""
        if self._asked_at is None:
            self._asked_at = now
            self.control.shutdown(socket.SHUT_RDWR)

    def look(self, now: float) -> bool:
        """Kills a hanging process, and ends an idle one. Returns whether to continue watching it."""
        if self.exit_text() is not None:
            return bool(self.members)
        left_s = [member.left_for_s(now) for member in self.members]
        if any(member.is_overdue(now) for member in self.members) or (left_s and min(left_s) >= _ALL_LEFT_S):
            self.kill("the thread of a camera did not end")
        elif not self.members and now - self.idle_since >= _IDLE_S:
            self.ask_to_end(now)
            if self._asked_at is not None and now - self._asked_at >= _END_S:
                self.kill("it did not end")
        return True

    def is_reaped(self, timeout_s: float) -> bool:
        return self._running.is_reaped(timeout_s)

    def close(self) -> None:
        """Closes its descriptors, once."""
        self.control.close()
        self._running.close()


class SharedDecodeProcess(ProcessLink):
    """A camera in a shared process, running once constructed. Raises OSError, without leaving anything."""

    def __init__(self, host: DecodeHost, start: Start, name: str, pictures: Pictures | None = None) -> None:
        super().__init__(start, name)
        self._host, self.pictures = host, pictures
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
        host.members.add(self)
        self.flush()

    @property
    def pid(self) -> int:
        return self._host.pid

    def left_for_s(self, now: float) -> float:
        """How long it has been stopping; 0 while it is in use, and once it is over."""
        return 0.0 if self._left_at is None or self.exit_text() is not None else now - self._left_at

    def is_overdue(self, now: float) -> bool:
        """Whether it is stopping for longer than allowed."""
        return self.left_for_s(now) >= self._leave_s

    def kill(self) -> None:
        """Stops the camera: its thread sees the socket's end, or is killed with the process."""
        if self._left_at is None:
            self._left_at = time.monotonic()
            with suppress(OSError):  # the other end is gone
                self.socket.shutdown(socket.SHUT_RDWR)

    def kill_untrusted(self) -> None:
        self._host.kill_untrusted()

    def exit_text(self) -> str | None:
        if self._how is None:
            self._how = self._seen_end()
        return self._how

    def is_reaped(self, timeout_s: float) -> bool:
        return self.exit_text() is not None or self._host.is_reaped(timeout_s)

    def close(self) -> None:
        super().close()
        self._host.members.discard(self)
        self._host.idle_since = time.monotonic()

    def _seen_end(self) -> str | None:
        """How the thread ended, by its exit byte; without one the process died, and is waited for."""
        try:
            status = os.read(self.pidfd, 1)
        except BlockingIOError:
            return None
        if status:
            return f"ended with status {status[0]}"
        how = self._host.exit_text()
        self.is_lost = how is not None and not self._host.is_killed_as_untrusted
        return how


class DecodeHosts:
    """Starts decode processes: one per source on the CPU, shared ones on a GPU. Not thread-safe, except `processes`."""

    def __init__(self, options: SourcesOptions) -> None:
        self.options = options
        gpu = options.gpu
        self.cards = DecoderCards(gpu.cards, gpu.decoder_limit) if gpu is not None else DecoderCards()
        self._hosts: list[DecodeHost] = []
        self._offsets = 0

    def line(self, start: Start, name: str, *, company: str, pictures: Pictures | None = None) -> ProcessLink:
        """Starts a run with start.decoder. company: see DecoderChoice. pictures: of the source's last run. Raises
        OSError."""
        gpu = self.options.gpu
        if start.decoder == "cpu" or gpu is None:
            return DecodeProcess(self.options.command, start, name)
        even = gpu.cameras_per_process // 2 * 2 or 1  # decoders are shared by two within a process
        places = 1 if company == ALONE else even
        card = self.cards.position(name)
        able = [host for host in self._hosts if host.card == card and host.has_room(places, company)]
        for host in sorted(able, key=lambda one: fitness(one.pictures, pictures, places)):
            with suppress(BrokenPipeError):  # it died at this moment
                return SharedDecodeProcess(host, start, name, pictures)
        device = gpu.device if card is None else 0  # of several cards, a process sees its own
        command = (*gpu.command, str(device), str(int(gpu.has_pinned_processes)))
        host = DecodeHost(command, places, company, card=card, environ=self.cards.environ(name))
        self._hosts.append(host)
        return SharedDecodeProcess(host, start, name, pictures)

    def next_offset_s(self) -> float:
        """When the next of many files begins to play."""
        self._offsets += 1
        return start_offset_s(self._offsets - 1)

    def tick(self, now: float) -> None:
        """Runs due actions; call it about once a second."""
        if self.options.gpu is not None:
            self.cards.measured(self.options.gpu.read_decoders())
        for host in list(self._hosts):
            if not host.look(now):
                self._hosts.remove(host)
                host.close()

    def processes(self) -> tuple[ProcessSnapshot, ...]:
        """The shared processes. Thread-safe."""
        return tuple(ProcessSnapshot(host.pid, "nvdec", len(host.members)) for host in self._hosts)

    def kill(self) -> None:
        for host in self._hosts:
            host.kill("the program ends")

    def close(self, timeout_s: float) -> None:
        """Ends every process. Their members must be closed before."""
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
