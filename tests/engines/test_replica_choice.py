"""Which replica a call goes to: the model's, the sequence's, all of them; over engines without a process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import RetryBudget
from penstock.engines.relayed_calls import INFER_METHOD, SERVICE
from penstock.engines.replicas import Replicas
from penstock.protocol.call import GrpcCall, HttpCall
from penstock.protocol.engine import ModelConfig, ModelState, TensorSpec
from penstock.protocol.errors import EngineUnavailable, ModelNotReady
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor
from penstock.testing import FakeEngine, FakeMode

SPEC = TensorSpec("x", Datatype.FP32, (1,))
X = Tensor("x", Datatype.FP32, (1, 1), memoryview(np.ones(1, np.float32).tobytes()))


def model(name: str, *, is_sequential: bool = False) -> ModelConfig:
    return ModelConfig(name, "python", 8, (SPEC,), (SPEC,), has_sequence_batching=is_sequential)


@asynccontextmanager
async def over(*engines: FakeEngine) -> AsyncIterator[Replicas]:
    replicas = Replicas({f"http://e{number}": engine for number, engine in enumerate(engines)})
    assert await replicas.ready()
    await replicas.repository_index()
    try:
        yield replicas
    finally:
        await replicas.aclose()


async def look_until(replicas: Replicas, standing: str) -> None:
    """Looks as the watch does, until the second replica stands so."""
    async with asyncio.timeout(60):
        while replicas.statistics()[1].standing != standing:
            await replicas.ready()
            await asyncio.sleep(0.005)


def step(sequence: int) -> GrpcCall:
    request = service_pb2.ModelInferRequest(model_name="steps")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    request.parameters["sequence_id"].int64_param = sequence
    return GrpcCall(INFER_METHOD, request.SerializeToString())


async def homes(replicas: Replicas, engines: list[FakeEngine]) -> dict[int, set[int]]:
    """The engines that get a step of each of thirty sequences, whichever way it comes."""
    found: dict[int, set[int]] = {}
    for sequence in range(1, 31):
        before = [len(engine.calls) + len(engine.http_calls) for engine in engines]
        await replicas.infer(InferRequest("steps", (X,), parameters={"sequence_id": sequence}))
        assert (await replicas.send(step(sequence), deadline=None)).code == 0
        body = b'{"parameters":{"sequence_id":%d}}' % sequence
        await replicas.send(HttpCall("POST", b"/v2/models/steps/infer", (), body), deadline=None)
        after = [len(engine.calls) + len(engine.http_calls) for engine in engines]
        found[sequence] = {number for number in range(len(engines)) if after[number] > before[number]}
    return found


async def test_steps_of_a_sequence_go_to_one_replica_as_long_as_it_serves() -> None:
    """Over either protocol and both seams; when a replica goes, only its own sequences move."""
    engines = [FakeEngine([model("steps", is_sequential=True)]) for _ in range(3)]
    async with over(*engines) as replicas:
        await replicas.model_config("steps")
        first = await homes(replicas, engines)
        assert all(len(where) == 1 for where in first.values())
        assert {number for where in first.values() for number in where} == {0, 1, 2}
        engines[1].mode = FakeMode.UNAVAILABLE
        await look_until(replicas, "down")
        second = await homes(replicas, engines)
        assert all(second[sequence] == where for sequence, where in first.items() if where != {1})
        assert all(1 not in where for where in second.values())


async def test_call_goes_where_its_model_is() -> None:
    """Replicas may differ for a while, as when one is loading: what it has not is asked of the others."""
    engines = [FakeEngine([model("a")]), FakeEngine([model("a"), model("b")])]
    async with over(*engines) as replicas:
        for _ in range(12):
            await replicas.infer(InferRequest("b", (X,)))
            await replicas.send(HttpCall("POST", b"/v2/models/b/infer", (), b"{}"), deadline=None)
            request = service_pb2.ModelInferRequest(model_name="b")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
            request.raw_input_contents.append(bytes(4))
            assert (await replicas.send(GrpcCall(INFER_METHOD, request.SerializeToString()), deadline=None)).code == 0
        assert (len(engines[0].calls), len(engines[0].http_calls), len(engines[1].calls)) == (0, 0, 24)
        assert {row.name: row.state for row in await replicas.repository_index()} == {"a": "READY", "b": "READY"}


async def test_what_changes_an_engine_goes_to_all() -> None:
    """A client's load reaches every replica, and the worst answer is the client's."""
    engines = [FakeEngine([model("a")]), FakeEngine([model("a")])]
    async with over(*engines) as replicas:
        await replicas.send(HttpCall("POST", b"/v2/repository/models/a/load", (), b"{}"), deadline=None)
        assert [len(engine.http_calls) for engine in engines] == [1, 1]
        engines[1].load_failures["a"] = "no weights"
        load = service_pb2.RepositoryModelLoadRequest(model_name="a").SerializeToString()
        answer = await replicas.send(GrpcCall(SERVICE + "RepositoryModelLoad", load), deadline=None)
        assert "no weights" in answer.details
        with pytest.raises(ModelNotReady, match="no weights"):
            await replicas.load("a")


async def test_replica_that_was_away_loads_what_it_should_have() -> None:
    """Before it gets a call: what was loaded into all is loaded into it, too."""
    engines = [FakeEngine([model("a")]), FakeEngine([model("a")])]
    async with over(*engines) as replicas:
        await replicas.load("a")
        engines[1].mode = FakeMode.UNAVAILABLE
        await look_until(replicas, "down")
        engines[1].mode = FakeMode.NORMAL
        await engines[1].unload("a")
        await look_until(replicas, "up")
        assert await engines[1].ready("a")


async def test_replica_that_lost_one_model_serves_the_others() -> None:
    """One that cannot be loaded any more is asked of the other replica; it keeps none of the rest away."""
    engines = [FakeEngine([model("a"), model("b")]) for _ in range(2)]
    async with over(*engines) as replicas:
        await replicas.load("a")
        await replicas.load("b")
        engines[1].mode = FakeMode.UNAVAILABLE
        await look_until(replicas, "down")
        engines[1].mode = FakeMode.NORMAL
        await engines[1].unload("a")
        await engines[1].unload("b")
        engines[1].load_failures["a"] = "no weights"
        await look_until(replicas, "up")
        for _ in range(12):
            await replicas.infer(InferRequest("a", (X,)))
            await replicas.infer(InferRequest("b", (X,)))
        assert {request.model_name for request in engines[1].calls} == {"b"}


class Broken(FakeEngine):
    """Its index cannot be read once, with an unexpected error."""

    breaks = False

    async def repository_index(self) -> list[ModelState]:
        if self.breaks:
            self.breaks = False
            raise ValueError("an unexpected error")
        return await super().repository_index()


async def test_replica_whose_probe_broke_is_probed_again() -> None:
    """Whatever a probe raised, a bug of ours too: the replica does not stay out for ever."""
    broken = Broken([model("a")])
    async with over(FakeEngine([model("a")]), broken) as replicas:
        broken.mode = FakeMode.UNAVAILABLE
        await look_until(replicas, "down")
        broken.mode, broken.breaks = FakeMode.NORMAL, True
        await look_until(replicas, "up")
        assert not broken.breaks


async def test_stream_keeps_its_replica_busy_until_it_ends() -> None:
    """Read, left in the middle or cancelled: the replica is free again, and the next goes to the less busy one."""
    engines = [FakeEngine([model("a")]), FakeEngine([model("a")])]
    call = HttpCall("POST", b"/v2/models/a/generate_stream", (), b"{}")
    async with over(*engines) as replicas:
        first = await replicas.stream(call, deadline=None)
        second = await replicas.open_stream(SERVICE + "ModelStreamInfer", (), deadline=None)
        assert [row.in_flight for row in replicas.statistics()] == [1, 1]
        assert b"".join([chunk async for chunk in first.chunks]) == b"{}"
        second.cancel()
        second.cancel()
        assert [row.in_flight for row in replicas.statistics()] == [0, 0]
        left = await replicas.stream(call, deadline=None)
        await left.chunks.aclose()
        assert [row.in_flight for row in replicas.statistics()] == [0, 0]
        assert [engine.open_streams for engine in engines] == [0, 0]


async def test_second_try_at_another_replica_is_no_first_call_of_the_budget() -> None:
    """The replica's own client counts whatever it sends, and a tenth is allowed of the calls that clients made."""
    budget = RetryBudget(share=0.1, floor_per_s=0.0, burst=4.0)

    class Broken(FakeEngine):
        """It counts as TritonBackend does, and never answers an inference."""

        async def infer(self, request: InferRequest) -> InferResponse:
            budget.calls += 1
            raise EngineUnavailable("the connection broke")

    replicas = Replicas({f"http://e{number}": Broken([model("a")]) for number in range(2)}, budget=budget)
    try:
        for _ in range(200):
            with pytest.raises(EngineUnavailable):
                await replicas.infer(InferRequest("a", (X,)))
            await replicas.ready()  # as the watch does: both go on being asked
        assert budget.calls == 200
        assert 20 <= budget.taken <= 4 + 20
    finally:
        await replicas.aclose()
