"""FAULTS 71: a card falls off the bus; models on it make the gateway not ready, with the reason, until it is back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from penstock.engines.watch import EngineWatch
from penstock.gateway import telemetry_parts as engines
from penstock.gateway.settings import Settings
from penstock.gateway.telemetry_parts import compose_telemetry
from penstock.protocol.engine import ModelConfig
from tests.gateway.test_watch import QUICK, ScriptedEngine
from tests.support.waiting import until

LOST, UNKNOWN_ERROR = 15, 999


class EngineOnGpu(ScriptedEngine):
    """Its model runs on a GPU."""

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        return replace(await super().model_config(model_name, model_version), is_on_gpu=True)


@contextlib.asynccontextmanager
async def watching(engine: ScriptedEngine) -> AsyncIterator[EngineWatch]:
    """A watch of this engine beside the telemetry that the gateway composes; both are ended."""
    watch = EngineWatch(engine, QUICK)
    telemetry = compose_telemetry(Settings(), watch, environment={})
    assert telemetry is not None
    tasks = [asyncio.create_task(one.run()) for one in (watch, telemetry)]
    try:
        async with asyncio.timeout(60):
            await watch.first_ready.wait()
            await until(lambda: telemetry.health.cards)
            yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_gpu_falls_off_the_bus_gateway_is_not_ready_until_it_is_back(nvml: Callable[..., None]) -> None:
    """The reason names the card and what to do; once it answers again the engine is greeted anew."""
    async with watching(EngineOnGpu()) as watch:
        generation = watch.generation
        nvml(error=LOST, open_error=UNKNOWN_ERROR)
        await until(lambda: not watch.is_up)
        assert watch.reason.startswith("GPU 0 (GPU-a) is lost: ")
        assert "nvidia-smi --gpu-reset" in watch.reason
        nvml()
        await until(lambda: watch.is_up)
        assert watch.generation == generation + 1


async def test_gpu_that_no_model_runs_on_may_fall_off_the_bus(nvml: Callable[..., None]) -> None:
    """Models on the CPU serve on."""
    engine = ScriptedEngine()
    async with watching(engine) as watch:
        nvml(error=LOST)
        looks = engine.looks
        await until(lambda: engine.looks > looks + 20)
        assert watch.is_up


@pytest.mark.parametrize(
    ("said", "has_driver", "has_reader"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"gpu_metrics": "off"}, True, False),
        ({"engine": "http://elsewhere.example:8000"}, True, False),
        ({"engine": "http://elsewhere.example:8000", "gpu_metrics": "http://elsewhere.example:9400/m"}, False, True),
    ],
)
def test_cards_are_read_where_the_engine_and_a_driver_are(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], has_driver: bool, has_reader: bool
) -> None:
    """Else no process is started; an exporter is read wherever it is, and its card is not held against the engine."""
    monkeypatch.setattr(engines, "has_driver", lambda: has_driver)
    watch = EngineWatch(ScriptedEngine(), QUICK)
    plain = watch.hindrance
    telemetry = compose_telemetry(Settings.model_validate(said), watch, environment={})
    assert (telemetry is not None) == has_reader
    assert (watch.hindrance is plain) == (not has_reader or "engine" in said)
