"""Ended spans on their way to the collector: a bounded queue and a thread. Nobody who ends a span ever waits."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

MAX_SPANS = 2048
BATCH_SPANS = 128  # small: while a batch is encoded, the event loop shares the interpreter with it
INTERVAL_S = 1.0


class SpanOutbox(SpanProcessor):
    """Sends batches in order, one at a time. What finds the queue full, or the collector away, is dropped and counted.

    tell: called from the thread with a sentence when the collector is lost (with why) and when it is back (with "").
    """

    def __init__(self, exporter: SpanExporter, tell: Callable[[str], None], *, interval_s: float = INTERVAL_S) -> None:
        self._exporter = exporter
        self._tell = tell
        self._interval_s = interval_s
        self._spans: deque[ReadableSpan] = deque()
        self._is_due = threading.Event()
        self._is_stopping = False
        self._is_lost = False
        self._full = 0
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that no collector got."""
        return self._full + self._refused

    def on_end(self, span: ReadableSpan) -> None:
        """Take it along, or drop it."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._is_stopping or len(self._spans) >= MAX_SPANS:
            self._full += 1
            return
        self._spans.append(span)
        if len(self._spans) >= BATCH_SPANS:
            self._is_due.set()

    def stop(self, grace_s: float) -> None:
        """Send what waits, for so long at most."""
        self._is_stopping = True
        self._is_due.set()
        self._thread.join(grace_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping:
            self._is_due.wait(self._interval_s)
            self._is_due.clear()
            self._send_all()
        self._send_all()  # what came between the last look and the stop

    def _send_all(self) -> None:
        while self._spans:
            self._send()

    def _send(self) -> None:
        batch: list[ReadableSpan] = []
        with suppress(IndexError):
            while len(batch) < BATCH_SPANS:
                batch.append(self._spans.popleft())
        try:
            result = self._exporter.export(batch)
            reason = "" if result is SpanExportResult.SUCCESS else "the collector took no spans"
        except Exception as error:  # noqa: BLE001 - the root of the thread
            reason = f"spans could not be sent: {error!r}"
        if reason:
            self._refused += len(batch)
        if bool(reason) != self._is_lost:
            self._is_lost = bool(reason)
            self._tell(reason)
