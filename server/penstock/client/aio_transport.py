"""HTTP transport on aiohttp, for one event loop. Every response has a deadline and a size limit."""

import asyncio
from pathlib import Path
from typing import IO, TYPE_CHECKING

from penstock.client.operations import HttpReply
from penstock.client.options import ClientOptions
from penstock.client.replies import Attempt, closed_without_response, connection_error, not_http, too_large
from penstock.network import client_context
from penstock.protocol.errors import InferenceError, InvalidRequest

if TYPE_CHECKING:  # imported for the first request
    import aiohttp

_CHUNK_BYTES = 1 << 18


class AioTransport:
    """Sends requests to one gateway."""

    def __init__(self, options: ClientOptions) -> None:
        """Opens no connection."""
        self._options = options
        self._session: aiohttp.ClientSession | None = None

    async def send(self, attempt: Attempt) -> HttpReply:
        """The complete response. Raises ConnectionFailed, GatewayUnreachable, DeadlineExceeded, InvalidRequest."""
        import aiohttp

        session = self._session or self._open()
        try:
            async with asyncio.timeout(attempt.timeout_s):
                return await self._exchange(session, attempt)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failure(error, attempt.timeout_s) from None  # the message contains the cause

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> "aiohttp.ClientSession":
        """Ignores proxy environment variables: a proxy would receive the API key."""
        import aiohttp

        tls = client_context() if self._options.is_tls else False
        connector = aiohttp.TCPConnector(limit=0, ssl=tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept-encoding", "user-agent"),
        )
        return self._session

    async def _exchange(self, session: "aiohttp.ClientSession", attempt: Attempt) -> HttpReply:
        import yarl

        operation, body = attempt.operation, attempt.operation.body
        limit_bytes = min(operation.max_response_bytes, self._options.max_response_bytes)
        origin = self._options.url[: len(self._options.url) - len(self._options.prefix)]
        url = yarl.URL(origin + attempt.target, encoded=True)
        data = body if isinstance(body, bytes) else await asyncio.to_thread(_opened, body)
        request = session.request(operation.method, url, data=data, headers=attempt.headers, allow_redirects=False)
        async with request as answer:
            parts, size_bytes = [], 0
            while chunk := await answer.content.read(_CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    answer.close()
                    raise too_large(self._options, limit_bytes)
                parts.append(chunk)
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return HttpReply(answer.status, answer.reason or "", headers, b"".join(parts))

    def _failure(self, error: Exception, timeout_s: float) -> InferenceError:
        import aiohttp

        match error:
            case aiohttp.ClientConnectorCertificateError():
                return connection_error(error.certificate_error, self._options, timeout_s)
            case aiohttp.ClientConnectorError():
                return connection_error(error.os_error, self._options, timeout_s)
            case aiohttp.ServerDisconnectedError():
                return closed_without_response(self._options)
            case aiohttp.ClientResponseError():
                return not_http(self._options)
        return connection_error(error, self._options, timeout_s)


def _opened(file: Path) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read ({error.strerror})") from error
