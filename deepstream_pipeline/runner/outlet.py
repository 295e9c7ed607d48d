"""A sink with its channel and its thread: whatever it does, the pipeline goes on."""

import threading
import time
from dataclasses import dataclass

import structlog

from deepstream_pipeline.channel import Channel
from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.interfaces import Sink
from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.types import DropPolicy, FrameResult

log = structlog.get_logger(component="video")
LOOK_S = 0.5
PATIENCE_S = 30.0  # with a sink that takes nothing, where nothing should be lost
TELL_EVERY_S = 60.0
PICTURES_BYTES = 128 << 20  # that wait for one sink: twenty of 1080p, five of 4K


@dataclass(frozen=True, slots=True)
class OutletOptions:
    """capacity: results that wait at most. draws: it uses the frames' pictures; always_draws: it needs every one.

    has_spool: what waits for it waits in a spool of its own, which tells how much that is.
    """

    name: str
    capacity: int
    draws: bool = False
    always_draws: bool = False
    has_spool: bool = False

    def shows(self, result: FrameResult) -> bool:
        """Whether the sink has any use for it. Previews of a frame without a picture have none, and would be woken for
        each: 0.5 ms of a core on a machine where a frame costs 12."""
        return not self.draws or self.always_draws or result.frame.image is not None


@dataclass(frozen=True, slots=True)
class EndOfSource:
    """No more results of it come."""

    source_id: str


class Outlet:
    """`start`, then `put` from the thread of the results, then `close`."""

    def __init__(
        self, sink: Sink, options: OutletOptions, metrics: VideoMetrics, *, patience_s: float = PATIENCE_S
    ) -> None:
        self.options = options
        self.failure = ""
        self._sink = sink
        self._metrics = metrics
        self._channel: Channel[FrameResult | EndOfSource] = Channel(
            options.capacity,
            DropPolicy.DROP_OLDEST,
            patience_s=patience_s,
            size_of=_picture_bytes,
            capacity_bytes=PICTURES_BYTES,
        )
        self._told_drops = 0
        self._tell_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"sink-{options.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def lost(self) -> int:
        """Results that it had no room or no time for, or that the sink wrote nowhere."""
        return self._channel.statistics().dropped + getattr(self._sink, "lost", 0)

    @property
    def sentence(self) -> str:
        """Of a sink that failed: why, and how many results are not in it. A spool's own words say how many messages;
        beside them results are counted only where they did not get so far."""
        is_counted = self.lost > 0 or not self.options.has_spool
        return f"{self.options.name} failed: {self.failure}" + (f" ({self.lost} results lost)" if is_counted else "")

    def put(self, item: FrameResult | EndOfSource, *, may_wait: bool) -> None:
        """may_wait: there is no live source, so that nothing is lost by waiting for the sink; one that hangs is waited
        for no longer than PATIENCE_S. The end of a source waits for nobody, and is not lost."""
        policy = DropPolicy.BLOCK if may_wait else DropPolicy.DROP_OLDEST
        self._channel.put(item, policy, is_kept=isinstance(item, EndOfSource))

    def end(self, *, is_hurried: bool = False) -> None:
        """Nothing more comes. Does not wait; `close` does."""
        self._channel.close(is_hurried=is_hurried)

    def close(self, timeout_s: float, *, is_hurried: bool = False) -> bool:
        """Whether what was taken is written and the sink closed within the time."""
        self.end(is_hurried=is_hurried)
        if self._thread.ident is None:  # never started: what the sink opened is closed all the same
            self._close_sink()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._channel.is_over:
            item = self._channel.take(LOOK_S)
            if item is not None:
                self._guarded(item)
            self._tell_depth()
        self._close_sink()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except SinkFailed as error:
            self._fail(error.message)
        except Exception:
            log.exception("a sink failed unexpectedly at its end", sink=self.options.name)
            self._fail("internal error; the log says which")

    def _guarded(self, item: FrameResult | EndOfSource) -> None:
        try:
            if isinstance(item, EndOfSource):
                self._sink.end_source(item.source_id)
            else:
                self._sink.write(item)
        except SinkFailed as error:
            self._fail(error.message)
        except Exception:  # the root of the sink's thread: a bug of one sink costs the others nothing
            log.exception("a sink failed unexpectedly", sink=self.options.name)
            self._fail("internal error; the log says which")

    def _fail(self, text: str) -> None:
        """Told once, and again when the text is another, or it is a while later: it may have worked meanwhile."""
        self._metrics.sink_errors(self.options.name)
        now = time.monotonic()
        if text != self.failure or now >= self._tell_at:
            log.error("a sink fails", sink=self.options.name, reason=text)
            self._tell_at = now + TELL_EVERY_S
        self.failure = text

    def _tell_depth(self) -> None:
        statistics = self._channel.statistics()
        if not self.options.has_spool:
            self._metrics.sink_depth(self.options.name, statistics.depth, statistics.size_bytes)
        lost = statistics.dropped + getattr(self._sink, "lost", 0)  # of a full disk, say: files' sinks count it
        if lost > self._told_drops:
            self._metrics.sink_dropped(self.options.name, lost - self._told_drops)
            self._told_drops = lost


def _picture_bytes(item: FrameResult | EndOfSource) -> int:
    image = item.frame.image if isinstance(item, FrameResult) else None
    return image.nbytes if image is not None else 0
