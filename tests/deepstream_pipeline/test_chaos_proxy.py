"""The proxy does the configured damage to a connection, and nothing else."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.deepstream_pipeline.chaos_proxy import Chaos, ChaosProxy, chaos_proxy

PAYLOAD = bytes(range(256)) * 2000


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what comes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while part := connection.recv(65536):
                    connection.sendall(part)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10.0)


def through(proxy: ChaosProxy, payload: bytes, timeout_s: float = 20.0) -> bytes:
    """What comes back of it. Raises OSError where the connection broke, whichever side of it noticed."""
    faults: list[OSError] = []
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s) as connection:

        def send() -> None:
            try:
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
            except OSError as fault:
                faults.append(fault)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        sender.join(10.0)
    if faults:
        raise faults[0]
    return b"".join(parts)


def test_calm_proxy_passes_every_byte_both_ways(echo: int) -> None:
    """Half a megabyte there and back, to the end, on eight connections at once; and none stays."""
    with chaos_proxy(echo) as proxy:
        answers: list[bytes] = []
        askers = [threading.Thread(target=lambda: answers.append(through(proxy, PAYLOAD))) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(30.0)
        assert answers == [PAYLOAD] * 8
        until = time.monotonic() + 10.0
        while proxy.connections:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_delay_is_at_least_what_was_said(echo: int) -> None:
    """Once in each direction."""
    with chaos_proxy(echo, Chaos(delay_s=0.2)) as proxy:
        began = time.monotonic()
        assert through(proxy, b"x") == b"x"
        assert time.monotonic() - began >= 0.4


def test_throttle_is_kept(echo: int) -> None:
    """50 kB at 50 kB/s are no quicker than a second, less what goes at once."""
    with chaos_proxy(echo, Chaos(bytes_per_s=50_000)) as proxy:
        began = time.monotonic()
        assert through(proxy, PAYLOAD[:50_000]) == PAYLOAD[:50_000]
        assert time.monotonic() - began > 0.9


def test_flips_are_of_what_the_server_sends_and_about_as_many_as_said(echo: int) -> None:
    """As many bits differ as it says, and no byte is lost."""
    with chaos_proxy(echo, Chaos(flips_a_megabyte=100)) as proxy:
        answer = through(proxy, PAYLOAD)
        flipped = proxy.flipped
    assert len(answer) == len(PAYLOAD)
    differing = sum((a ^ b).bit_count() for a, b in zip(answer, PAYLOAD, strict=True))
    assert differing <= flipped
    assert 20 < differing < 120


def test_dark_proxy_swallows_and_gives_back_when_it_is_light(echo: int) -> None:
    """Neither end notices; the connection is as it was."""
    with chaos_proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.set(is_dark=True)
        connection.sendall(b"b")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.set(is_dark=False)
        connection.settimeout(10.0)
        assert connection.recv(1) == b"b"


def test_reset_is_a_reset_and_new_connections_pass(echo: int) -> None:
    """Open connections are closed; new ones are served."""
    with chaos_proxy(echo) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0) as connection:
            connection.sendall(b"a")
            assert connection.recv(1) == b"a"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        assert through(proxy, b"y") == b"y"


def test_connection_is_reset_after_its_bytes(echo: int) -> None:
    """Once the server sent so many."""
    with chaos_proxy(echo, Chaos(reset_after_bytes=40_000)) as proxy:
        with pytest.raises(OSError, match=r"reset|pipe"):
            through(proxy, PAYLOAD)
        assert through(proxy, b"few") == b"few"


def test_closed_proxy_refuses_and_calm_takes_again(echo: int) -> None:
    """As a server that is down."""
    with chaos_proxy(echo, Chaos(is_closed=True)) as proxy:
        with pytest.raises(OSError, match=r"reset|pipe|not connected"):
            assert through(proxy, PAYLOAD) == PAYLOAD, "it passed"
        proxy.calm()
        assert through(proxy, b"z") == b"z"


def test_reader_that_does_not_read_is_held_in_bounds(echo: int) -> None:
    """What waits in the proxy has an end, and the sender waits."""
    with chaos_proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=0.5) as connection:
        with pytest.raises(TimeoutError):
            connection.sendall(bytes(64 * 1024 * 1024))
        assert all(way.held_bytes <= 256 * 1024 + 16 * 1024 for way in proxy._ways)


def test_proxy_of_a_server_that_is_not_there_resets() -> None:
    """It does not hang, and its thread ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    before = threading.active_count()
    with chaos_proxy(port) as proxy, pytest.raises(OSError, match=r"reset|pipe|not connected"):
        assert through(proxy, PAYLOAD), "it passed"
    assert threading.active_count() <= before + 1
