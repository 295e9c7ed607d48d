"""Limits on the connections to the gRPC port. gRPC's core accepts connections itself and limits only their total.

Therefore the guard scans the descriptors of this process at intervals, and shuts down connections beyond the limits.
It needs Linux (/proc and TCP_INFO); on other systems only the total limit applies.
"""

import asyncio
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from server.core.connections import Client, OpenConnection, PortLimits, excess_connections
from server.grpc.address_filter import refuse_connections
from server.grpc.floods import Floods
from server.logs import get_logger

INTERVAL_S = 0.25
MAX_SHARE_OF_TIME = 0.05  # maximum share of the event loop's time for scans
MAX_UNREAD_BYTES = 32 << 10  # unread data of a connection from an address that floods
_DESCRIPTORS = Path("/proc/self/fd")
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_LAST_DATA_SENT_AT, _LAST_DATA_RECEIVED_AT = 44, 52  # offsets in Linux's struct tcp_info; values in milliseconds
_INFO_BYTES = 56
_MILLISECONDS = struct.Struct("=I")

log = get_logger("grpc")


class ConnectionGuard:
    """Enforces the gRPC port's limits. closed: called with a stable reason for each connection that is shut down.

    floods: addresses and clients whose connections are closed, too.
    """

    def __init__(
        self, port: int, limits: PortLimits, closed: Callable[[str], None], floods: Floods | None = None
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

    def end_floods(self, addresses: Collection[str], clients: Collection[Client]) -> None:
        """Refuses new connections from these addresses, and closes the connections of these clients.

        Also closes connections from these addresses with much unread data: most of their calls never get here.
        """
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
                with _borrowed(descriptor) as listener:
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
        with _borrowed(descriptor) as connection:
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
    """Descriptors of this process; 0 if unknown."""
    with suppress(OSError):
        return _DESCRIPTORS.stat().st_size or len(os.listdir(_DESCRIPTORS))
    return 0


def idle_s(connection: OpenConnection) -> float:
    """Seconds since data was last sent or received; 0 if unknown."""
    if _TCP_INFO is None:
        return 0.0
    try:
        with _borrowed(connection.descriptor) as borrowed:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    except OSError:
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
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object that does not own its descriptor. It detects the family: a wrong one truncates addresses."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
