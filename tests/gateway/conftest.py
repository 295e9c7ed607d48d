"""Fixtures for tests of the gateway's parts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway import telemetry_parts
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.gpu.telemetry.reader import TelemetryOptions
from penstock.protocol.engine import ModelConfig
from penstock.testing import FakeEngine
from tests.gateway.rig import CLASSIFIER, DETECTOR, NMS_INSIDE, TENSORS_ONLY, InlinePool, LazyPool, Rig, answer

FAKE_NVML = Path(__file__).parents[1] / "gpu" / "fake_nvml"


@pytest.fixture
def card_uuids() -> tuple[str, ...]:
    """The cards of `nvml`, which a file may replace."""
    return ("GPU-a",)


@pytest.fixture
def nvml(card_uuids: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what NVML answers of the last card from now on, and the Xids that were reported; a driver seems to be here.

    The telemetry that the gateway composes reads it every 20 ms.
    """
    state = tmp_path / "nvml.json"
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    monkeypatch.setattr(telemetry_parts, "has_driver", lambda: True)
    quick = TelemetryOptions(interval_s=0.02, restart_delay_s=0.01, no_gpu_delay_s=0.01)
    monkeypatch.setattr(telemetry_parts, "TelemetryOptions", lambda dcgm_url: replace(quick, dcgm_url=dcgm_url))

    def change(xids: tuple[tuple[int, int], ...] = (), **last: Any) -> None:
        cards = [{"uuid": uuid, "util": 1, "gpm": {"2": 1.0}} for uuid in card_uuids]
        cards[-1] |= last
        new = state.with_suffix(".new")
        new.write_text(json.dumps({"cards": cards, "xids": xids}))
        new.replace(state)

    change()
    return change


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
