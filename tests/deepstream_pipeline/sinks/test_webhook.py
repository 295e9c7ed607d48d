"""Posting to an address that answers, fails, waits, redirects or is not there. FAULTS 61."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock_video.backoff import Backoff
from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerSink, ResultKind
from penstock_video.sinks.spool import Message
from penstock_video.sinks.webhook import (
    BUDGET,
    DeadLetters,
    RetryBudget,
    WebhookLink,
    WebhookOptions,
    retry_after_s,
    webhook_sink,
)
from tests.deepstream_pipeline.sinks.results import result
from tests.support.ports import free_port
from tests.support.waiting import becomes_true, wait_for
from tests.support.web_server import serving

SECRET = "s3cret"


class Receiver:
    """What an address was sent, and what it answers: a status, by frame number and try, 200 where nothing is said."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.status: dict[int, list[int]] = {}
        self.headers: dict[str, str] = {}
        self.delay_s = 0.0
        self.is_over = threading.Event()

    def answer(self, body: bytes) -> int:
        """Of this request."""
        said = json.loads(body)
        number = said["frame_num"]
        waiting = self.status.get(number, [])
        return waiting.pop(0) if len(waiting) > 1 else next(iter(waiting), 200)

    def frames(self) -> list[int]:
        """Of every request, in order."""
        return [json.loads(body)["frame_num"] for _, body in self.requests]


@pytest.fixture
def receiver() -> Receiver:
    """One for each test."""
    return Receiver()


@pytest.fixture
def url(receiver: Receiver) -> Iterator[str]:
    """Where it listens."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.append(({name.title(): value for name, value in self.headers.items()}, body))
            if receiver.delay_s:
                receiver.is_over.wait(receiver.delay_s)
            self.send_response(receiver.answer(body))
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as address:
        yield address
        receiver.is_over.set()


def options(url: str, **more: object) -> WebhookOptions:
    """Of objects, a message a frame."""
    return WebhookOptions(url, **{"what": ResultKind.OBJECTS, "timeout_s": 2.0, **more})  # type: ignore[arg-type]


def write(sink: BrokerSink, count: int) -> None:
    """So many frames."""
    for number in range(count):
        sink.write(result(number, has_image=False, objects=1))


def close_losing(sink: BrokerSink, count: int, reason: str) -> None:
    """Closes a sink that lost so many, and says so with the reason of the last."""
    messages = "1 message" if count == 1 else f"{count} messages"
    with pytest.raises(SinkFailed, match=f"^{messages} for webhook http://127.*not delivered: {reason}$"):
        sink.close()


def letters(path: Path) -> list[tuple[str, int]]:
    """(reason, frame) of each dead letter."""
    lines = map(json.loads, path.read_bytes().splitlines())
    return [(line["reason"], line["message"]["frame_num"]) for line in lines]


def test_webhook_posts_each_message_with_its_id_and_the_users_headers(receiver: Receiver, url: str) -> None:
    """JSON, in order, over one connection, signed as the user says."""
    login = url.replace("//", "//cam:s3cret@")
    sink = webhook_sink(options(f"{login}/hook?x=1", headers=(("X-Token", "abc"),)))
    write(sink, 20)
    sink.close()
    assert receiver.frames() == list(range(20))
    headers = receiver.requests[0][0]
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Token"] == "abc"
    assert headers["Idempotency-Key"].startswith("cam:0:objects:0:")
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"cam:s3cret").decode()
    assert sink.statistics().sent == 20


def test_webhook_answered_500_for_a_while_tries_again_and_keeps_the_order(receiver: Receiver, url: str) -> None:
    """A fault that passes costs nothing: the same message, the same id, then the next."""
    receiver.status = {1: [500, 503, 429, 200]}
    sink = webhook_sink(options(url))
    write(sink, 3)
    wait_for(lambda: sink.statistics().sent == 3)
    sink.close()
    assert receiver.frames() == [0, 1, 1, 1, 1, 2]
    assert len({headers["Idempotency-Key"] for headers, _ in receiver.requests}) == 3
    assert sink.statistics().errors == 3


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_webhook_that_is_away_behind_a_proxy_is_waited_for(status: int, receiver: Receiver, url: str) -> None:
    """A receiver that restarts, or has enough, uses no attempt of a message, however often it says so."""
    receiver.status = {0: [status]}
    sink = webhook_sink(options(url, attempts=1))
    write(sink, 3)
    wait_for(lambda: sink.statistics().errors >= 2)
    assert (sink.statistics().reason, sink.statistics().is_connected) == (f"answered {status}", False)
    receiver.status = {}
    wait_for(lambda: sink.statistics().sent == 3)
    sink.close()
    tries = len(receiver.requests) - 2
    assert tries >= 3
    assert receiver.frames() == [0] * tries + [1, 2]


def test_webhook_that_fails_is_tried_again_over_many_seconds(
    url: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a few seconds does not use up the attempts of a message, however the jitter falls."""
    monkeypatch.setattr("penstock_video.sinks.webhook.random.random", lambda: 0.0)
    receiver.status = {0: [500]}
    link = WebhookLink(options(url))
    message = Message("cam", "m0", "objects", b'{"frame_num":0}')
    outcomes = [link.send([message]) for _ in range(5)]
    link.close()
    assert [list(outcome.left) for outcome in outcomes] == [[message]] * 4 + [[]]
    assert sum(outcome.pause_s for outcome in outcomes[:-1]) > 5.0


def test_webhook_that_is_closed_while_it_fails_uses_up_no_attempts(url: str, receiver: Receiver) -> None:
    """At the end there are seconds for all of it: they are waited, not spent on messages one after the other."""
    receiver.status = {number: [500] for number in range(10)}
    sink = webhook_sink(options(url))
    write(sink, 10)
    with pytest.raises(SinkFailed, match=r"^10 messages for .* were not delivered: answered 500$"):
        sink.close()
    assert (sink.statistics().refused, set(receiver.frames())) == (0, {0})
    assert len(receiver.requests) <= 5


def test_webhook_answered_500_for_ever_gives_up_after_its_attempts(
    receiver: Receiver, url: str, tmp_path: Path
) -> None:
    """One message that breaks the receiver goes to the dead letters with its reason; the next ones arrive."""
    receiver.status = {1: [500]}
    sink = webhook_sink(options(url, attempts=3, dead_letters=tmp_path / "dead.jsonl"))
    write(sink, 4)
    wait_for(lambda: sink.statistics().depth == 0)
    close_losing(sink, 1, "answered 500, at attempt 3 of 3")
    assert receiver.frames() == [0, 1, 1, 1, 2, 3]
    assert letters(tmp_path / "dead.jsonl") == [("answered 500, at attempt 3 of 3", 1)]
    assert (sink.statistics().sent, sink.statistics().refused) == (3, 1)


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "answered 400"), (302, "answered 302: redirects are not followed")]
)
def test_webhook_answered_4xx_or_a_redirect_is_a_dead_letter_at_once(
    status: int, reason: str, receiver: Receiver, url: str, tmp_path: Path
) -> None:
    """What would be refused again is not sent again, and no one is led to another host."""
    receiver.status, receiver.headers = {0: [status]}, {"Location": "/elsewhere"}
    sink = webhook_sink(options(url, dead_letters=tmp_path / "dead.jsonl"))
    write(sink, 2)
    wait_for(lambda: sink.statistics().depth == 0)
    close_losing(sink, 1, reason)
    assert receiver.frames() == [0, 1]
    assert letters(tmp_path / "dead.jsonl") == [(reason, 0)]


def test_webhook_without_an_answer_in_time_tries_again(receiver: Receiver, url: str, tmp_path: Path) -> None:
    """A receiver that hangs costs its time-out, never the writer; then it is a dead letter."""
    receiver.delay_s = 20.0
    sink = webhook_sink(options(url, timeout_s=0.2, attempts=2, dead_letters=tmp_path / "dead.jsonl"))
    began = time.perf_counter()
    write(sink, 1)
    assert time.perf_counter() - began < 0.5
    wait_for(lambda: sink.statistics().refused == 1)
    receiver.delay_s = 0.0
    close_losing(sink, 1, "no answer in time, at attempt 2 of 2")
    assert letters(tmp_path / "dead.jsonl") == [("no answer in time, at attempt 2 of 2", 0)]


DRIBBLES = {
    "head": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"y"),
    "interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
}


@pytest.mark.parametrize("where", DRIBBLES)
def test_webhook_whose_answer_dribbles_is_left_in_time(where: str, tmp_path: Path) -> None:
    """A byte now and then is no answer: an exchange has a time as a whole, and the next one a new connection."""
    begins, goes_on = DRIBBLES[where]
    is_over, connections = threading.Event(), []

    class Dribbler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            connections.append(self.client_address)
            with suppress(OSError):
                self.wfile.write(begins)
                while not is_over.wait(0.05):
                    self.wfile.write(goes_on)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Dribbler) as address:
        sink = webhook_sink(options(address, timeout_s=0.5, attempts=2, dead_letters=tmp_path / "dead.jsonl"))
        write(sink, 1)
        is_left = becomes_true(lambda: sink.statistics().refused == 1)
        is_over.set()
        with suppress(SinkFailed):
            sink.close()
    assert is_left
    assert len(set(connections)) == 2
    trouble = "answered 500" if where == "body" else "no answer in time"
    assert letters(tmp_path / "dead.jsonl") == [(f"{trouble}, at attempt 2 of 2", 0)]


def test_webhook_no_one_listens_to_waits_and_uses_no_attempt(receiver: Receiver, tmp_path: Path) -> None:
    """An address that cannot be reached is waited for, as any broker; what fits the spool is not lost."""
    port = free_port()
    sink = webhook_sink(options(f"http://127.0.0.1:{port}", attempts=1, dead_letters=tmp_path / "dead.jsonl"))
    write(sink, 5)
    wait_for(lambda: sink.statistics().errors >= 3)
    said = sink.statistics()
    assert (said.depth, said.refused, said.reason) == (5, 0, "cannot be reached")
    with pytest.raises(SinkFailed, match="5 messages"):
        sink.close()
    assert not (tmp_path / "dead.jsonl").exists()


def test_webhook_set_to_wait_waits(receiver: Receiver, url: str) -> None:
    """Retry-After is obeyed."""
    receiver.status, receiver.headers = {0: [503, 200]}, {"Retry-After": "1"}
    sink = webhook_sink(options(url))
    began = time.monotonic()
    write(sink, 1)
    wait_for(lambda: sink.statistics().sent == 1)
    assert time.monotonic() - began >= 1.0
    sink.close()


def test_webhook_that_fails_for_many_messages_spends_its_budget(
    receiver: Receiver, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When many messages fail, second tries are few: the requests stay near the number of messages."""
    for name in ("broker", "webhook"):
        monkeypatch.setattr(f"penstock_video.sinks.{name}.BACKOFF", Backoff(0.001, 0.001))
    receiver.status = {number: [500] for number in range(0, 120, 2)}
    sink = webhook_sink(options(url, attempts=50, dead_letters=tmp_path / "dead.jsonl"))
    write(sink, 120)
    wait_for(lambda: sink.statistics().depth == 0, 40.0)
    close_losing(sink, 60, "answered 500, and the budget of second tries is spent")
    assert (sink.statistics().sent, sink.statistics().refused) == (60, 60)
    assert 120 < len(receiver.requests) <= 120 + BUDGET + 0.2 * 60 + 5
    assert "budget of second tries is spent" in letters(tmp_path / "dead.jsonl")[-1][0]


def test_webhook_shows_no_secret(receiver: Receiver, url: str, tmp_path: Path) -> None:
    """Neither logs, statistics, dead letters nor reprs hold what the address, its path or its headers keep."""
    reported = options(
        url.replace("//", f"//cam:{SECRET}@") + f"/{SECRET}?key={SECRET}",
        headers=(("X-Token", SECRET),),
        dead_letters=tmp_path / "dead.jsonl",
        attempts=1,
    )
    receiver.status = {0: [500], 1: [404]}
    with capture_logs() as lines:
        sink = webhook_sink(reported)
        write(sink, 3)
        wait_for(lambda: sink.statistics().depth == 0)
        close_losing(sink, 2, "answered 404")
    assert lines
    assert SECRET not in repr(lines) + repr(reported) + repr(sink.statistics()) + (tmp_path / "dead.jsonl").read_text()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0.0), ("7", 7.0), ("86400", 60.0), ("-3", 0.0), ("nan", 0.0), ("soon", 0.0),
     ("Fri, 15 Jan 2027 08:00:05 GMT", 5.0), ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date_and_bounded(header: str, seconds: float) -> None:
    """Whatever a receiver says, the pause is between nothing and a minute."""
    assert retry_after_s(header, 1_800_000_000.0) == seconds


def test_retry_budget_fills_by_time_and_by_what_is_delivered() -> None:
    """Twenty saved, one for five delivered, one for ten seconds."""
    budget = RetryBudget()
    assert [budget.take(0.0) for _ in range(21)] == [True] * 20 + [False]
    budget.delivered(5)
    assert [budget.take(0.0), budget.take(0.0)] == [True, False]
    assert [budget.take(10.5), budget.take(10.5)] == [True, False]


def test_dead_letters_that_are_full_or_cannot_be_written_lose_and_say_so_once(tmp_path: Path) -> None:
    """The file is bounded, an unwritable place is no reason to stop, and each is logged once."""
    one = [Message("cam", "1", "events", b'{"a":1}')]
    with capture_logs() as lines:
        small = DeadLetters(tmp_path / "dead.jsonl", max_bytes=250)
        for _ in range(10):
            small.add(one, "why")
        nowhere = DeadLetters(tmp_path / "absent" / "dead.jsonl")
        for _ in range(3):
            nowhere.add(one, "why")
    assert 0 < (tmp_path / "dead.jsonl").stat().st_size <= 250
    assert json.loads((tmp_path / "dead.jsonl").read_bytes().splitlines()[0])["message"] == {"a": 1}
    assert [line["event"] for line in lines] == ["dead letters are lost"] * 2


def test_webhook_header_with_a_line_break_is_refused_at_the_start() -> None:
    """It could add headers of its own."""
    with pytest.raises(SinkFailed, match="a header's name or value has a line break"):
        webhook_sink(WebhookOptions("http://host", headers=(("X", "a\r\nY: b"),)))
