"""Several fake Tritons as one engine: who is asked, who is left out, what is sent again."""

import asyncio
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from penstock.engines import replica
from penstock.engines.failures import Outliers
from penstock.engines.replica import merged_pages
from penstock.engines.replica_routing import ReplicaState
from penstock.engines.replicas import Replicas
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, ModelNotFound, OutOfMemory
from tests.engines.dark_proxy import DarkProxy
from tests.engines.fake_triton import FakeTriton, Mode
from tests.engines.replica_groups import (
    HTTP_INFER,
    connected,
    group,
    infer_call,
    infer_request,
    infers,
    pair,
    standings,
)
from tests.support.waiting import until


async def test_calls_are_spread_over_all_and_go_to_the_least_busy() -> None:
    """In turns while all are idle, over both protocols; one that holds its calls gets no more than its share."""
    async with group(3) as (replicas, fakes):
        for _ in range(30):
            await replicas.infer(infer_request())
        for _ in range(30):
            await replicas.send(infer_call(), deadline=None)
        for _ in range(30):
            await replicas.send(HTTP_INFER, deadline=None)
        assert all(18 <= count <= 22 for count in infers(fakes)), infers(fakes)
        assert all(9 <= len(fake.http_requests) <= 11 for fake in fakes)
        before = infers(fakes)
        fakes[0].mode = Mode.SLOW
        held = asyncio.create_task(_some(replicas, 3))
        await until(lambda: infers(fakes) == [count + 1 for count in before])
        for _ in range(10):
            await replicas.infer(infer_request())
        assert infers(fakes)[0] == before[0] + 1
        fakes[0].release.set()
        await held
        assert [row.in_flight for row in replicas.statistics()] == [0, 0, 0]


async def _some(replicas: Replicas, count: int) -> None:
    await asyncio.gather(*(replicas.infer(infer_request()) for _ in range(count)))


async def test_one_bad_replica_of_three_is_ejected_and_comes_back_when_it_is_well() -> None:
    """Its callers see few failures; ever longer times without it, then one call at a time until it answers well."""
    async with group(3, outliers=Outliers(3, first_s=0.3, uniform=lambda: 0.0)) as (replicas, fakes):
        fakes[1].mode = Mode.ERROR
        failed = 0
        while standings(replicas) != ["up", "ejected", "up"]:
            try:
                await replicas.infer(infer_request())
            except EngineFailed:
                failed += 1
            assert failed <= 5
        assert failed == 5
        before = infers(fakes)
        await _some(replicas, 20)
        assert infers(fakes)[1] == before[1]

        await until(lambda: standings(replicas) == ["up", "up", "up"])
        outcomes = await asyncio.gather(*(replicas.infer(infer_request()) for _ in range(12)), return_exceptions=True)
        assert Counter(type(outcome) for outcome in outcomes)[EngineFailed] == 1
        assert (standings(replicas)[1], replicas.statistics()[1].ejections) == (ReplicaState.EJECTED, 2)

        fakes[1].mode = Mode.NORMAL
        await until(lambda: standings(replicas) == ["up", "up", "up"])
        served = infers(fakes)[1]
        await _some(replicas, 12)
        await _some(replicas, 12)
        assert infers(fakes)[1] > served + 1


async def test_replicas_that_all_fail_are_all_asked() -> None:
    """A model that raises everywhere ejects no replica, and its error is the engine's own."""
    async with group(3) as (replicas, fakes):
        for fake in fakes:
            fake.mode = Mode.ERROR
        for _ in range(30):
            with pytest.raises(EngineFailed, match="boom"):
                await replicas.infer(infer_request())
            answer = await replicas.send(infer_call(), deadline=None)
            assert answer.code == 13
        assert standings(replicas) == ["up", "up", "up"]
        assert all(18 <= count <= 22 for count in infers(fakes)), infers(fakes)


async def test_call_that_a_killed_replica_held_is_done_by_another() -> None:
    """Only those notice a dead replica whose calls change state; it is back when it answers again."""
    async with pair() as two:
        await two.kill()
        for _ in range(10):
            await two.replicas.infer(infer_request())
            assert (await two.replicas.send(HTTP_INFER, deadline=None)).status == 200
        assert await two.replicas.ready()
        assert standings(two.replicas) == ["down", "up"]
        async with FakeTriton(grpc_port=two.grpc_port).running() as back:
            await until_ready(two.replicas, ["up", "up"])
            await _some(two.replicas, 4)
            assert infers([back]) != [0]


async def until_ready(replicas: Replicas, expected: list[str]) -> None:
    """Looks as the watch does, until it is so."""
    async with asyncio.timeout(30):
        while standings(replicas) != expected:
            await replicas.ready()
            await asyncio.sleep(0.02)


async def test_stopped_replica_costs_a_few_deadlines_and_is_left_out_until_it_goes_on() -> None:
    """Late calls make it suspect, a probe decides within a second; the others are served all the time."""
    async with pair() as two:
        two.process.send_signal(signal.SIGSTOP)
        late = 0
        async with asyncio.timeout(30):
            while standings(two.replicas)[0] == ReplicaState.UP:
                try:
                    await two.replicas.infer(infer_request(time.monotonic() + 0.1))
                except DeadlineExceeded:
                    late += 1
        assert late <= 5 + 20  # 5 to suspect it, and what goes there in the probe's second
        await until(lambda: standings(two.replicas)[0] == ReplicaState.DOWN)
        before = infers([two.fake])
        await _some(two.replicas, 20)
        assert infers([two.fake]) == [before[0] + 20]
        two.process.send_signal(signal.SIGCONT)
        await until_ready(two.replicas, ["up", "up"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_calls_of_a_replica_that_vanished_are_done_by_another(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-open connection, no deadline: the replica is down by its probe, and its calls go elsewhere."""
    monkeypatch.setattr(replica, "CUT_S", 0.5)
    async with FakeTriton().running() as lost, FakeTriton().running() as fake, AsyncExitStack() as stack:
        http = await stack.enter_async_context(DarkProxy(lost.http_port).running())
        grpc = await stack.enter_async_context(DarkProxy(lost.grpc_port).running())
        addresses = {f"http://127.0.0.1:{http.port}": f"127.0.0.1:{grpc.port}", fake.http_url: fake.grpc_address}
        replicas = connected(addresses)
        assert await replicas.ready()
        await replicas.repository_index()
        http.go_dark()
        grpc.go_dark()
        if protocol == "http":
            calls = [asyncio.create_task(_http_status(replicas)) for _ in range(8)]
        else:
            calls = [asyncio.create_task(_grpc_code(replicas)) for _ in range(8)]
        await until_ready(replicas, ["down", "up"])
        async with asyncio.timeout(30):
            while not all(call.done() for call in calls):
                await replicas.ready()
                await asyncio.sleep(0.02)
        assert [call.result() for call in calls] == [200 if protocol == "http" else 0] * 8
        assert [row.in_flight for row in replicas.statistics()] == [0, 0]
        await replicas.aclose()


async def _http_status(replicas: Replicas) -> int:
    return (await replicas.send(HTTP_INFER, deadline=None)).status


async def _grpc_code(replicas: Replicas) -> int:
    return (await replicas.send(infer_call(), deadline=None)).code


async def test_step_of_a_sequence_is_not_done_by_another_replica() -> None:
    """It might have been done: the caller gets an error, and nothing is sent again. Of 32, some are the dead one's."""
    async with pair() as two:
        await two.kill()
        steps = (two.replicas.infer(infer_request(sequence_id=number)) for number in range(1, 33))
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, EngineUnavailable)]
        assert failed
        assert infers([two.fake]) == [32 - len(failed)]


async def test_replica_that_ends_gives_its_models_up_without_an_error() -> None:
    """Triton unloads its models before it goes, and says 404 meanwhile: another replica has them, and is asked."""
    async with group(2) as (replicas, fakes):
        fakes[0].mode = Mode.ENDING
        relayed = (replicas.send(HTTP_INFER, deadline=None) for _ in range(6))
        assert [answer.status for answer in await asyncio.gather(*relayed)] == [200] * 6
        asked = len(fakes[0].http_requests)
        assert 0 < asked < 6
        for _ in range(6):
            assert (await replicas.send(HTTP_INFER, deadline=None)).status == 200
            assert (await replicas.send(infer_call(), deadline=None)).code == 0
            assert (await replicas.infer(infer_request())).outputs
        assert (len(fakes[0].http_requests), infers(fakes)) == (asked, [0, 12])
        await replicas.repository_index()  # lists it still: each way it is asked again, and once
        assert [(await replicas.send(infer_call(), deadline=None)).code for _ in range(4)] == [0] * 4
        assert infers(fakes)[0] == 1
        await replicas.repository_index()
        assert all([(await replicas.infer(infer_request())).outputs for _ in range(4)])
        assert infers(fakes)[0] == 2


async def test_model_that_every_replica_has_given_up_is_not_found() -> None:
    """What all say is the answer, and they are not asked in turn for ever."""
    async with group(2) as (replicas, fakes):
        for fake in fakes:
            fake.mode = Mode.ENDING
        for _ in range(10):
            with pytest.raises(ModelNotFound, match="has no available versions"):
                await replicas.infer(infer_request())
            assert (await replicas.send(HTTP_INFER, deadline=None)).status == 404
        assert sum(infers(fakes)) == 11


async def test_retries_are_a_tenth_even_when_every_call_is_broken() -> None:
    """Both replicas reset every connection: 400 calls are not 800."""
    async with group(2) as (replicas, fakes):
        for fake in fakes:
            fake.mode = Mode.RESET
        failed = 0
        for _ in range(400):
            try:
                await replicas.send(HTTP_INFER, deadline=None)
            except EngineUnavailable:
                failed += 1
        sent = sum(len(fake.http_requests) for fake in fakes)
        assert failed == 400
        assert 432 <= sent <= 400 + 80 + 10  # a fifth, and one a second


async def test_none_answers_is_said_at_once() -> None:
    """With every replica gone a call is refused without a wait, and the group is not ready."""
    replicas = connected({"http://127.0.0.1:9": "127.0.0.1:9", "http://127.0.0.1:7": "127.0.0.1:7"})
    assert not await replicas.ready()
    took_s: list[float] = []
    for _ in range(10):
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"none of the engines answers \(http://127.0.0.1:9, http://127"):
            await replicas.infer(infer_request())
        took_s.append(time.monotonic() - started)
    assert min(took_s) < 0.01
    await replicas.aclose()


async def test_models_are_loaded_into_all_and_listed_once() -> None:
    """A replica's failure to load is the group's; the index names a model once."""
    async with group(2) as (replicas, fakes):
        await replicas.load("double")
        assert [fake.grpc_methods.count("RepositoryModelLoad") for fake in fakes] == [1, 1]
        rows = await replicas.repository_index()
        assert [(row.name, row.state) for row in rows] == [
            ("double", "READY"),
            ("broken", "UNAVAILABLE"),
            ("unloaded", ""),
        ]
        assert (await replicas.model_config("double")).instance_count == 2


async def test_engine_out_of_memory_is_reported_as_such() -> None:
    """The batcher halves its batches by it; the replica is not sent the call again."""
    async with group(2) as (replicas, fakes):
        for fake in fakes:
            fake.mode = Mode.OUT_OF_MEMORY
        with pytest.raises(OutOfMemory, match=r"model 'double' failed: .*Failed to allocate memory"):
            await replicas.infer(infer_request())
        assert sum(infers(fakes)) == 1


def test_metrics_pages_become_one() -> None:
    """Each family once, every sample with its replica."""
    page = b'# HELP n count\n# TYPE n counter\nn{model="a"} 1\nn{} 2\n# TYPE h histogram\nh_bucket{le="1"} 3\nh_sum 4\n'
    merged = merged_pages({"u:1": page, "u:2": page}).decode()
    assert merged.count("# TYPE n counter") == 1
    assert merged.splitlines()[2:6] == [
        'n{replica="u:1",model="a"} 1',
        'n{replica="u:1"} 2',
        'n{replica="u:2",model="a"} 1',
        'n{replica="u:2"} 2',
    ]
    assert 'h_sum{replica="u:2"} 4' in merged
