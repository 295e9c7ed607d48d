"""The Backend protocol, kept alike by a real Triton and by the embedded engine."""

import asyncio
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.call import GrpcCall
from penstock.protocol.engine import Engine, ModelState
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ModelNotReady
from penstock.protocol.inference import Array, Datatype, InferRequest, tensor_from_numpy
from tests.contract.models import arrays, ask, x_and_y
from tests.engines import onnx_models
from tests.engines.onnx_models import SAMPLES
from tests.integration.living import COUNTED_WITHIN_S

pytestmark = [pytest.mark.xdist_group("contract"), pytest.mark.asyncio(loop_scope="module")]
ROW = np.array([[1, 2, 3]], np.float32)


@pytest.fixture
def fresh(repository: Path, request: pytest.FixtureRequest) -> str:
    """A model of this test's own, which adds 1; not loaded."""
    name = re.sub(r"\W", "_", request.node.name)
    onnx_models.save(onnx_models.plus(1), repository, name, config=x_and_y())
    return name


def replace(repository: Path, model: str, content: bytes) -> None:
    """Another file for version 1, put there at once."""
    beside = repository / model / "1" / "next"
    beside.write_bytes(content)
    beside.rename(repository / model / "1" / "model.onnx")


async def rows_of(engine: Engine, model: str) -> list[ModelState]:
    """The model's rows of the index."""
    return [row for row in await engine.repository_index() if row.name == model]


async def test_infer_every_datatype_answers_what_was_sent(engine: Engine) -> None:
    """All thirteen datatypes in a batch of three, bit for bit, each in its own type."""
    sent = {f"in_{name}": np.concatenate([sample] * 3) for name, sample in SAMPLES.items()}
    response = await engine.infer(ask("types", **sent))
    assert {tensor.name: tensor.datatype for tensor in response.outputs} == {
        f"out_{name}": Datatype(name) for name in SAMPLES
    }
    for name in SAMPLES:
        np.testing.assert_array_equal(arrays(response)[f"out_{name}"], sent[f"in_{name}"])


async def test_infer_answer_carries_name_version_id_and_time(engine: Engine) -> None:
    """The highest version answers where none is asked for, and the request's id comes back."""
    request = InferRequest("versions", (tensor_from_numpy("x", ROW),), id="seven")
    response = await engine.infer(request)
    assert (response.model_name, response.model_version, response.id) == ("versions", "10", "seven")
    assert 0 < response.timings.infer < 10


@pytest.mark.parametrize("version", ["2", "10"])
async def test_infer_version_runs_its_own_file(engine: Engine, version: str) -> None:
    """Two versions at once; each adds its own number."""
    response = await engine.infer(ask("versions", version=version, x=ROW))
    assert response.model_version == version
    np.testing.assert_array_equal(arrays(response)["y"], ROW + np.float32(version))


@pytest.mark.parametrize(("wanted", "answered"), [((), {"sum", "product"}), (("product", "product"), {"product"})])
async def test_infer_outputs_are_those_asked_for(engine: Engine, wanted: tuple[str, ...], answered: set[str]) -> None:
    """None named means all; one named twice comes once."""
    response = await engine.infer(ask("no_config", wanted, a=ROW, b=2 * ROW))
    assert [tensor.name for tensor in response.outputs].count("product") == 1
    assert set(arrays(response)) == answered
    np.testing.assert_array_equal(arrays(response)["product"], 2 * ROW * ROW)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("no_batch", (1, 3)),
        ("scalar", (1,)),
        ("batched_scalar", (3, 1)),
        ("reshaped", (2, 6)),
        ("dynamic", (2, 4, 5)),
        ("dynamic", (1, 0, 3)),
    ],
)
async def test_infer_shapes_at_the_edge_keep_their_shape(engine: Engine, model: str, shape: tuple[int, ...]) -> None:
    """No batch dimension, scalars, reshapes, sizes that vary and a size of 0 answer in the shape asked in."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    answered = arrays(await engine.infer(ask(model, x=x)))["y"]
    assert answered.shape == shape
    np.testing.assert_array_equal(answered, x * x)


@pytest.mark.parametrize(("brought", "bias"), [({}, 5), ({"bias": np.array([7], np.float32)}, 7)])
async def test_infer_optional_input_may_be_left_out(engine: Engine, brought: dict[str, Array], bias: int) -> None:
    """The file's own value stands in."""
    response = await engine.infer(ask("optional", x=ROW[0], **brought))
    assert arrays(response)["y"].tolist() == [1 + bias, 2 + bias, 3 + bias]


async def test_infer_many_at_once_each_get_their_own(engine: Engine) -> None:
    """Requests of three shapes, in flight together."""
    pictures = [np.full((1, 2 + n % 3, 5), n, np.float32) for n in range(24)]
    responses = await asyncio.gather(*(engine.infer(ask("dynamic", x=picture)) for picture in pictures))
    for picture, response in zip(pictures, responses, strict=True):
        np.testing.assert_array_equal(arrays(response)["y"], picture * picture)


async def test_infer_late_answer_is_given_up_at_the_deadline(engine: Engine) -> None:
    """A run of seconds is left when its time is over, and one whose time was over before is not begun."""
    await engine.infer(ask("slow", trips=np.array([[1]])))
    began = time.monotonic()
    await engine.infer(ask("slow", trips=np.array([[300]])))
    seconds = ask("slow", trips=np.array([[round(300 * 3 / (time.monotonic() - began))]]))
    for wait_s in (0.3, -1.0):
        deadline = time.monotonic() + wait_s
        with pytest.raises(DeadlineExceeded):
            await engine.infer(InferRequest(seconds.model_name, seconds.inputs, deadline=deadline))
        assert time.monotonic() - max(deadline, deadline - wait_s) < 0.2


MODELS = [
    *("no_config", "types", "no_batch", "dynamic", "scalar", "batched_scalar", "reshaped", "table", "optional", "slow"),
    *("warm", "versions"),
]


@pytest.mark.parametrize("model", MODELS)
async def test_config_and_metadata_are_the_same_of_both(
    embedded: EmbeddedEngine, triton: TritonEngine, model: str
) -> None:
    """Completed from the file and given the same defaults, to the last field but the library that runs it."""
    question = service_pb2.ModelConfigRequest(name=model).SerializeToString()
    answer = await triton.send(GrpcCall("/inference.GRPCInferenceService/ModelConfig", question), deadline=None)
    theirs = service_pb2.ModelConfigResponse.FromString(answer.message).config
    theirs.runtime = ""
    assert embedded.config_message(model) == theirs
    assert await embedded.model_config(model) == await triton.model_config(model)
    assert await embedded.model_metadata(model) == await triton.model_metadata(model)


async def test_metadata_of_a_version_names_only_that(engine: Engine) -> None:
    """And the model's all that version_policy serves."""
    assert (await engine.model_metadata("versions", "2")).versions == ("2",)
    assert (await engine.model_metadata("versions")).versions == ("2", "10")
    assert (await engine.model_metadata("warm")).versions == ("2",)


async def test_index_of_both_has_the_same_rows(embedded: EmbeddedEngine, triton: TritonEngine) -> None:
    """Names, versions and states in one order, and for the broken ones the same reason, as a part at least."""
    ours = [row for row in await embedded.repository_index() if not row.name.startswith("test_")]
    theirs = [row for row in await triton.repository_index() if not row.name.startswith("test_")]
    assert [row[:3] for row in map(astuple, ours)] == [row[:3] for row in map(astuple, theirs)]
    assert {row.name for row in ours if row.state == "UNAVAILABLE"} == {"broken_datatype", "broken_dims", "broken_file"}
    for our, their in zip(ours, theirs, strict=True):
        assert our.reason.partition(" in the ONNX file")[0].partition(" cannot open")[0] in their.reason


def astuple(row: ModelState) -> tuple[str, str, str, str]:
    """A row's fields."""
    return row.name, row.version, row.state, row.reason


async def test_load_and_unload_are_seen_in_the_index(engine: Engine, fresh: str) -> None:
    """Never loaded, ready, unloaded; what is unloaded is not found, and comes back by another load."""
    assert await rows_of(engine, fresh) == [ModelState(fresh, "", "", "")]
    assert not await engine.ready(fresh)
    await engine.load(fresh)
    assert await rows_of(engine, fresh) == [ModelState(fresh, "1", "READY", "")]
    assert await engine.ready(fresh)
    assert await engine.ready(fresh, "1")
    assert not await engine.ready(fresh, "2")
    await engine.unload(fresh)
    async with asyncio.timeout(30):
        while await rows_of(engine, fresh) != [ModelState(fresh, "1", "UNAVAILABLE", "unloaded")]:
            await asyncio.sleep(0.02)
    with pytest.raises(ModelNotFound, match="has no available versions"):
        await engine.infer(ask(fresh, x=ROW))
    await engine.load(fresh)
    assert arrays(await engine.infer(ask(fresh, x=ROW)))["y"].tolist() == [[2, 3, 4]]


async def test_reload_takes_the_new_file_and_keeps_the_old_where_that_is_broken(
    engine: Engine, fresh: str, repository: Path
) -> None:
    """A load of a changed model replaces it; one that fails tells why and changes nothing."""
    await engine.load(fresh)
    replace(repository, fresh, onnx_models.plus(2).SerializeToString())
    assert arrays(await engine.infer(ask(fresh, x=ROW)))["y"].tolist() == [[2, 3, 4]], "not before the load"
    await engine.load(fresh)
    assert arrays(await engine.infer(ask(fresh, x=ROW)))["y"].tolist() == [[3, 4, 5]]
    replace(repository, fresh, b"this is no ONNX file")
    with pytest.raises(ModelNotReady, match=rf"model '{fresh}' cannot be loaded: version 1: .*cannot open"):
        await engine.load(fresh)
    assert arrays(await engine.infer(ask(fresh, x=ROW)))["y"].tolist() == [[3, 4, 5]]
    assert await rows_of(engine, fresh) == [ModelState(fresh, "1", "READY", "")]


async def test_model_gone_from_disk_serves_until_it_is_unloaded(engine: Engine, fresh: str, repository: Path) -> None:
    """It has no row any more, cannot be loaded again, and is not found once unloaded."""
    await engine.load(fresh)
    shutil.rmtree(repository / fresh)
    assert await rows_of(engine, fresh) == []
    with pytest.raises(ModelNotReady, match="not in the engine's model repository"):
        await engine.load(fresh)
    assert arrays(await engine.infer(ask(fresh, x=ROW)))["y"].tolist() == [[2, 3, 4]]
    await engine.unload(fresh)
    async with asyncio.timeout(30):
        while await engine.ready(fresh):
            await asyncio.sleep(0.02)


async def test_load_unknown_or_broken_says_why(engine: Engine) -> None:
    """One class, and the sentence that names tensor, file and config. Unloading what is not there is no error."""
    with pytest.raises(ModelNotReady, match="not in the engine's model repository"):
        await engine.load("nope")
    with pytest.raises(ModelNotReady, match="'x' is TYPE_FP32 in the ONNX file, TYPE_INT32 in the configuration"):
        await engine.load("broken_datatype")
    await engine.unload("nope")


async def test_ready_engine_is_ready_although_models_are_broken(engine: Engine) -> None:
    """One bad model takes nothing from the others."""
    assert await engine.ready()
    assert await engine.ready("versions")
    assert not await engine.ready("broken_file")


async def test_statistics_and_metrics_count_alike(embedded: EmbeddedEngine, triton: TritonEngine, fresh: str) -> None:
    """The same requests give the same counts of requests, rows, runs and batches, under the same metric names."""
    for engine in (embedded, triton):
        await engine.load(fresh)
        for rows in (1, 3, 3):
            await engine.infer(ask(fresh, x=np.ones((rows, 3), np.float32)))
        with pytest.raises(InvalidRequest):
            await engine.infer(ask(fresh, x=np.ones((9, 3), np.float32)))
    (ours,) = embedded.statistics(fresh)
    until_s = time.monotonic() + COUNTED_WITHIN_S
    while counts(theirs := await statistics_of(triton, fresh)) != counts(ours) and time.monotonic() < until_s:
        await asyncio.sleep(0.02)
    assert counts(ours) == counts(theirs)
    assert ours.inference_stats.success.ns >= ours.inference_stats.compute_infer.ns > 0
    our_lines, their_lines = [metric_lines(await engine.metrics(), fresh) for engine in (embedded, triton)]
    assert set(our_lines) == set(their_lines)
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"):
        key = f'{name}{{model="{fresh}",version="1"}}'
        assert our_lines[key] == their_lines[key]


async def statistics_of(triton: TritonEngine, model: str) -> service_pb2.ModelStatistics:
    question = service_pb2.ModelStatisticsRequest(name=model).SerializeToString()
    answer = await triton.send(GrpcCall("/inference.GRPCInferenceService/ModelStatistics", question), deadline=None)
    (statistics,) = service_pb2.ModelStatisticsResponse.FromString(answer.message).model_stats
    return statistics


def counts(statistics: service_pb2.ModelStatistics) -> tuple[object, ...]:
    """What does not depend on time."""
    parts = statistics.inference_stats
    durations = (parts.success, parts.fail, parts.queue, parts.compute_input, parts.compute_infer, parts.compute_output)
    batches = [(batch.batch_size, batch.compute_infer.count) for batch in statistics.batch_stats]
    return (
        (statistics.name, statistics.version, statistics.inference_count, statistics.execution_count),
        [duration.count for duration in durations],
        batches,
    )


def metric_lines(page: bytes, model: str) -> dict[str, str]:
    """nv_inference_… of one model: name and sorted labels, and the value."""
    lines = {}
    for line in page.decode().splitlines():
        found = re.fullmatch(r"(nv_inference_\w+)\{(.*)\} (\S+)", line)
        if found and f'model="{model}"' in found[2]:
            lines[f"{found[1]}{{{','.join(sorted(found[2].split(',')))}}}"] = found[3]
    return lines
