"""The sink in front of every broker: `write` puts into a spool and returns, one thread of its own delivers.

Delivery is in order and at least once: after a lost connection nobody knows what of the last batch arrived, so it is
sent again, and a consumer may see a message twice, never before one of the same source that was written earlier (but
for such repetitions). Every message carries an id that stays the same when it is repeated. While the broker is away
the spool holds what fits; beyond that the oldest are lost, and counted.
"""

import random
import secrets
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.sinks.link import Link, LinkDown, Outcome
from deepstream_pipeline.sinks.schemas import Schema, event_lines, objects_line
from deepstream_pipeline.sinks.spool import Message, Spool
from deepstream_pipeline.types import FrameResult

OPEN_TIMEOUT_S = 3.0
IDLE_S = 0.5
CLOSE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, CLOSING_PAUSE_S = 0.2, 5.0, 0.1
MAX_TOLD = 8  # different reasons that are logged in one outage
REFUSED_AGAIN_S = 60.0  # refusals that go on are told again

log = structlog.get_logger(component="video")


class What(StrEnum):
    """What a broker is sent: a message an event, a message a frame with its objects, or both."""

    EVENTS = "events"
    OBJECTS = "objects"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """What all brokers' options have. spool_messages, spool_bytes: what is held while the broker is away.
    allowed_outbound: of server.core.outbound.Outbound."""

    what: What = What.EVENTS
    schema: Schema = Schema.FULL
    spool_messages: int = 10_000
    spool_bytes: int = 64 * 2**20
    allowed_outbound: tuple[str, ...] = ()


class SinkGauge(Protocol):
    """Who is told how a sink does. From the writing thread and the sender's; none of it may block or raise."""

    def depth(self, n: int, size_bytes: int) -> None:
        """So much is in the spool now."""
        ...

    def dropped(self, n: int) -> None:
        """So many more were lost: no room, or refused by the broker for ever."""
        ...

    def failed(self) -> None:
        """One more attempt failed."""
        ...


class Unwatched:
    """A SinkGauge that nobody reads."""

    def depth(self, n: int, size_bytes: int) -> None:
        """Nothing."""

    def dropped(self, n: int) -> None:
        """Nothing."""

    def failed(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """depth, size_bytes: in the spool now. The counts are sums; written = sent + dropped + refused + depth, always.

    dropped: lost for want of room. refused: lost because the broker will never take them (a webhook's dead letters).
    refusal: why the last of them. errors: attempts that failed. is_connected: what the last attempt showed, of a link
    that asks nothing but to take messages the last that was taken or left; reason: why not.
    """

    depth: int
    size_bytes: int
    written: int
    sent: int
    dropped: int
    refused: int
    errors: int
    is_connected: bool
    reason: str
    refusal: str = ""

    @property
    def lost(self) -> int:
        """Of a sink that is closed: messages that did not arrive, and never will."""
        return self.depth + self.refused + self.dropped

    def why_lost(self) -> str:
        """One reason, or of several each with its number."""
        left = self.reason or "no time was left"
        reasons = ((self.depth, left), (self.refused, self.refusal), (self.dropped, "no room in its spool"))
        told = [(count, reason) for count, reason in reasons if count]
        return told[0][1] if len(told) == 1 else ", ".join(f"{count} ({reason})" for count, reason in told)


class Backoff:
    """Pauses between attempts: doubling to a bound, each between half and the whole of it, so that many spread out."""

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0

    def next_s(self) -> float:
        """How long to wait now."""
        whole = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return whole * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It works: the next pause is the first again."""
        self._failures = 0


class BrokerSink:
    """A Sink (of interfaces) that delivers over a link. Its thread runs from here until `close`."""

    def __init__(self, link: Link, options: BrokerOptions, gauge: SinkGauge | None = None) -> None:
        self._link = link
        self._options = options
        self._gauge: SinkGauge = gauge or Unwatched()
        self._spool = Spool(options.spool_messages, options.spool_bytes)
        self._changed = threading.Condition()  # guards the spool, and what statistics() tells
        self._closing = threading.Event()
        self._over_at = float("inf")
        self._backoff = Backoff()
        self._run_id, self._epoch = secrets.token_hex(4), 0
        self._is_open = self._is_connected = False
        self._reason, self._refusal, self._errors = "not connected yet", "", 0
        self._told: set[str] = set()
        self._untold = ""  # why the connection was lost: the next attempt mostly knows better
        self._refusal_told = ("", float("-inf"))  # and when
        self._dropped_before = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {link.name}", daemon=True)
        self._thread.start()

    def write(self, result: FrameResult) -> None:
        """Spools what the broker is to have of it; never waits for the broker. Raises SinkFailed once it is closed."""
        messages = self._messages(result)
        if not messages:
            return
        if self._closing.is_set():
            raise SinkFailed(f"{self._link.place} is closed: frame {result.frame.frame_num} comes too late")
        with self._changed:
            dropped = sum([self._spool.put(message) for message in messages])
            self._changed.notify()
        if dropped:
            self._tell_dropped(dropped)
        self._tell_depth()

    def end_source(self, source_id: str) -> None:
        """Ids of a source that comes again under the same name, and counts its frames anew, are new ones."""
        self._epoch += 1

    def close(self) -> None:
        """Delivers what is spooled, for at most 5 s. Raises SinkFailed where messages were lost since the beginning:
        left now, refused, or dropped for want of room; it says how many and why."""
        with self._changed:
            if self._closing.is_set():
                return
            self._over_at = time.monotonic() + CLOSE_S
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(CLOSE_S + 0.5)  # a thread that hangs in its library beyond that ends by its own time-outs
        said = self.statistics()
        if said.lost:
            count = f"{said.lost} message{'s' * (said.lost != 1)}"
            were = "were" if said.lost != 1 else "was"
            raise SinkFailed(f"{count} for {self._link.place} {were} not delivered: {said.why_lost()}")

    def statistics(self) -> BrokerStatistics:
        """How it stands. From any thread."""
        with self._changed:
            spool = self._spool.statistics()
            return BrokerStatistics(
                depth=spool.depth,
                size_bytes=spool.size_bytes,
                written=spool.put,
                sent=spool.sent,
                dropped=spool.dropped,
                refused=spool.refused,
                errors=self._errors,
                is_connected=self._is_connected,
                reason=self._reason,
                refusal=self._refusal,
            )

    def _messages(self, result: FrameResult) -> list[Message]:
        frame, what, schema = result.frame, self._options.what, self._options.schema
        named, made_in = f"{frame.source_id}:{frame.frame_num}", f"{self._run_id}-{self._epoch}"
        messages = []
        if what != What.EVENTS:
            line = objects_line(result, schema)
            messages.append(Message(frame.source_id, f"{named}:objects:0:{made_in}", "objects", line))
        if what != What.OBJECTS and result.analytics.events:
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
            if has_answered and not self._spool.has_waiting:  # else the first delivery shows it
                self._connected()
        messages, has_taken = self._next()
        if not has_taken:
            self._link.idle()
            self._tell_depth()
            return
        self._settle(self._link.send(messages))

    def _next(self) -> tuple[tuple[Message, ...], bool]:
        with self._changed:
            if self._spool.has_taken:
                return (), True
            if not self._spool.has_waiting and not self._closing.is_set():
                self._changed.wait(IDLE_S)
            messages = self._spool.take(self._link.max_messages, self._link.max_bytes)
            return messages, bool(messages)

    def _settle(self, outcome: Outcome) -> None:
        with self._changed:
            self._spool.done(outcome.delivered)
            self._spool.refuse(outcome.refused)
            self._spool.put_back(outcome.left)
            has_taken = self._spool.has_taken
        if outcome.refused:
            self._refused(outcome)
        if outcome.left or (outcome.trouble and not has_taken):
            self._lost(outcome.trouble, outcome.pause_s)
        elif outcome.trouble:
            if self._is_connected or not self._told:
                self._count_error()
            self._waiting(outcome.trouble)
        elif outcome.delivered:
            self._connected()
        self._tell_depth()

    def _refused(self, outcome: Outcome) -> None:
        self._count_error()
        self._gauge.dropped(len(outcome.refused))
        with self._changed:
            self._refusal = outcome.refusal
            if not self._is_connected:
                self._reason = outcome.refusal
            refused = self._spool.statistics().refused
        told, told_at = self._refusal_told
        if outcome.refusal != told or time.monotonic() - told_at >= REFUSED_AGAIN_S:
            self._refusal_told = (outcome.refusal, time.monotonic())
            log.warning("sink's messages refused", sink=self._link.place, reason=outcome.refusal, refused=refused)

    def _lost(self, reason: str, pause_s: float) -> None:
        self._link.close()
        self._is_open = False
        with self._changed:
            self._spool.put_back_all()
        self._count_error()
        is_first = self._is_connected and not pause_s
        self._waiting(reason, is_told=not is_first)
        self._pause(pause_s)

    def _pause(self, asked_s: float) -> None:
        """Before the next attempt. While closing it is short, but what was asked for is waited, as the time allows."""
        until = time.monotonic() + asked_s
        if not self._closing.wait(max(asked_s, self._backoff.next_s())):
            return
        now = time.monotonic()
        time.sleep(max(0.0, min(max(CLOSING_PAUSE_S, until - now), self._over_at - now)))

    def _connected(self) -> None:
        self._backoff.reset()
        if self._is_connected:
            return
        if self._untold:
            self._tell_waiting(self._untold)
        with self._changed:
            self._is_connected, self._reason = True, ""
            spool = self._spool.statistics()
        dropped, self._dropped_before = spool.dropped - self._dropped_before, spool.dropped
        tell = log.warning if self._told else log.info  # who was told of the outage is told of its end
        self._told.clear()
        tell("sink connected", sink=self._link.place, spooled=spool.depth, dropped=dropped)

    def _waiting(self, reason: str, *, is_told: bool = True) -> None:
        with self._changed:
            self._is_connected, self._reason = False, reason
        if is_told:
            self._tell_waiting(reason)
        else:
            self._untold = reason

    def _tell_waiting(self, reason: str) -> None:
        self._untold = ""
        self._tell_once("waiting", "sink waits for its broker", reason)

    def _count_error(self) -> None:
        with self._changed:
            self._errors += 1
        self._gauge.failed()

    def _tell_once(self, kind: str, event: str, reason: str) -> None:
        said = f"{kind}: {reason}"
        if said not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(said)
            log.warning(event, sink=self._link.place, reason=reason)

    def _tell_dropped(self, n: int) -> None:
        self._gauge.dropped(n)
        self._tell_once("full", "sink drops its oldest messages", "its spool is full")

    def _tell_depth(self) -> None:
        with self._changed:
            n, size_bytes = len(self._spool), self._spool.size_bytes
        self._gauge.depth(n, size_bytes)
