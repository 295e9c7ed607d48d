"""EmbeddedEngine under way: what only it promises of its runs. What it shares with Triton is in tests/contract."""

import asyncio
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.embedded import model_version
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.ort_serving.config import OrtDeviceLost
from penstock.engines.ort_serving.session import OrtModel
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
)
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from tests.contract.models import SLOW, config
from tests.engines import onnx_models
from tests.engines.embedded_models import plus, y_of
from tests.support.waiting import until

ENDLESS = 10_000_000


async def load_slow(engine: EmbeddedEngine, repository: Path, *, instances: int = 1) -> None:
    """`slow` takes as long as it is asked to."""
    group = f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]"
    onnx_models.save(onnx_models.slow(), repository, "slow", config=config(SLOW, max_batch_size=1, instances=group))
    await engine.load("slow")


def slow(engine: EmbeddedEngine, trips: int, *, deadline: float | None = None) -> "asyncio.Task[Any]":
    """A request to `slow` on its way."""
    tensor = tensor_from_numpy("trips", np.array([[trips]]))
    return asyncio.create_task(engine.infer(InferRequest("slow", (tensor,), deadline=deadline)))


async def until_pending(engine: EmbeddedEngine, count: int) -> None:
    """Until so many requests wait for an instance of `slow`."""
    line = f'nv_inference_pending_request_count{{model="slow",version="1"}} {count}\n'.encode()

    async def is_pending() -> bool:
        return line in await engine.metrics()

    await until(is_pending)


async def test_reload_under_load_fails_no_request(engine: EmbeddedEngine, repository: Path) -> None:
    """While models come and go, every answer is the old one or the new one, and the new one from the load on."""
    plus(repository, 0)
    await engine.load("plus")
    answers: list[float] = []
    is_over = False

    async def ask() -> None:
        while not is_over:
            answers.append((await y_of(engine))[0])

    asking = asyncio.create_task(ask())
    for addend in range(1, 6):
        plus(repository, addend)
        await engine.load("plus")
        assert await y_of(engine) == [addend + 1, addend + 2, addend + 3]
        seen = len(answers)
        while len(answers) < seen + 3:
            assert not asking.done(), asking
            await asyncio.sleep(0)
    is_over = True
    await asking
    assert answers == sorted(answers)
    assert set(answers) == {1, 2, 3, 4, 5, 6}


async def test_reload_that_fails_leaves_the_old_version_serving(engine: EmbeddedEngine, repository: Path) -> None:
    """The load says why, and the next request gets the old version's answer."""
    plus(repository, 1)
    await engine.load("plus")
    before = await y_of(engine)
    (repository / "plus" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelNotReady, match="cannot open"):
        await engine.load("plus")
    assert await y_of(engine) == before


async def test_event_loop_goes_on_during_loads_and_runs(engine: EmbeddedEngine, repository: Path) -> None:
    """Opening 32 MB and a run of half a second do not hold the loop: it turns and turns meanwhile."""
    onnx_models.save(onnx_models.wide(8_000_000), repository, "wide")
    await load_slow(engine, repository)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    turning = asyncio.create_task(turn())
    await engine.load("wide")
    during_load, turns = turns, 0
    with pytest.raises(DeadlineExceeded):
        await slow(engine, ENDLESS, deadline=time.monotonic() + 0.5)
    turning.cancel()
    assert during_load > 3
    assert turns > 20


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_run_that_is_given_up_frees_its_instance(engine: EmbeddedEngine, repository: Path, how: str) -> None:
    """A run of hours ends when its caller goes or its time is over, and the next request gets the only instance."""
    await load_slow(engine, repository)
    hours = slow(engine, ENDLESS, deadline=time.monotonic() + 0.2 if how == "late" else None)
    await asyncio.sleep(0)
    following = slow(engine, 1)
    await until_pending(engine, 1)
    if how == "cancelled":
        hours.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlineExceeded):
        await hours
    async with asyncio.timeout(30):
        response = await following
    assert response.outputs[0].to_numpy().tolist() == [[1]]
    assert response.timings.queue > 0
    assert engine.statistics("slow")[0].inference_stats.fail.count == 1


async def test_waiting_requests_are_bounded_and_keep_their_deadline(engine: EmbeddedEngine, repository: Path) -> None:
    """One runs, one waits, the third is turned away; the one that waits fails at its deadline."""
    await load_slow(engine, repository)
    running = slow(engine, ENDLESS)
    waiting = slow(engine, 1, deadline=time.monotonic() + 0.2)
    await until_pending(engine, 1)
    with pytest.raises(Overloaded, match=r"1 requests wait for an instance of model 'slow' \(limit 1\); retry") as full:
        await slow(engine, 1)
    assert full.value.retry_after_s > 0
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.\d+ s for an instance of model 'slow' \(it has 1\)"):
        await waiting
    leaving = slow(engine, 1)
    await until_pending(engine, 1)
    leaving.cancel()
    await until_pending(engine, 0)
    running.cancel()
    assert (await slow(engine, 2)).outputs[0].to_numpy().tolist() == [[2]]


async def test_instances_are_runs_at_once(engine: EmbeddedEngine, repository: Path) -> None:
    """Two instances run two requests, the third waits."""
    await load_slow(engine, repository, instances=2)
    running = [slow(engine, ENDLESS) for _ in range(2)]
    third = slow(engine, 1)
    await until_pending(engine, 1)
    running[0].cancel()
    async with asyncio.timeout(30):
        await third
    assert not running[1].done()
    running[1].cancel()


async def test_unload_lets_the_running_request_finish(engine: EmbeddedEngine, repository: Path) -> None:
    """The one that runs and the one that waits are answered; new ones are refused at once."""
    await load_slow(engine, repository)
    running, waiting = slow(engine, 300), slow(engine, 2)
    await until_pending(engine, 1)
    await engine.unload("slow")
    assert await engine.repository_index() == [ModelState("slow", "1", "UNLOADING", "")]
    with pytest.raises(ModelNotFound, match="'slow' has no available versions"):
        await slow(engine, 1)
    assert [task.outputs[0].to_numpy().item() for task in await asyncio.gather(running, waiting)] == [300, 2]
    assert await engine.repository_index() == [ModelState("slow", "1", "UNAVAILABLE", "unloaded")]


async def test_close_ends_what_runs_and_what_waits(engine: EmbeddedEngine, repository: Path) -> None:
    """Both get BackendUnavailable at once, and so does everybody after them; closing twice is no error."""
    await load_slow(engine, repository)
    tasks = [slow(engine, ENDLESS), slow(engine, 1)]
    await until_pending(engine, 1)
    started = time.monotonic()
    await engine.aclose()
    for task in [*tasks, slow(engine, 1)]:
        with pytest.raises(EngineUnavailable, match="the embedded engine is closed"):
            await task
    assert time.monotonic() - started < 2
    assert not await engine.ready()
    for call in (engine.load("slow"), engine.unload("slow"), engine.repository_index()):
        with pytest.raises(EngineUnavailable):
            await call
    await engine.aclose()


async def test_close_ends_a_load(engine: EmbeddedEngine, repository: Path) -> None:
    """Its callers get an error."""
    plus(repository, 1)
    loads = [asyncio.create_task(engine.load("plus")) for _ in range(4)]
    await asyncio.sleep(0)
    await engine.aclose()
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineUnavailable}


async def test_failure_inside_the_thread_is_one_requests_failure(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error is logged and answered, and the instance serves on."""
    plus(repository, 1)
    await engine.load("plus")
    with monkeypatch.context() as patched:
        patched.setattr(OrtModel, "run", lambda *_: {}["surprise"])
        with pytest.raises(EngineFailed, match="model 'plus': KeyError in the engine, see the gateway's log"):
            await y_of(engine)
    assert await y_of(engine) == [2, 3, 4]
    statistics = engine.statistics("plus")[0].inference_stats
    assert (statistics.success.count, statistics.fail.count) == (1, 1)
    assert b'nv_inference_request_failure{model="plus",version="1",reason="BACKEND"} 1' in await engine.metrics()


async def test_lost_gpu_ends_the_process_which_is_then_started_again(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later request could succeed: clients get 503, and the stack starts the gateway anew."""
    plus(repository, 1)
    await engine.load("plus")
    ends: list[str] = []

    def lose(*_: object) -> None:
        raise OrtDeviceLost("cudaStreamSynchronize: an illegal memory access was encountered")

    monkeypatch.setattr(OrtModel, "run", lose)
    monkeypatch.setattr(model_version, "exit_after", lambda: ends.append("end"))
    with pytest.raises(EngineUnavailable, match="the CUDA context is lost, and the process restarts: cudaStream"):
        await y_of(engine)
    assert ends == ["end"]


async def test_no_thread_to_be_had_is_one_requests_failure(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine out of threads: the request fails, the model can be unloaded, no run is left behind."""
    await load_slow(engine, repository)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(EngineUnavailable, match="model 'slow' cannot run: can't start new thread"):
            await slow(engine, ENDLESS)
    async with asyncio.timeout(30):
        assert (await slow(engine, 1)).outputs[0].to_numpy().tolist() == [[1]]
    plus(repository, 1)
    await engine.load("plus")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        await engine.unload("plus")
    with pytest.raises(ModelNotFound):
        await y_of(engine)


def refuse_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_shape_that_no_array_can_have_is_refused(engine: EmbeddedEngine, repository: Path) -> None:
    """[1, 0, 2^62] has no element and no byte; it ends the process of a model of Triton's python backend."""
    onnx_models.save(onnx_models.square(("N", "H", "W")), repository, "dynamic")
    await engine.load("dynamic")
    tensor = Tensor("x", Datatype.FP32, (1, 0, 2**62), memoryview(b""))
    with pytest.raises(InvalidRequest, match="unexpected shape for input 'x' for model 'dynamic'"):
        await engine.infer(InferRequest("dynamic", (tensor,)))


async def test_model_that_hangs_is_reloaded_and_its_callers_fail_at_once(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ignores deadline and terminate flag: new threads serve the model while the old thread hangs."""
    release, is_stuck = threading.Event(), threading.Event()
    run = OrtModel.run

    def stuck_once(self: OrtModel, *args: Any) -> list[Any]:
        if not is_stuck.is_set():
            is_stuck.set()
            release.wait(30)
        return run(self, *args)

    monkeypatch.setattr(OrtModel, "run", stuck_once)
    await load_slow(engine, repository)
    running, waiting = slow(engine, 1), slow(engine, 1)
    await until_pending(engine, 1)
    await asyncio.to_thread(is_stuck.wait, 10)
    engine.renew("slow", "it answered nothing for 30 s")
    for call in (running, waiting):
        with pytest.raises(EngineUnavailable, match="model 'slow' is restarted: it answered nothing for 30 s"):
            await call

    async def is_served() -> bool:
        try:
            return bool(await slow(engine, 1, deadline=time.monotonic() + 5))
        except EngineUnavailable:
            return False

    await until(is_served)
    release.set()


async def test_model_that_is_given_up_ends_its_calls_and_is_not_loaded_again(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients get an error while the run continues, and the index lists the model as unloaded."""
    release, entered = threading.Event(), threading.Event()
    run = OrtModel.run

    def stuck(self: OrtModel, *args: Any) -> list[Any]:
        entered.set()
        release.wait(30)
        return run(self, *args)

    monkeypatch.setattr(OrtModel, "run", stuck)
    await load_slow(engine, repository)
    call = slow(engine, 1)
    await asyncio.to_thread(entered.wait, 10)
    await engine.give_up("slow")
    await engine.give_up("unknown")
    with pytest.raises(EngineUnavailable, match="model 'slow' is restarted: it hung"):
        await call
    rows = [row for row in await engine.repository_index() if row.name == "slow"]
    assert [(row.state, row.reason) for row in rows] == [("UNAVAILABLE", "unloaded")]
    release.set()


async def test_session_of_a_model_that_is_given_up_is_freed_when_its_run_ends(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's memory, up to gigabytes, does not stay with the list of hung runs."""
    release, entered = threading.Event(), threading.Event()
    run = OrtModel.run
    sessions: list[weakref.ref[OrtModel]] = []

    def stuck(self: OrtModel, *args: Any) -> list[Any]:
        sessions.append(weakref.ref(self))
        entered.set()
        release.wait(30)
        return run(self, *args)

    monkeypatch.setattr(OrtModel, "run", stuck)
    await load_slow(engine, repository)
    call = slow(engine, 1)
    await asyncio.to_thread(entered.wait, 10)
    await engine.give_up("slow")
    with pytest.raises(EngineUnavailable):
        await call
    release.set()

    async def is_freed() -> bool:
        gc.collect()
        return sessions[0]() is None

    await until(is_freed)


async def test_model_is_not_loaded_anew_beside_too_many_threads_that_hang(
    engine: EmbeddedEngine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in ONNX Runtime cannot be ended, so the gateway abandons only a bounded number."""
    release, entered = threading.Event(), threading.Semaphore(0)
    run = OrtModel.run

    def stuck(self: OrtModel, *args: Any) -> list[Any]:
        entered.release()
        release.wait(30)
        return run(self, *args)

    monkeypatch.setattr("penstock.engines.embedded.engine.MAX_HUNG_RUNS", 0)
    monkeypatch.setattr(OrtModel, "run", stuck)
    await load_slow(engine, repository)
    call = slow(engine, 1)
    await asyncio.to_thread(entered.acquire, timeout=10)
    engine.renew("slow", "it hangs")
    release.set()
    assert (await call).model_name == "slow"
