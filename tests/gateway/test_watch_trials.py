"""Models are tried when they are loaded, before they serve clients."""

import asyncio
import dataclasses

import pytest

from penstock.engines.model_health import Cause
from penstock.engines.probes import TrialResult
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineUnavailable, ModelUnavailable
from tests.gateway.test_watch import QUICK, ScriptedEngine, watching
from tests.support.waiting import until


async def test_models_are_tried_before_the_engine_is_up_and_before_a_load_is_answered() -> None:
    """When the engine is ready or a load is answered, the model was tried; a trial that failed is repeated."""
    tried: list[str] = []
    refusals = [EngineUnavailable("connection refused")]

    async def try_model(config: ModelConfig) -> TrialResult:
        tried.append(config.name)
        if refusals:
            raise refusals.pop()
        return TrialResult()

    engine = ScriptedEngine({"good": "", "spare": ""})
    options = dataclasses.replace(QUICK, wanted=("good",), try_model=try_model)
    async with watching(engine, [], options) as watch:
        await watch.first_ready.wait()
        assert tried[:1] == ["good"]
        await until(lambda: tried == ["good", "good"])
        await engine.load("spare")
        await watch.note_loaded("spare")
        assert tried[2:] == ["spare"]


async def test_model_that_hangs_at_start_is_not_tried() -> None:
    """A trial would hang like its canary."""
    tried: list[str] = []

    async def try_model(config: ModelConfig) -> TrialResult:
        tried.append(config.name)
        return TrialResult()

    engine = ScriptedEngine({"good": "", "stuck": ""}, waits={"stuck"})
    options = dataclasses.replace(QUICK, execution_timeout_s=lambda _: 60.0, try_model=try_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engines.watch.GREETING_S", 0.05)
        async with watching(engine, [], options) as watch:
            await watch.first_ready.wait()
            assert tried == ["good"]


async def test_config_carries_what_the_trial_of_its_rows_found() -> None:
    """The config has no result before the first trial, nor between a load and the next trial."""
    found: list[ModelConfig] = []

    async def try_model(config: ModelConfig) -> TrialResult:
        found.append(await watch.find(config.name))
        return TrialResult(unmerged="its rows go astray" if len(found) < 2 else "")

    engine = ScriptedEngine({"good": ""})
    async with watching(engine, [], dataclasses.replace(QUICK, try_model=try_model)) as watch:
        await watch.first_ready.wait()
        assert (await watch.find("good")).unmerged == "its rows go astray"
        await watch.note_loaded("good")
        assert (await watch.find("good")).unmerged == ""
    assert [config.unmerged for config in found] == [None, None]


async def test_loaded_model_that_hangs_is_unavailable_before_its_load_is_answered() -> None:
    """Its trial begins with a canary, which has the model's execution time-out; then it is restarted."""
    restarted: list[tuple[str, str, int]] = []
    tried: list[str] = []

    async def try_model(config: ModelConfig) -> TrialResult:
        tried.append(config.name)
        return TrialResult()

    engine = ScriptedEngine({"good": "", "stuck": ""}, hung={"stuck"})
    options = dataclasses.replace(
        QUICK, wanted=("good",), execution_timeout_s=lambda _: 7.0, try_model=try_model, canary_interval_s=60.0
    )
    async with watching(engine, [], options, restart_model=lambda *said: restarted.append(said)) as watch:
        await watch.first_ready.wait()
        await engine.load("stuck")
        await watch.note_loaded("stuck")
        known = watch.models["stuck"]
        assert (known.is_ready, known.unavailable) == (False, Cause.HANG)
        assert known.reason == "it answered nothing for 7 s (execution_timeout_ms)"
        assert restarted == [("stuck", known.reason, 1)]
        assert tried == ["good"]


async def test_loaded_model_serves_no_client_before_its_first_answer() -> None:
    """A model that served continues to serve while it is reloaded."""
    begun, tried = asyncio.Event(), asyncio.Event()

    async def try_model(config: ModelConfig) -> TrialResult:
        if config.name == "slow":
            begun.set()
            await tried.wait()
        return TrialResult()

    engine = ScriptedEngine({"good": "", "slow": ""})
    options = dataclasses.replace(QUICK, wanted=("good",), try_model=try_model)
    async with watching(engine, [], options) as watch:
        await watch.first_ready.wait()
        await engine.load("slow")
        load = asyncio.create_task(watch.note_loaded("slow"))
        await until(lambda: "slow" in watch.models and watch.models["slow"].unavailable is Cause.STARTING)
        with pytest.raises(ModelUnavailable, match="its first inference has no answer yet") as raised:
            await watch.find("slow")
        assert raised.value.retry_after_s == 1.0
        tried.set()
        await load
        assert watch.models["slow"].is_ready
        begun.clear()
        tried.clear()
        again = asyncio.create_task(watch.note_loaded("slow"))
        await begun.wait()
        assert watch.models["slow"].is_ready
        tried.set()
        await again


async def test_model_without_an_answer_at_start_is_not_ready_though_the_engine_is() -> None:
    """It does not delay other models, and serves no client before its canary is answered."""
    engine = ScriptedEngine({"good": "", "slow": ""}, waits={"slow"})
    options = dataclasses.replace(QUICK, execution_timeout_s=lambda _: 60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engines.watch.GREETING_S", 0.05)
        async with watching(engine, [], options) as watch:
            await watch.first_ready.wait()
            assert watch.models["good"].is_ready
            assert watch.models["slow"].unavailable is Cause.STARTING
