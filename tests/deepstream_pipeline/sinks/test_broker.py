"""What all brokers' sinks have in common, with a link that obeys the test."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerOptions, BrokerSink, ResultKind, SinkGauge
from penstock_video.sinks.broker_link import DeliveryOutcome, LinkDown, scrub
from penstock_video.sinks.schemas import Schema
from penstock_video.sinks.spool import Message
from tests.deepstream_pipeline.sinks.results import crossing, result
from tests.support.waiting import wait_for


class Scripted:
    """A Link that does what `answers` says, one a send, and delivers when nothing is said."""

    name, place = "scripted", "scripted, topic t"
    max_messages, max_bytes = 10, 10_000
    over_at = float("inf")

    def __init__(self, *answers: Callable[[Sequence[Message]], DeliveryOutcome]) -> None:
        self.answers = list(answers)
        self.calls: list[list[str]] = []
        self.delivered: list[Message] = []
        self.open_error = ""
        self.opened = self.closed = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_answer = True

    def open(self, timeout_s: float) -> bool:
        self.opened += 1
        if self.open_error:
            raise LinkDown(self.open_error)
        return self.has_answer

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        self.may_go_on.wait(30.0)
        self.calls.append([one.id for one in messages])
        outcome = self.answers.pop(0)(messages) if self.answers else DeliveryOutcome(delivered=messages)
        self.delivered += outcome.delivered
        return outcome

    def idle(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


class Gauge(SinkGauge):
    """Keeps what is reported to it."""

    def __init__(self) -> None:
        self.depths: list[tuple[int, int]] = []
        self.drops = self.failures = 0

    def depth(self, n: int, size_bytes: int) -> None:
        self.depths.append((n, size_bytes))

    def dropped(self, n: int) -> None:
        self.drops += n

    def failed(self) -> None:
        self.failures += 1


@pytest.fixture
def make() -> Iterator[Callable[..., BrokerSink]]:
    """Sinks that are closed when the test ends."""
    made: list[tuple[BrokerSink, Scripted]] = []

    def sink(link: Scripted, gauge: Gauge | None = None, **options: Any) -> BrokerSink:
        made.append((BrokerSink(link, BrokerOptions(**{"what": ResultKind.OBJECTS, **options}), gauge), link))
        return made[-1][0]

    yield sink
    for one, link in made:
        link.may_go_on.set()
        link.open_error = ""
        with suppress(SinkFailed):  # of a loss that the test wanted
            one.close()


def frames(link: Scripted) -> list[int]:
    """What was delivered, by frame number."""
    return [int(one.id.split(":")[1]) for one in link.delivered]


def test_sink_writing_while_its_broker_hangs_never_waits(make: Callable[..., BrokerSink]) -> None:
    """1,000 writes into a link that answers nothing do not wait for it; nothing is lost."""
    link = Scripted()
    link.may_go_on.clear()
    sink = make(link)
    began = time.perf_counter()
    for number in range(1_000):
        sink.write(result(number, has_image=False, objects=1))
    assert time.perf_counter() - began < 10.0  # the link hangs for 30 s
    link.may_go_on.set()
    wait_for(lambda: len(link.delivered) == 1_000)
    assert frames(link) == list(range(1_000))


def test_sink_whose_link_is_lost_sends_what_was_left_again_in_order(make: Callable[..., BrokerSink]) -> None:
    """What had no answer goes out again, before what came later, under the same id."""
    link = Scripted(lambda batch: DeliveryOutcome(delivered=batch[:2], left=batch[2:], trouble="gone"))
    link.may_go_on.clear()
    sink = make(link)
    for number in range(20):
        sink.write(result(number, has_image=False))
    link.may_go_on.set()
    wait_for(lambda: len(link.delivered) == 20)
    assert frames(link) == list(range(20))
    first, again = link.calls[0][2:], link.calls[1]
    assert again[: len(first)] == first
    assert link.opened == 2
    assert sink.statistics().errors == 1


def test_sink_with_a_message_that_is_refused_counts_it_and_goes_on(make: Callable[..., BrokerSink]) -> None:
    """One message that the broker will never take costs itself only."""
    gauge = Gauge()
    link = Scripted(lambda batch: DeliveryOutcome(delivered=batch[1:], refused=batch[:1], refusal="too large"))
    link.may_go_on.clear()
    sink = make(link, gauge)
    for number in range(15):
        sink.write(result(number, has_image=False))
    link.may_go_on.set()
    wait_for(lambda: sink.statistics().depth == 0)
    said = sink.statistics()
    assert (said.written, said.sent, said.refused, said.is_connected) == (15, 14, 1, True)
    assert gauge.drops == 1
    assert gauge.failures == 1
    with pytest.raises(SinkFailed, match=r"^1 message for scripted, topic t was not delivered: too large$"):
        sink.close()


def test_sink_whose_spool_is_full_tells_each_loss_to_its_gauge(make: Callable[..., BrokerSink]) -> None:
    """Drops are counted exactly, in the statistics and in the gauge, and the depth never passes its bounds."""
    gauge, link = Gauge(), Scripted()
    link.open_error = "no one there"
    sink = make(link, gauge, spool_messages=40)
    for number in range(100):
        sink.write(result(number, has_image=False))
    assert sink.statistics().dropped == gauge.drops == 60
    assert max(depth for depth, _ in gauge.depths) == 40
    assert sink.statistics().size_bytes == gauge.depths[-1][1]
    link.open_error = ""
    wait_for(lambda: len(link.delivered) == 40)
    assert frames(link) == list(range(60, 100))
    with pytest.raises(
        SinkFailed, match=r"^60 messages for scripted, topic t were not delivered: no room in its spool"
    ):
        sink.close()


def test_sink_whose_broker_is_away_says_so_once_and_once_when_it_is_back(make: Callable[..., BrokerSink]) -> None:
    """One log line as it goes, one as it comes, whatever number of attempts lies between. A reader of warnings only
    sees both; a connection without any trouble is no warning."""
    link = Scripted()
    with capture_logs() as lines:
        sink = make(link, spool_messages=5)
        wait_for(lambda: sink.statistics().is_connected)
        link.open_error, link.answers = (
            "no one there",
            [lambda batch: DeliveryOutcome(left=batch, trouble="no one there")],
        )
        for number in range(20):
            sink.write(result(number, has_image=False))
        wait_for(lambda: sink.statistics().errors >= 3)
        assert sink.statistics().reason == "no one there"
        link.open_error = ""
        wait_for(lambda: sink.statistics().is_connected)
    reported = [line["event"] for line in lines]
    assert reported[0] == reported[-1] == "sink connected"
    assert sorted(reported[1:-1]) == ["sink drops its oldest messages", "sink waits for its broker"]
    assert [line["log_level"] for line in lines] == ["info", "warning", "warning", "warning"]
    assert lines[-1]["dropped"] == sink.statistics().dropped > 0


def test_sink_that_is_refused_everything_never_says_that_it_is_connected(make: Callable[..., BrokerSink]) -> None:
    """A refusal is no delivery: it is reported once, not as a recovery, and named with its number."""
    refuse = partial(DeliveryOutcome, (), refusal="answered 401")
    link = Scripted(*[lambda batch: refuse(refused=batch)] * 3)
    link.max_messages, link.has_answer = 1, False
    with capture_logs() as lines:
        sink = make(link)
        for number in range(3):
            sink.write(result(number, has_image=False))
        wait_for(lambda: sink.statistics().refused == 3)
        said = sink.statistics()
        with pytest.raises(SinkFailed, match=r"^3 messages for scripted, topic t were not delivered: answered 401$"):
            sink.close()
    assert (said.is_connected, said.reason) == (False, "answered 401")
    assert [line["event"] for line in lines] == ["sink's messages refused"]


def test_sink_that_is_refused_for_long_says_so_again(
    make: Callable[..., BrokerSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of refusals are not one line at their beginning; each later one has the number until then."""
    monkeypatch.setattr("penstock_video.sinks.broker.REFUSED_AGAIN_S", 0.0)
    link = Scripted(*[lambda batch: DeliveryOutcome(refused=batch, refusal="answered 401")] * 3)
    link.max_messages = 1
    with capture_logs() as lines:
        sink = make(link)
        for number in range(3):
            sink.write(result(number, has_image=False))
        wait_for(lambda: sink.statistics().refused == 3)
    assert [line["refused"] for line in lines if line["event"] == "sink's messages refused"] == [1, 2, 3]


@pytest.mark.parametrize("reopens", [False, True])
def test_sink_whose_connection_is_lost_tells_the_reason_that_is_known_best(
    reopens: bool, make: Callable[..., BrokerSink]
) -> None:
    """One line: what the next attempt says, which knows more; where that one works, that it was lost at all."""
    link = Scripted()
    with capture_logs() as lines:
        sink = make(link)
        wait_for(lambda: sink.statistics().is_connected)
        link.open_error = "" if reopens else "refused"
        link.answers = [lambda batch: DeliveryOutcome(left=batch, trouble="lost")]
        sink.write(result(0, has_image=False))
        wait_for(lambda: sink.statistics().errors >= (1 if reopens else 3))
        link.open_error = ""
        wait_for(lambda: sink.statistics().sent == 1)
        wait_for(lambda: sink.statistics().is_connected)
    reported = [line["reason"] for line in lines if line["event"] == "sink waits for its broker"]
    assert reported == ["lost" if reopens else "refused"]
    assert (lines[-1]["event"], lines[-1]["log_level"]) == ("sink connected", "warning")


def test_sink_that_lost_in_several_ways_says_each_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum, and what it is made of."""
    monkeypatch.setattr("penstock_video.sinks.broker.CLOSE_S", 0.5)
    link = Scripted(
        lambda batch: DeliveryOutcome(refused=batch, refusal="too large"),
        lambda batch: DeliveryOutcome(left=batch, trouble="gone"),
    )
    link.may_go_on.clear()
    sink = BrokerSink(link, BrokerOptions(what=ResultKind.OBJECTS, spool_messages=5))
    sink.write(result(0, has_image=False))
    wait_for(lambda: bool(sink._spool._taken))
    for number in range(1, 12):
        sink.write(result(number, has_image=False))
    link.open_error = "no one there"
    link.may_go_on.set()
    said = r"^12 messages for .* not delivered: 4 \(no one there\), 1 \(too large\), 7 \(no room in its spool\)$"
    with pytest.raises(SinkFailed, match=said):
        sink.close()


def test_sink_that_is_closed_waits_as_long_as_it_was_asked_to(make: Callable[..., BrokerSink]) -> None:
    """The hurry of the end uses up no attempts: what a link asks for is waited, within the time that is left."""
    link = Scripted(lambda batch: DeliveryOutcome(left=batch, trouble="not yet", pause_s=1.5))
    link.may_go_on.clear()
    sink = make(link)
    sink.write(result(0, has_image=False))
    closing = threading.Thread(target=sink.close)
    closing.start()
    wait_for(sink._closing.is_set)
    began = time.monotonic()
    link.may_go_on.set()
    closing.join(10.0)
    assert (frames(link), len(link.calls)) == ([0], 2)
    assert time.monotonic() - began >= 1.5


def test_sink_that_is_closed_delivers_what_it_has_first(make: Callable[..., BrokerSink]) -> None:
    """Closing flushes, and lets go of the connection."""
    link = Scripted()
    sink = make(link)
    for number in range(100):
        sink.write(result(number, has_image=False))
    sink.close()
    assert frames(link) == list(range(100))
    assert link.closed == 1
    with pytest.raises(SinkFailed, match="comes too late"):
        sink.write(result(100, has_image=False))


def test_sink_that_is_closed_while_its_broker_is_away_says_what_was_left() -> None:
    """After five seconds it gives up, with the number of messages and the reason."""
    link = Scripted()
    link.open_error = "no one there"
    sink = BrokerSink(link, BrokerOptions(what=ResultKind.OBJECTS))
    for number in range(7):
        sink.write(result(number, has_image=False))
    began = time.monotonic()
    with pytest.raises(SinkFailed, match="7 messages for scripted, topic t were not delivered: no one there"):
        sink.close()
    assert 4.0 < time.monotonic() - began < 6.5
    sink.close()


def test_sink_whose_link_has_a_fault_of_its_own_goes_on(make: Callable[..., BrokerSink]) -> None:
    """An exception that no one expected costs an attempt, not the thread."""

    def broken(batch: Sequence[Message]) -> DeliveryOutcome:
        raise ZeroDivisionError

    link = Scripted(broken)
    sink = make(link)
    sink.write(result(0, has_image=False))
    wait_for(lambda: "ZeroDivisionError" in sink.statistics().reason)
    wait_for(lambda: sink.statistics().sent == 1)


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        (ResultKind.EVENTS, ["events"] * 2),
        (ResultKind.OBJECTS, ["objects"]),
        (ResultKind.BOTH, ["objects", "events", "events"]),
    ],
)
def test_sink_sends_what_it_is_asked_to(what: ResultKind, kinds: list[str], make: Callable[..., BrokerSink]) -> None:
    """Events, objects or both; a message an event, each with the source as its key and an id of its own."""
    link = Scripted()
    sink = make(link, what=what, schema=Schema.MINIMAL)
    sink.write(result(4, source_id="gate", has_image=False, events=(crossing(4), crossing(4, track_id=None))))
    if what == ResultKind.EVENTS:
        sink.write(result(5, source_id="gate", has_image=False))  # without one, nothing is sent
    wait_for(lambda: len(link.delivered) == len(kinds))
    assert [one.kind for one in link.delivered] == kinds
    assert {one.key for one in link.delivered} == {"gate"}
    assert len({one.id for one in link.delivered}) == len(kinds)
    assert all(one.id.startswith("gate:4:") and b'"version":"4.0"' in one.body for one in link.delivered)


def test_sink_whose_source_comes_again_gives_new_ids(make: Callable[..., BrokerSink]) -> None:
    """A source that was taken out and added again counts from 0; a consumer must not take that for repetitions."""
    link = Scripted()
    sink = make(link)
    sink.write(result(0, has_image=False))
    sink.end_source("cam")
    sink.write(result(0, has_image=False))
    wait_for(lambda: len(link.delivered) == 2)
    assert link.delivered[0].id != link.delivered[1].id


def test_scrub_leaves_no_secret_and_one_line() -> None:
    """A library's text may contain a secret, and is not shown."""
    assert scrub("login s3cret\nat host failed", ["s3cret", ""]) == "login *** at host failed"
