"""Serves models that hung before, each in a dedicated engine process, behind the main engine's interface."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.engines.relayed_calls import INFER_METHOD as INFER
from penstock.engines.relayed_calls import is_index, named_by
from penstock.logs import get_logger
from penstock.protocol.call import A, Call, GrpcAnswer, GrpcCall, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.codec import codec_of
from penstock.protocol.engine import Engine, GrpcStream, ModelConfig, ModelMetadata, ModelState
from penstock.protocol.errors import EngineUnavailable, InferenceError
from penstock.protocol.inference import InferRequest, InferResponse

log = get_logger("engine")
MAX_DEDICATED_ENGINES = 8
INDEX_S = 1.0  # an engine that does not answer must not delay the others
LOAD_AGAIN_S = 0.5
MAX_SILENT_LOOKS = 30  # about a second apart; then its process is restarted
RECORD = "it hung before; an engine process of its own serves it"
SILENT = "the engine process of its own does not answer"
STARTING = "it hung before; an engine process of its own starts for it"

_Work = Callable[[], Coroutine[None, None, None]]


class RoutedEngine:
    """The main engine, but calls for models in `apart` go to route(), which may raise EngineUnavailable."""

    def __init__(self, engine: Engine, apart: Callable[[], Collection[str]], route: Callable[[str], Engine]) -> None:
        self._engine = engine
        self._apart = apart
        self._route = route

    def _engine_of(self, model_name: str) -> Engine:
        return self._route(model_name) if model_name in self._apart() else self._engine

    def _engine_for(self, call: Call[A]) -> Engine:
        if not (apart := self._apart()) or (model_name := named_by(call)) not in apart:
            return self._engine
        return self._route(model_name)

    def infer(self, request: InferRequest) -> Coroutine[Any, Any, InferResponse]:
        return self._engine_of(request.model_name).infer(request)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        return await self._engine_of(model_name).model_metadata(model_name, model_version)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        return await self._engine_of(model_name).model_config(model_name, model_version)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        try:
            return await self._engine_of(model_name).ready(model_name, model_version)
        except EngineUnavailable:
            return False

    async def repository_index(self) -> list[ModelState]:
        return await self._engine.repository_index()

    async def load(self, model_name: str) -> None:
        await self._engine_of(model_name).load(model_name)

    async def unload(self, model_name: str) -> None:
        await self._engine_of(model_name).unload(model_name)

    async def metrics(self) -> bytes:
        """The main engine's metrics."""
        return await self._engine.metrics()

    async def aclose(self) -> None:
        await self._engine.aclose()

    def send(self, call: Call[A], *, deadline: float | None) -> Coroutine[Any, Any, A]:
        return self._engine_for(call).send(call, deadline=deadline)

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        return await self._engine_for(call).stream(call, deadline=deadline)

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """The first request's model selects the engine for the whole stream."""
        if not self._apart():
            return await self._engine.open_stream(method, metadata, deadline=deadline)

        async def opened(first: bytes) -> GrpcStream:
            engine = self._engine_for(GrpcCall(INFER, first))
            return await engine.open_stream(method, metadata, deadline=deadline)

        return DeferredStream(opened)


class DeferredStream:
    """A GrpcStream that is opened by its first request. Receiving waits for that."""

    def __init__(self, opened: Callable[[bytes], Coroutine[None, None, GrpcStream]]) -> None:
        self._open = opened
        self._stream: asyncio.Future[GrpcStream] = asyncio.get_running_loop().create_future()

    async def send(self, message: bytes) -> None:
        if not self._stream.done():
            stream = await self._open(message)
            if self._stream.cancelled():  # cancelled while it was opened
                stream.cancel()
            else:
                self._stream.set_result(stream)
        await self._stream.result().send(message)

    async def half_close(self) -> None:
        await (await self._stream).half_close()

    async def receive(self) -> bytes | None:
        return await (await asyncio.shield(self._stream)).receive()

    async def end(self) -> GrpcAnswer:
        return await self._stream.result().end()

    def cancel(self) -> None:
        if self._stream.done() and not self._stream.cancelled():
            self._stream.result().cancel()
        self._stream.cancel()


@dataclass(slots=True)
class _DedicatedEngine:
    """folder: run directory of the process; empty while it starts. engine: set once its model is loaded."""

    folder: str = ""
    engine: Engine | None = None
    silent_looks: int = 0


class DedicatedEngines(RoutedEngine):
    """Dedicated engine processes for models that hung. Use on one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        connect: Callable[[str], Engine],  # to the process of that run directory
        give_up: Callable[[str], Coroutine[None, None, None]],  # unloads the model in the main engine
        start: Callable[[str, str], None],  # (model, reason): (re)starts a process; then assign()
    ) -> None:
        super().__init__(engine, lambda: self._own, self._find)
        self._connect = connect
        self._give_up = give_up
        self._start = start
        self._own: dict[str, _DedicatedEngine] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def names(self) -> tuple[str, ...]:
        """Models with a dedicated engine."""
        return tuple(self._own)

    def has(self, model_name: str) -> bool:
        """Whether the model has a dedicated engine."""
        return model_name in self._own

    def serves(self, model_name: str) -> bool:
        """Whether the model is loaded in its dedicated engine."""
        return model_name in self._own and self._own[model_name].engine is not None

    def restart(self, model_name: str, reason: str, *, hangs: int) -> bool:
        """Restarts the model's dedicated engine; False if it has none. A model with hangs gets one, up to a limit."""
        if model_name not in self._own:
            if not hangs or len(self._own) >= MAX_DEDICATED_ENGINES:
                return False
            self._add(model_name)
        self._start(model_name, reason)
        return True

    def assign(self, folders: Mapping[str, str]) -> None:
        """Sets the processes' run directories by model; empty while a process starts."""
        for name, folder in folders.items():
            own = self._own.get(name) or self._add(name)
            if own.folder == folder:
                continue
            own.folder, own.silent_looks = folder, 0
            former, own.engine = own.engine, None
            if former is not None:
                self._run(former.aclose)
            if folder:
                self._run(partial(self._load, name, own))

    async def repository_index(self) -> list[ModelState]:
        """The main engine's index, with rows of the dedicated engines for their models."""
        rows = [row for row in await super().repository_index() if row.name not in self._own]
        return [*rows, *await self._own_rows()] if self._own else rows

    async def load(self, model_name: str) -> None:
        """Loads the model, unless its dedicated engine is starting, which loads it by itself."""
        if model_name not in self._own or self.serves(model_name):
            await super().load(model_name)

    def send(self, call: Call[A], *, deadline: float | None) -> Coroutine[Any, Any, A]:
        if self._own and is_index(call):
            return self._index(call, deadline)
        return super().send(call, deadline=deadline)

    async def _index(self, call: Call[A], deadline: float | None) -> A:
        answer = await self._engine.send(call, deadline=deadline)
        if not answer.succeeded:
            return answer
        codec = codec_of(call)
        rows = await self._own_rows(ready=codec.wants_ready_only(call))
        return codec.with_index(answer, lambda others: [row for row in others if row.name not in self._own] + rows)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        for own in self._own.values():
            if own.engine is not None:
                await own.engine.aclose()
        await super().aclose()

    def _find(self, model_name: str) -> Engine:
        if (engine := self._own[model_name].engine) is None:
            raise EngineUnavailable(f"model {model_name!r} is unavailable: {STARTING}")
        return engine

    def _add(self, model_name: str) -> _DedicatedEngine:
        own = self._own[model_name] = _DedicatedEngine()
        log.warning("model hung; starting an engine process for it", model=model_name)
        self._run(partial(self._give_up, model_name))
        return own

    async def _load(self, model_name: str, own: _DedicatedEngine) -> None:
        """Loads the model. If that fails, the dedicated engine still accepts later loads and reports the error."""
        engine, folder = self._connect(own.folder), own.folder
        try:
            while own.folder == folder:
                try:
                    await engine.load(model_name)
                except EngineUnavailable:
                    await asyncio.sleep(LOAD_AGAIN_S)
                    continue
                except InferenceError as error:
                    log.error("model that hung cannot be loaded again", model=model_name, reason=error.message)
                own.engine = engine
                log.info("model is served by its own engine process", model=model_name)
                return
        finally:
            if own.engine is not engine:
                await engine.aclose()

    async def _own_rows(self, *, ready: bool = False) -> list[ModelState]:
        """ready: only rows of ready versions."""
        listed = await asyncio.gather(*(self._rows_of(name, own) for name, own in self._own.items()))
        return [row for rows in listed for row in rows if row.state == "READY" or not ready]

    async def _rows_of(self, model_name: str, own: _DedicatedEngine) -> list[ModelState]:
        if (engine := own.engine) is None:
            return [ModelState(model_name, "", "UNAVAILABLE", STARTING)]
        try:
            async with asyncio.timeout(INDEX_S):
                rows = [row for row in await engine.repository_index() if row.name == model_name]
        except (InferenceError, TimeoutError):
            own.silent_looks += 1
            if own.silent_looks == MAX_SILENT_LOOKS:
                own.silent_looks = 0
                self._start(model_name, SILENT)
            return [ModelState(model_name, "", "UNAVAILABLE", SILENT)]
        own.silent_looks = 0
        return [replace(row, reason=row.reason or RECORD) for row in rows]

    def _run(self, work: _Work) -> None:
        async def root() -> None:
            with suppress(InferenceError):
                await work()

        task = asyncio.create_task(root())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
