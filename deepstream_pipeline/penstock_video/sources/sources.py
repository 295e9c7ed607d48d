"""All sources of the program, on one thread that waits for every decode process and blocks on none."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import structlog

from penstock_video.errors import PipelineError, SourceExists, TooManySources, UnknownSource
from penstock_video.sources.decode_host import DecodeHosts
from penstock_video.sources.decoder_cards import CardSnapshot
from penstock_video.sources.options import ProcessSnapshot, SourceListener, SourceNeeds, SourceSnapshot, SourcesOptions
from penstock_video.sources.process import ProcessLink, ProcessSelector, WakeUp
from penstock_video.sources.protocol import Cut, Want
from penstock_video.sources.source import Source
from penstock_video.types import SourceConfig

__all__ = ["SourceListener", "SourceNeeds", "SourceSnapshot", "Sources", "SourcesOptions"]

log = structlog.get_logger(component="video")

_IDLE_S = 1.0  # maximum interval of checks of every source
_TICK_S = 0.02  # minimum of the same
_REST_S = 0.002  # between two iterations, to batch frames of many cameras
_HURRY_S = 0.1  # between two checks, once it is closed
_STALE_S = 10.0  # a longer iteration hangs in a callback
_KILL_S = 0.5  # before the end of close's timeout
_MAX_PATH = 4096

_HOLD_S = 3.0
Command = Callable[[float], None]
Key = TypeVar("Key", bound=Hashable)


class OpeningGate(Generic[Key]):
    """Limits how many sources are opened at the same time: starting and probing needs a core. A source leaves when it
    is open or its process ended, and after _HOLD_S, since waiting for a camera needs no CPU."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._inside: dict[Key, float] = {}
        self._queue: deque[Key] = deque()
        self._queued: set[Key] = set()

    def ask(self, key: Key) -> None:
        """Joins the queue; a source that waits already keeps its position."""
        if key not in self._queued:
            self._queued.add(key)
            self._queue.append(key)

    def is_asking(self, key: Key) -> bool:
        return key in self._queued

    def next(self, now: float) -> Key | None:
        """The next source that may start; it counts once `enter` is called."""
        self._inside = {key: until for key, until in self._inside.items() if until > now}
        if not self._queue or len(self._inside) >= self._places:
            return None
        key = self._queue.popleft()
        self._queued.discard(key)
        return key

    def enter(self, key: Key, now: float) -> None:
        self._inside[key] = now + _HOLD_S

    def leave(self, key: Key) -> None:
        self._inside.pop(key, None)

    def next_wakeup(self) -> float | None:
        """When `next` can change its answer, if no source leaves before."""
        if not self._queue or not self._inside:
            return None
        return min(self._inside.values())


class Sources:
    """Call `start`, then the others from any thread, and `close` once. Only `close` waits for cameras. A source that
    ended by itself keeps its state until it is removed, or its ID is added again."""

    def __init__(self, options: SourcesOptions, listener: SourceListener) -> None:
        self.faults = 0  # our own or the listener's errors, each of which ended one process
        self._options = options
        self._listener = listener
        self._sources: dict[str, Source] = {}
        self._present: set[str] = set()
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._returned: deque[tuple[Source, ProcessLink, int]] = deque()
        self._gate: OpeningGate[Source] = OpeningGate(options.max_opening)
        self._hosts = DecodeHosts(options)
        self._wake_up = WakeUp()
        self._wires: ProcessSelector[Source] = ProcessSelector(self._wake_up)
        self._thread = threading.Thread(target=self._run, name="sources", daemon=True)
        self._turned_at = time.monotonic()
        self._woken_at = self._tick_at = 0.0
        self._end_at: float | None = None

    # from any thread

    def start(self) -> None:
        self._turned_at = time.monotonic()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread exists: from `start` to the end of `close`, except after an internal error."""
        return self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread's loop is running."""
        return self.is_running and time.monotonic() - self._turned_at < _STALE_S

    def add(self, config: SourceConfig, needs: SourceNeeds) -> None:
        """Raises SourceExists, TooManySources, and PipelineError once it is closed."""
        source_id = config.source_id
        with self._lock:
            if self._end_at is not None:
                raise PipelineError("no source is added to a program that ends")
            former = self._sources.get(source_id)
            if source_id in self._present and former is not None and former.is_over:
                self._forget(source_id)
            if source_id in self._present:
                raise SourceExists(f"there is a source {source_id!r} already; remove it first, or choose another id")
            if len(self._present) >= self._options.max_sources:
                raise TooManySources(f"{self._options.max_sources} sources are the most here; remove one")
            self._present.add(source_id)
            self._post(lambda now: self._add(config, needs, now))

    def remove(self, source_id: str) -> None:
        """Removes a source; its ID is free at once. Raises UnknownSource."""
        with self._lock:
            self._known(source_id)
            self._forget(source_id)

    def pause(self, source_id: str) -> None:
        """Disconnects a live source; pauses a file where it is. Raises UnknownSource."""
        self._ask(source_id, Source.pause)

    def resume(self, source_id: str) -> None:
        """Resumes a source: a file where it was paused. Raises UnknownSource."""
        self._ask(source_id, Source.resume)

    def want_images(self, source_id: str, is_wanted: bool, interval_s: float = 0.0) -> None:
        """Starts or stops sending full pictures, at most one each interval_s. Raises UnknownSource."""
        want = Want(is_wanted, interval_s)
        self._ask(source_id, lambda source, now: source.want_images(want))

    def record(self, source_id: str, cut: Cut) -> None:
        """Starts a recording, reported by on_recorded. Raises UnknownSource, ValueError for too long a path."""
        if len(cut.path) > _MAX_PATH:
            raise ValueError(f"a path of {len(cut.path)} characters (at most {_MAX_PATH})")
        self._ask(source_id, lambda source, now: source.record(cut))

    def snapshot(self) -> tuple[SourceSnapshot, ...]:
        """Snapshots of all sources that were not removed, in the order of their addition."""
        return tuple(source.snapshot() for source in list(self._sources.values()) if not source.is_unwanted)

    def snapshot_of(self, source_id: str) -> SourceSnapshot | None:
        """A source's snapshot, also while it is being removed; None when it is gone."""
        source = self._sources.get(source_id)
        return None if source is None else source.snapshot()

    def processes(self) -> tuple[ProcessSnapshot, ...]:
        shared = self._hosts.processes()
        of_many = {process.pid for process in shared}
        pids = [process.pid for source in list(self._sources.values()) if (process := source.process) is not None]
        return shared + tuple(ProcessSnapshot(pid, "cpu", 1) for pid in pids if pid not in of_many)

    def cards(self) -> tuple[tuple[CardSnapshot, ...], int]:
        """The cards that decode, and how often they refused a source."""
        return self._hosts.cards.snapshots(), self._hosts.cards.refusals

    def close(self, timeout_s: float) -> bool:
        """Ends every source. Returns whether all ended in time. No process, thread or descriptor is left."""
        with self._lock:
            is_first, self._end_at = self._end_at is None, time.monotonic() + timeout_s
        if is_first and self._thread.ident is None:
            self._close_all()
            return True
        self._wake_up.ring()
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive() and not self._sources

    # with the lock

    def _known(self, source_id: str) -> None:
        if source_id not in self._present:
            raise UnknownSource(f"there is no source {source_id!r}")

    def _forget(self, source_id: str) -> None:
        self._present.discard(source_id)
        source = self._sources.get(source_id)
        if source is not None:
            source.is_unwanted = True
        self._post(lambda now: self._do(source_id, Source.remove, now))

    def _ask(self, source_id: str, call: Callable[[Source, float], None]) -> None:
        with self._lock:
            self._known(source_id)
            self._post(lambda now: self._do(source_id, call, now))

    def _post(self, command: Command) -> None:
        self._commands.append(command)
        self._wake_up.ring()

    def _give_back(self, source: Source, process: ProcessLink, slot: int) -> None:
        self._returned.append((source, process, slot))
        self._wake_up.ring()

    # on the thread

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._turn()
        except Exception:
            log.exception("the sources' thread failed")
            self.faults += 1
        finally:
            self._close_all()

    def _turn(self) -> None:
        self._rest()
        self._turned_at = now = time.monotonic()
        wakeups = [self._tick_at, self._gate.next_wakeup() or self._tick_at]
        timeout_s = _HURRY_S if self._end_at is not None else _IDLE_S
        events = self._wires.wait(max(0.0, min(*wakeups, now + timeout_s) - now))
        self._woken_at = time.monotonic()
        for source, process, is_socket in events:
            if process is source.process:  # it may have been reaped just before
                call = self._read if is_socket else self._reap
                self._attend(source, call)
        self._wake_up.clear()
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        while self._commands:
            self._commands.popleft()(time.monotonic())
        self._take_back(returned)  # after earlier requests: a file's process ends with its last slot
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick(now)
        self._open_next()

    def _rest(self) -> None:
        """Sleeps briefly after a recent wake-up, to batch frames; with 80 cameras this halves the time per frame."""
        rest_s = self._woken_at + _REST_S - time.monotonic()
        if rest_s > 0.0:
            time.sleep(rest_s)

    def _is_done(self) -> bool:
        if self._end_at is None:
            return False
        now = time.monotonic()
        for source in list(self._sources.values()):
            if not source.is_leaving:
                self._attend(source, Source.remove)
            if now >= self._end_at - _KILL_S:
                source.kill()
                self._hosts.kill()
        is_empty = not self._sources and not self._commands  # a source that was just added reports its end, too
        return is_empty or now >= self._end_at

    def _close_all(self) -> None:
        """Kills and reaps the remaining sources, after the timeout or an internal error, and reports their end."""
        if self._sources:
            self._hosts.kill()
        for source in self._sources.values():
            source.kill()
        late: dict[tuple[int, str], list[str]] = {}
        for source in self._sources.values():
            if (process := source.process) is not None:
                how = "was killed" if process.is_reaped(_KILL_S) else "cannot be killed"
                late.setdefault((process.pid, how), []).append(source.source_id)
            self._let_go(source)
        for (pid, how), sources in late.items():
            log.error("a decode process did not end in time", sources=", ".join(sources), pid=pid, process=how)
        self._hosts.close(_KILL_S)
        self._wires.close()
        self._wake_up.close()

    def _let_go(self, source: Source) -> None:
        process = source.process
        if process is not None:
            self._wires.cut(process)
        try:
            source.let_go(time.monotonic())
        except Exception:
            log.exception("a source's end could not be reported", source=source.source_id)
            self.faults += 1
        if process is not None:
            process.close()

    def _add(self, config: SourceConfig, needs: SourceNeeds, now: float) -> None:
        former = self._sources.get(config.source_id)
        if former is not None:
            former.deferred.append(lambda later: self._add(config, needs, later))
            return
        source = Source(config, needs, self._hosts, listener=self._listener, give_back=self._give_back, now=now)
        self._sources[config.source_id] = source
        self._attend(source, lambda one, _: one.tell())
        self._tick_at = now

    def _do(self, source_id: str, call: Callable[[Source, float], None], now: float) -> None:
        source = self._sources.get(source_id)
        if source is not None and source.is_leaving:
            source.deferred.append(lambda later: self._do(source_id, call, later))
        elif source is not None:
            self._attend(source, call)

    def _attend(self, source: Source, call: Callable[[Source, float], None]) -> None:
        """Runs a call for one source. If it or the listener fails, the source loses its process."""
        now = time.monotonic()
        try:
            call(source, now)
        except Exception:
            log.exception("a source's turn failed", source=source.source_id)
            self.faults += 1
            source.kill()
        self._settle(source, now)

    def _settle(self, source: Source, now: float) -> None:
        watch, process = source.watch, source.process
        if process is not None:
            self._wires.update(process, is_receiving=watch.is_receiving)
        if not watch.is_opening:
            self._gate.leave(source)
        wakeup = watch.next_wakeup()
        if wakeup is not None and not self._gate.is_asking(source):
            self._tick_at = min(self._tick_at, max(wakeup, now + _TICK_S))
        if watch.is_over:
            self._settle_over(source, now)

    def _settle_over(self, source: Source, now: float) -> None:
        if source.is_leaving and self._sources.get(source.source_id) is source:
            del self._sources[source.source_id]
            for command in source.deferred:
                command(now)

    def _tick(self, now: float) -> None:
        self._tick_at = now + _IDLE_S
        self._hosts.tick(now)
        for source in list(self._sources.values()):
            self._attend(source, self._tick_one)

    def _tick_one(self, source: Source, now: float) -> None:
        if source.tick(now):
            self._gate.ask(source)

    def _open_next(self) -> None:
        while (source := self._gate.next(time.monotonic())) is not None:
            self._attend(source, self._open)

    def _open(self, source: Source, now: float) -> None:
        if not source.tick(now):  # it was paused or removed while it was queued
            return
        self._gate.enter(source, now)
        source.start(now)
        if source.process is not None:
            self._wires.connect(source.process, source)

    def _read(self, source: Source, now: float) -> None:
        if source.process is not None:
            source.process.flush()
        source.receive(now)

    def _reap(self, source: Source, now: float) -> None:
        process = source.process
        if process is None:
            return
        if (how := process.exit_text()) is None:
            self._wires.poll(process, source)
            return
        source.hear_out(now)
        self._wires.cut(process)
        process.close()
        source.process_ended(now, how)

    def _take_back(self, returned: list[tuple[Source, ProcessLink, int]]) -> None:
        slots: dict[ProcessLink, tuple[Source, list[int]]] = {}
        for source, process, slot in returned:
            slots.setdefault(process, (source, []))[1].append(slot)
        for process, (source, numbers) in slots.items():
            source.released(process, numbers, time.monotonic())
            if process.is_behind and process is source.process:
                self._wires.update(process, is_receiving=source.watch.is_receiving)
