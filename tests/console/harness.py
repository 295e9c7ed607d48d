"""Runs the console's application in front of a fake gateway, both on loopback ports."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from penstock.console.app import ConsoleApp, ConsoleParts
from penstock.console.pages import read_static_files
from penstock.console.proxy import Proxy, Upstream
from penstock.gateway.rest.listener import HttpListener
from penstock.network import bind
from penstock.port_policy import BrowserPolicy

KEY = "a-key-of-the-fake-gateway"


@dataclass
class FakeGateway:
    """Accepts KEY. asked: (method, path, headers, body) of each call. answers: what a path answers instead; it may
    take its time."""

    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    answers: dict[str, Callable[[web.Request], web.StreamResponse | Awaitable[web.StreamResponse]]] = field(
        default_factory=dict
    )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.raw_path, headers, body))
        if made := self.answers.get(request.path):
            answer = made(request)
            return answer if isinstance(answer, web.StreamResponse) else await answer
        if request.headers.get("x-api-key", KEY) != KEY:
            return web.json_response({"error": "the API key is unknown"}, status=401)
        return web.json_response({"path": request.raw_path, "body_bytes": len(body)})


@dataclass
class Browser:
    """Calls the console as a browser does, with its cookies. url: of the console."""

    url: str
    gateway: FakeGateway
    session: aiohttp.ClientSession
    proxy: Proxy

    async def ask(
        self, method: str, path: str, *, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, and body. headers: with _ for -."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        from yarl import URL

        address = URL(self.url + path, encoded=True)
        async with self.session.request(method, address, data=body, headers=sent, allow_redirects=False) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()

    async def send(self, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request was sent byte for byte. head: lines; {host} stands for the console's."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = head.replace("{host}", f"{host}:{port}").split("\n")
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
        return reader, writer

    async def log_in(self, key: str = KEY) -> int:
        """The status of a login."""
        body = json.dumps({"api_key": key}).encode()
        return (await self.ask("POST", "/session", body=body, content_type="application/json"))[0]


@contextlib.asynccontextmanager
async def served_console(
    gateway: FakeGateway | None = None, *, allowed_hosts: tuple[str, ...] = (), has_video: bool = False, **given: Any
) -> AsyncIterator[Browser]:
    """The console before a fake gateway. has_video: it is also the video program; otherwise nothing listens there.

    given: of ConsoleParts.
    """
    gateway = gateway or FakeGateway()
    runner = web.ServerRunner(web.Server(gateway.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    unused = bind("127.0.0.1", 0, flag="--none")
    gateway_port = runner.addresses[0][1]
    video_port = gateway_port if has_video else unused.getsockname()[1]
    unused.close()
    parts = ConsoleParts(
        gateway=Upstream("gateway", f"http://127.0.0.1:{gateway_port}", "start it with `penstock up`"),
        video=Upstream("video program", f"http://127.0.0.1:{video_port}", "start it with `penstock up --video`"),
        files=read_static_files(),
        policy=BrowserPolicy("127.0.0.1", allowed_hosts),
        **given,
    )
    listener = HttpListener(ConsoleApp(parts), bind("127.0.0.1", 0, flag="--port"))
    listener.start()
    await asyncio.sleep(0)
    try:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar, auto_decompress=False) as session:
            yield Browser(f"http://127.0.0.1:{listener.port}", gateway, session, parts.proxy)
    finally:
        await listener.stop(1.0)
        await parts.proxy.aclose()
        await runner.cleanup()
