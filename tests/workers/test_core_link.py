"""A front's link and the core's end of it, over a real Unix socket in one process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.model_health import KnownModel
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.workers import client as core_link
from penstock.gateway.workers.client import CoreClient
from penstock.gateway.workers.connection import WorkerHello
from penstock.gateway.workers.core_server import CoreServer
from penstock.protocol.cancellation import CancelStage, note_cancel_stage, when_stage_known
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from penstock.protocol.inference import (
    CloseReason,
    Datatype,
    EngineTimeFit,
    InferRequest,
    InferResponse,
    tensor_from_numpy,
)
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("short_path")
CONFIG = ModelConfig("owned", "python", 8, (TensorSpec("x", Datatype.FP32, (-1,)),), (), {"batch_owner": "gateway"})


@dataclass
class FakeWatch:
    """The core's; records what it is sent."""

    is_up: bool = True
    reason: str = ""
    generation: int = 1
    models: dict[str, KnownModel] = field(default_factory=lambda: {"owned": KnownModel("owned", True, config=CONFIG)})
    served: list[str] = field(default_factory=list)
    suspicions: int = 0
    late: list[tuple[str, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    async def find(self, model_name: str) -> ModelConfig:
        if model_name == "new":
            return CONFIG
        raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")

    def note_served(self, model_name: str) -> None:
        self.served.append(model_name)

    def suspect(self) -> None:
        self.suspicions += 1

    def note_late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> None:
        self.late.append((model_name, waited_s))

    def note_failed(self, model_name: str) -> None:
        self.failed.append(model_name)


@dataclass
class FakeMember:
    """A request that entered the FakeEngine's queue."""

    answer: "asyncio.Task[InferResponse]"


@dataclass
class FakeEngine:
    """BatcherPool and Backend: answers what it is given. holds: until `release`, or until it is cancelled, and
    then it was at `where`."""

    error: InferenceError | None = None
    where: CancelStage | None = None
    holds: bool = False
    asked: list[tuple[InferRequest, str, int]] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    alone: int = 0

    def owns(self, model_name: str) -> bool:
        return model_name == "owned"

    def enter(self, request: InferRequest, **how: Any) -> "tuple[FakeEngine, FakeMember] | None":
        """As BatcherPool.enter."""
        return (
            (self, FakeMember(asyncio.create_task(self.infer(request, **how))))
            if self.owns(request.model_name)
            else None
        )

    def leave(self, member: FakeMember) -> CancelStage:
        """As ModelBatcher.leave."""
        member.answer.cancel()
        return self.where or CancelStage.QUEUE

    async def infer(self, request: InferRequest, *, client: str = "", priority: int = 0) -> InferResponse:
        self.alone += not client
        self.asked.append((request, client, priority))
        self.entered.set()
        if self.holds:
            try:
                await self.release.wait()
            except asyncio.CancelledError as cancelled:
                self.cancelled.set()
                if self.where is not None:
                    note_cancel_stage(cancelled, self.where)
                raise
        if self.error is not None:
            raise self.error
        return InferResponse(request.model_name, "1", request.inputs, request.id)


@dataclass
class Pair:
    """link: the front's end, connected. core: the task that serves it."""

    link: CoreClient
    watch: FakeWatch
    engine: FakeEngine
    server: CoreServer
    core: "asyncio.Task[None]"

    async def lose_core(self) -> None:
        self.core.cancel()
        await asyncio.gather(self.core, return_exceptions=True)


@pytest.fixture
def short_path(tmp_path: Path) -> Path:
    """A Unix socket's path has 107 bytes at most."""
    assert len(str(tmp_path)) < 90
    return tmp_path


@asynccontextmanager
async def paired(folder: Path) -> AsyncIterator[Pair]:
    watch, engine = FakeWatch(), FakeEngine()
    server = CoreServer(watch, engine, engine)  # type: ignore[arg-type]
    core = asyncio.create_task(server.run(folder))
    link = CoreClient(folder, WorkerHello(1), max_asks=4)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(30):
            await link.first_up.wait()
            yield Pair(link, watch, engine, server, core)
    finally:
        for task in (running, core):
            task.cancel()
        await asyncio.gather(running, core, return_exceptions=True)
        await asyncio.sleep(0)  # what is closed is gone with the loop's next turn


def request(model_name: str = "owned", *, deadline: float | None = None) -> InferRequest:
    x = tensor_from_numpy("x", np.arange(4, dtype=np.float32).reshape(1, 4))
    return InferRequest(model_name, (x,), "1", "id-7", ("y",), {"a": 1, "b": "c"}, deadline, (("traceparent", "00"),))


async def test_link_hands_a_request_over_and_its_answer_back_whole(tmp_path: Path) -> None:
    """Tensors, parameters, deadline, metadata, client and priority come to the core's batcher as they were."""
    async with paired(tmp_path) as pair:
        asked = request(deadline=time.monotonic() + 60)
        answer = await pair.link.infer(asked, client="key camera", priority=2)
        ((received, client, priority),) = pair.engine.asked
        assert (client, priority, pair.engine.alone) == ("key camera", 2, 0)
        assert (received.parameters, received.metadata, received.outputs) == (
            {"a": 1, "b": "c"},
            asked.metadata,
            ("y",),
        )
        assert received.deadline == asked.deadline
        assert answer.id == "id-7"
        assert answer.outputs[0].to_numpy().tolist() == [[0, 1, 2, 3]]


async def test_link_tells_what_the_core_knows_of_the_engine(tmp_path: Path) -> None:
    """Models, owners and generation, now and at every change; the same config stays the same object."""
    async with paired(tmp_path) as pair:
        known = pair.link.models["owned"]
        assert known.config == CONFIG
        assert pair.link.owns("owned")
        assert not pair.link.owns("other")
        pair.watch.models["other"] = KnownModel("other", False, "unloaded")
        pair.watch.generation = 2
        await until(lambda: "other" in pair.link.models)
        assert pair.link.models["owned"] is known
        assert pair.link.generation == 2
        pair.watch.is_up, pair.watch.reason = False, "the engine does not answer"
        await until(lambda: not pair.link.is_up)
        assert pair.link.reason == "the engine does not answer"
        assert await pair.link.find("new") == CONFIG
        with pytest.raises(ModelNotFound, match="unknown model: 'nope'"):
            await pair.link.find("nope")


async def test_core_has_the_queues_of_a_worker_until_it_is_gone(tmp_path: Path) -> None:
    """A report replaces the former one. After the connection ends nothing waits there, and counts stay."""
    fit = EngineTimeFit(0.002, 0.0001, 0.0, 9)
    queue = QueueStatistics(3, 5, 4096, 1, 8, fit, 0.01, {2: 4}, {CloseReason.FULL: 4}, {"deadline": 1})
    async with paired(tmp_path) as pair:
        reported = pair.server.reported
        pair.link.report_queues({"m": queue})
        await until(lambda: "m" in reported.joined({}))
        assert replace(reported.joined({})["m"], fit=fit) == queue
        pair.link.report_queues({"m": replace(queue, depth=0)})
        await until(lambda: reported.joined({})["m"].depth == 0)
    ended = reported.joined({})["m"]
    assert (ended.rows, ended.in_flight, ended.wait_s, ended.closed_by) == (0, 0, None, {CloseReason.FULL: 4})


async def test_change_that_is_spread_is_known_to_the_fronts_when_it_is_said_to_be(tmp_path: Path) -> None:
    """A client that loads a model and uses it sees the new one; without fronts nothing is waited for."""
    async with paired(tmp_path) as pair:
        for number in range(20):
            pair.watch.models[f"other {number}"] = KnownModel(f"other {number}", True, config=CONFIG)
            await pair.server.spread()
            assert f"other {number}" in pair.link.models
    async with asyncio.timeout(30):
        await pair.server.spread()


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("unexpected shape for input 'x'"),
        Overloaded("cannot be met", reason="cannot_meet", retry_after_s=0.7),
        DeadlineExceeded("the deadline passed in the queue"),
        EngineFailed("model 'owned' failed"),
        InferenceError("internal error"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_error_of_the_core_is_itself_in_the_front(tmp_path: Path, error: InferenceError) -> None:
    """Class, text, reason and the time to wait come over."""
    async with paired(tmp_path) as pair:
        pair.engine.error = error
        with pytest.raises(InferenceError) as caught:
            await pair.link.infer(request(), client="c")
        assert type(caught.value) is type(error)
        assert (caught.value.message, caught.value.reason) == (error.message, error.reason)
        assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def left(pair: Pair, model_name: str, *, has_begun: bool = True) -> list[CancelStage]:
    """A request that its caller leaves: where it was, once that is known."""
    pair.engine.entered.clear()
    asking = asyncio.create_task(pair.link.infer(request(model_name), client="c"))
    await (pair.engine.entered.wait() if has_begun else asyncio.sleep(0))
    asking.cancel()
    stages: list[CancelStage] = []
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await asking
    when_stage_known(cancelled.value, CancelStage.STREAM, stages.append)
    return stages


async def test_core_says_where_the_request_was_that_a_caller_left(tmp_path: Path) -> None:
    """The caller is gone at once, and counted a moment later by what the core's rooms noted, or by who owns it."""
    async with paired(tmp_path) as pair:
        pair.engine.holds = True
        for model_name, where, expected in [
            ("owned", CancelStage.QUEUE, CancelStage.QUEUE),
            ("owned", CancelStage.BATCH, CancelStage.BATCH),
            ("other", None, CancelStage.ENGINE),
        ]:
            pair.engine.where = where
            stages = await left(pair, model_name)
            assert stages == []
            await until(lambda stages=stages: stages)
            assert stages == [expected]
        asked = len(pair.engine.asked)
        stages = await left(pair, "owned", has_begun=False)  # request and cancellation come to the core together
        await until(lambda: stages)
        assert (stages, len(pair.engine.asked)) == ([CancelStage.QUEUE], asked)


async def test_core_that_dies_fails_what_waits_and_serves_again_when_it_is_back(tmp_path: Path) -> None:
    """No waiting for the dead: what waits and what comes is refused at once; a new core is found by itself."""
    async with paired(tmp_path) as pair:
        pair.engine.holds = True
        asking = asyncio.create_task(pair.link.infer(request(), client="c"))
        await pair.engine.entered.wait()
        await pair.lose_core()
        with pytest.raises(EngineUnavailable, match="core is restarting"):
            await asking
        assert not pair.link.is_up
        with pytest.raises(EngineUnavailable):
            await pair.link.infer(request(), client="c")
        pair.engine.holds = False
        core = asyncio.create_task(CoreServer(pair.watch, pair.engine, pair.engine).run(tmp_path))  # type: ignore[arg-type]
        await until(lambda: pair.link.is_up)
        assert (await pair.link.infer(request(), client="c")).id == "id-7"
        core.cancel()
        await asyncio.gather(core, return_exceptions=True)


async def test_deadline_that_the_core_does_not_keep_is_kept_by_the_front(tmp_path: Path) -> None:
    """A moment late, since the core's own word is the better one."""
    async with paired(tmp_path) as pair:
        pair.engine.holds = True
        with pytest.raises(DeadlineExceeded):
            await pair.link.infer(request(deadline=time.monotonic()), client="c")
        await pair.engine.cancelled.wait()


async def test_link_is_bounded(tmp_path: Path) -> None:
    """More than so many do not wait for the core at once."""
    async with paired(tmp_path) as pair:
        pair.engine.holds = True
        asking = [asyncio.create_task(pair.link.infer(request(), client="c")) for _ in range(4)]
        await until(lambda: len(pair.engine.asked) == 4)
        with pytest.raises(Overloaded):
            await pair.link.infer(request(), client="c")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_core_hears_what_the_front_saw_of_the_engine(tmp_path: Path) -> None:
    """Served models now and then, suspicions and late calls each time; and a silent engine's calls are cut."""
    cut: list[str] = []
    async with paired(tmp_path) as pair:
        pair.link.when_silent(cut.append)
        pair.link.note_served("owned")
        pair.link.suspect()
        pair.link.note_late("owned", 1.5)
        pair.link.note_failed("other")
        await until(lambda: pair.watch.served == ["owned"] and pair.watch.suspicions == 1)
        await until(lambda: pair.watch.late == [("owned", 1.5)] and pair.watch.failed == ["other"])
        pair.server.cut("silent")
        await until(lambda: cut == ["silent"])


async def test_request_that_cannot_be_sent_leaves_nothing(tmp_path: Path) -> None:
    """A record that cannot be made is the request's own failure, and takes no place from others."""
    async with paired(tmp_path) as pair:
        for _ in range(5):
            with pytest.raises(InvalidRequest):
                await pair.link.infer(replace(request(), parameters={"a": 10**30}), client="c")
        assert (await pair.link.infer(request(), client="c")).id == "id-7"


async def test_core_that_was_silent_runs_nothing_for_clients_that_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its front asks over a new connection; what was asked over the old one is given up."""
    async with paired(tmp_path) as pair:
        pair.engine.holds = True
        asking = asyncio.create_task(pair.link.infer(request(), client="c"))
        await pair.engine.entered.wait()
        monkeypatch.setattr(core_link, "SILENCE_S", 0.0)
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await asking
        monkeypatch.undo()
        await asyncio.wait_for(pair.engine.cancelled.wait(), 5)
        pair.engine.holds = False
        await until(lambda: pair.link.is_up)
        assert (await pair.link.infer(request(), client="c")).id == "id-7"
