"""Local relay between FFmpeg and the network that checks every connection of a source named by an API client."""

import asyncio
import re
import ssl
import threading
from collections.abc import Coroutine
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from penstock.outbound import OutboundPolicy
from penstock_video.decode.uri import UriKind, kind_of, redacted
from penstock_video.errors import PipelineError, SourceNotAllowed, SourceUnavailable

_CHUNK_BYTES = 64 * 1024
_MOST_HEAD_BYTES = 64 * 1024
_MOST_ANSWER_BYTES = 1024 * 1024  # of RTSP responses before a stream plays: a few hundred bytes and the description
_PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
_TURNS = 5
_HOP_BY_HOP = (b"connection:", b"proxy-", b"keep-alive:")
# As FFmpeg parses a status line: a word that begins so, then a number as in atoi().
_REDIRECTION = re.compile(rb"RTSP/\S*\s+\+?0*3\d\d")
_PLAY = re.compile(rb"^PLAY\s", re.MULTILINE)


class Relay:
    """Relay for one source, until close(). FFmpeg connects to `port` of 127.0.0.1. fault: the last error."""

    def __init__(self, uri: str, outbound: OutboundPolicy, timeout_s: float) -> None:
        """uri: of HTTP or RTSP. timeout_s: for the DNS lookup and connecting. Raises SourceUnavailable."""
        self.fault: PipelineError | None = None
        self.port = 0
        self._uri, self._outbound, self._timeout_s = uri, outbound, timeout_s
        self._kind, self._parts = kind_of(uri), urlsplit(uri)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        self._is_listening.wait()
        if not self.port:
            raise SourceUnavailable(f"{redacted(uri)}: this machine has no free port for its relay")

    @property
    def uri(self) -> str:
        """The URI for FFmpeg: for RTSP the relay's address with user and password, for HTTP the source's own."""
        if self._kind is UriKind.HTTP:
            return self._uri
        user, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(scheme="rtsp", netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    @property
    def options(self) -> dict[str, str]:
        """FFmpeg's options to connect through it."""
        return {"http_proxy": f"http://127.0.0.1:{self.port}"} if self._kind is UriKind.HTTP else {}

    def close(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._is_listening.set()
            self._loop.close()

    async def _serve(self) -> None:
        with suppress(OSError):
            async with await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=_MOST_HEAD_BYTES) as server:
                self.port = server.sockets[0].getsockname()[1]
                self._is_listening.set()
                await self._over.wait()
                server.close()
                await _settle()  # just accepted connections have tasks then
                connections = asyncio.all_tasks() - {asyncio.current_task()}
                for task in connections:
                    task.cancel()
                await asyncio.gather(*connections, return_exceptions=True)
                await _settle()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relayed = self._http(reader, writer) if self._kind is UriKind.HTTP else self._rtsp(reader, writer)
        try:
            await relayed
        except PipelineError as error:
            self.fault = error
            if self._kind is UriKind.HTTP:
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):  # a side disconnected, or did not send HTTP
            pass
        finally:
            writer.close()

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one request. Later data on the connection goes to the same host."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, target, version = first.split(b" ")
        is_tunnel = method == b"CONNECT"
        parts = urlsplit((b"//" + target if is_tunnel else target).decode("latin-1"))
        far_reader, far_writer = await self._connected(parts, 443 if is_tunnel else 80)
        if is_tunnel:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            kept = [line for line in lines if not line.lower().startswith(_HOP_BY_HOP)]
            head = [b" ".join((method, path.encode("latin-1"), version)), *kept, b"Connection: close", b"", b""]
            far_writer.write(b"\r\n".join(head))
        await _both(_copy(reader, far_writer), _copy(far_reader, writer), far_writer)

    async def _rtsp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scheme = self._parts.scheme.lower()
        far_reader, far_writer = await self._connected(self._parts, _PORTS[scheme], has_tls=scheme == "rtsps")
        plays = asyncio.Event()

        async def ask() -> None:
            asked = b""
            while chunk := await reader.read(_CHUNK_BYTES):
                asked = b"" if plays.is_set() else asked[-_MOST_HEAD_BYTES:] + chunk
                if _PLAY.search(asked):  # from here on FFmpeg follows no redirects
                    plays.set()
                far_writer.write(chunk)
                await far_writer.drain()

        async def answer() -> None:
            answered = b""
            while chunk := await far_reader.read(_CHUNK_BYTES):
                if not plays.is_set():
                    answered += chunk
                    self._refuse_redirection(answered)
                writer.write(chunk)
                await writer.drain()

        await _both(ask(), answer(), far_writer)

    def _refuse_redirection(self, answered: bytes) -> None:
        if _REDIRECTION.search(answered):
            raise SourceNotAllowed(
                f"{redacted(self._uri)} redirects to another address, which is not allowed for a source that was "
                "added through the API; add that address instead"
            )
        if len(answered) > _MOST_ANSWER_BYTES:
            raise SourceNotAllowed(f"{redacted(self._uri)} sends a description of more than {_MOST_ANSWER_BYTES} bytes")

    async def _connected(
        self, parts: SplitResult, default_port: int, *, has_tls: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to the first address of the host that is allowed and reachable. Raises PipelineError."""
        host, port = parts.hostname or "", parts.port or default_port
        shown = f"{redacted(self._uri)}: {host}:{port}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._first(host, port, _unchecked() if has_tls else None)
        except TimeoutError:
            raise SourceUnavailable(f"{shown} accepted no connection within {self._timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise SourceUnavailable(f"{shown} cannot be reached ({error})") from None

    async def _first(
        self, host: str, port: int, tls: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects once. Raises SourceNotAllowed, OSError."""
        failed: OSError | None = None
        refused = ""
        for *_, address in await self._loop.getaddrinfo(host, port, type=1, proto=6):  # SOCK_STREAM, TCP
            where = str(address[0])
            if why := self._outbound.why_refused(host, where):
                refused = why
                continue
            try:
                return await asyncio.open_connection(where, port, ssl=tls, server_hostname=host if tls else None)
            except OSError as error:
                failed = error
        if failed is not None or not refused:
            raise failed or OSError("it has no address")
        raise SourceNotAllowed(f"{redacted(self._uri)}: {refused}")


async def _settle() -> None:
    """Waits a few iterations of the event loop, until connections have started or released their sockets."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


async def _both(
    there: Coroutine[object, object, None], back: Coroutine[object, object, None], far_writer: asyncio.StreamWriter
) -> None:
    """Copies data in both directions until the server or FFmpeg disconnects. Raises the error that ended it."""
    tasks = [asyncio.ensure_future(there), asyncio.ensure_future(back)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        far_writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
