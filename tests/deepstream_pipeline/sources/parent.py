"""The parent's side with the fake decode process, and a listener that writes down what is reported to it."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from penstock_video.sources.options import SourceNeeds, SourceSnapshot, SourcesOptions
from penstock_video.sources.protocol import Beat, Opened, Recorded
from penstock_video.sources.sources import Sources
from penstock_video.types import PreparedFrame, SourceConfig, SourceState
from tests.deepstream_pipeline.sources.fake_child import ROW_BYTES

DEADLINE_S = 30.0
COMMAND = (sys.executable, str(Path(__file__).with_name("fake_child.py")))
OPTIONS = SourcesOptions(command=COMMAND, max_pixels=640 * 480)
NEEDS = SourceNeeds(b"", ROW_BYTES, np.uint8)


@dataclass
class EventLog:
    """Events that a listener received; frames are released at once, unless is_keeping them, of all or of one source."""

    is_keeping: bool = False
    keeps_only: str = ""
    events: list[tuple[str, str, object]] = field(default_factory=list)
    frames: list[PreparedFrame] = field(default_factory=list)
    on_frame_call: Callable[[PreparedFrame], None] | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: Counter[tuple[str, str]] = Counter()

    def _note(self, kind: str, source_id: str, what: object) -> None:
        with self._changed:
            self.events.append((kind, source_id, what))
            self._counts[kind, source_id] += 1
            self._changed.notify_all()

    def on_frame(self, prepared: PreparedFrame) -> None:
        if self.on_frame_call is not None:
            self.on_frame_call(prepared)
        is_kept = self.is_keeping and prepared.frame.source_id.startswith(self.keeps_only)
        if is_kept:
            self.frames.append(prepared)
        self._note("frame", prepared.frame.source_id, prepared.frame)
        if not is_kept:
            prepared.release()

    def on_lost(self, source_id: str, reason: str, count: int) -> None:
        self._note("lost", source_id, (reason, count))

    def on_state(self, source_id: str, state: SourceState, reason: str) -> None:
        self._note("state", source_id, (state, reason))

    def on_opened(self, source_id: str, opened: Opened) -> None:
        self._note("opened", source_id, opened)

    def on_beat(self, source_id: str, beat: Beat) -> None:
        self._note("beat", source_id, beat)

    def on_ended(self, source_id: str) -> None:
        self._note("ended", source_id, None)

    def on_recorded(self, source_id: str, recorded: Recorded) -> None:
        self._note("recorded", source_id, (recorded.path, recorded.error))

    def of(self, kind: str, source_id: str = "a") -> list[object]:
        """All of a kind so far."""
        with self._changed:
            return [what for event_log, source, what in self.events if (event_log, source) == (kind, source_id)]

    def count(self, kind: str, source_id: str = "a") -> int:
        """How many of a kind so far."""
        return self._counts[kind, source_id]

    def forget(self, source_ids: list[str]) -> None:
        """All that was given them, and every frame's event."""
        with self._changed:
            gone = {*source_ids}
            self.events[:] = [event for event in self.events if event[0] != "frame" and event[1] not in gone]
            for key in [key for key in self._counts if key[1] in gone]:
                del self._counts[key]

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Until it is so, asked after each event."""
        until = time.monotonic() + DEADLINE_S
        with self._changed:
            while not is_so():
                left = until - time.monotonic()
                assert left > 0, [event for event in self.events if event[0] != "frame"][-20:]
                self._changed.wait(min(left, 0.1))

    def wait_for(self, kind: str, count: int = 1, source_id: str = "a") -> list[object]:
        """Waits until it received so many of a kind."""
        self.wait(lambda: self._counts[kind, source_id] >= count)
        return self.of(kind, source_id)

    def wait_for_state(self, state: SourceState, source_id: str = "a") -> str:
        """Until it was in that state; the reason."""
        found: list[str] = []

        def is_so() -> bool:
            states = (what for event_log, source, what in self.events if (event_log, source) == ("state", source_id))
            found[:] = [what[1] for what in states if isinstance(what, tuple) and what[0] is state]
            return bool(found)

        self.wait(is_so)
        return found[0]


def camera(mode: str, source_id: str = "a", **changes: object) -> SourceConfig:
    """A live source that behaves so."""
    return replace(SourceConfig(f"rtsp://fake/{mode}", source_id), **changes)  # type: ignore[arg-type]


def clip(mode: str, source_id: str = "a", **changes: object) -> SourceConfig:
    """A file that behaves so."""
    return replace(SourceConfig(f"file:///{mode}", source_id), **changes)  # type: ignore[arg-type]


@contextmanager
def running(event_log: EventLog, options: SourcesOptions = OPTIONS) -> Iterator[Sources]:
    """Sources that are closed in the end, whatever happens."""
    sources = Sources(options, event_log)
    sources.start()
    try:
        yield sources
        assert sources.faults == 0
    finally:
        assert sources.close(10.0)


def one(sources: Sources, source_id: str = "a") -> SourceSnapshot:
    """What is known of one source, once the thread knows it."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        for snapshot in sources.snapshot():
            if snapshot.source_id == source_id:
                return snapshot
        time.sleep(0.005)
    raise AssertionError(f"no source {source_id!r}")
