"""Floods of calls without a valid key: their calls are cancelled, and their connections are closed and refused.

Refusing a call takes 0.3 ms. A few connections can send 20,000 calls a second: gRPC's core then cancels calls of all
clients at random, because too many wait to be accepted.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress

from server.access.credentials import CREDENTIAL_NAMES
from server.core.connections import Client, PortLimits
from server.core.refused_calls import RefusedCalls
from server.grpc.peers import client_of
from server.grpc.sturdy import Taken
from server.logs import get_logger

CLOSE_INTERVAL_S = 0.05
LOOK_INTERVAL_S = 0.25
MAX_SHARE_OF_TIME = 0.05  # maximum share of the event loop's time for closing connections
CALLS_OF_PROXY = 100  # calls in a row without a key before a trusted proxy's connection is closed

log = get_logger("grpc")


class Floods:
    """Floods as the gate and the server's loop see them.

    A trusted proxy may connect again, and its connections that also carry calls with a key stay open.
    needs_key: whether a method is refused without a key. dropped: called for each call that is cancelled.
    """

    def __init__(self, limits: PortLimits, needs_key: Callable[[str], bool], dropped: Callable[[], None]) -> None:
        self._limits = limits
        self._needs_key = needs_key
        self._dropped = dropped
        self._refused = RefusedCalls()
        self._dropped_in_row: Counter[Client] = Counter()  # since the last call with a key on the same connection
        self._to_close: set[Client] = set()
        self._has_work = asyncio.Event()
        self._now = asyncio.get_running_loop().time

    @property
    def is_active(self) -> bool:
        """Whether an address is flooding, or was."""
        return self._refused.has_floods

    def note(self, peer: str) -> None:
        """A call of this peer was refused for lack of a valid key."""
        client = client_of(peer)
        if client is None:
            return
        now = self._now()
        if self._refused.note(client.address, now):
            log.warning("flood of calls without a valid key", client=client.address)
        if self._refused.is_flooding(client.address, now) and not self._limits.is_proxy(client.address):
            self._close(client)

    def drops(self, method: str, call: Taken) -> bool:
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

    def _close(self, client: Client) -> None:
        self._dropped_in_row.pop(client, None)
        self._to_close.add(client)
        self._has_work.set()

    async def run(self, enforce: Callable[[Collection[str], Collection[Client]], None]) -> None:
        """Acts on noted floods until cancelled.

        enforce: called with addresses that flood (without proxies), and with clients whose connections to close.
        """
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
