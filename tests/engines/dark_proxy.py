"""A network that fails without a word."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DarkProxy:
    """A network between gateway and engine that can go dark: nothing is closed, nothing arrives any more."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._lit = asyncio.Event()
        self._lit.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["DarkProxy"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def go_dark(self) -> None:
        self._lit.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65_536):
                await self._lit.wait()
                sink.write(piece)
        except ConnectionError:
            pass
        finally:
            sink.close()
