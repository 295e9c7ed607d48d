"""Fixtures for tests of the gateway's parts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.protocol.engine import ModelConfig
from penstock.testing import FakeEngine
from tests.gateway.rig import CLASSIFIER, DETECTOR, NMS_INSIDE, TENSORS_ONLY, InlinePool, LazyPool, Rig, answer


@pytest.fixture
def pool() -> LazyPool:
    """Of the rig. Files whose subject is not a decoder process replace it by an InlinePool."""
    return LazyPool()


@pytest.fixture
def more_models() -> tuple[ModelConfig, ...]:
    """Models of the rig that a file adds."""
    return ()


@pytest.fixture
async def rig(pool: LazyPool | InlinePool, more_models: tuple[ModelConfig, ...]) -> AsyncIterator[Rig]:
    slo = replace(TENSORS_ONLY, name="hasty", parameters={"slo_p99_ms": "50"})
    hasty = replace(CLASSIFIER, name="hasty-classes", parameters={**CLASSIFIER.parameters, "slo_p99_ms": "500"})
    odd = replace(CLASSIFIER, name="odd", parameters={**CLASSIFIER.parameters, "slo_p99_ms": "fast"})
    untried = replace(NMS_INSIDE, name="found-untried", unmerged=None)
    models = (DETECTOR, CLASSIFIER, NMS_INSIDE, untried, TENSORS_ONLY, slo, hasty, odd, *more_models)
    backend = FakeEngine(models, answer=answer)
    options = WatchOptions(probe_interval_s=60, down_interval_s=0.01, canary_interval_s=60)
    watch = EngineWatch(backend, options, refuse=DeclaredOptions().refusal)
    admission, metrics = InFlightLimiter(InFlightLimits(max_requests=4)), Metrics()
    slots = EngineSlots(backend, watch)
    images = ImageFlow(backend=backend, watch=watch, pool=pool, metrics=metrics, slots=slots)
    control = AdmissionControl(watch=watch, admission=admission, metrics=metrics)
    plane = DataPlane(
        PlaneParts(relay=backend, watch=watch, images=images, admission=control, metrics=metrics, slots=slots)
    )
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
    yield Rig(plane, backend, admission, watch, metrics, images, pool)
    assert admission.statistics().requests == 0
    assert admission.statistics().size_bytes == 0
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await pool.aclose()
