"""Control APIs: reloads of a model (cold start), and the streams of a video program."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import quote

import msgspec

from penstock_load.clients.client import Client, Endpoint, TargetError, is_good, reason_of, short
from penstock_load.clients.http import HttpPort
from penstock_load.clients.payloads import IndexedModel
from penstock_load.results import Reload, Side, Status

POLL_S = 0.02
MOVING = ("READY", "LOADING", "UNLOADING")

Connect = Callable[[], Awaitable[Client]]
Clock = Callable[[], float]


class ReloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and what stands in the results. timeout_s: of each step: an unload, a load, an answer."""

    cycles: int
    timeout_s: float = 120.0
    round: int = 1
    side: Side = Side.TARGET


async def reload_cycles(
    endpoint: Endpoint, model: str, *, connect: Connect, plan: ReloadPlan, clock: Clock = time.monotonic
) -> tuple[Reload, ...]:
    """One Reload a cycle. load_ms: from the load call until it has returned and the model says that it is ready.

    connect: makes the client that asks; one is used for all cycles, so that no connection is part of an answer's time.
    The model is loaded again whatever happens, Ctrl-C included. Raises TargetError, and asks the model once before it
    takes it away, so that a target which cannot be asked keeps its model.
    """
    client = await connect()
    try:
        await _answer_ms(client, 0, clock)
        async with HttpPort(endpoint, plan.timeout_s) as port:
            repository = _Repository(port, endpoint.http_url, model, plan.timeout_s, clock)
            await repository.require_ready()
            return tuple([await _cycle(repository, client, plan, number) for number in range(plan.cycles)])
    finally:
        await client.aclose()


async def _cycle(repository: "_Repository", client: Client, plan: ReloadPlan, number: int) -> Reload:
    async with repository.unloaded():
        began_s = repository.clock()
        await repository.load()
        load_ms = (repository.clock() - began_s) * 1e3
    first_ms = await _answer_ms(client, 2 * number, repository.clock)
    second_ms = await _answer_ms(client, 2 * number + 1, repository.clock)
    return Reload(plan.round, plan.side, repository.model, load_ms, first_ms, second_ms)


async def _answer_ms(client: Client, number: int, clock: Clock) -> float:
    began_s = clock()
    answer = await client.send(number)
    if answer.status is not Status.OK:
        raise TargetError(f"the model's answer was no answer: {answer.status} {answer.code} {answer.error}".rstrip())
    return (clock() - began_s) * 1e3


class _Repository:
    """One model of the target's repository, by the v2 repository extension."""

    def __init__(self, port: HttpPort, http_url: str, model: str, timeout_s: float, clock: Clock) -> None:
        self.model = model
        self.clock = clock
        self._port = port
        self._url = http_url.rstrip("/")
        self._name = quote(model, safe="")
        self._timeout_s = timeout_s

    async def require_ready(self) -> None:
        """Raises TargetError where the model is not served now: it could not be brought back."""
        if not await self._is_ready():
            raise TargetError(f"{self.model} is not ready at {self._url}; only a model that is served can be reloaded")

    @asynccontextmanager
    async def unloaded(self) -> AsyncIterator[None]:
        """The block loads it; where it does not come to its end, the model is loaded here.

        Readiness does not say whether that is needed: an unload which was not waited for may still be under way.
        """
        is_taken = True
        try:
            if refusal := await self._change("unload"):
                is_taken = False
                raise TargetError(refusal)
            await self._until(self._is_gone, "gone")
            yield
        except BaseException as error:
            left = await self._put_back() if is_taken else ""
            if left and isinstance(error, TargetError):
                raise TargetError(f"{error}; {left}") from error
            if left:
                error.add_note(left)
            raise

    async def load(self) -> None:
        """Returns when the model is ready. Raises TargetError."""
        if refusal := await self._change("load"):
            raise TargetError(refusal)
        await self._until(self._is_ready, "ready")

    async def _put_back(self) -> str:
        """Loads it; a sentence where that fails."""
        try:
            await self.load()
        except TargetError as error:
            return f"{self.model} is left unloaded ({error}); load it with POST {self._url}{self._path('load')}"
        return ""

    async def _change(self, verb: str) -> str:
        """Empty where the server did it, else what it said."""
        status, body = await self._port.call("POST", self._path(verb))
        if is_good(status):
            return ""
        return (
            f"{self._url} does not {verb} {self.model} ({status}: {reason_of(body)}); reloads need a server that lets "
            "its clients do that (Triton: --model-control-mode=explicit)"
        )

    async def _until(self, condition: Callable[[], Awaitable[bool]], state: str) -> None:
        until_s = self.clock() + self._timeout_s
        while not await condition():
            if self.clock() >= until_s:
                raise TargetError(
                    f"{self.model} is not {state} within {self._timeout_s:g} s, though {self._url} agreed"
                )
            await asyncio.sleep(POLL_S)

    async def _is_ready(self) -> bool:
        status, _ = await self._port.call("GET", f"/v2/models/{self._name}/ready")
        return is_good(status)

    async def _is_gone(self) -> bool:
        """Not ready, and no version of it still on its way out, where the server has an index to say so."""
        if await self._is_ready():
            return False
        status, body = await self._port.call("POST", "/v2/repository/index")
        try:
            index = msgspec.json.decode(body, type=list[IndexedModel]) if is_good(status) else []
        except (msgspec.DecodeError, UnicodeDecodeError):
            return True
        return not any(known.name == self.model and known.state in MOVING for known in index)

    def _path(self, verb: str) -> str:
        return f"/v2/repository/models/{self._name}/{verb}"


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


class _StreamList(msgspec.Struct):
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
            return msgspec.json.decode(body, type=_StreamList).streams
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
        status, answer = await self._port.call(method, path, body)
        if status >= 300 and status not in accepted:
            raise TargetError(
                f"{method} {self._url}{path} was refused ({status}: {short(answer.decode(errors='replace'))})"
            )
        return answer
