"""Models are tried when they are loaded, before anybody is served by them."""

import dataclasses

import pytest

from server.backends.load_trial import Tried
from server.core.errors import BackendUnavailable
from server.core.model import ModelConfig
from tests.gateway.test_watch import QUICK, ScriptedEngine, until, watching


async def test_models_are_tried_before_the_engine_is_up_and_before_a_load_is_answered() -> None:
    """Whoever finds the engine ready, or loaded a model, finds it tried; where that failed, it is tried again."""
    tried: list[str] = []
    refusals = [BackendUnavailable("connection refused")]

    async def try_model(config: ModelConfig) -> Tried:
        tried.append(config.name)
        if refusals:
            raise refusals.pop()
        return Tried()

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
    """A trial would hang as its canary does."""
    tried: list[str] = []

    async def try_model(config: ModelConfig) -> Tried:
        tried.append(config.name)
        return Tried()

    engine = ScriptedEngine({"good": "", "stuck": ""}, waits={"stuck"})
    options = dataclasses.replace(QUICK, execution_timeout_s=lambda _: 60.0, try_model=try_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.backends.watch.GREETING_S", 0.05)
        async with watching(engine, [], options) as watch:
            await watch.first_ready.wait()
            assert tried == ["good"]


async def test_config_carries_what_the_trial_of_its_rows_found() -> None:
    """Until the trial, and after each load until the next, nothing is said."""
    found: list[ModelConfig] = []

    async def try_model(config: ModelConfig) -> Tried:
        found.append(await watch.find(config.name))
        return Tried(unmerged="its rows go astray" if len(found) < 2 else "")

    engine = ScriptedEngine({"good": ""})
    async with watching(engine, [], dataclasses.replace(QUICK, try_model=try_model)) as watch:
        await watch.first_ready.wait()
        assert (await watch.find("good")).unmerged == "its rows go astray"
        await watch.note_loaded("good")
        assert (await watch.find("good")).unmerged == ""
    assert [config.unmerged for config in found] == [None, None]
