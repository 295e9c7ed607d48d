"""A model with a record of hanging has an engine of its own; other models stay in the main one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines import dedicated_engines as own_engines
from penstock.engines.dedicated_engines import MAX_DEDICATED_ENGINES, RECORD, DedicatedEngines
from penstock.engines.relayed_calls import INDEX_METHOD, INDEX_PATH
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.engine import GrpcStream, ModelState
from penstock.protocol.errors import EngineUnavailable, ModelNotFound
from penstock.protocol.inference import InferRequest
from tests.engines.fake_triton import FakeTriton
from tests.engines.replica_groups import HTTP_INFER, X, infer_call, infer_request
from tests.support.waiting import until

INDEX = b'[{"name": "other", "version": "1", "state": "READY"}, {"name": "double", "state": "UNAVAILABLE"}]'


class OwnBackend(TritonEngine):
    """Does not report its models once it is silent. The fakes have no index over HTTP."""

    is_silent = False

    async def send(self, call: HttpCall | GrpcCall, *, deadline: float | None) -> HttpAnswer | GrpcAnswer:
        if isinstance(call, HttpCall) and call.target == INDEX_PATH:
            return HttpAnswer(200, (), INDEX)
        return await super().send(call, deadline=deadline)

    async def repository_index(self) -> list[ModelState]:
        if self.is_silent:
            raise EngineUnavailable("no answer")
        return await super().repository_index()


def to(fake: FakeTriton) -> OwnBackend:
    return OwnBackend(http_url=fake.http_url, grpc_address=fake.grpc_address, max_connections=8)


@dataclass
class Bench:
    """main, own: fakes. given_up, started: models that the main engine gave up, and models to start."""

    engines: DedicatedEngines
    main: FakeTriton
    own: FakeTriton
    given_up: list[str] = field(default_factory=list)
    started: list[tuple[str, str]] = field(default_factory=list)
    connected: list[OwnBackend] = field(default_factory=list)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """The folder `own` represents the model's own engine."""
    async with FakeTriton().running() as main, FakeTriton(has_streams=True).running() as own:
        backend, made = to(main), list[Bench]()

        async def give_up(model: str) -> None:
            made[0].given_up.append(model)

        def connect(_: str) -> OwnBackend:
            made[0].connected.append(to(own))
            return made[0].connected[-1]

        engines = DedicatedEngines(
            backend,
            connect=connect,
            give_up=give_up,
            start=lambda model, reason: made[0].started.append((model, reason)),
        )
        made.append(Bench(engines, main, own))
        try:
            yield made[0]
        finally:
            await engines.aclose()


async def ask_all(engines: DedicatedEngines) -> None:
    """An inference in each of the three ways."""
    await engines.infer(infer_request())
    await engines.send(infer_call(), deadline=None)
    await engines.send(HTTP_INFER, deadline=None)


async def test_model_without_a_record_is_restarted_in_the_main_engine() -> None:
    """A failing canary does not count as a hang."""
    async with bench() as own:
        assert not own.engines.restart("double", "it fails", hangs=0)
        await ask_all(own.engines)
        assert own.engines.names() == ()
        assert (own.given_up, own.started) == ([], [])
        assert (own.main.grpc_methods.count("ModelInfer"), len(own.main.http_requests)) == (2, 1)


async def test_model_that_hung_is_asked_of_its_own_engine_from_then_on() -> None:
    """While it starts, clients get that reason; later restarts concern this engine, whatever the cause."""
    async with bench() as own:
        assert own.engines.restart("double", "it hangs", hangs=1)
        await until(lambda: own.given_up == ["double"])
        with pytest.raises(EngineUnavailable, match="model 'double' is unavailable: it hung before; an engine proc"):
            await own.engines.infer(infer_request())
        own.engines.assign({"double": ""})
        own.engines.assign({"double": "own"})
        await until(lambda: is_served(own))
        await ask_all(own.engines)
        assert (own.own.grpc_methods.count("ModelInfer"), len(own.own.http_requests)) == (2, 1)
        assert ("ModelInfer" in own.main.grpc_methods, own.main.http_requests) == (False, [])
        assert own.engines.restart("double", "it fails", hangs=1)
        assert own.started == [("double", "it hangs"), ("double", "it fails")]
        assert own.given_up == ["double"]


def is_served(own: Bench) -> bool:
    return "RepositoryModelLoad" in own.own.grpc_methods and own.engines.serves("double")


async def test_stream_goes_to_the_engine_of_its_first_request() -> None:
    """The main engine gets no stream here."""
    async with bench() as own:
        own.engines.assign({"double": "own"})
        await until(lambda: is_served(own))
        stream = await own.engines.open_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer", (), deadline=asyncio.get_running_loop().time() + 10
        )
        receiving = asyncio.create_task(stream.receive())
        await stream.send(infer_call().message)
        answer = service_pb2.ModelStreamInferResponse.FromString(await receiving or b"")
        assert answer.infer_response.model_name == "double"
        stream.cancel()


async def test_stream_that_is_cancelled_while_it_is_opened_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's stream is cancelled as soon as it is open."""
    async with bench() as own:
        own.engines.assign({"double": "own"})
        await until(lambda: is_served(own))
        stream = await own.engines.open_stream("/inference.GRPCInferenceService/ModelStreamInfer", (), deadline=None)
        engine, cancelled, may_open = own.connected[0], asyncio.Event(), asyncio.Event()
        open_stream = engine.open_stream

        async def slowly(*call: Any, **options: Any) -> GrpcStream:
            await may_open.wait()
            opened = await open_stream(*call, **options)
            cancel = opened.cancel
            monkeypatch.setattr(opened, "cancel", lambda: (cancelled.set(), cancel()))
            return opened

        monkeypatch.setattr(engine, "open_stream", slowly)
        sending = asyncio.create_task(stream.send(infer_call().message))
        await asyncio.sleep(0)
        stream.cancel()
        may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert cancelled.is_set()


async def test_index_lists_the_record_over_both_protocols() -> None:
    """READY with the reason; the main engine's row of the model is not shown."""
    async with bench() as own:
        own.engines.assign({"double": "own"})
        await until(lambda: is_served(own))
        rows = {row.name: row for row in await own.engines.repository_index()}
        assert (rows["double"].state, rows["double"].reason) == ("READY", RECORD)
        answer = await own.engines.send(GrpcCall(INDEX_METHOD, b""), deadline=None)
        index = service_pb2.RepositoryIndexResponse.FromString(answer.message)
        assert [(row.state, row.reason) for row in index.models if row.name == "double"] == [("READY", RECORD)]
        assert len(index.models) == len(rows)


@pytest.mark.parametrize(("body", "names"), [(b"", ["double", "broken"]), (b'{"ready":true}', ["double"])])
async def test_index_over_http_has_the_rows_that_were_asked_for(body: bytes, names: list[str]) -> None:
    """Rows of models with own engines replace the main engine's rows."""
    async with bench() as own:
        own.engines.assign({"double": "own", "broken": "own"})
        await until(lambda: own.engines.serves("broken") and is_served(own))
        answer = await own.engines.send(HttpCall("POST", b"/v2/repository/index", (), body), deadline=None)
        rows = json.loads(answer.body)
        assert [row["name"] for row in rows] == ["other", *names]
        assert [(row["state"], row["reason"]) for row in rows if row["name"] == "double"] == [("READY", RECORD)]


async def test_own_engine_that_starts_or_cannot_load_says_why() -> None:
    """The own engine reports that `broken` cannot be loaded; a starting engine loads its model by itself."""
    async with bench() as own:
        own.engines.assign({"double": "", "broken": "own"})
        await own.engines.load("double")
        assert "RepositoryModelLoad" not in own.main.grpc_methods
        await until(lambda: own.engines.serves("broken"))
        with pytest.raises(ModelNotFound, match="'broken' is not found"):
            await own.engines.infer(InferRequest("broken", (X,)))
        rows = {row.name: row for row in await own.engines.repository_index()}
        assert (rows["broken"].state, rows["broken"].reason[:14]) == ("UNAVAILABLE", "Internal: boom")
        assert (rows["double"].state, rows["double"].reason[:14]) == ("UNAVAILABLE", "it hung before")


async def test_own_engines_are_bounded() -> None:
    """Further models are restarted in the main engine."""
    async with bench() as own:
        for number in range(MAX_DEDICATED_ENGINES):
            assert own.engines.restart(f"m{number}", "it hangs", hangs=1)
        assert not own.engines.restart("one-more", "it hangs", hangs=1)
        assert len(own.engines.names()) == MAX_DEDICATED_ENGINES


async def test_own_engine_that_falls_silent_is_unavailable_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is restarted after some failed checks; the other models are listed meanwhile."""
    monkeypatch.setattr(own_engines, "MAX_SILENT_LOOKS", 2)
    async with bench() as own:
        own.engines.assign({"double": "own"})
        await until(lambda: is_served(own))
        own.connected[0].is_silent = True
        for _ in range(2):
            rows = {row.name: row for row in await own.engines.repository_index()}
            assert (rows["double"].state, rows["double"].reason) == ("UNAVAILABLE", own_engines.SILENT)
            assert "broken" in rows
        assert own.started == [("double", own_engines.SILENT)]
