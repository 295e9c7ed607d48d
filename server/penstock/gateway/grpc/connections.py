"""Limits of the gRPC port: connections in total and per address, and floods of calls without a valid key.

gRPC's core accepts connections itself and limits only their total. So the guard scans this process's descriptors at
intervals and shuts down excess connections; a socket filter in the kernel refuses flooding addresses. This needs Linux
(/proc, TCP_INFO, SO_ATTACH_FILTER); elsewhere only the total limit applies.
"""

import asyncio
import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

from penstock.gateway.auth.api_keys import CREDENTIAL_NAMES
from penstock.gateway.auth.rate_limiter import RefusedCallCounter
from penstock.gateway.grpc.aio_server import AcceptedCall
from penstock.logs import get_logger
from penstock.network import tcp_info
from penstock.port_policy import OpenConnection, PeerAddress, PortLimits, excess_connections

MAX_ADDRESSES = 64
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER
_LOAD, _LOAD_BYTE, _AND, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_IP_HEADER = -0x100000 & 0xFFFFFFFF  # base of offsets into the IP header
_SOURCE_V4, _SOURCE_V6 = _IP_HEADER + 12, _IP_HEADER + 8
_TAKE, _DROP = 0xFFFFFFFF, 0
_INSTRUCTION = struct.Struct("=HBBI")  # of classic BPF: code, offset if equal, offset if not, operand

Instruction = tuple[int, int, int, int]


def refuse_connections(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Replaces the listener's filter; without addresses there is none. Raises OSError if filters are not supported."""
    blocked = [ip_address(address.partition("%")[0]) for address in addresses][:MAX_ADDRESSES]
    if not blocked:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return
    code = b"".join(_INSTRUCTION.pack(*each) for each in filter_program(blocked))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, program)


def filter_program(blocked: Iterable[IPv4Address | IPv6Address]) -> list[Instruction]:
    """Drops packets from these addresses. IPv4 clients of an IPv6 socket also have IPv4 headers."""
    v4: list[Instruction] = [(_LOAD, 0, 0, _SOURCE_V4)]
    v6: list[Instruction] = []
    for address in blocked:
        if isinstance(address, IPv4Address):
            v4 += [(_JUMP_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _DROP)]
            continue
        for number, word in enumerate(struct.unpack(">4I", address.packed)):
            rest = 2 * (3 - number) + 1  # instructions of this address after the comparison
            v6 += [(_LOAD, 0, 0, _SOURCE_V6 + 4 * number), (_JUMP_IF_EQUAL, 0, rest, word)]
        v6.append((_RETURN, 0, 0, _DROP))
    v4.append((_RETURN, 0, 0, _TAKE))
    version = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_AND, 0, 0, 0xF0), (_JUMP_IF_EQUAL, 1, 0, 0x40), (_JUMP, 0, 0, len(v4))]
    return [*version, *v4, *v6, (_RETURN, 0, 0, _TAKE)]


def host_of(peer: str) -> str:
    """The host in a peer's name ("ipv4:127.0.0.1:53210" or "ipv6:%5B::1%5D:53210"); "" for a Unix socket."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def client_of(peer: str) -> PeerAddress | None:
    """The peer as a client; None for a Unix socket."""
    host, port = host_of(peer), peer.rpartition(":")[2]
    return PeerAddress(host, int(port)) if host and port.isdigit() else None


CLOSE_INTERVAL_S = 0.05
LOOK_INTERVAL_S = 0.25
MAX_SHARE_OF_TIME = 0.05  # maximum share of the event loop's time for closing connections
CALLS_OF_PROXY = 100  # consecutive calls without a key before a trusted proxy's connection is closed

log = get_logger("grpc")


class FloodGuard:
    """Detects floods of calls without a valid key, and drops their calls.

    A trusted proxy may reconnect, and its connections that also carry calls with a key stay open. needs_key: whether a
    method is refused without a key. dropped: called for each cancelled call.
    """

    def __init__(self, limits: PortLimits, needs_key: Callable[[str], bool], dropped: Callable[[], None]) -> None:
        self._limits = limits
        self._needs_key = needs_key
        self._dropped = dropped
        self._refused = RefusedCallCounter()
        self._dropped_in_row: Counter[PeerAddress] = Counter()  # since the last call with a key on the same connection
        self._to_close: set[PeerAddress] = set()
        self._has_work = asyncio.Event()
        self._now = asyncio.get_running_loop().time

    @property
    def is_active(self) -> bool:
        """Whether an address is flooding, or was."""
        return self._refused.has_floods

    def note(self, peer: str) -> None:
        """Counts a call of this peer that was refused for lack of a valid key."""
        client = client_of(peer)
        if client is None:
            return
        now = self._now()
        if self._refused.note(client.address, now):
            log.warning("flood of calls without a valid key", client=client.address)
        if self._refused.is_flooding(client.address, now) and not self._limits.is_proxy(client.address):
            self._close(client)

    def drops(self, method: str, call: AcceptedCall) -> bool:
        """Whether to cancel a call at once: it needs a key, has none, and its address is flooding."""
        if not self._needs_key(method):
            return False
        peer = call.peer()
        client = client_of(peer)
        if client is None or not self._refused.is_flooding(client.address, self._now()):
            return False
        if any(name in CREDENTIAL_NAMES for name, _ in call.metadata()):
            self._dropped_in_row.pop(client, None)
            return False
        self.note(peer)
        self._dropped()
        self._dropped_in_row[client] += 1
        if self._dropped_in_row[client] > CALLS_OF_PROXY:  # no other client shares the connection
            self._close(client)
        return True

    def _close(self, client: PeerAddress) -> None:
        self._dropped_in_row.pop(client, None)
        self._to_close.add(client)
        self._has_work.set()

    async def run(self, enforce: Callable[[Collection[str], Collection[PeerAddress]], None]) -> None:
        """Acts on noted floods until cancelled. enforce: called with flooding addresses and clients to disconnect."""
        flooding: frozenset[str] = frozenset()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S if flooding else None):
                    await self._has_work.wait()
            self._has_work.clear()
            clients, self._to_close = self._to_close, set()
            started = self._now()
            flooding = frozenset(each for each in self._refused.flooding(started) if not self._limits.is_proxy(each))
            enforce(flooding, clients)
            if not self._refused.has_floods:
                self._dropped_in_row.clear()
            await asyncio.sleep(max(CLOSE_INTERVAL_S, (self._now() - started) / MAX_SHARE_OF_TIME))


INTERVAL_S = 0.25
MAX_UNREAD_BYTES = 32 << 10  # unread data of a connection from an address that floods
_DESCRIPTORS = Path("/proc/self/fd")
_LAST_DATA_SENT_AT, _LAST_DATA_RECEIVED_AT = 44, 52  # offsets in Linux's struct tcp_info; values in milliseconds
_INFO_BYTES = 56
_MILLISECONDS = struct.Struct("=I")


class ConnectionGuard:
    """Enforces the gRPC port's limits. closed: called with a shutdown's reason. floods: clients to disconnect."""

    def __init__(
        self, port: int, limits: PortLimits, closed: Callable[[str], None], floods: FloodGuard | None = None
    ) -> None:
        self._port = port
        self._limits = limits
        self._closed = closed
        self._floods = floods
        self._open_files = 0
        self._blocked: Collection[str] = frozenset()
        self._listeners: set[int] = set()  # descriptors
        self._sockets: dict[int, OpenConnection] = {}  # by descriptor; sockets of other ports have no address

    @property
    def count(self) -> int:
        """Open connections at the last scan."""
        return sum(1 for one in self._sockets.values() if one.address)

    async def run(self) -> None:
        """Enforces the limits until cancelled."""
        if self._floods is None:
            await self._watch()
        else:
            await asyncio.gather(self._watch(), self._floods.run(self.end_floods))

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        pause_s = INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            started = now()
            self.enforce()
            pause_s = max(INTERVAL_S, (now() - started) / MAX_SHARE_OF_TIME)

    def enforce(self) -> None:
        """Shuts down connections beyond the limits. Reads descriptors again only if their number has changed."""
        open_files = count_open_files()
        if open_files == self._open_files:
            return
        self._open_files = open_files
        excess = excess_connections(self._connections(), self._limits, idle_s)
        closed = sum([self._close(one, "connections_full") for one in excess])
        if excess:
            self._open_files = 0  # read again: new connections may have got these descriptors
            log.warning("closed gRPC connections beyond the limit", closed=closed)

    def end_floods(self, addresses: Collection[str], clients: Collection[PeerAddress]) -> None:
        """Refuses connections from these addresses, and closes those of these clients, or with much unread data."""
        connections = self._connections()
        self._block(addresses)
        for one in connections:
            is_behind = one.address in addresses and _unread_bytes(one) > MAX_UNREAD_BYTES
            if is_behind or (one.address, one.port) in clients:
                self._close(one, "refused_calls")

    def _block(self, addresses: Collection[str]) -> None:
        if self._blocked == addresses:
            return
        self._blocked = addresses
        for descriptor in self._listeners:
            try:
                with _borrow_socket(descriptor) as listener:
                    refuse_connections(listener, addresses)
            except OSError as error:
                log.warning("cannot refuse connections by address", error=str(error))

    def _connections(self) -> list[OpenConnection]:
        """The TCP connections to the port. Other threads may open and close them meanwhile."""
        known, self._sockets = self._sockets, {}
        for descriptor in _descriptors():
            with suppress(OSError):
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    one = known.get(descriptor)
                    is_same = one is not None and one.inode == status.st_ino
                    self._sockets[descriptor] = (
                        one if one is not None and is_same else self._read(descriptor, status.st_ino)
                    )
        return [one for one in self._sockets.values() if one.address]

    def _read(self, descriptor: int, inode: int) -> OpenConnection:
        """The connection; without an address if it is not one to the port."""
        with _borrow_socket(descriptor) as connection:
            own = connection.getsockname()
            if isinstance(own, tuple) and len(own) > 1 and own[1] == self._port:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._listeners.add(descriptor)
                    return OpenConnection(descriptor, inode, "", 0)
                with suppress(OSError):  # it may have no peer any more
                    address, port = connection.getpeername()[:2]
                    return OpenConnection(descriptor, inode, address.removeprefix("::ffff:"), port)
        return OpenConnection(descriptor, inode, "", 0)

    def _close(self, connection: OpenConnection, reason: str) -> bool:
        """Shuts it down as if the client had closed it. Returns False if it was closed before."""
        try:
            own = socket.socket(fileno=os.dup(connection.descriptor))  # the number may be reused at any time
        except OSError:
            return False
        with own, suppress(OSError):
            if os.fstat(own.fileno()).st_ino == connection.inode:
                own.shutdown(socket.SHUT_RDWR)
                self._closed(reason)
                return True
        return False


def count_open_files() -> int:
    """Number of this process's descriptors; 0 if unknown."""
    with suppress(OSError):
        return _DESCRIPTORS.stat().st_size or len(os.listdir(_DESCRIPTORS))
    return 0


def idle_s(connection: OpenConnection) -> float:
    """Seconds since data was last sent or received; 0 if unknown."""
    try:
        with _borrow_socket(connection.descriptor) as borrowed:
            info = tcp_info(borrowed, _INFO_BYTES)
    except OSError:
        return 0.0
    if info is None:
        return 0.0
    sent, received = (_MILLISECONDS.unpack_from(info, at)[0] for at in (_LAST_DATA_SENT_AT, _LAST_DATA_RECEIVED_AT))
    return float(min(sent, received)) / 1000


def _unread_bytes(connection: OpenConnection) -> int:
    """Received bytes that were not read; 0 if unknown."""
    count = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(connection.descriptor, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return []


@contextmanager
def _borrow_socket(descriptor: int) -> Iterator[socket.socket]:
    """A socket object that does not own its descriptor. It detects the family: a wrong one truncates addresses."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
