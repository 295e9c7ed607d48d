"""A card of two falls off the bus while requests run: its engine's calls are done by the other's, until it is back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.call_options import CallTimeouts, RetryBudget
from penstock.engines.failures import means_card_fault
from penstock.engines.replica import CardReplicas
from penstock.engines.replica_routing import ReplicaState
from penstock.engines.replicas import Replicas
from penstock.engines.triton.client import TritonEngine
from penstock.engines.watch import EngineWatch
from penstock.gateway import telemetry_parts
from penstock.gateway.card_engines import CardEngine, CardEngines, read_card_engines, write_card_engines
from penstock.gateway.card_losses import CardLosses
from penstock.gateway.readiness import readiness_of
from penstock.gateway.settings import Settings
from penstock.gateway.workers.gateway_process import LostCards
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineUnavailable, InferenceError, ModelNotReady
from tests.engines.fake_triton import FakeTriton, Mode
from tests.engines.replica_groups import HTTP_INFER, Turns, infer_call, infer_request
from tests.gateway.test_watch import QUICK
from tests.support.waiting import until

GPU_IS_LOST, UNKNOWN_ERROR = 15, 999
CARDS = CardEngines((CardEngine("GPU 0", "GPU-a", "/run/a"), CardEngine("GPU 1", "GPU-b", "/run/b")))


class OnGpu(TritonEngine):
    """Its models run on a GPU."""

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        return replace(await super().model_config(model_name, model_version), is_on_gpu=True)


@asynccontextmanager
async def card_replicas(rules: CardReplicas | None = None) -> AsyncIterator[tuple[Replicas, list[FakeTriton]]]:
    """Two fake Tritons, one for each card."""
    async with FakeTriton().running() as first, FakeTriton().running() as second:
        fakes = [first, second]
        timeouts = CallTimeouts(control_s=1.0, connect_s=0.5)
        engines = {
            each.label: OnGpu(
                http_url=fake.http_url, grpc_address=fake.grpc_address, max_connections=8, timeouts=timeouts
            )
            for each, fake in zip(CARDS.engines, fakes, strict=True)
        }
        replicas = Replicas(engines, budget=RetryBudget(), uniform=Turns(), cards=rules)
        assert await replicas.ready()
        await replicas.repository_index()
        try:
            yield replicas, fakes
        finally:
            await replicas.aclose()


@pytest.fixture
def card_uuids() -> tuple[str, ...]:
    """Two cards; the second is lost."""
    return ("GPU-a", "GPU-b")


@asynccontextmanager
async def watched(replicas: Replicas) -> AsyncIterator[tuple[EngineWatch, list[LostCards]]]:
    """The watch and the telemetry as the gateway composes them, and what the parent process is sent."""
    watch, sent = EngineWatch(replicas, QUICK), list[LostCards]()
    watch.who_is_left_out = replicas.left_out
    telemetry = telemetry_parts.compose_telemetry(Settings(), watch, environment={}, cards=CARDS)
    assert telemetry is not None
    losses = CardLosses(CARDS, replicas, watch, sent.append)
    telemetry.observed = lambda: losses.observe(telemetry.health.lost)
    tasks = [asyncio.create_task(one.run()) for one in (watch, telemetry)]
    try:
        async with asyncio.timeout(60):
            await watch.first_ready.wait()
            await until(lambda: len(telemetry.health.cards) == 2)
            yield watch, sent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def client(replicas: Replicas, outcomes: Counter[str], stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            await replicas.infer(infer_request())
            outcomes["ok"] += 1
        except InferenceError as error:
            outcomes[type(error).__name__] += 1
        await asyncio.sleep(0)


def states(replicas: Replicas) -> list[ReplicaState]:
    return [row.standing for row in replicas.statistics()]


@pytest.mark.parametrize("loss", [{"error": GPU_IS_LOST, "open_error": UNKNOWN_ERROR}, {"xids": ((1, 79),)}])
async def test_card_lost_under_load_costs_no_request_and_its_engine_comes_back(
    nvml: Callable[..., None], loss: dict[str, Any]
) -> None:
    """The gateway stays ready and names the card; calls that hang on it are done again; the parent ends its engine."""
    async with card_replicas() as (replicas, fakes), watched(replicas) as (watch, sent):
        outcomes, stop = Counter[str](), asyncio.Event()
        clients = [asyncio.create_task(client(replicas, outcomes, stop)) for _ in range(8)]
        await until(lambda: min(len(fake.rows) for fake in fakes) > 10)
        fakes[1].mode = Mode.SLOW  # a kernel on a card that is off the bus never ends
        nvml(**loss)
        await until(lambda: states(replicas) == [ReplicaState.UP, ReplicaState.LOST])
        (detail,) = readiness_of(watch, None).details
        assert detail.startswith("GPU 1 (GPU-b) is lost: ")
        assert readiness_of(watch, None).is_ready
        assert sent == [LostCards({"GPU 1": detail})]
        before = outcomes["ok"]
        await until(lambda: outcomes["ok"] > before + 100)
        fakes[1].mode, calls = Mode.NORMAL, len(fakes[1].rows)
        fakes[1].release.set()
        if "xids" in loss:  # it needs a reset, in which NVML loses it
            nvml(error=GPU_IS_LOST, open_error=UNKNOWN_ERROR)
            await until(lambda: "Xid" not in watch.left_out["GPU 1"])
        nvml()
        await until(lambda: states(replicas) == [ReplicaState.UP, ReplicaState.UP])
        await until(lambda: len(fakes[1].rows) > calls + 10)
        stop.set()
        await asyncio.gather(*clients)
        assert sent[-1] == LostCards({})
        assert readiness_of(watch, None).details == ()
        assert outcomes.keys() == {"ok"}


async def test_model_whose_only_card_is_lost_is_refused_with_a_retry_and_loaded_when_it_is_back() -> None:
    """It is not taken for a model that is not there; others on the same engines serve on."""
    async with card_replicas(CardReplicas({"double": ("GPU 1",)})) as (replicas, fakes):
        assert (await replicas.model_config("double")).instance_count == 1
        await replicas.load("double")
        replicas.set_lost({"GPU 1": "GPU 1 is lost"})
        with pytest.raises(EngineUnavailable, match=r"GPU 1: GPU 1 is lost") as refused:
            await replicas.infer(infer_request())
        assert refused.value.retry_after_s > 0
        with pytest.raises(ModelNotReady, match="GPU 1 is lost"):
            await replicas.load("double")
        (row,) = [row for row in await replicas.repository_index() if row.name == "double"]
        assert (row.state, row.reason) == ("UNAVAILABLE", "GPU 1 is lost")
        assert replicas.live_share("double") == 0.0
        replicas.set_lost({})
        async with asyncio.timeout(60):
            while replicas.live_share("double") < 1.0:  # as the watch looks
                assert await replicas.ready()
        await replicas.infer(infer_request())
        assert fakes[0].rows == []


async def test_broken_cuda_context_is_answered_by_the_other_card_or_503() -> None:
    """Over both protocols, before anything else says that the card is lost."""
    async with card_replicas() as (replicas, fakes):
        fakes[1].mode = Mode.CUDA_FAULT
        for _ in range(4):
            await replicas.infer(infer_request())
            assert (await replicas.send(HTTP_INFER, deadline=None)).status == 200
            assert (await replicas.send(infer_call(), deadline=None)).code == 0
        fakes[0].mode = Mode.CUDA_FAULT
        with pytest.raises(EngineUnavailable, match=r"cannot use its GPU: .*illegal memory access"):
            await replicas.infer(infer_request())


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA_ERROR_LAUNCH_FAILED: could not copy 12 B", True),
        ("cudaErrorDevicesUnavailable", True),
        ("RuntimeError: CUDA error: invalid argument", False),
        ("CUDA failure 2: out of memory ; GPU=0", False),
        ("shape [1, 4] is invalid", False),
    ],
)
def test_errors_of_a_broken_context_differ_from_errors_of_a_request(text: str, is_fault: bool) -> None:
    """Only the first are tried on another card."""
    assert means_card_fault(text) == is_fault


def test_cards_of_a_stack_are_found_in_its_run_directory(tmp_path: Path) -> None:
    """None without the file, which a stack with one engine does not write."""
    assert read_card_engines(tmp_path) == CardEngines()
    wanted = CardEngines(CARDS.engines, {"m": ("GPU 1",)})
    write_card_engines(tmp_path, wanted)
    assert read_card_engines(tmp_path) == wanted
