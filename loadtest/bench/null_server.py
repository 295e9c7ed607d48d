"""The cheapest HTTP server that an image client takes for one: the same answer to everything, at once.

`python -m loadtest.bench.null_server [JSON]` prints its port and runs until its stdin is closed.
"""

import asyncio
import sys
from typing import cast

import uvloop

_BODY = sys.argv[1].encode() if __name__ == "__main__" and sys.argv[1:] else b'{"results":[{}]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
_LENGTH = b"content-length:"


class NullConnection(asyncio.Protocol):
    """Counts the request's bytes, so that a body in several pieces is one request."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps where to answer."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        """Answers each request that is complete."""
        while data:
            if self._missing:
                taken = min(self._missing, len(data))
                self._missing -= taken
                data = data[taken:]
            else:
                head, found, data = (self._head + data).partition(b"\r\n\r\n")
                self._head = b"" if found else head
                if not found:
                    return
                self._missing = _content_length(head)
            if not self._missing:
                assert self._transport is not None
                self._transport.write(ANSWER)


def _content_length(head: bytes) -> int:
    found = head.lower().partition(_LENGTH)[2]
    return int(found.partition(b"\r\n")[0]) if found else 0


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullConnection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
