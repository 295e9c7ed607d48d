"""EmbeddedEngine: what lies on disk, what is loaded of it, and why the rest is not."""

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.engines.embedded import repository as repository_reader
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.repository import ModelFolder
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import EngineUnavailable, InferenceError, ModelNotReady
from tests.contract.models import config, x_and_y
from tests.engines import onnx_models
from tests.engines.embedded_models import ROW, plus, y_of
from tests.support.waiting import until

TENSORS = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


OTHER_MODELS = {
    "needs backend 'python': start with --engine triton": 'backend: "python"',
    "needs backend 'tensorflow': start with --engine triton": 'platform: "tensorflow_savedmodel"',
    "is an ensemble: start with --engine triton": 'platform: "ensemble" ensemble_scheduling { step [] }',
    "the embedded engine has no sequence batching, which model": 'backend: "onnxruntime" sequence_batching {}',
    "no decoupled answers": 'backend: "onnxruntime" model_transaction_policy { decoupled: true }',
    "Couldn't parse integer: many": "max_batch_size: many",
    "the folder is 'strange'": 'name: "other" backend: "onnxruntime"',
}


@pytest.mark.parametrize("reason", OTHER_MODELS)
async def test_model_for_another_engine_is_listed_with_the_reason(
    engine: EmbeddedEngine, repository: Path, reason: str
) -> None:
    """It is a row that says what it needs, its load says the same, and the model beside it is served."""
    plus(repository, 1)
    onnx_models.save(onnx_models.identity(), repository, "strange", config=OTHER_MODELS[reason])
    (row,) = [row for row in await engine.repository_index() if row.name == "strange"]
    assert (row.version, row.state) == ("", "UNAVAILABLE")
    assert reason in row.reason
    with pytest.raises(ModelNotReady) as caught:
        await engine.load("strange")
    assert row.reason in str(caught.value)
    await engine.load("plus")
    assert await y_of(engine) == [2, 3, 4]


async def test_model_without_config_is_recognised_by_its_file(engine: EmbeddedEngine, repository: Path) -> None:
    """As Triton does it: a model.py alone is a python model."""
    (repository / "people" / "1").mkdir(parents=True)
    (repository / "people" / "1" / "model.py").touch()
    (row,) = await engine.repository_index()
    assert row.reason == (
        "the embedded engine runs ONNX models only; model 'people' needs backend 'python': start with --engine triton"
    )


async def test_index_reads_the_disk_at_each_call(engine: EmbeddedEngine, repository: Path) -> None:
    """Models come, go and get another config; hidden folders and plain files are none."""
    assert await engine.repository_index() == []
    plus(repository, 1)
    (repository / ".half").mkdir()
    (repository / "notes.txt").touch()
    assert await engine.repository_index() == [ModelState("plus", "", "", "")]
    (repository / "plus" / "config.pbtxt").write_text('backend: "python"')
    assert [row.state for row in await engine.repository_index()] == ["UNAVAILABLE"]
    shutil.rmtree(repository / "plus")
    assert await engine.repository_index() == []


async def test_disk_that_hangs_costs_its_news_only(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded is listed and served, a load is refused at once from the second on; then all is as before."""
    plus(repository, 1)
    engine = EmbeddedEngine((repository,), disk_timeout_s=0.05)
    await engine.load("plus")
    await engine.repository_index()
    answers, seen = threading.Event(), repository_reader.scan

    def hang(repositories: tuple[Path, ...]) -> dict[str, ModelFolder]:
        assert answers.wait(30)
        return seen(repositories)

    monkeypatch.setattr(repository_reader, "scan", hang)
    with capture_logs() as logs:
        for _ in range(3):
            assert await engine.repository_index() == [ModelState("plus", "1", "READY", "")]
    assert [entry["event"] for entry in logs] == ["the disk is silent; what is loaded is served on"]
    assert await y_of(engine) == [2, 3, 4]
    with pytest.raises(EngineUnavailable, match=r"could not be read within 0\.05 s"):
        await engine.load("plus")
    plus(repository, 1, name="later")
    answers.set()
    await until(lambda: lists(engine, "later"))
    await engine.load("later")
    await engine.aclose()


async def lists(engine: EmbeddedEngine, name: str) -> bool:
    """Whether the index has it."""
    return name in [row.name for row in await engine.repository_index()]


@pytest.mark.parametrize("kind", ["pipe", "long"])
async def test_unreadable_config_is_a_reason(engine: EmbeddedEngine, repository: Path, kind: str) -> None:
    """A pipe is not waited for, ten megabytes are not parsed for ten seconds; the model beside it is served."""
    plus(repository, 1)
    plus(repository, 1, name="odd")
    path = repository / "odd" / "config.pbtxt"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("# " + "x" * (1 << 20))
    (row,) = [row for row in await engine.repository_index() if row.name == "odd"]
    assert ("it is no file" if kind == "pipe" else "it has 1048578 bytes (limit 1048576)") in row.reason
    with pytest.raises(ModelNotReady):
        await engine.load("odd")
    await engine.load("plus")
    assert await y_of(engine) == [2, 3, 4]


async def test_name_in_two_repositories_is_refused(tmp_path: Path) -> None:
    """The name is ambiguous."""
    for name in ("one", "two"):
        plus(tmp_path / name, 1)
    engine = EmbeddedEngine((tmp_path / "one", tmp_path / "two", tmp_path / "absent"))
    (row,) = await engine.repository_index()
    assert (row.name, row.state) == ("plus", "UNAVAILABLE")
    assert "one name may stand in one repository" in row.reason
    with pytest.raises(ModelNotReady, match=r"it is in .*one/plus and in .*two/plus"):
        await engine.load("plus")
    await engine.aclose()


async def test_versions_are_the_numbers_without_leading_zeros(engine: EmbeddedEngine, repository: Path) -> None:
    """latest takes the highest of them, not the last in the alphabet."""
    for version in (2, 9, 10):
        plus(repository, version, version=version, rest="version_policy { latest { num_versions: 2 } }")
    (repository / "plus" / "2").rename(repository / "plus" / "012")
    for name in ("11.bak", "12 (copy)", "99999999999999999999", "+13", "١٤"):
        (repository / "plus" / name).mkdir()
    await engine.load("plus")
    assert (await engine.model_metadata("plus")).versions == ("9", "10")
    assert await y_of(engine) == [11, 12, 13]


async def test_one_bad_version_fails_the_load(engine: EmbeddedEngine, repository: Path) -> None:
    """All or nothing, as in Triton, and each version's row tells its part."""
    for version in (1, 2):
        plus(repository, version, version=version, rest="version_policy { all {} }")
    (repository / "plus" / "2" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelNotReady, match=r"'plus' cannot be loaded: version 2: ONNX Runtime .* cannot open"):
        await engine.load("plus")
    good, bad = await engine.repository_index()
    assert (good.version, good.state, good.reason) == ("1", "UNAVAILABLE", "unloaded")
    assert (bad.version, bad.state) == ("2", "UNAVAILABLE")
    assert "cannot open" in bad.reason


async def test_load_of_an_unchanged_model_does_nothing(engine: EmbeddedEngine, repository: Path) -> None:
    """As in Triton: what it counted stays."""
    plus(repository, 1)
    await engine.load("plus")
    await y_of(engine)
    await engine.load("plus")
    assert engine.statistics("plus")[0].inference_count == 1
    plus(repository, 2)
    await engine.load("plus")
    assert engine.statistics("plus")[0].inference_count == 0


async def test_load_with_a_config_takes_it_instead_of_the_file(engine: EmbeddedEngine, repository: Path) -> None:
    """Until the next load without one; what is no config is refused."""
    plus(repository, 1)
    await engine.load("plus", '{"backend": "onnxruntime", "max_batch_size": 2}')
    assert engine.config_message("plus").max_batch_size == 2
    with pytest.raises(ModelNotReady, match="the config in the load request is not valid"):
        await engine.load("plus", '{"max_batch_size": "many"}')
    assert engine.config_message("plus").max_batch_size == 2
    await engine.load("plus")
    assert engine.config_message("plus").max_batch_size == 8


@pytest.mark.parametrize(
    "setting",
    [
        '"default_model_filename": "../../plus/1/model.onnx"',
        '"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3], "label_filename": "/etc/hostname"}]',
        '"model_warmup": [{"name": "w", "inputs": {"x": {"input_data_file": "../../secret"}}}]',
    ],
)
async def test_load_with_a_config_reaches_no_file_outside_the_model(
    engine: EmbeddedEngine, repository: Path, setting: str
) -> None:
    """A client that may load models cannot read other files of the machine."""
    plus(repository, 1)
    with pytest.raises(ModelNotReady, match="must name a file inside the model's folder"):
        await engine.load("plus", f'{{"backend": "onnxruntime", {setting}}}')


async def test_load_goes_on_without_its_caller(engine: EmbeddedEngine, repository: Path) -> None:
    """A client that hangs up does not leave a model half loaded."""
    plus(repository, 1)
    loading = asyncio.create_task(engine.load("plus"))
    await asyncio.sleep(0)
    loading.cancel()
    await until(lambda: engine.ready("plus"))
    assert await y_of(engine) == [2, 3, 4]


async def test_model_on_gpu_runs_on_the_cpu_with_a_warning(engine: EmbeddedEngine, repository: Path) -> None:
    """The same sentence as Triton's log has for it."""
    group = "instance_group [ { kind: KIND_GPU count: 1 gpus: [ 1 ] } ]"
    text = config(TENSORS, max_batch_size=8, instances=group)
    onnx_models.save(onnx_models.plus(1), repository, "plus", config=text)
    with capture_logs() as logs:
        await engine.load("plus")
    reasons = [entry["reason"] for entry in logs if entry["log_level"] == "warning"]
    assert reasons == [
        "the model runs on the CPU instead of GPU 1: onnxruntime-gpu is not installed here (make gpu, or penstock "
        "setup triton --gpu)"
    ]
    assert engine.facts("plus") == EngineFacts(fallbacks=tuple(reasons))
    assert await y_of(engine) == [2, 3, 4]


WARMUP = """model_warmup {{ name: "first" batch_size: {rows} count: 2
  inputs {{ key: "{name}" value {{ data_type: TYPE_FP32 dims: [ 3 ] {content} }} }} }}
"""


async def test_warmup_runs_before_the_model_is_ready(engine: EmbeddedEngine, repository: Path) -> None:
    """From a file beside the model; what the warm-up did is not counted as inference."""
    plus(repository, 1, rest=WARMUP.format(rows=2, name="x", content='input_data_file: "row"'))
    (repository / "plus" / "warmup").mkdir()
    (repository / "plus" / "warmup" / "row").write_bytes(ROW.tobytes())
    await engine.load("plus")
    assert engine.statistics("plus")[0].inference_count == 0


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"rows": 9, "name": "x", "content": "zero_data: true"}, "batch-size must be <= 8 for 'plus'"),
        ({"rows": 1, "name": "z", "content": "zero_data: true"}, "unexpected inference input 'z' for model 'plus'"),
        ({"rows": 1, "name": "x", "content": 'input_data_file: "none"'}, "warmup/none: No such file"),
    ],
)
async def test_warmup_that_is_no_request_fails_the_load(
    engine: EmbeddedEngine, repository: Path, sample: dict[str, str | int], reason: str
) -> None:
    """The sentence names the sample and what is wrong with it."""
    plus(repository, 1, rest=WARMUP.format(**sample))
    with pytest.raises(ModelNotReady, match=rf"its warm-up sample 'first' is no request to it: .*{reason}"):
        await engine.load("plus")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ("count: 4294967295 batch_size: 1", "sample 'w' wants 4294967295 runs"),
        ("count: 1 batch_size: 1000000000", "input 'x' has 12000000000 bytes"),
    ],
)
async def test_warmup_without_end_fails_the_load(
    engine: EmbeddedEngine, repository: Path, numbers: str, reason: str
) -> None:
    """It would keep a thread that loads, or the memory, for itself."""
    inputs = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } }'
    plus(repository, 1, rest=f'model_warmup {{ name: "w" {numbers} {inputs} }}')
    with pytest.raises(ModelNotReady, match=reason):
        await engine.load("plus")


async def test_labels_are_those_of_the_outputs_file(engine: EmbeddedEngine, repository: Path) -> None:
    """As Triton's: a file that is not there fails the load."""
    text = x_and_y().replace('name: "y"', 'name: "y" label_filename: "labels.txt"')
    onnx_models.save(onnx_models.plus(1), repository, "plus", config=text)
    with pytest.raises(ModelNotReady, match=r"version 1: the label file .*labels\.txt cannot be read"):
        await engine.load("plus")
    (repository / "plus" / "labels.txt").write_text("left\nright\n")
    await engine.load("plus")
    assert engine.labels("plus", "1", "y") == ("left", "right")
    assert engine.labels("plus", "", "x") == ()


async def test_labels_of_a_windows_editor_have_no_mark_and_no_carriage_return(
    engine: EmbeddedEngine, repository: Path
) -> None:
    """A byte order mark and CR LF are not part of a label."""
    text = x_and_y().replace('name: "y"', 'name: "y" label_filename: "labels.txt"')
    onnx_models.save(onnx_models.plus(1), repository, "plus", config=text)
    (repository / "plus" / "labels.txt").write_bytes(b"\xef\xbb\xbfleft\r\nright\r\n")
    await engine.load("plus")
    assert engine.labels("plus", "1", "y") == ("left", "right")


async def test_calls_raise_errors_of_the_tree_only(engine: EmbeddedEngine, repository: Path) -> None:
    """A repository that is gone, and a model whose files cannot be read."""
    plus(repository, 1)
    (repository / "plus" / "1" / "model.onnx").unlink()
    (repository / "plus" / "1" / "model.onnx").mkdir()
    with pytest.raises(ModelNotReady, match="there is no file"):
        await engine.load("plus")
    shutil.rmtree(repository)
    assert await engine.repository_index() == []
    with pytest.raises(InferenceError):
        await engine.load("plus")
