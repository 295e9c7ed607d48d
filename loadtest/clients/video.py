"""The video program's control API, as any client sees it: streams are added, looked at and taken out."""

from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from loadtest.clients.client import Endpoint, TargetError
from loadtest.clients.http_port import HttpPort
from loadtest.clients.replies import short
from loadtest.clients.target import nothing_answers

_JSON = {"content-type": "application/json"}


class Stream(msgspec.Struct):
    """What it says of a source, as far as a load test looks."""

    source_id: str
    state: str
    reason: str = ""
    fps: float = 0.0
    frames: int = 0
    inferred: int = 0
    drops: dict[str, int] = {}
    width: int = 0
    height: int = 0
    codec: str = ""
    position_s: float = 0.0


class _Streams(msgspec.Struct):
    streams: list[Stream]


class VideoClient:
    """Made inside the event loop that uses it. Each call raises TargetError where it does not do what is asked."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._url = endpoint.http_url
        self._port = HttpPort(endpoint, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._port.aclose()

    async def streams(self) -> list[Stream]:
        """Every source that it has."""
        body = await self._ask("GET", "/v1/streams")
        try:
            return msgspec.json.decode(body, type=_Streams).streams
        except msgspec.DecodeError as error:
            raise TargetError(
                f"{self._url}/v1/streams is no video program's control API ({short(str(error))})"
            ) from None

    async def add(self, source_id: str, uri: str) -> None:
        """A camera: the URI, again and again, at its own speed."""
        camera = {"uri": uri, "source_id": source_id, "is_loop": True, "is_realtime": True}
        await self._ask("POST", "/v1/streams", msgspec.json.encode(camera))

    async def remove(self, source_id: str) -> None:
        """It is gone, or was not there."""
        await self._ask("DELETE", f"/v1/streams/{source_id}", accepted=(404,))

    async def metrics(self) -> str:
        """Its metrics page."""
        return (await self._ask("GET", "/metrics")).decode(errors="replace")

    async def _ask(self, method: str, path: str, body: bytes = b"", accepted: tuple[int, ...] = ()) -> bytes:
        try:
            status, answer = await self._port.call(method, URL(self._url + path), body, _JSON if body else None)
        except TimeoutError as error:
            raise TargetError(f"{method} {self._url}{path} was not answered in time") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise TargetError(nothing_answers(self._url, short(str(error) or type(error).__name__))) from error
        if status >= 300 and status not in accepted:
            raise TargetError(
                f"{method} {self._url}{path} was refused ({status}: {short(answer.decode(errors='replace'))})"
            )
        return answer
