"""Calls that are not answered in time make the watch suspect the engine, until a probe decides."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from tests.gateway.test_watch import QUICK, ScriptedEngine, watching
from tests.support.waiting import until

PATIENT = WatchOptions(
    probe_interval_s=60.0, down_interval_s=0.01, canary_interval_s=60.0, late_calls=3, liveness_timeout_s=0.05
)


@dataclass
class StoppedAtTimes(ScriptedEngine):
    """An engine whose answers wait while it is stopped."""

    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        await self.running.wait()
        return await super().ready(model_name, model_version)


@asynccontextmanager
async def stopped_engine() -> AsyncIterator[tuple[StoppedAtTimes, EngineWatch]]:
    """One that was ready and now answers nothing, and who watches it."""
    engine = StoppedAtTimes(models={"good": ""})
    engine.running.set()
    async with watching(engine, [], PATIENT) as watch:
        await watch.first_ready.wait()
        engine.running.clear()
        yield engine, watch


async def test_engine_that_answers_neither_calls_nor_a_probe_is_down_until_it_does() -> None:
    """The circuit: k late calls, one unanswered probe, then nothing but probes until one is answered."""
    async with stopped_engine() as (engine, watch):
        watch.note_late()
        watch.note_late()
        await asyncio.sleep(0)
        assert watch.is_up
        watch.note_late()
        await until(lambda: not watch.is_up)
        assert watch.reason == "3 calls in a row were not answered in time, nor was a probe within 0.05 s"
        engine.running.set()
        await until(lambda: watch.is_up)
        assert watch.openings == 1


async def test_engine_of_a_slow_model_stays_up() -> None:
    """Its calls are late by the dozen, its probe is answered: one probe, and no request is refused for it."""
    engine = ScriptedEngine(models={"good": ""})
    async with watching(engine, [], PATIENT) as watch:
        await watch.first_ready.wait()
        looks = engine.looks
        for _ in range(30):
            watch.note_late()
        await until(lambda: engine.looks > looks)
        await asyncio.sleep(0)
        for _ in range(30):
            watch.note_late()
        await asyncio.sleep(0.02)
        assert (watch.is_up, watch.openings, engine.looks) == (True, 0, looks + 1)


async def test_answers_between_late_calls_raise_no_suspicion() -> None:
    """Only failures in a row count: an engine that serves some is not asked."""
    engine = ScriptedEngine(models={"good": ""})
    async with watching(engine, [], PATIENT) as watch:
        await watch.first_ready.wait()
        looks = engine.looks
        for _ in range(20):
            watch.note_late()
            watch.note_late()
            watch.note_served("good")
        await asyncio.sleep(0.01)
        assert engine.looks == looks


async def test_engine_whose_probe_is_late_in_a_crowd_stays_up() -> None:
    """Calls are answered while the probe is not: busy, not hung."""
    async with stopped_engine() as (_, watch):
        for _ in range(3):
            watch.note_late()
        await asyncio.sleep(0.01)
        watch.note_served("good")
        await asyncio.sleep(0.1)
        assert (watch.is_up, watch.openings) == (True, 0)


async def test_process_that_stood_still_itself_does_not_blame_the_engine() -> None:
    """What came meanwhile is read too late: that says nothing of who sent it."""
    async with stopped_engine() as (_, watch):
        for _ in range(3):
            watch.note_late()
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # the loop, and with it every answer and timer
        await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert (watch.is_up, watch.openings) == (True, 0)


@pytest.mark.parametrize(("waited_s", "is_found"), [(0.4, False), (0.6, True)])
async def test_call_that_waits_for_half_the_execution_timeout_brings_the_canary_forward(
    waited_s: float, is_found: bool
) -> None:
    """A client without a deadline waits as long as the model hangs, and an idle model's canary may be minutes away."""
    engine = ScriptedEngine(models={"good": "", "stuck": ""})
    rarely = replace(QUICK, canary_interval_s=3600.0)
    async with watching(engine, [], rarely, restart_model=lambda *_: None) as watch:
        await watch.first_ready.wait()
        engine.hung.add("stuck")
        looks = engine.looks

        def is_over() -> bool:
            watch.note_late("stuck", waited_s, is_waiting=True)
            return not watch.models["stuck"].is_ready or engine.looks > looks + 150

        await until(is_over)
        assert watch.models["stuck"].is_ready is not is_found


async def test_call_that_waits_is_no_verdict_on_a_model_whose_canary_never_passed() -> None:
    """Its stream of answers may take longer than the execution time-out; only a call that ended counts as evidence."""
    engine = ScriptedEngine(models={"good": "", "odd": ""}, sick={"odd"})
    async with watching(engine, [], replace(QUICK, canary_interval_s=3600.0), restart_model=lambda *_: None) as watch:
        await watch.first_ready.wait()
        looks = engine.looks

        def is_over() -> bool:
            watch.note_late("odd", 5.0, is_waiting=True)
            return not watch.models["odd"].is_ready or engine.looks > looks + 20

        await until(is_over)
        assert watch.models["odd"].is_ready
