"""The watch knows whether the engine can work, and has it load what is wanted."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from penstock.engines.model_health import Cause
from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.protocol.engine import ModelConfig, ModelMetadata, ModelState, TensorSpec
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    ModelNotFound,
    ModelNotReady,
    ModelRefused,
    ModelUnavailable,
)
from penstock.protocol.inference import Datatype, InferRequest, InferResponse
from tests.support.waiting import until

QUICK = WatchOptions(
    probe_interval_s=0.01, down_interval_s=0.01, canary_interval_s=0.0, execution_timeout_s=lambda _: 1.0
)


@dataclass
class ScriptedEngine:
    """An engine whose state a test turns; it keeps its promises as Backend."""

    models: dict[str, str] = field(default_factory=lambda: {"good": "", "bad": "no such file"})
    is_alive: bool = True
    is_sick: bool = False
    sick: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    waits: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    looks: int = 0
    on_infer: Callable[[str], None] = lambda _: None

    async def infer(self, request: InferRequest) -> InferResponse:
        self.calls.append(f"infer {request.model_name}")
        self.on_infer(request.model_name)
        if request.model_name in self.waits:
            self.calls.append(f"wait {request.model_name}")
            await asyncio.Event().wait()
        if request.model_name in self.hung:
            raise DeadlineExceeded("the engine did not answer within 30 s")
        if self.is_sick or request.model_name in self.sick:
            raise EngineFailed("CUDA error: an illegal memory access was encountered")
        return InferResponse(request.model_name, "1", ())

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        raise ModelNotFound(model_name)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        self.calls.append(f"config {model_name}")
        if model_name not in self.loaded:
            raise ModelNotFound(f"no model {model_name!r}")
        return ModelConfig(model_name, "python", 0, (TensorSpec("x", Datatype.FP32, (1,)),), ())

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        self.looks += 1
        return self.is_alive

    async def repository_index(self) -> list[ModelState]:
        if not self.is_alive:
            raise EngineUnavailable("connection refused")
        return [
            ModelState(name, "1", "READY" if name in self.loaded else "UNAVAILABLE" if why else "", why)
            for name, why in self.models.items()
        ]

    async def load(self, model_name: str) -> None:
        self.calls.append(f"load {model_name}")
        if self.models[model_name]:
            raise ModelNotReady(self.models[model_name])
        self.loaded.add(model_name)

    async def unload(self, model_name: str) -> None:
        self.loaded.discard(model_name)

    async def metrics(self) -> bytes:
        return b""

    async def aclose(self) -> None:
        return


@asynccontextmanager
async def watching(
    engine: ScriptedEngine,
    asked: list[str],
    options: WatchOptions = QUICK,
    *,
    restart_model: Callable[[str, str, int], None] | None = None,
) -> AsyncIterator[EngineWatch]:
    watch = EngineWatch(engine, options, ask_restart=asked.append, restart_model=restart_model)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(30):
            yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("at_once", [1, 3])
async def test_watch_loads_so_many_models_at_once_and_no_more(at_once: int) -> None:
    """Loading is mostly waiting for one core; all that are wanted are loaded all the same."""
    loading: list[str] = []
    most = 0

    class SlowEngine(ScriptedEngine):
        async def load(self, model_name: str) -> None:
            nonlocal most
            loading.append(model_name)
            most = max(most, len(loading))
            for _ in range(5):
                await asyncio.sleep(0)
            await super().load(model_name)
            loading.remove(model_name)

    engine = SlowEngine(dict.fromkeys("abcdefg", ""))
    async with watching(engine, [], dataclasses.replace(QUICK, loads_at_once=at_once)) as watch:
        await watch.first_ready.wait()
        assert all(watch.models[name].is_ready for name in "abcdefg")
    assert most == at_once


async def test_watch_loading_several_when_the_engine_goes_tries_again() -> None:
    """An engine that dies in the middle is down, with its reason, and all is loaded once it is back."""

    class DyingEngine(ScriptedEngine):
        async def load(self, model_name: str) -> None:
            if self.is_sick:
                raise EngineUnavailable("connection refused")
            await super().load(model_name)

    engine = DyingEngine(dict.fromkeys("abc", ""), is_sick=True)
    async with watching(engine, [], dataclasses.replace(QUICK, loads_at_once=3)) as watch:
        await until(lambda: watch.reason == "connection refused")
        engine.is_sick = False
        await watch.first_ready.wait()
        assert engine.loaded == set("abc")


async def test_watch_loads_what_is_wanted_and_names_what_cannot_be_loaded() -> None:
    """A broken model does not keep the others from being served, and its reason is kept."""
    engine = ScriptedEngine()
    async with watching(engine, []) as watch:
        await watch.first_ready.wait()
        assert watch.is_up
        assert watch.models["good"].is_ready
        assert (watch.models["bad"].is_ready, watch.models["bad"].reason) == (False, "no such file")
        assert "infer good" in engine.calls


@pytest.mark.parametrize(
    ("wanted", "left_out"),
    [
        (("good", "gone", "bad"), {"gone", "spare", "foreign"}),
        (None, {"gone", "spare"}),
        ((), {"gone", "spare", "foreign", "bad"}),
    ],
)
async def test_watch_tells_a_model_that_failed_from_one_that_is_not_wanted(
    wanted: tuple[str, ...] | None, left_out: set[str]
) -> None:
    """What was unloaded, or is not named, is left out; where nothing is named, what was never loaded is."""
    models = {"good": "", "gone": "", "spare": "", "bad": "no such file", "foreign": "no such backend"}
    engine = ScriptedEngine(models, loaded={"good", "gone"})
    async with watching(engine, [], WatchOptions(wanted, False, 0.01, 0.01, 60.0)) as watch:
        await watch.first_ready.wait()
        await engine.unload("gone")
        watch.note_unloaded("gone")
        assert {name for name, known in watch.models.items() if watch.is_left_out(known)} == left_out


async def test_watch_after_engine_restart_loads_again_what_a_client_loaded() -> None:
    """Models that were loaded at run time come back with the engine; unloaded ones do not."""
    engine = ScriptedEngine(models={"good": "", "later": "", "gone": ""})
    async with watching(engine, [], WatchOptions(("good", "gone"), True, 0.01, 0.01, 60.0)) as watch:
        await watch.first_ready.wait()
        await engine.load("later")
        await watch.note_loaded("later")
        await engine.unload("gone")
        watch.note_unloaded("gone")
        engine.is_alive = False
        await until(lambda: not watch.is_up)
        engine.loaded.clear()
        engine.is_alive = True
        await until(lambda: watch.is_up)
        assert engine.loaded == {"good", "later"}


async def test_watch_after_engine_restart_reads_the_configs_again() -> None:
    """A config.pbtxt that was changed while the engine was away counts from its return."""
    engine = ScriptedEngine(models={"good": ""})
    async with watching(engine, [], WatchOptions(None, True, 0.01, 0.01, 60.0)) as watch:
        await watch.first_ready.wait()
        engine.is_alive = False
        await until(lambda: not watch.is_up)
        engine.calls.clear()
        engine.is_alive = True
        await until(lambda: watch.is_up)
        assert "config good" in engine.calls
        assert watch.models["good"].is_ready


async def test_watch_of_engine_that_lives_but_cannot_infer_asks_for_restart() -> None:
    """A sticky CUDA error: after three canaries in a row ready is false and the parent is asked to restart it."""
    engine, asked = ScriptedEngine(models={"good": ""}), []
    async with watching(engine, asked) as watch:
        await watch.first_ready.wait()
        engine.is_sick = True
        await until(lambda: asked)
        assert not watch.is_up
        assert "model 'good': 3 canary inferences in a row failed, the last: CUDA error" in asked[0]
        engine.is_sick = False
        await until(lambda: watch.is_up)


async def test_watch_does_not_call_an_engine_up_when_no_canary_succeeds() -> None:
    """An engine that answers its health page and nothing else is not ready."""
    engine = ScriptedEngine(models={"good": ""}, is_sick=True)
    async with watching(engine, []) as watch:
        await until(lambda: "no canary inference succeeded" in watch.reason)
        assert not watch.is_up


async def test_watch_informed_of_a_death_believes_it_at_once() -> None:
    """The parent's word counts before the next probe, with its reason."""
    engine = ScriptedEngine(models={"good": ""})
    async with watching(engine, [], WatchOptions(None, True, 60.0, 0.01, 60.0)) as watch:
        await watch.first_ready.wait()
        engine.is_alive = False
        watch.mark_down("tritonserver died of signal 9")
        assert not watch.is_up
        assert watch.reason == "tritonserver died of signal 9"


async def test_watch_finds_a_model_that_was_loaded_behind_its_back() -> None:
    """A config that is not known is asked of the engine; an unknown model is ModelNotFound."""
    engine = ScriptedEngine(models={"good": ""})
    async with watching(engine, [], WatchOptions((), True, 60.0, 0.01, 60.0)) as watch:
        await watch.first_ready.wait()
        engine.loaded.add("good")
        assert (await watch.find("good")).name == "good"
        with pytest.raises(ModelNotFound):
            await watch.find("unknown")


async def test_model_that_hung_is_refused_with_the_reason_until_its_canary_passes() -> None:
    """This holds although the engine does not list it as ready while its own engine process starts."""
    engine, restarted = ScriptedEngine(models={"good": "", "stuck": ""}), list[tuple[str, str, int]]()
    async with watching(engine, [], restart_model=lambda *what: restarted.append(what)) as watch:
        await watch.first_ready.wait()
        engine.hung.add("stuck")
        await until(lambda: restarted)
        engine.loaded.discard("stuck")
        looks = engine.looks
        await until(lambda: engine.looks > looks + 3)
        assert watch.models["stuck"].unavailable is Cause.HANG
        with pytest.raises(ModelUnavailable, match="it answered nothing for 1 s"):
            watch.models["stuck"].require_served()
        engine.hung.clear()
        engine.loaded.add("stuck")
        await until(lambda: watch.models["stuck"].is_ready)


@pytest.mark.parametrize("is_crowded", [True, False])
async def test_watch_restarts_a_model_that_answers_no_client(is_crowded: bool) -> None:
    """A late canary behind a queue is no hang; a late canary while no client is served is one."""
    engine, restarted = ScriptedEngine(models={"good": "", "stuck": ""}), list[tuple[str, str, int]]()
    async with watching(engine, [], restart_model=lambda *what: restarted.append(what)) as watch:
        await watch.first_ready.wait()
        if is_crowded:
            engine.on_infer = watch.note_served  # answers to others come while the canary waits
        engine.hung.add("stuck")
        before = len(engine.calls)
        await until(lambda: restarted or len(engine.calls) > before + 30)
        assert watch.is_up
        assert watch.models["good"].is_ready
        assert watch.models["stuck"].is_ready is is_crowded
        assert restarted == ([] if is_crowded else [("stuck", "it answered nothing for 1 s (execution_timeout_ms)", 1)])


async def test_model_that_fails_is_unavailable_alone_and_comes_back() -> None:
    """It is not ready, and refused with the reason; the other model and the engine stay up."""
    engine, asked = ScriptedEngine(models={"good": "", "bad": ""}), list[str]()
    async with watching(engine, asked) as watch:
        await watch.first_ready.wait()
        engine.sick.add("bad")
        await until(lambda: not watch.models["bad"].is_ready)
        assert (watch.models["bad"].unavailable, watch.models["good"].is_ready) == (Cause.CANARY, True)
        with pytest.raises(ModelUnavailable, match="model 'bad' is unavailable: 3 canary inferences in a row failed"):
            await watch.find("bad")
        assert watch.unavailable() == {("bad", "canary"): 1.0}
        engine.sick.clear()
        await until(lambda: watch.models["bad"].is_ready)
        assert (asked, watch.is_up, watch.unavailable()) == ([], True, {})
        assert (await watch.find("bad")).name == "bad"


async def test_model_whose_trial_failed_stays_unavailable_until_it_is_loaded_again() -> None:
    """The trial at load marks it; later canaries that pass do not change that."""
    engine = ScriptedEngine(models={"good": "", "odd": ""})
    async with watching(engine, []) as watch:
        await watch.first_ready.wait()
        watch.mark_unavailable("odd", Cause.TRIAL, "its output is a scalar")
        before = engine.calls.count("infer good")
        await until(lambda: engine.calls.count("infer good") > before + 5)
        assert (watch.models["odd"].is_ready, watch.models["odd"].reason) == (False, "its output is a scalar")
        await watch.note_loaded("odd")
        assert watch.models["odd"].is_ready


async def test_model_that_hangs_at_start_does_not_keep_the_others_from_being_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is up when another model's canary passed; later calls to the hanging model are refused."""
    monkeypatch.setattr("penstock.engines.watch.GREETING_S", 0.05)
    engine = ScriptedEngine(models={"good": "", "stuck": ""}, waits={"stuck"})
    async with watching(engine, []) as watch:
        await watch.first_ready.wait()
        assert watch.models["good"].is_ready


async def test_canaries_of_a_model_that_waits_do_not_hold_up_the_look_at_the_engine() -> None:
    """An engine that dies meanwhile is noticed at the next check."""
    engine = ScriptedEngine(models={"good": "", "stuck": ""})
    async with watching(engine, []) as watch:
        await watch.first_ready.wait()
        engine.waits.add("stuck")
        await until(lambda: "wait stuck" in engine.calls)
        engine.is_alive = False
        await until(lambda: not watch.is_up)


async def test_watch_of_a_sick_engine_looks_at_its_interval() -> None:
    """What the watch finds out itself does not wake it: a sick engine is not asked fifty times a second."""
    engine = ScriptedEngine(models={"good": ""}, is_sick=True)
    async with watching(engine, [], WatchOptions(down_interval_s=60.0)) as watch:
        await until(lambda: "no canary inference succeeded" in watch.reason)
        watch.suspect()
        await until(lambda: engine.calls.count("infer good") == 2)
        await until(lambda: engine.looks == 2)
        await asyncio.sleep(0.1)  # five times the pause that a wake-up takes
        assert engine.looks == 2


async def test_model_that_the_gateway_refuses_is_not_ready_though_the_engine_serves_it() -> None:
    """What config.pbtxt cannot mean is said once, keeps no other model down, and costs no question a second."""
    engine = ScriptedEngine({"good": "", "odd": ""})
    refuse = {"odd": "model 'odd': slo_p99_ms is 'fast' in config.pbtxt"}
    watch = EngineWatch(engine, QUICK, refuse=lambda config: refuse.get(config.name, ""))
    task = asyncio.create_task(watch.run())
    await watch.first_ready.wait()
    looks = engine.looks
    await until(lambda: engine.looks > looks + 3)
    task.cancel()
    assert watch.models["good"].is_ready
    assert (watch.models["odd"].is_ready, watch.models["odd"].is_refused) == (False, True)
    assert watch.models["odd"].reason == refuse["odd"]
    assert (engine.calls.count("config odd"), engine.calls.count("infer odd")) == (1, 0)
    with pytest.raises(ModelRefused, match="slo_p99_ms is 'fast'"):
        await watch.find("odd")


async def test_refused_model_is_served_once_its_new_config_is_loaded() -> None:
    """A client that loads the model again, mended, need not start the gateway again."""
    engine = ScriptedEngine({"odd": ""})
    refusals = {"odd": "no"}
    watch = EngineWatch(engine, QUICK, refuse=lambda config: refusals.get(config.name, ""))
    task = asyncio.create_task(watch.run())
    await watch.first_ready.wait()
    assert watch.models["odd"].is_refused
    refusals.clear()
    await watch.note_loaded("odd")
    task.cancel()
    assert watch.models["odd"].is_ready
