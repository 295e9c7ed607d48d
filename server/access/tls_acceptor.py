"""Accepts TLS connections, and limits those whose handshake is not complete."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from server.core.connections import PortLimits
from server.logs import get_logger

BACKLOG = 2048
RETRY_S = 1.0

log = get_logger("tls")
CurrentTls = Callable[[], ssl.SSLContext]
"""The TLS context for a new connection."""


class TlsAcceptor:
    """Replaces asyncio.Server, which creates a protocol only after the handshake.

    With asyncio.Server nothing would limit connections of clients that never complete their handshakes. Here an
    address with too many handshakes cannot begin another one, and beyond the total limit the oldest is dropped.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: CurrentTls,
        protocol: Callable[[], asyncio.Protocol],
        *,
        limits: PortLimits,
        handshake_timeout_s: float,
        refused: Callable[[str], None],
    ) -> None:
        """Starts to accept. refused: called with a stable reason for each connection that is closed."""
        self._listener = listener
        self._tls = tls
        self._protocol = protocol
        self._limits = limits
        self._handshake_timeout_s = handshake_timeout_s
        self._refused = refused
        self._handshakes: dict[asyncio.Task[None], str] = {}  # the client's address; oldest first
        self._by_address: Counter[str] = Counter()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting, and cancels handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when no more connections are accepted."""
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, client = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection", error=error.strerror, retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            self._begin(connection, client[0])
            await asyncio.sleep(0)  # let other tasks run, however many connections wait here

    def _begin(self, connection: socket.socket, address: str) -> None:
        if self._by_address[address] >= self._limits.allowed_from(address):
            connection.close()
            self._refused("connections_full")
            return
        if len(self._handshakes) >= self._limits.max_connections:
            next(iter(self._handshakes)).cancel()
            self._refused("connections_full")
        task = asyncio.create_task(self._shake_hands(connection))
        self._handshakes[task] = address
        self._by_address[address] += 1
        task.add_done_callback(self._ended)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls(), ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # no certificate, another protocol, too slow, disconnected
            log.debug("TLS handshake failed", error=str(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        address = self._handshakes.pop(task)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("TLS handshake failed", error=repr(error))
