"""State machine of one source: start, retry, stall, pause, end. No I/O, no clock."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from penstock_video.backoff import Backoff
from penstock_video.decode.uri import UriKind, kind_of, seems_live
from penstock_video.errors import SourceNotAllowed
from penstock_video.sources.pace import MARGIN_FPS, Pace, Stillness
from penstock_video.sources.protocol import EndReason
from penstock_video.types import SourceConfig, SourceState

START_MARGIN_S = 5.0  # for the process to start, before it connects to the source
GRACE_S = 2.0  # for a process to end, after we asked or it reported its end
WELL_S = 10.0  # after frames for this long, the number of failures restarts at 0
AUTH_RETRY_S = 60.0
TAKEN_OUT = "taken out"  # the reason of a removed source
WAITING_BEATS_S = 3.0  # of a source that waits for its turn, which is reported each second
WAITS_FOR_CARD = "waits for its turn at the GPU, which creates one decoder at a time"
WAITS_FOR_READING = "waits until the load of the GPU's decoders is measured"
POSTPONED_S = 1.0
FILE_ATTEMPTS = 2  # for a file without frames yet: what kills its decoder once will kill it again
_FOR_GOOD = (EndReason.NOT_ALLOWED, EndReason.NEEDS_CPU)
_BY_CPU = (EndReason.NEEDS_CPU, EndReason.NO_CARD)


class Action(Enum):
    """What the caller must do: START a process, then call `started`; ask it to STOP; KILL it; send Hold."""

    NONE = "none"
    START = "start"
    STOP = "stop"
    KILL = "kill"
    HOLD = "hold"
    GO_ON = "go_on"


@dataclass(frozen=True, slots=True)
class LifecycleOptions:
    """is_live, is_local: by the address, corrected once open. Others: from SourceConfig."""

    is_live: bool
    is_local: bool = False
    is_loop: bool = False
    reconnect_interval_s: float = 10.0
    reconnect_attempts: int = -1
    open_timeout_s: float = 10.0
    expected_fps: float | None = None
    frozen_after_s: float = 30.0
    may_use_cpu: bool = True

    @classmethod
    def of(cls, config: SourceConfig, *, may_use_cpu: bool) -> "LifecycleOptions":
        """The options of a configured source."""
        try:
            is_local = kind_of(config.uri) is UriKind.FILE
        except SourceNotAllowed:
            is_local = True
        return cls(
            is_live=seems_live(config.uri),
            is_local=is_local,
            is_loop=config.is_loop,
            reconnect_interval_s=config.reconnect_interval_s,
            reconnect_attempts=config.reconnect_attempts,
            open_timeout_s=config.open_timeout_s,
            expected_fps=config.expected_fps,
            frozen_after_s=config.frozen_after_s,
            may_use_cpu=may_use_cpu,
        )


class _Phase(Enum):
    """State of the process: none, wanted, started, open, asked to end, killed, over for good."""

    IDLE = 0
    WAITING = 1
    OPENING = 2
    OPEN = 3
    ENDING = 4
    KILLED = 5
    OVER = 6


class SourceLifecycle:
    """State machine of one source. jitter: a random number in [0, 1).

    state, reason: for display; the reason is empty while it runs. restarts: processes after the first. frames: received
    from all processes; decoded: also the lost ones. fps: decoded over the last seconds, as of the last tick.
    """

    def __init__(self, options: LifecycleOptions, now: float, jitter: Callable[[], float]) -> None:
        self.state, self.reason = SourceState.CONNECTING, ""
        self.restarts, self.frames, self.decoded, self.fps = 0, 0, 0, 0.0
        self.is_live = options.is_live
        self._options = options
        self._jitter = jitter
        self._backoff, self._slow = Backoff(), Backoff(AUTH_RETRY_S * 1.2, AUTH_RETRY_S * 1.2, chance=1 / 3)
        self._phase, self._due = _Phase.WAITING, float(now)
        self._failures, self._is_restart = 0, False
        self._is_paused = self._is_removed = False
        self._stillness = Stillness(options.frozen_after_s)
        self._forget_process()

    def _forget_process(self) -> None:
        self._end: tuple[EndReason, str] | None = None
        self._fault = ""  # why we ended it
        self._is_pause_requested = False  # asked to end, by pause
        self._running_since: float | None = None
        self._beats = 0
        self._limit_fps = self._options.expected_fps
        self._pace = Pace()

    @property
    def is_frozen(self) -> bool:
        """Whether it has shown the same picture for frozen_after_s."""
        return self._stillness.is_frozen

    @property
    def is_over(self) -> bool:
        """Whether it ended and no process is left."""
        return self._phase is _Phase.OVER

    @property
    def is_taken(self) -> bool:
        """Whether its frames are used: not while it is removed or its process is ended."""
        return self._phase is _Phase.OPEN

    @property
    def is_opening(self) -> bool:
        """Whether its process was started and has not opened the source yet."""
        return self._phase is _Phase.OPENING

    @property
    def is_receiving(self) -> bool:
        """Whether a process runs that was not killed."""
        return self._phase in (_Phase.OPENING, _Phase.OPEN, _Phase.ENDING)

    def next_wakeup(self) -> float | None:
        """When to call `tick` at the latest, or None."""
        if self._phase in (_Phase.IDLE, _Phase.OVER, _Phase.KILLED):
            return None
        is_held = self._is_paused and self._phase in (_Phase.OPENING, _Phase.OPEN)
        return None if is_held else self._due

    def tick(self, now: float, *, is_ours: bool = False) -> Action:
        """The due action. is_ours: the process waits for the parent, so its silence is no fault."""
        self.fps = self._pace.fps(now)
        wakeup = self.next_wakeup()
        if wakeup is None or now < wakeup:
            return Action.NONE
        options = self._options
        if self._phase is _Phase.WAITING:
            return Action.START
        if self._phase is _Phase.OPENING:
            return self.kill(f"not open after {options.open_timeout_s:g} s")
        if self._phase is _Phase.ENDING:
            is_meant = self._end is not None or self._is_pause_requested or self._is_removed
            return self.kill("" if is_meant else "its process hung up, and did not end")
        if is_ours:
            self._due = now + options.reconnect_interval_s
            return Action.NONE
        self.state = SourceState.STALLED
        return self.kill(f"no frame for {options.reconnect_interval_s:g} s")

    def postpone(self, now: float) -> None:
        """Starts no process yet: the decoders are measured first."""
        self._due, self.reason = now + POSTPONED_S, WAITS_FOR_READING

    def started(self, now: float) -> None:
        self._forget_process()
        self.restarts += int(self._is_restart)
        self._phase, self._due = _Phase.OPENING, now + self._options.open_timeout_s + START_MARGIN_S
        if self.state is SourceState.STALLED:
            self.state = self._unconnected()
        if self.reason in (WAITS_FOR_CARD, WAITS_FOR_READING):
            self.reason = ""

    def refused(self, now: float, text: str) -> None:
        """Records that no card has room for it, after `started`."""
        self.end_reported(now, EndReason.NO_CARD, text)
        self.process_ended(now, "")

    def opened(self, now: float, fps: float, *, is_live: bool) -> None:
        """Records that the process opened the source, or the stream changed. fps: of the stream, 0 if unknown."""
        self.is_live = is_live
        self._limit_fps = self._options.expected_fps or fps or None
        if self._phase is _Phase.OPENING:
            self._phase = _Phase.OPEN
            self._due = now + self._options.reconnect_interval_s

    def frame(self, now: float, digest: int, pts_s: float) -> Action:
        """Counts a received frame."""
        self.frames += 1
        self._stillness.see(now if self.is_live else pts_s, digest)
        if self._running_since is None:
            self._running_since = now
        if not self._is_paused and self._phase is _Phase.OPEN:
            self.state, self.reason = SourceState.RUNNING, ""
        return self._count(now, 1)

    def lost(self, now: float, count: int) -> Action:
        """Counts decoded frames that were lost."""
        return self._count(now, count)

    def beat(self, now: float, decoded: int, *, is_waiting: bool = False, is_pacing: bool = False) -> None:
        """Records that the process is alive. decoded: since its start. is_waiting, is_pacing: see Beat."""
        if is_waiting and self._phase is _Phase.OPEN and self.state is SourceState.CONNECTING:
            self.reason = WAITS_FOR_CARD
        elif self.reason == WAITS_FOR_CARD:
            self.reason = ""
        if decoded > self._beats:
            self._beats = decoded
            self.progress(now)
        if (is_waiting or is_pacing) and self._phase is _Phase.OPEN:
            self._due = now + max(self._options.reconnect_interval_s, WAITING_BEATS_S)

    def end_reported(self, now: float, reason: EndReason, text: str) -> None:
        """Records why the process ends; it gets GRACE_S to do so."""
        self._end = (reason, text)
        self.await_exit(now)

    def process_ended(self, now: float, text: str) -> None:
        """Records how the process ended, such as "was ended by SIGSEGV"."""
        was_requested, end, fault = self._is_pause_requested and not self._fault, self._end, self._fault
        running_s = 0.0 if self._running_since is None else now - self._running_since
        if running_s >= WELL_S:
            self._failures = 0
        self._phase, self.fps = _Phase.IDLE, 0.0
        if self._is_removed:
            self.finish(SourceState.ENDED, TAKEN_OUT)
        elif was_requested or (self._is_paused and self.is_live):
            self._begin_anew(now)
        elif end is not None and not fault:
            self._by_reason(now, *end)
        else:
            self._retry(now, fault or f"the decode process {text}")

    def pause(self, now: float) -> Action:
        """Ends a live source's process; pauses a file where it is."""
        if self._is_paused or self._is_removed or self.is_over:
            return Action.NONE
        self._is_paused = True
        self.state, self.reason = SourceState.PAUSED, ""
        if self._phase is _Phase.WAITING:
            self._phase = _Phase.IDLE
        if self._phase not in (_Phase.OPENING, _Phase.OPEN):
            return Action.NONE
        if not self.is_live:
            return Action.HOLD
        self._is_pause_requested = True
        self.await_exit(now)
        return Action.STOP

    def resume(self, now: float) -> Action:
        """Resumes it: a live source in a new process."""
        if not self._is_paused:
            return Action.NONE
        self._is_paused = False
        if self.is_over:
            return Action.NONE
        self.state = SourceState.CONNECTING
        if self._phase is _Phase.IDLE:
            self._begin_anew(now)
        if self._phase is _Phase.OPENING:
            self._due = now + self._options.open_timeout_s + START_MARGIN_S
        elif self._phase is _Phase.OPEN:
            self.state = SourceState.CONNECTING if self._running_since is None else SourceState.RUNNING
            self._due = now + self._options.reconnect_interval_s
        return Action.GO_ON if self._phase in (_Phase.OPENING, _Phase.OPEN) else Action.NONE

    def remove(self, now: float) -> Action:
        """Removes it. It is over at once, or when its process has ended."""
        self._is_removed = True
        if self._phase in (_Phase.IDLE, _Phase.WAITING):
            self.finish(SourceState.ENDED, TAKEN_OUT)
        if self._phase not in (_Phase.OPENING, _Phase.OPEN):
            return Action.NONE
        self.await_exit(now)
        return Action.STOP

    def _count(self, now: float, frames: int) -> Action:
        self.decoded += frames
        self.progress(now)
        is_runaway = self._pace.count(now, frames, self._limit_fps if self.is_live else None)
        if not is_runaway or self._phase is not _Phase.OPEN:
            return Action.NONE
        return self.kill(
            f"{self._pace.fps(now):.0f} frames/s, where {self._limit_fps or 0:g} are expected "
            f"(more than {MARGIN_FPS:g} above)"
        )

    def progress(self, now: float) -> None:
        """Restarts the silence timer: a frame came, or the process may have waited for the parent."""
        if self._phase is _Phase.OPEN:
            self._due = now + self._options.reconnect_interval_s

    def await_exit(self, now: float) -> None:
        """Gives the process GRACE_S to end: it closed its socket, or was asked to end."""
        if self._phase in (_Phase.OPENING, _Phase.OPEN):
            self._phase, self._due = _Phase.ENDING, now + GRACE_S

    def kill(self, fault: str) -> Action:
        """Kills the process, for an invalid message, silence, or too many frames. fault: the reason; "" if none."""
        if self._phase not in (_Phase.OPENING, _Phase.OPEN, _Phase.ENDING):
            return Action.NONE
        self._phase, self._fault = _Phase.KILLED, fault
        if fault and not self._is_paused:
            self.reason = fault
            if self.state is SourceState.RUNNING:
                self.state = SourceState.RECONNECTING
        return Action.KILL

    def _by_reason(self, now: float, reason: EndReason, text: str) -> None:
        """Four cases: over for good; a wrong password, retried slowly; another decoder; others, retried."""
        is_gone = reason is EndReason.UNAVAILABLE and self._options.is_local
        is_unreadable = reason is EndReason.DECODE and not self.is_live
        is_repeatable = self.is_live or self._options.is_loop or not self.frames
        if reason is EndReason.PLAYED_OUT or (reason is EndReason.EOF and not self.is_live):
            self.finish(SourceState.ENDED, "")
        elif reason in _BY_CPU and self._options.may_use_cpu and is_repeatable:
            self._is_restart, self._due = False, now
            self._phase = _Phase.IDLE if self._is_paused else _Phase.WAITING
        elif reason in _FOR_GOOD or is_gone or is_unreadable:
            self.finish(SourceState.FAILED, text or reason.value)
        else:
            self._retry(now, text or ("the source hung up" if reason is EndReason.EOF else reason.value), reason)

    def _retry(self, now: float, text: str, reason: EndReason | None = None) -> None:
        """reason: from its process. A file whose process needed the GPU has not shown its content yet."""
        is_auth = reason is EndReason.AUTH_FAILED
        self._failures, self._is_restart = self._failures + 1, True
        if not self.is_live and self.frames and not self._options.is_loop:
            self.finish(SourceState.FAILED, f"{text}, after {self.frames} frames; a file is not read twice")
            return
        limit = self._options.reconnect_attempts
        if self._options.is_local and not self.is_live and reason is not EndReason.NO_CARD:
            limit = FILE_ATTEMPTS if limit < 0 else min(limit, FILE_ATTEMPTS)
        if 0 <= limit < self._failures:
            self.finish(SourceState.FAILED, f"given up after {self._failures} attempts: {text}")
            return
        self.reason = text
        if self._is_paused:
            self._begin_anew(now)
            return
        if self.state is not SourceState.STALLED:
            self.state = SourceState.AUTH_FAILED if is_auth else self._unconnected()
        delay_s = (self._slow if is_auth else self._backoff).delay_s(1 if is_auth else self._failures, self._jitter())
        self._phase, self._due = _Phase.WAITING, now + delay_s

    def _begin_anew(self, now: float) -> None:
        """Starts a new process now, or once it is resumed."""
        self._failures, self._is_restart = 0, False
        self._phase, self._due = (_Phase.IDLE if self._is_paused else _Phase.WAITING), now

    def _unconnected(self) -> SourceState:
        return SourceState.RECONNECTING if self.frames else SourceState.CONNECTING

    def finish(self, state: SourceState, reason: str) -> None:
        """Ends the source for good."""
        self.state, self.reason, self._phase = state, reason, _Phase.OVER
