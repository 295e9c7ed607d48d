"""Calls at the engine are bounded, in turn between clients, and counted until the engine has finished them."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from penstock.engines.model_health import EngineView, KnownModel
from penstock.gateway import engine_slots as engine_turns
from penstock.gateway.engine_slots import INITIAL_SLOTS, MAX_SLOTS, EngineSlots
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.cancellation import AbandonedCall, CancelStage, cancel_stage_of, mark_abandoned
from penstock.protocol.engine import ModelConfig, Relay
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from penstock.protocol.identity import Verb
from penstock.testing import FakeMode
from tests.gateway.rig import CALL, Rig, picture

MODEL = ModelConfig("slow", "python", 0, (), (), instance_count=2)
HEAD = InferHead("slow")
AT_ONCE = 4  # for a model with two instances whose answers are slow


@dataclass
class Engine:
    """A relay that answers on command, and a view of its models."""

    models: dict[str, KnownModel] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)
    waiting: list["asyncio.Future[None]"] = field(default_factory=list)
    left: list[AbandonedCall] = field(default_factory=list)
    finishes: bool = True

    def note_served(self, model_name: str) -> None:
        self.served.append(model_name)

    async def send(self, call: HttpCall | GrpcCall, *, deadline: float | None) -> HttpAnswer | GrpcAnswer:
        content = call.body if isinstance(call, HttpCall) else call.message
        await self._answer(content)
        return HttpAnswer(200, (), content) if isinstance(call, HttpCall) else GrpcAnswer(0, content)

    async def _answer(self, what: bytes) -> None:
        self.asked.append(what)
        self.waiting.append(asyncio.get_running_loop().create_future())
        try:
            await self.waiting[-1]
        except asyncio.CancelledError as error:
            if self.finishes:
                self.left.append(mark_abandoned(error))
            raise

    def answer_one(self) -> None:
        next(one for one in self.waiting if not one.done()).set_result(None)


@pytest.fixture
def engine() -> Engine:
    return Engine({"slow": KnownModel("slow", True, "", MODEL)})


def turns_of(engine: Engine, engines: int = 1) -> EngineSlots:
    return EngineSlots(cast(Relay, engine), cast(EngineView, engine), engines)


def ask(
    turns: EngineSlots, who: str, what: str = "", *, head: InferHead = HEAD, until: float | None = None
) -> "asyncio.Task[HttpAnswer]":
    call = HttpCall("POST", b"/v2/models/slow/infer", (), (what or who).encode())
    return asyncio.create_task(turns.send(call, head, who, until))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def left(tasks: list["asyncio.Task[HttpAnswer]"]) -> list[BaseException]:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    ends: list[BaseException] = []
    for task in tasks:
        with pytest.raises(asyncio.CancelledError) as end:
            task.result()
        ends.append(end.value)
    return ends


async def test_no_more_calls_stand_at_the_engine_than_keep_its_instances_busy(engine: Engine) -> None:
    """The others wait here; each answer lets the next one in."""
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(20)]
    await settle()
    assert len(engine.asked) == AT_ONCE
    for _ in range(20):
        engine.answer_one()
        await settle()
    assert {(await call).status for call in calls} == {200}


async def test_clients_take_turns_before_the_engine(engine: Engine) -> None:
    """Another client's call is served next, although the first client has 500 waiting calls."""
    turns = turns_of(engine)
    for _ in range(500):
        ask(turns, "eve")
    await settle()
    ours = [ask(turns, "alice") for _ in range(2)]
    await settle()
    for _ in range(4):
        engine.answer_one()
        await settle()
    assert engine.asked[AT_ONCE:].count(b"alice") == 2
    for call in ours:
        call.cancel()


async def test_call_that_was_left_takes_room_until_the_engine_has_answered_it(engine: Engine) -> None:
    """Otherwise clients that disconnect would fill the engine; an answer shows that the model works."""
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(500)]
    await settle()
    ends = await left(calls)
    assert [cancel_stage_of(end) for end in ends].count(CancelStage.QUEUE) == 500 - AT_ONCE
    ours = ask(turns, "alice")
    await settle()
    assert len(engine.left) == AT_ONCE
    assert engine.asked == [b"eve"] * AT_ONCE
    engine.left[0].end(is_served=True)
    await settle()
    assert engine.asked[AT_ONCE:] == [b"alice"]
    assert engine.served == ["slow"]
    ours.cancel()


async def test_call_that_was_taken_back_keeps_its_room_for_a_while(engine: Engine) -> None:
    """Triton still works on it, unless it waits in the dynamic batcher, which drops it."""
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(AT_ONCE)]
    await settle()
    await left(calls)
    ours = ask(turns, "alice")
    for call in engine.left:
        call.end()
    await settle()
    assert engine.asked == [b"eve"] * AT_ONCE
    async with asyncio.timeout(60):
        while len(engine.asked) == AT_ONCE:
            await asyncio.sleep(0.01)
    ours.cancel()


async def test_call_that_a_batcher_drops_gives_its_room_back_at_once(engine: Engine) -> None:
    """Triton's dynamic batcher drops calls that were cancelled before their turn."""
    config = replace(MODEL, max_batch_size=1, has_dynamic_batching=True)
    engine.models["slow"] = KnownModel("slow", True, "", config)
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(AT_ONCE)]
    await settle()
    await left(calls)
    ours = ask(turns, "alice")
    for call in engine.left:
        call.end()
    await settle()
    assert engine.asked[AT_ONCE:] == [b"alice"]
    ours.cancel()


async def test_all_who_wait_may_leave_at_once(engine: Engine) -> None:
    """Room that is returned before the cancelled calls run goes to the remaining ones."""
    turns = turns_of(engine)
    engine.finishes = False
    calls = [ask(turns, "eve") for _ in range(50)]
    await settle()
    ours = ask(turns, "alice")
    await settle()
    for call in calls:  # calls at the engine are cancelled first, and let in calls that are already cancelled
        call.cancel()
    assert len(await asyncio.gather(*calls, return_exceptions=True)) == 50
    await settle()
    engine.answer_one()
    assert (await ours).status == 200
    later = [ask(turns, "bob") for _ in range(AT_ONCE)]
    await settle()
    assert engine.asked.count(b"bob") == AT_ONCE
    await left(later)


async def test_call_that_is_let_in_and_cancelled_at_the_same_time_gives_its_room_back(engine: Engine) -> None:
    """The next call gets the room."""
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(AT_ONCE + 1)]
    await settle()
    engine.answer_one()
    while not calls[0].done():
        await asyncio.sleep(0)
    calls[-1].cancel()
    await asyncio.gather(calls[-1], return_exceptions=True)
    for call in engine.left:
        call.end(is_served=True)
    later = ask(turns, "bob")
    await settle()
    assert engine.asked[-1] == b"bob"
    await left([later])


async def test_deadline_passes_while_a_call_waits(engine: Engine) -> None:
    """The error says how long it waited, and for what."""
    turns = turns_of(engine)
    for _ in range(AT_ONCE):
        ask(turns, "eve")
    await settle()
    with pytest.raises(DeadlineExceeded, match="waiting for the calls of model 'slow' before it"):
        await ask(turns, "alice", until=time.monotonic() + 0.01)
    assert len(engine.asked) == AT_ONCE


async def test_call_that_fails_gives_its_room_back(engine: Engine) -> None:
    """This holds for any number of failed calls."""
    turns = turns_of(engine)
    for _ in range(20):
        call = ask(turns, "eve")
        await settle()
        engine.waiting[-1].set_exception(EngineUnavailable("gone"))
        with pytest.raises(EngineUnavailable):
            await call


async def test_quick_answers_make_room_for_more_and_slow_ones_take_it_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is between the calls that the instances need and MOST."""
    turns = turns_of(engine)
    for _ in range(300):
        ask(turns, "eve")
    await settle()
    most = 0
    for _ in range(100):
        engine.answer_one()
        await settle()
        most = max(most, sum(not one.done() for one in engine.waiting))
    assert most == MAX_SLOTS
    monkeypatch.setattr(engine_turns, "FAST_CALL_S", -1.0)  # from now on every answer counts as slow
    for _ in range(150):
        engine.answer_one()
        await settle()
    assert sum(not one.done() for one in engine.waiting) == AT_ONCE


@pytest.mark.parametrize(
    ("config", "at_once"),
    [
        (replace(MODEL, instance_count=1), INITIAL_SLOTS),
        (replace(MODEL, instance_count=40), 80),
        (replace(MODEL, max_batch_size=16, has_dynamic_batching=True), 64),
        (replace(MODEL, max_batch_size=16), AT_ONCE),
        (replace(MODEL, is_ensemble=True), MAX_SLOTS),
        (replace(MODEL, is_decoupled=True), 100),
        (replace(MODEL, has_sequence_batching=True), 100),
        (replace(MODEL, has_priorities=True), 100),
        (None, 100),
    ],
)
async def test_room_is_what_a_models_config_says(engine: Engine, config: ModelConfig | None, at_once: int) -> None:
    """It is twice what its instances execute at once; unlimited if a call may have to wait for a later one."""
    engine.models["slow"] = KnownModel("slow", True, "", config)
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(100)]
    await settle()
    assert len(engine.asked) == at_once
    await left(calls)


async def test_several_engines_have_room_each(engine: Engine) -> None:
    """The room is that of one engine times their number."""
    turns = turns_of(engine, engines=3)
    calls = [ask(turns, "eve") for _ in range(100)]
    await settle()
    assert len(engine.asked) == 3 * AT_ONCE
    await left(calls)


async def test_large_json_bodies_are_read_by_the_engine_one_after_the_other(engine: Engine) -> None:
    """Large bodies of all clients wait for each other; small ones do not wait for them."""
    for name in ("slow", "quick"):
        engine.models[name] = KnownModel(name, True, "", replace(MODEL, instance_count=50))
    turns = turns_of(engine)
    large = InferHead("slow", json_bytes=16_000_000)
    calls = [ask(turns, "eve", head=large) for _ in range(20)]
    await settle()
    calls += [ask(turns, "eve", "small") for _ in range(2)]
    calls += [ask(turns, "alice", head=InferHead("quick", json_bytes=2_000_000))]
    await settle()
    assert engine.asked == [b"eve", b"small", b"small"]
    engine.waiting[0].set_result(None)
    await settle()
    engine.waiting[3].set_result(None)
    await settle()
    assert engine.asked[3:5] == [b"eve", b"alice"]
    await left(calls[2:])


async def test_grpc_calls_take_turns_with_http_ones(engine: Engine) -> None:
    """Both count for the same model."""
    turns = turns_of(engine)
    calls = [ask(turns, "eve") for _ in range(AT_ONCE)]
    await settle()
    call = asyncio.create_task(turns.send(GrpcCall("/m", b"alice"), HEAD, "alice", None))
    await settle()
    assert engine.asked == [b"eve"] * AT_ONCE
    engine.answer_one()
    await settle()
    assert engine.asked[-1] == b"alice"
    call.cancel()
    await left(calls[1:])


async def test_places_on_streams_are_as_many_and_one_that_is_left_is_kept_for_a_while(engine: Engine) -> None:
    """A stream's end does not show when the engine has finished, so the last answer's time is assumed."""
    turns = turns_of(engine)
    for _ in range(AT_ONCE):
        with suppress(EngineUnavailable), await turns.place("slow", "eve", None):
            raise EngineUnavailable("the stream ended")
    waiting = asyncio.create_task(turns.place("slow", "alice", None))
    await settle()
    assert not waiting.done()
    async with asyncio.timeout(60):
        with await waiting:
            pass
        for _ in range(20):
            with await turns.place("slow", "alice", None):
                pass


async def test_place_of_a_call_that_the_engine_works_on_is_kept_when_its_caller_has_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot and its key's share are freed only then; otherwise one client could fill the engine repeatedly."""
    left: list[AbandonedCall] = []

    async def works_on(*_: object, **__: object) -> HttpAnswer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            left.append(mark_abandoned(error))
            raise
        raise AssertionError

    monkeypatch.setattr(rig.backend, "send", works_on)
    task = asyncio.create_task(rig.plane.relay(Verb.INFER, InferHead("boxes"), CALL))
    async with asyncio.timeout(60):
        while rig.admission.statistics().requests == 0:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.admission.statistics().requests == 1
    left[0].end()
    assert rig.admission.statistics().requests == 0


async def test_pictures_of_a_model_that_is_relayed_go_to_the_engine_in_turn(rig: Rig) -> None:
    """A few are sent at a time, however many there are."""
    rig.backend.mode = FakeMode.SLOW
    before = len(rig.backend.calls)
    asking = asyncio.create_task(rig.ask("boxes", *[picture(1)] * 8))
    async with asyncio.timeout(60):
        while len(rig.backend.calls) < before + INITIAL_SLOTS:
            await asyncio.sleep(0.005)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(rig.backend.calls) == before + INITIAL_SLOTS
    rig.backend.release.set()
    await asking
    assert len(rig.backend.calls) == before + 8
