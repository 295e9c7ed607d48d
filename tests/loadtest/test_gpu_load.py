"""The load of the GPU bench: a closed and an open loop over plain sockets, against a server of a few lines."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from loadtest.bench.gpu.callers import (
    BrokenConnection,
    CallerLane,
    CallerRequest,
    Connection,
    exchange,
    reply_text,
    run_callers,
)
from loadtest.bench.gpu.generators import Schedule, run_schedule
from loadtest.bench.gpu.tritons import http_post

GOOD = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 99\r\nContent-Length: 4\r\n\r\nokok"
FULL = b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno"
Answer = Callable[[int], list[bytes]]  # by the number of the request: what is sent, piece by piece; nothing: hangs up


class Server:
    """Answers whole requests in the order in which they come, each connection on a thread of its own."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._lock, self.asked = answer, threading.Lock(), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(ConnectionError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                size = 0
                while line.strip():
                    name, _, value = line.partition(b": ")
                    size = int(value) if name == b"Content-Length" else size
                    line = stream.readline()
                stream.read(size)
                with self._lock:
                    number, self.asked = self.asked, self.asked + 1
                pieces = self._answer(number)
                if not pieces:
                    return
                for piece in pieces:
                    connection.sendall(piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    """Starts a server with these answers."""
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def lane(server: Server, name: str = "a", body: bytes = b"x") -> CallerLane:
    """A caller of it."""
    return CallerLane(name, server.port, http_post("/v2", body, "image/jpeg"))


def test_answer_in_pieces_is_whole_and_its_length_is_the_bodys_own(serve: Callable[[Answer], Server]) -> None:
    """Triton's Inference-Header-Content-Length is not the length, wherever the pieces are cut."""
    server = serve(lambda _: [GOOD[:20], GOOD[20:60], GOOD[60:-1], GOOD[-1:]])
    reply = exchange(server.port, lane(server, body=b"y" * 3_000_000).request, timeout_s=5)
    assert (reply.status, reply.body) == (200, b"okok")


def test_answer_without_a_length_is_refused(serve: Callable[[Answer], Server]) -> None:
    """A server that streams is none that this load can measure, and is not waited for."""
    server = serve(lambda _: [b"HTTP/1.1 200 OK\r\n\r\nokok"])
    with pytest.raises(BrokenConnection, match="length"):
        exchange(server.port, lane(server).request, timeout_s=5)


def test_exchange_with_a_silent_server_ends_in_time(serve: Callable[[Answer], Server]) -> None:
    """An answer that does not come is a broken connection after the time that was given."""
    gate = threading.Event()
    server = serve(lambda _: [GOOD] if gate.wait(5) else [])
    with pytest.raises(BrokenConnection, match=r"no answer for 0\.05 s"):
        exchange(server.port, lane(server).request, timeout_s=0.05)
    gate.set()


def test_connection_that_is_closed_says_so(serve: Callable[[Answer], Server]) -> None:
    """The reason stands in the failure."""
    server = serve(lambda _: [])
    with closing(Connection(server.port)) as connection:
        connection.send(lane(server).request)
        select.select((connection,), (), (), 5)
        with pytest.raises(BrokenConnection, match=r"closed|receiving"):
            connection.receive()


def good_until(stop: Path, count: int) -> Answer:
    """Good answers; after so many the run is over."""

    def answer(number: int) -> list[bytes]:
        if number >= count:
            stop.touch()
        return [GOOD]

    return answer


def test_closed_loop_counts_every_answer_of_every_lane(serve: Callable[[Answer], Server], tmp_path: Path) -> None:
    """Each lane asks again as soon as it is answered; all requests are reported, except those under way."""
    stop = tmp_path / "stop"
    server = serve(good_until(stop, 200))
    run = run_callers(list(enumerate([lane(server), lane(server)])), time.monotonic(), 0.0, 30.0, stop)
    assert {ask.lane for ask in run.asks} == {0, 1}
    assert server.asked - 2 <= len(run.asks) <= server.asked
    assert all(not ask.failure and ask.latency_ms > 0 for ask in run.asks)


def test_closed_loop_goes_on_after_refusals_and_broken_connections(
    serve: Callable[[Answer], Server], tmp_path: Path
) -> None:
    """A failure has its reason, and the lane opens a new connection."""
    stop = tmp_path / "stop"
    good = good_until(stop, 5)
    server = serve(lambda number: [FULL] if number == 0 else [] if number == 1 else good(number))
    run = run_callers([(0, lane(server))], time.monotonic(), 0.0, 30.0, stop)
    failures = [ask.failure for ask in run.asks if ask.failure]
    assert failures[0] == "503: no"
    assert "closed" in failures[1] or "receiving" in failures[1]
    assert len(failures) == 2
    assert not run.asks[-1].failure


def test_closed_loop_leaves_out_what_settled(serve: Callable[[Answer], Server], tmp_path: Path) -> None:
    """Answers of the settling are in no figure; times count from its end."""
    stop, begin_s = tmp_path / "stop", time.monotonic()
    server = serve(lambda number: good_until(stop, number + (time.monotonic() < begin_s + 0.2))(number))
    run = run_callers([(0, lane(server))], begin_s, 0.1, 30.0, stop)
    assert 0 < len(run.asks) < server.asked
    assert all(ask.at_s >= -0.001 for ask in run.asks)


def test_closed_loop_ends_when_the_file_is_there(serve: Callable[[Answer], Server], tmp_path: Path) -> None:
    """A run that watches a recovery does not last longer than the recovery."""
    server, stop = serve(lambda _: [GOOD]), tmp_path / "stop"
    stop.touch()
    began_s = time.monotonic()
    run_callers([(0, lane(server))], began_s, 0.0, 30.0, stop)
    assert time.monotonic() - began_s < 5


def test_open_loop_counts_from_the_moment_due_however_late_it_was_sent(serve: Callable[[Answer], Server]) -> None:
    """With one connection, the second of two that are due together waits for the first, and that counts."""
    server = serve(lambda number: [GOOD] if number or not threading.Event().wait(0.1) else [])
    moments = (0.0, 0.0)
    run = run_schedule(Schedule(server.port, (lane(server).request,), moments, connections=1), time.monotonic())
    assert len(run.latencies_ms) == 2
    assert min(run.latencies_ms) >= 95
    assert max(run.late_ms) >= 95


def test_open_loop_sends_no_request_before_its_moment(serve: Callable[[Answer], Server]) -> None:
    """A free connection waits for the schedule."""
    server = serve(lambda _: [GOOD])
    begin_s = time.monotonic()
    schedule = Schedule(server.port, (lane(server).request,), (0.0, 0.15), connections=4)
    run = run_schedule(schedule, begin_s)
    assert time.monotonic() - begin_s >= 0.15
    assert min(run.late_ms) >= 0


def test_open_loop_tells_what_failed_by_its_words(serve: Callable[[Answer], Server]) -> None:
    """Refusals and broken connections are failures, and a new connection takes the next request."""
    answers: list[list[bytes]] = [[FULL], [], [GOOD]]
    server = serve(lambda number: answers[number])
    moments = (0.0, 0.05, 0.1)
    schedule = Schedule(server.port, (lane(server).request,), moments, connections=1, timeout_s=1.0)
    run = run_schedule(schedule, time.monotonic())
    assert len(run.latencies_ms) == 1
    assert run.failures.pop("503") == 1
    assert sum(run.failures.values()) == 1
    assert run.unsent == 0


def test_open_loop_gives_up_on_an_answer_that_does_not_come(serve: Callable[[Answer], Server]) -> None:
    """After the time-out the run ends, and what is under way counts as never answered."""
    gate = threading.Event()
    server = serve(lambda _: [GOOD] if gate.wait(5) else [])
    schedule = Schedule(server.port, (lane(server).request,), (0.0,), connections=1, timeout_s=0.1)
    assert run_schedule(schedule, time.monotonic()).unsent == 1
    gate.set()


def test_refusal_has_status_and_message() -> None:
    """A table has room for the beginning of what a server says."""
    from loadtest.bench.gpu.callers import Reply

    assert reply_text(Reply(503, b"full " * 100)) == "503: " + ("full " * 100)[:160]
    assert CallerRequest(0, 0.0, 1.0).failure == ""
