"""Copies of models on cards, by what engines measured: what is loaded, and what clients notice of it."""

import asyncio
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.replica import CardReplicas
from penstock.engines.replicas import Replicas
from penstock.gateway.card_copies import CardCopies, ModelLoads
from penstock.gateway.card_engines import CardEngine, CardEngines
from penstock.gateway.model_needs import read_needs
from penstock.gpu.placement import GIB, ModelNeed
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.engine import ModelConfig
from penstock.protocol.inference import Datatype, InferRequest, Tensor
from penstock.testing import FakeEngine

CARDS = CardEngines(
    tuple(CardEngine(f"GPU {at}", f"GPU-{at}", "", memory_bytes=gib * GIB) for at, gib in enumerate((10, 8))),
    placements={"hot": "GPU 0: it fits"},
)
NAMES = ("hot", "cold", "cpu")
NEEDS = [ModelNeed("hot", 6 * GIB), ModelNeed("cold", 4 * GIB), ModelNeed("cpu", is_on_cpu=True)]


class Engine(FakeEngine):
    """Counts seconds of computing as Triton does: computed_s, by model."""

    def __init__(self) -> None:
        super().__init__([ModelConfig(name, "torch", 8, (), ()) for name in NAMES])
        self._loaded.clear()
        self.computed_s = dict.fromkeys(NAMES, 0.0)

    async def send(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        answer = service_pb2.ModelStatisticsResponse()
        for name in self._loaded:
            model = answer.model_stats.add(name=name, version="1")
            for size in (1, 8):  # half of the time for single rows
                model.batch_stats.add(batch_size=size).compute_infer.ns = int(self.computed_s[name] * 5e8)
            model.inference_stats.compute_infer.ns = int(self.computed_s[name] * 4e9)  # counts a batch for each row
        return GrpcAnswer(0, answer.SerializeToString())

    def loaded(self) -> set[str]:
        return set(self._loaded)


class Bench:
    """Two engines; `hot` is on the first, `cpu` too, `cold` on both."""

    def __init__(self) -> None:
        self.engines = {each.label: Engine() for each in CARDS.engines}
        homes = {"hot": ("GPU 0",), "cpu": ("GPU 0",)}
        self.replicas = Replicas(self.engines, cards=CardReplicas(homes))
        self.spread: list[dict[str, tuple[str, ...]]] = []
        self.copies = CardCopies(CARDS, self.replicas, self.engines, needs=lambda: NEEDS, spread=self._spread)
        self.now = 0.0

    async def start(self) -> None:
        for name in NAMES:
            await self.replicas.load(name)
        await self.replicas.repository_index()
        await self.look()

    async def look(self, **computed_s: float) -> None:
        """Ten seconds later. computed_s: of the first engine, since then."""
        for name, seconds in computed_s.items():
            self.engines["GPU 0"].computed_s[name] += seconds
        self.now += 10
        await self.copies.look(self.now)

    async def _spread(self) -> None:
        self.spread.append({name: tuple(labels) for name, labels in self.replicas.homes.items()})

    def loaded(self) -> list[set[str]]:
        return [engine.loaded() for engine in self.engines.values()]


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.start()
    assert bench.loaded() == [{"hot", "cold", "cpu"}, {"cold"}]
    return bench


async def test_model_of_a_busy_card_gets_a_copy_and_another_makes_room(bench: Bench) -> None:
    """All workers know that the removed copy gets no calls before it is unloaded. The reason is shown."""
    await bench.look(hot=8, cpu=10)
    assert not bench.spread, "4 s of 10: half of the last load counts, and the CPU's is no card's"
    await bench.look(hot=9)
    assert bench.loaded() == [{"hot", "cold", "cpu"}, {"hot"}]
    assert [step.get("cold") for step in bench.spread] == [("GPU 0",), ("GPU 0",)]
    assert [step["hot"] for step in bench.spread] == [("GPU 0",), ("GPU 0", "GPU 1")]
    assert bench.copies.placements["hot"].startswith("GPU 0, GPU 1: GPU 0 is busy 65% of the time and GPU 1 0%")
    assert bench.copies.placements["cold"] == "GPU 0: hot needs the memory of GPU 1"
    await bench.look(hot=9)
    assert len(bench.spread) == 2, "it is better than before"


async def test_calls_go_to_the_cards_that_have_the_model(bench: Bench) -> None:
    """Calls follow the placement before and after a copy, and the copy's instances count for batches."""
    assert (await bench.replicas.model_config("hot")).instance_count == 1
    await bench.look(hot=20)
    await bench.replicas.repository_index()
    request = InferRequest("hot", (Tensor("x", Datatype.FP32, (1,), memoryview(bytes(4))),))
    await asyncio.gather(*(bench.replicas.infer(request) for _ in range(64)))
    assert all(engine.calls for engine in bench.engines.values())
    assert bench.replicas.live_share("hot") == 2.0
    await bench.replicas.unload("hot")
    await bench.look(hot=20)
    assert bench.loaded() == [{"cold", "cpu"}, set()], "what a client unloaded stays so"


async def test_copy_that_cannot_be_loaded_is_not_tried_again(bench: Bench) -> None:
    """The model goes on being served where it is."""
    bench.engines["GPU 1"].load_failures["hot"] = "CUDA out of memory"
    for _ in range(3):
        await bench.look(hot=20)
    assert bench.replicas.homes["hot"] == ("GPU 0",)
    assert bench.loaded()[1] == set()
    assert len(bench.spread) == 1


async def test_model_that_is_unloaded_while_it_is_copied_stays_so(bench: Bench) -> None:
    """Its copy is unloaded, too."""
    second = bench.engines["GPU 1"]
    load = second.load

    async def slow_load(name: str) -> None:
        await bench.replicas.unload("hot")
        await load(name)

    second.load = slow_load  # type: ignore[method-assign]
    await bench.look(hot=20)
    assert not any("hot" in loaded for loaded in bench.loaded())


async def test_models_of_a_lost_card_are_loaded_by_another_engine(bench: Bench) -> None:
    """Those on the CPU too, since their engine is stopped. What finds no room waits for its card."""
    bench.replicas.set_lost({"GPU 0": "GPU 0 fell off the bus"})
    await bench.look()
    assert bench.loaded()[1] == {"cpu", "cold"}
    assert bench.replicas.homes["cpu"] == ("GPU 0", "GPU 1"), "it is loaded there again when the card is back"


def test_load_is_a_moving_mean_and_an_engine_that_restarts_counts_from_zero() -> None:
    """The load of a model that was unloaded falls to zero."""
    loads = ModelLoads()
    assert loads.note(0.0, {"a": {"m": 100.0}}) == {}
    assert loads.note(10.0, {"a": {"m": 108.0}, "b": {"m": 50.0}}) == {"m": 0.4}
    assert loads.note(20.0, {"a": {"m": 4.0}, "b": {"m": 54.0}}) == {"m": pytest.approx(0.6)}
    assert loads.note(30.0, {}) == {"m": pytest.approx(0.3)}


def test_needs_of_models_are_read_from_their_files(tmp_path: Path) -> None:
    """An ensemble's steps are loaded wherever the ensemble is, so they are no model of one engine."""
    step = 'step [{ model_name: "step" model_version: -1 }]'
    texts = {
        "auto": 'backend: "onnxruntime"',
        "cpu": 'backend: "onnxruntime" instance_group [{ kind: KIND_CPU }]',
        "ensemble": f'platform: "ensemble" ensemble_scheduling {{ {step} }}',
        "gpu": 'backend: "torch" instance_group [{ count: 2 kind: KIND_GPU gpus: [1] }] sequence_batching { }',
        "script": 'backend: "python"',
        "step": 'backend: "python" instance_group [{ kind: KIND_CPU }]',
        "torn": "backend: [",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    needs = {need.name: need for need in read_needs([tmp_path], None)}
    assert [name for name, need in needs.items() if need.is_on_cpu] == ["cpu"]
    assert [name for name, need in needs.items() if need.memory_bytes] == ["auto", "gpu"]
    assert (needs["gpu"].cards, needs["gpu"].is_stateful) == ((1,), True)
    assert needs["gpu"].memory_bytes == 2 * needs["auto"].memory_bytes
    assert [need.name for need in read_needs([tmp_path], ["cpu"])] == ["cpu"]


async def test_stream_goes_to_the_engine_that_has_the_model_of_its_first_request(bench: Bench) -> None:
    """A stream is opened at its first request, because its model is not known before."""
    bench.replicas.set_homes({"hot": ("GPU 1",)})
    await bench.engines["GPU 1"].load("hot")
    message = service_pb2.ModelInferRequest(model_name="hot")
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    message.raw_input_contents.append(bytes(4))
    stream = await bench.replicas.open_stream("/inference.GRPCInferenceService/ModelStreamInfer", (), deadline=None)
    await stream.send(message.SerializeToString())
    await stream.half_close()
    assert await stream.receive() is not None
    assert (await stream.end()).code == 0
    assert [len(engine.streams) for engine in bench.engines.values()] == [0, 1]
