"""An answer's body on its way from the engine to whoever reads it, piece by piece and bounded."""

import asyncio
from collections import deque
from collections.abc import Callable

HIGH_BYTES = 256 << 10
LOW_BYTES = 64 << 10


class Inflow:
    """Pieces in the order in which they came. The connection is told to pause while its reader is behind.

    throttle: called with True when more than 256 KiB wait to be read, with False when 64 KiB or less are left.
    """

    def __init__(self, throttle: Callable[[bool], None]) -> None:
        self._throttle = throttle
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_throttled = False
        self._has_ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, piece: bytes) -> None:
        """The next piece."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        self._news.set()
        if self._waiting_bytes > HIGH_BYTES:
            self._set_throttled(True)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes. error: why, where the answer is not whole; the first end holds."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._news.set()

    async def take(self) -> bytes:
        """The next piece, waited for; empty at the end. Raises what `end` was given, after the pieces before it."""
        while not self._pieces and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        if not self._pieces:
            if self._error is not None:
                raise self._error
            return b""
        piece = self._pieces.popleft()
        self._waiting_bytes -= len(piece)
        if self._waiting_bytes <= LOW_BYTES:
            self._set_throttled(False)
        return piece

    def _set_throttled(self, is_throttled: bool) -> None:
        if is_throttled is not self._is_throttled:
            self._is_throttled = is_throttled
            self._throttle(is_throttled)
