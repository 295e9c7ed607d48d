"""A TCP proxy that treats its connections badly: delays, throttles, resets, swallows, flips bits. Loopback only.

    with chaos_proxy(server.port) as proxy:
        open_video(f"rtsp://127.0.0.1:{proxy.port}/a")
        proxy.set(delay_s=0.2); proxy.set(flips_a_megabyte=50); proxy.reset()

What it does is said by Chaos and may be changed at any time. It holds at most 256 KiB a direction of a connection.
"""

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_CHUNK = 16 * 1024
_HELD_BYTES = 256 * 1024
_MOST_CONNECTIONS = 256
_TURN_S = 0.01
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset


@dataclass(frozen=True)
class Chaos:
    """What happens to bytes on their way. delay_s: each is so late. bytes_per_s: at most, a direction; 0 for no limit.

    flips_a_megabyte: bits that are turned over, of what the server sends. is_dark: nothing passes, nothing is closed.
    is_closed: new connections are refused, with a reset. reset_after_bytes: a connection is reset once the server sent
    so many; 0 for never.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    flips_a_megabyte: float = 0.0
    is_dark: bool = False
    is_closed: bool = False
    reset_after_bytes: int = 0


@dataclass(eq=False)
class _Way:
    """One direction of a connection. held: (when it may go on, bytes)."""

    source: socket.socket
    target: socket.socket
    is_from_server: bool
    held: deque[tuple[float, bytes]] = field(default_factory=deque)
    held_bytes: int = 0
    passed_bytes: int = 0
    free_at: float = 0.0
    is_read_to_end: bool = False
    is_over: bool = False


class ChaosProxy:
    """Between 127.0.0.1:`port` and a server of this machine. One thread for all its connections."""

    def __init__(self, target_port: int, chaos: Chaos, *, seed: int = 1) -> None:
        self._target = ("127.0.0.1", target_port)
        self._chaos = chaos
        self._dice = random.Random(seed)
        self._ways: list[_Way] = []
        self._is_to_reset, self._is_over = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        self.flipped = 0
        self._thread = threading.Thread(target=self._turn_round, name="chaos-proxy", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._ways) // 2

    def set(self, **changes: float | bool | int) -> None:
        """Other chaos from now on; fields of Chaos."""
        self._chaos = replace(self._chaos, **changes)  # type: ignore[arg-type]

    def calm(self) -> None:
        """Everything passes as it is."""
        self._chaos = Chaos()

    def reset(self) -> None:
        """Every connection that is open now is reset, on both sides."""
        self._is_to_reset.set()
        until = time.monotonic() + 10.0
        while self._is_to_reset.is_set() and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(_TURN_S)

    def close(self) -> None:
        """It is gone, and its connections with it."""
        self._is_over.set()
        self._thread.join(10.0)
        self._cut_all()
        self._listener.close()

    def _turn_round(self) -> None:
        while not self._is_over.is_set():
            if self._is_to_reset.is_set():
                self._cut_all()
                self._is_to_reset.clear()
            has_moved = self._accept()
            for way in self._ways:
                has_moved |= self._read(way) | self._pass_on(way)
            self._sweep()
            if not has_moved:
                self._wait()

    def _cut_all(self) -> None:
        for way in self._ways:
            _cut(way)
        self._ways = []

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for way in self._ways:
                if self._may_read(way):
                    selector.register(way.source, selectors.EVENT_READ)
            selector.select(_TURN_S)

    def _accept(self) -> bool:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return False
        if self._chaos.is_closed or self.connections >= _MOST_CONNECTIONS:
            _reset(client)
            return True
        try:
            server = socket.create_connection(self._target, timeout=2.0)
        except OSError:
            _reset(client)
            return True
        self.accepted += 1
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways += [_Way(client, server, is_from_server=False), _Way(server, client, is_from_server=True)]
        return True

    def _may_read(self, way: _Way) -> bool:
        return not (way.is_over or way.is_read_to_end or self._chaos.is_dark or way.held_bytes >= _HELD_BYTES)

    def _read(self, way: _Way) -> bool:
        if not self._may_read(way):
            return False
        try:
            part = way.source.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            _cut(way)
            return True
        if not part:
            way.is_read_to_end = True
            return True
        if way.is_from_server:
            part = self._damaged(part)
        now, chaos = time.monotonic(), self._chaos
        way.free_at = max(way.free_at, now) + (len(part) / chaos.bytes_per_s if chaos.bytes_per_s else 0.0)
        way.held.append((max(way.free_at, now + chaos.delay_s), part))
        way.held_bytes += len(part)
        return True

    def _pass_on(self, way: _Way) -> bool:
        if way.is_over or self._chaos.is_dark:
            return False
        has_moved, now = False, time.monotonic()
        while way.held and way.held[0][0] <= now:
            due, part = way.held.popleft()
            try:
                sent = way.target.send(part)
            except BlockingIOError:
                sent = 0
            except OSError:
                _cut(way)
                return True
            way.held_bytes -= sent
            way.passed_bytes += sent
            has_moved |= sent > 0
            if sent < len(part):
                way.held.appendleft((due, part[sent:]))
                break
        limit = self._chaos.reset_after_bytes
        if way.is_from_server and limit and way.passed_bytes >= limit:
            _cut(way)
        elif way.is_read_to_end and not way.held:
            _end(way)
        return has_moved

    def _damaged(self, part: bytes) -> bytes:
        expected = len(part) * self._chaos.flips_a_megabyte / 1e6
        flips = int(expected) + (self._dice.random() < expected % 1)
        if not flips:
            return part
        damaged = bytearray(part)
        for _ in range(flips):
            damaged[self._dice.randrange(len(damaged))] ^= 1 << self._dice.randrange(8)
        self.flipped += flips
        return bytes(damaged)

    def _sweep(self) -> None:
        """A connection goes when one of its directions was cut, or both have ended."""
        kept: list[_Way] = []
        for one, other in zip(self._ways[::2], self._ways[1::2], strict=True):
            is_cut = one.source.fileno() < 0 or one.target.fileno() < 0
            if is_cut or (one.is_over and other.is_over):
                one.source.close()
                one.target.close()
            else:
                kept += [one, other]
        self._ways = kept


def _end(way: _Way) -> None:
    way.is_over = True
    with contextlib.suppress(OSError):
        way.target.shutdown(socket.SHUT_WR)


def _cut(way: _Way) -> None:
    way.is_over = True
    _reset(way.source)
    _reset(way.target)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    connection.close()


@contextlib.contextmanager
def chaos_proxy(target_port: int, chaos: Chaos | None = None) -> Iterator[ChaosProxy]:
    """A proxy in front of that port of this machine, until the block ends."""
    proxy = ChaosProxy(target_port, chaos or Chaos())
    try:
        yield proxy
    finally:
        proxy.close()
