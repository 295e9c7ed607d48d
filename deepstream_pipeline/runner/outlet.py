"""A sink with its channel and its thread: whatever it does, the pipeline goes on."""

import threading
from dataclasses import dataclass

import structlog

from deepstream_pipeline.channel import Channel
from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.interfaces import Sink
from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.types import DropPolicy, FrameResult

log = structlog.get_logger(component="video")
LOOK_S = 0.5


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


@dataclass(frozen=True, slots=True)
class EndOfSource:
    """No more results of it come."""

    source_id: str


class Outlet:
    """`start`, then `put` from the thread of the results, then `close`."""

    def __init__(self, sink: Sink, options: OutletOptions, metrics: VideoMetrics) -> None:
        self.options = options
        self.failure = ""
        self._sink = sink
        self._metrics = metrics
        self._channel: Channel[FrameResult | EndOfSource] = Channel(options.capacity, DropPolicy.DROP_OLDEST)
        self._told_drops = 0
        self._thread = threading.Thread(target=self._run, name=f"sink-{options.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, item: FrameResult | EndOfSource, *, may_wait: bool) -> None:
        """may_wait: there is no live source, so that nothing is lost by waiting for the sink."""
        must = may_wait or isinstance(item, EndOfSource)
        self._channel.put(item, DropPolicy.BLOCK if must else DropPolicy.DROP_OLDEST)

    def close(self, timeout_s: float, *, is_hurried: bool = False) -> bool:
        """Whether what was taken is written and the sink closed within the time."""
        self._channel.close(is_hurried=is_hurried)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._channel.is_over:
            item = self._channel.take(LOOK_S)
            if item is not None:
                self._guarded(item)
            self._tell_depth()
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
        """Told once, and again when the text is another."""
        self._metrics.sink_errors(self.options.name)
        if text != self.failure:
            log.error("a sink fails", sink=self.options.name, reason=text)
        self.failure = text

    def _tell_depth(self) -> None:
        statistics = self._channel.statistics()
        if not self.options.has_spool:
            self._metrics.sink_depth(self.options.name, statistics.depth)
        lost = statistics.dropped + getattr(self._sink, "lost", 0)  # of a full disk, say: files' sinks count it
        if lost > self._told_drops:
            self._metrics.sink_dropped(self.options.name, lost - self._told_drops)
            self._told_drops = lost
