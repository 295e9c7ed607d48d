"""Unary calls to an engine's gRPC port without TLS: one connection of our own, made again when it is gone."""

import asyncio
import re
import time

from server.backends.http2_calls import CallBroken, CallUnread, Http2Calls
from server.backends.http2_grpc import Reply, head_of, metadata_fields
from server.backends.http2_keepalive import Keepalive
from server.backends.patience import Patience
from server.backends.retry_budget import RetryBudget
from server.core.relay import GrpcMetadata

TURNS = 5
PAUSE_S = 0.005
_UNIX = "unix:/"
_PLAIN = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):[0-9]+")


def is_plain_address(address: str) -> bool:
    """Whether it is "host:port" or "unix:/path", not another kind of gRPC target."""
    return _PLAIN.fullmatch(address) is not None or is_socket_address(address)


def is_socket_address(address: str) -> bool:
    """Whether it is "unix:/path"."""
    return address.startswith(_UNIX)


class UnaryCalls:
    """Make it inside the running loop. address: "host:port" or "unix:/path"."""

    def __init__(self, address: str, patience: Patience, *, budget: RetryBudget | None = None) -> None:
        """budget: of calls that are sent again, shared with the engine's other clients."""
        self._address = address
        self._patience = patience
        self._budget = budget or RetryBudget()
        self._connection: Http2Calls | None = None
        self._connecting: asyncio.Task[Http2Calls] | None = None
        self._heads: dict[str, bytes] = {}
        self._is_closed = False

    async def call(self, method: str, message: bytes, metadata: GrpcMetadata) -> Reply:
        """What the engine answers. A call that it never looked at is sent again, within the budget, TURNS times.

        Raises CallBroken, TooManyGivenUp. The engine is told no deadline: whoever has one gives the call up.
        """
        head = self._head(method)
        if metadata:
            head += metadata_fields(metadata)
        self._budget.calls += 1
        for turn in range(1, TURNS):
            try:
                return await (await self._open()).unary(head, message)
            except CallUnread:
                if not self._budget.take(time.monotonic()):
                    raise
                await asyncio.sleep(turn * PAUSE_S)
        return await (await self._open()).unary(head, message)

    def close(self) -> None:
        """Drop the connection; calls in flight fail, and so do later ones."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _open(self) -> Http2Calls:
        """The connection, or the one that is being made: by a task of its own, since whoever wants it may give up."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise CallBroken("this client was closed")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._take)
        connecting = self._connecting
        await asyncio.wait((connecting,))
        if connecting.cancelled():
            raise CallBroken("this client was closed")
        return connecting.result()

    def _take(self, connecting: asyncio.Task[Http2Calls]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        self._connection = connecting.result()
        if self._is_closed:
            self._connection.close()

    async def _connect(self) -> Http2Calls:
        patience = self._patience
        try:
            async with asyncio.timeout(patience.connect_s):
                connection = await self._connected(Keepalive(patience.keepalive_s, patience.keepalive_timeout_s))
                try:
                    await connection.greeted()
                except BaseException:
                    connection.close()
                    raise
                return connection
        except TimeoutError as error:
            raise CallBroken(f"no answer within {patience.connect_s:g} s") from error
        except OSError as error:
            raise CallBroken(str(error)) from error

    async def _connected(self, keepalive: Keepalive) -> Http2Calls:
        """A new connection, before the engine's SETTINGS frame has arrived. Raises OSError."""
        loop = asyncio.get_running_loop()
        if is_socket_address(self._address):
            path = self._address.removeprefix("unix:")
            _, connection = await loop.create_unix_connection(lambda: Http2Calls(keepalive), path)
        else:
            host, _, port = self._address.rpartition(":")
            _, connection = await loop.create_connection(lambda: Http2Calls(keepalive), host.strip("[]"), int(port))
        return connection

    def _head(self, method: str) -> bytes:
        head = self._heads.get(method)
        if head is None:
            authority = "localhost" if is_socket_address(self._address) else self._address
            head = head_of(method.encode(), authority.encode())
            if len(self._heads) < 64:  # methods are a dozen; a client may make up more
                self._heads[method] = head
        return head
