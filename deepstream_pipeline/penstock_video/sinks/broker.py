"""The sink in front of every broker: `write` queues a message, and one thread delivers."""

import random
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated

import structlog
from pydantic import Field

from penstock_video.backoff import Backoff
from penstock_video.errors import SinkFailed
from penstock_video.interfaces import INTERNAL
from penstock_video.metrics import VideoMetrics
from penstock_video.sinks.broker_link import NO_TIME_LEFT, BrokerLink, DeliveryOutcome, LinkDown
from penstock_video.sinks.schemas import Schema, event_lines, objects_line
from penstock_video.sinks.spool import Message, Spool, SpoolStatistics
from penstock_video.types import FrameResult

OPEN_TIMEOUT_S = 3.0
IDLE_S = 0.5
CLOSE_S = 5.0
LONGEST_PAUSE_S, CLOSING_PAUSE_S = 5.0, 0.1
BACKOFF = Backoff(0.2, LONGEST_PAUSE_S)
MAX_LOGGED_REASONS = 8  # different reasons that are logged in one outage
REFUSED_AGAIN_S = 60.0  # repeated refusals are logged again

log = structlog.get_logger(component="video")


class ResultKind(StrEnum):
    """Messages for a broker: one per event, one per frame with its objects, or both."""

    EVENTS = "events"
    OBJECTS = "objects"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Options of every broker. spool_messages, spool_bytes: limits of the spool while the broker is away."""

    what: ResultKind = ResultKind.EVENTS
    schema: Schema = Schema.FULL
    spool_messages: Annotated[int, Field(alias="spool-messages", ge=1, le=10_000_000)] = 10_000
    spool_bytes: Annotated[int, Field(alias="spool-bytes", ge=1 << 10, le=16 << 30)] = 64 * 2**20
    allowed_outbound: Annotated[tuple[str, ...], Field(json_schema_extra=INTERNAL)] = ()


class SinkGauge:
    """A broker's spool in the metrics, under the sink's name. Used by the writing and the sending thread."""

    def __init__(self, name: str, metrics: VideoMetrics) -> None:
        self._name, self._metrics = name, metrics

    def depth(self, n: int, size_bytes: int) -> None:
        """Sets the spool's size."""
        self._metrics.sink_depth(self._name, n, size_bytes)

    def dropped(self, n: int) -> None:
        """Counts dropped or refused messages."""
        self._metrics.sink_dropped(self._name, n)

    def failed(self) -> None:
        """Counts a failed attempt."""
        self._metrics.sink_errors(self._name)


@dataclass(frozen=True, slots=True)
class BrokerStatistics(SpoolStatistics):
    """refusal: the last reason of a rejected message. errors: failed attempts. is_connected: as of the last attempt or
    message; reason: why not."""

    errors: int
    is_connected: bool
    reason: str
    refusal: str = ""

    @property
    def lost(self) -> int:
        """Messages that a closed sink did not deliver."""
        return self.depth + self.refused + self.dropped

    def why_lost(self) -> str:
        """The reason, or the reasons with their numbers."""
        left = self.reason or NO_TIME_LEFT
        reasons = ((self.depth, left), (self.refused, self.refusal), (self.dropped, "no room in its spool"))
        causes = [(count, reason) for count, reason in reasons if count]
        return causes[0][1] if len(causes) == 1 else ", ".join(f"{count} ({reason})" for count, reason in causes)


class BrokerSink:
    """A Sink that delivers over a link. Its thread runs until `close`."""

    def __init__(self, link: BrokerLink, options: BrokerOptions, gauge: SinkGauge | None = None) -> None:
        self._link = link
        self._options = options
        self._gauge = gauge
        self._spool = Spool(options.spool_messages, options.spool_bytes)
        self._changed = threading.Condition()  # guards the spool, and the values of statistics()
        self._closing = threading.Event()
        self._over_at = float("inf")
        self._attempts = 0  # consecutive failures
        self._run_id, self._epoch = secrets.token_hex(4), 0
        self._is_open = self._is_connected = False
        self._reason, self._refusal, self._errors = "not connected yet", "", 0
        self._logged_reasons: set[str] = set()
        self._untold = ""  # why the connection was lost: the next attempt's reason is usually better
        self._logged_refusal = ("", float("-inf"))  # and when
        self._dropped_before = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {link.name}", daemon=True)
        self._thread.start()

    def write(self, result: FrameResult) -> None:
        """Spools the result's messages; never waits for the broker. Raises SinkFailed after `close`."""
        messages = self._messages(result)
        if not messages:
            return
        if self._closing.is_set():
            raise SinkFailed(f"{self._link.place} is closed: frame {result.frame.frame_num} comes too late")
        with self._changed:
            dropped = sum([self._spool.put(message) for message in messages])
            self._changed.notify()
        if dropped:
            if self._gauge is not None:
                self._gauge.dropped(dropped)
            self._tell_once("full", "sink drops its oldest messages", "its spool is full")
        self._tell_depth()

    def end_source(self, source_id: str) -> None:
        """Begins new message IDs, for a source that restarts under the same name with frames counted from 0."""
        self._epoch += 1

    def close(self) -> None:
        """Delivers the spool for at most CLOSE_S. Raises SinkFailed if any message was lost, with number and reason."""
        with self._changed:
            if self._closing.is_set():
                return
            self._over_at = self._link.over_at = time.monotonic() + CLOSE_S
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(CLOSE_S + 0.5)  # a thread that hangs longer in its library ends by its own time-outs
        said = self.statistics()
        if said.lost:
            count = f"{said.lost} message{'s' * (said.lost != 1)}"
            were = "were" if said.lost != 1 else "was"
            raise SinkFailed(f"{count} for {self._link.place} {were} not delivered: {said.why_lost()}")

    def statistics(self) -> BrokerStatistics:
        """Current statistics. Thread-safe."""
        with self._changed:
            return BrokerStatistics(
                **asdict(self._spool.statistics()),
                errors=self._errors,
                is_connected=self._is_connected,
                reason=self._reason,
                refusal=self._refusal,
            )

    def _messages(self, result: FrameResult) -> list[Message]:
        frame, what, schema = result.frame, self._options.what, self._options.schema
        named, made_in = f"{frame.source_id}:{frame.frame_num}", f"{self._run_id}-{self._epoch}"
        messages = []
        if what != ResultKind.EVENTS:
            line = objects_line(result, schema)
            messages.append(Message(frame.source_id, f"{named}:objects:0:{made_in}", "objects", line))
        if what != ResultKind.OBJECTS and result.analytics.events:
            lines = zip(result.analytics.events, event_lines(result, schema), strict=True)
            for index, (event, line) in enumerate(lines):
                message_id = f"{named}:{event.kind}:{index}:{made_in}"
                messages.append(Message(frame.source_id, message_id, "events", line))
        return messages

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._turn()
            except LinkDown as error:
                self._lost(error.message, 0.0)
            except Exception as error:  # noqa: BLE001 - the thread's root: whatever it is, the sink goes on
                log.error("sink's sender failed", sink=self._link.place, error=type(error).__name__)
                self._lost(f"internal error ({type(error).__name__})", LONGEST_PAUSE_S)
        self._link.close()

    def _is_over(self) -> bool:
        with self._changed:
            return self._closing.is_set() and (not len(self._spool) or time.monotonic() >= self._over_at)

    def _turn(self) -> None:
        if not self._is_open:
            has_answered = self._link.open(max(0.1, min(OPEN_TIMEOUT_S, self._over_at - time.monotonic())))
            self._is_open = True
            if has_answered and not self._spool.has_waiting:  # otherwise the first delivery shows it
                self._connected()
        with self._changed:
            if not self._spool.has_waiting and not self._closing.is_set():
                self._changed.wait(IDLE_S)
            messages = self._spool.take(self._link.max_messages, self._link.max_bytes)
        if messages:
            self._settle(self._link.send(messages))
        else:
            self._link.idle()
            self._tell_depth()

    def _settle(self, outcome: DeliveryOutcome) -> None:
        with self._changed:
            self._spool.done(outcome.delivered)
            self._spool.refuse(outcome.refused)
            self._spool.put_back(outcome.left)
        if outcome.refused:
            self._refused(outcome)
        if outcome.trouble:
            self._lost(outcome.trouble, outcome.pause_s)
        elif outcome.delivered:
            self._connected()
        self._tell_depth()

    def _refused(self, outcome: DeliveryOutcome) -> None:
        self._count_error()
        if self._gauge is not None:
            self._gauge.dropped(len(outcome.refused))
        with self._changed:
            self._refusal = outcome.refusal
            if not self._is_connected:
                self._reason = outcome.refusal
            refused = self._spool.statistics().refused
        refusal, logged_at = self._logged_refusal
        if outcome.refusal != refusal or time.monotonic() - logged_at >= REFUSED_AGAIN_S:
            self._logged_refusal = (outcome.refusal, time.monotonic())
            log.warning("sink's messages refused", sink=self._link.place, reason=outcome.refusal, refused=refused)

    def _lost(self, reason: str, pause_s: float) -> None:
        self._link.close()
        self._is_open = False
        with self._changed:
            self._spool.put_back_all()
        self._count_error()
        is_first = self._is_connected and not pause_s
        with self._changed:
            self._is_connected, self._reason = False, reason
        self._untold = reason
        if not is_first:
            self._tell_waiting()
        self._pause(pause_s)

    def _pause(self, asked_s: float) -> None:
        """Waits before the next attempt. While closing, only waits as the broker requested, as time allows."""
        until = time.monotonic() + asked_s
        self._attempts += 1
        if not self._closing.wait(max(asked_s, BACKOFF.delay_s(self._attempts, random.random()))):
            return
        now = time.monotonic()
        time.sleep(max(0.0, min(max(CLOSING_PAUSE_S, until - now), self._over_at - now)))

    def _connected(self) -> None:
        self._attempts = 0
        if self._is_connected:
            return
        if self._untold:
            self._tell_waiting()
        with self._changed:
            self._is_connected, self._reason = True, ""
            spool = self._spool.statistics()
        dropped, self._dropped_before = spool.dropped - self._dropped_before, spool.dropped
        tell = log.warning if self._logged_reasons else log.info  # the same level as the outage
        self._logged_reasons.clear()
        tell("sink connected", sink=self._link.place, spooled=spool.depth, dropped=dropped)

    def _tell_waiting(self) -> None:
        reason, self._untold = self._untold, ""
        self._tell_once("waiting", "sink waits for its broker", reason)

    def _count_error(self) -> None:
        with self._changed:
            self._errors += 1
        if self._gauge is not None:
            self._gauge.failed()

    def _tell_once(self, kind: str, event: str, reason: str) -> None:
        said = f"{kind}: {reason}"
        if said not in self._logged_reasons and len(self._logged_reasons) < MAX_LOGGED_REASONS:
            self._logged_reasons.add(said)
            log.warning(event, sink=self._link.place, reason=reason)

    def _tell_depth(self) -> None:
        if self._gauge is not None:
            with self._changed:
                n, size_bytes = len(self._spool), self._spool.size_bytes
            self._gauge.depth(n, size_bytes)
