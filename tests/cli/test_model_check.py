"""`penstock models check` against an engine that answers what the test wants it to."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from penstock.cli import check as model_check
from penstock.cli import check_result as golden_record
from penstock.cli import check_result as model_verdict
from penstock.cli.check_request import GatewayCheckEngine
from penstock.cli.gateway_client import GatewayClient
from penstock.models.catalogue import CatalogueEntry
from penstock.models.onnx_reference import Reference
from penstock.protocol.errors import PermissionDenied
from penstock.protocol.inference import InferRequest, tensor_from_numpy
from tests.cli.conftest import Call, Head, StandIn, jpeg
from tests.cli.test_models import home, write_model
from tests.engines import onnx_models

CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
PYTHON_CONFIG = CONFIG.replace("onnxruntime", "python")
SEEING = """backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "network-input-order" value { string_value: "1" } }
"""
PERSON = {"xyxy": [10.0, 20.0, 40.0, 90.0], "class_id": 0, "label": "person", "score": 0.9}


@pytest.fixture
def engine(stand_in: StandIn) -> StandIn:
    """A running gateway that has the model `m`, which answers x + 1."""
    stand_in.index = [{"name": "m", "version": "1", "state": "READY"}]
    stand_in.result = {"detections": [PERSON]}
    return stand_in


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No shipped models beside the tests' own, and the log as it was before."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setenv("PENSTOCK_MODEL_REPOSITORY", str(home() / "none"))
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "9")  # unused, unless a test sets another
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def save(addend: float = 1.0, config: str = CONFIG, name: str = "m") -> Path:
    """An ONNX model x + addend in home's repository; its folder."""
    onnx_models.save(onnx_models.plus(addend), home() / "models", name, config=config)
    return home() / "models" / name


def save_python(config: str = PYTHON_CONFIG, name: str = "m") -> Path:
    """A model of Triton's python backend."""
    folder = write_model(name, config)
    (folder / "1" / "model.py").write_text("")
    return folder


def rows_of(penstock: Call, *words: object) -> list[dict[str, Any]]:
    """The rows, whatever the exit code says of them; it is 1 where one failed."""
    answer = penstock("models", "check", "--json", *words)
    rows: list[dict[str, Any]] = json.loads(answer.stdout)
    assert answer.exit_code == any(row["verdict"] in ("differs", "cannot run") for row in rows)
    return rows


@pytest.mark.usefixtures("narrow_terminal")
@pytest.mark.parametrize("name", ["resnet50-random-int8", "people-and-cars-int8-640x640"])
def test_check_table_of_a_long_name_fits_eighty_columns(penstock: Call, name: str) -> None:
    """Neither the name nor the last column is cut off."""
    save(name=name)
    lines = penstock("models", "check", name).stdout.splitlines()
    assert lines[0].split() == ["model", "verdict", "ran", "compared", "with", "of", "allowed"]
    assert max(map(len, lines[:3])) <= 80
    assert lines[2].split()[0] == name


def test_check_of_a_right_answer_is_ok_and_tells_how(penstock: Call, engine: StandIn) -> None:
    """Through the gateway, by the file's own graph."""
    save()
    answer = penstock("models", "check", "--url", engine.url)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines()[2].split() == ["m", "ok", "gateway", "ONNX", "Runtime", "0.0%"]
    (row,) = rows_of(penstock, "m", "--url", engine.url)
    assert (row["verdict"], row["ran"], row["compared_with"]) == ("ok", "gateway", ["ONNX Runtime"])
    assert row["outputs"][0]["difference"] == 0.0
    assert "/v2/models/m/versions/1/infer" in [asked.path for asked in engine.asked]


def _with_data(values: list[float]) -> Callable[[Head, bytes], tuple[Head, bytes]]:
    return lambda head, data: (head, np.array(values, np.float32).tobytes())


def _with_output(**members: object) -> Callable[[Head, bytes], tuple[Head, bytes]]:
    return lambda head, data: (head | {"outputs": [head["outputs"][0] | members]}, data)


@pytest.mark.parametrize(
    ("spoil", "verdict", "why"),
    [
        (_with_data([1, 1, 9]), "differs", "output 'y' differs at [0, 2]: got 9, expected 1."),
        (_with_data([1, np.nan, 1]), "differs", "output 'y' differs at [0, 1]: got nan, expected 1."),
        (_with_output(shape=[3, 1]), "differs", "output 'y' has shape [3, 1]; expected [1, 3]"),
        (_with_output(datatype="INT32"), "differs", "output 'y' is INT32; expected FP32"),
        (_with_output(name="z"), "differs", "output 'y' is not among the outputs that came ('z')"),
        (
            lambda head, data: (head, data[:-1]),
            "cannot run",
            "the response is truncated: output 'y' has 12 bytes, 11 received",
        ),
        (lambda head, data: (head, data + b"x"), "cannot run", "the response has 1 bytes after the last output"),
        (_with_output(parameters={}), "cannot run", "output 'y' has no binary data"),
        (lambda head, data: ({}, data), "cannot run", "the response is not a KServe v2 inference response"),
    ],
)
def test_check_of_a_wrong_answer_tells_what_is_wrong(
    penstock: Call, engine: StandIn, spoil: Callable[[Head, bytes], tuple[Head, bytes]], verdict: str, why: str
) -> None:
    """Output, place, what came and what should have; an answer that is none is a failure, not a crash."""
    save()
    engine.spoil = spoil
    (row,) = rows_of(penstock, "m", "--url", engine.url)
    assert row["verdict"] == verdict
    assert row["reasons"][0].startswith(why)


def test_check_of_a_refusal_passes_the_words_on(penstock: Call, engine: StandIn) -> None:
    """An engine that fails, and one that could not load the model, in its own words."""
    save()
    engine.refusals["/infer"] = (503, '{"error": "the engine is down"}', {})
    assert rows_of(penstock, "--url", engine.url)[0]["reasons"] == ["the engine is down"]
    engine.index = [{"name": "m", "state": "UNAVAILABLE", "reason": "Internal: no such operator"}]
    (row,) = rows_of(penstock, "--url", engine.url)
    assert row["verdict"] == "cannot run"
    assert row["reasons"] == [f"{engine.url} cannot serve it: Internal: no such operator"]


def test_check_that_the_gateway_forbids_is_an_access_error(penstock: Call, engine: StandIn) -> None:
    """Errors of the gateway's client keep their class; the row and the end of a recording have their text."""
    save_python()
    engine.refusals["/infer"] = (403, '{"error": "key \'spy\' has not the role infer"}', {})
    tensor = tensor_from_numpy("x", np.zeros((1, 3), np.float32))
    with pytest.raises(PermissionDenied, match="has not the role infer"):
        asyncio.run(GatewayCheckEngine(GatewayClient(engine.url)).infer(InferRequest("m", (tensor,))))
    (row,) = rows_of(penstock, "m", "--url", engine.url)
    assert (row["verdict"], "has not the role infer" in row["reasons"][0]) == ("cannot run", True)
    refused = penstock("models", "check", "m", "--record", "--url", engine.url)
    assert (refused.exit_code, "has not the role infer" in refused.stderr) == (1, True)


def test_check_of_an_onnx_model_that_no_gateway_serves_runs_here(
    penstock: Call, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gateway, or if the default gateway has not loaded the model; the output says which."""
    save()
    (row,) = rows_of(penstock)
    assert (row["verdict"], row["ran"], row["notes"]) == ("ok", "in-process", [])
    engine.index = [{"name": "m", "state": "UNAVAILABLE", "reason": "unloaded"}]
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", engine.url.rpartition(":")[2])
    (row,) = rows_of(penstock)
    assert (row["verdict"], row["ran"]) == ("ok", "in-process")
    assert row["notes"] == [f"it is not loaded at {engine.url}: checked in this process"]


def test_check_of_a_model_that_runs_elsewhere_only_fails_who_named_it(penstock: Call) -> None:
    """A check of all models skips models that need Triton, with a note; a check of such a model by name fails."""
    save_python()
    assert rows_of(penstock)[0]["verdict"] == "not judged"
    (row,) = rows_of(penstock, "m")
    assert row["verdict"] == "cannot run"
    assert "no gateway is asked at" in row["reasons"][0]
    assert "start with --engine triton" in row["reasons"][0]


def test_check_without_anything_to_judge_by_says_how_to_get_it(penstock: Call, engine: StandIn) -> None:
    """A python model has no reference; what it answers today can be recorded, and is the reference from then on."""
    folder = save_python()
    (row,) = rows_of(penstock, "m", "--url", engine.url)
    assert row["verdict"] == "not judged"
    assert "`penstock models check m --record`" in row["reasons"][0]
    (row,) = rows_of(penstock, "m", "--record", "--url", engine.url)
    assert (row["verdict"], row["compared_with"]) == ("ok", ["golden.json"])
    assert json.loads((folder / "golden.json").read_text())["recorded_with"] == "the gateway, triton 1"
    engine.spoil = _with_data([1, 1, 9])
    assert "(by golden.json)" in rows_of(penstock, "m", "--url", engine.url)[0]["reasons"][0]


def test_record_is_never_overwritten_and_wants_names(penstock: Call, engine: StandIn) -> None:
    """What was right once is not replaced by what is answered now, and not for all models at one stroke."""
    folder = save()
    assert penstock("models", "check", "m", "--record", "--url", engine.url).exit_code == 0
    first = (folder / "golden.json").read_bytes()
    again = penstock("models", "check", "m", "--record", "--url", engine.url)
    assert again.exit_code == 1
    assert "is there already: remove it" in again.stderr
    assert (folder / "golden.json").read_bytes() == first
    assert penstock("models", "check", "--record", "--url", engine.url).exit_code == 2


def test_check_of_another_file_than_recorded_tells_hash_and_answers(penstock: Call) -> None:
    """A swapped file is caught by its hash, and by what it answers; a damaged one by its hash and why it cannot run."""
    folder = save()
    assert rows_of(penstock, "m", "--record")[0]["compared_with"] == ["golden.json", "ONNX Runtime"]
    onnx_models.save(onnx_models.plus(1.5), home() / "other", "m")
    (folder / "1" / "model.onnx").write_bytes((home() / "other" / "m" / "1" / "model.onnx").read_bytes())
    (row,) = rows_of(penstock)
    assert row["verdict"] == "differs"
    assert "1/model.onnx has SHA-256" in row["reasons"][0]
    assert "0.5 apart where" in row["reasons"][1]
    (folder / "1" / "model.onnx").write_bytes(b"\x08")
    (row,) = rows_of(penstock)
    assert row["verdict"] == "cannot run"
    assert "SHA-256" in row["reasons"][0]
    assert "cannot be loaded" in row["reasons"][1]


def test_check_of_a_file_that_the_engine_has_not_loaded_says_so(penstock: Call, engine: StandIn) -> None:
    """The engine still serves the old one: its answers are right, the file on disk is not."""
    folder = save()
    (folder / "1" / "model.onnx").write_bytes(b"\x08")
    (row,) = rows_of(penstock, "--url", engine.url)
    assert row["verdict"] == "differs"
    assert row["reasons"][0].startswith("the engine answers, but the file on disk is not what it has loaded:")


def test_check_of_a_file_that_is_not_the_catalogues_says_so(penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pulled model the catalogue knows the hash; the way out is to pull it again."""
    save()
    entry = CatalogueEntry("m", "", "https://example.org/m.onnx", 1, "0" * 64, "MIT")
    monkeypatch.setattr(model_check, "read_catalogue", lambda: {"m": entry})
    (row,) = rows_of(penstock)
    assert row["verdict"] == "differs"
    assert "the catalogue says 000000000000…" in row["reasons"][0]
    assert "`penstock models pull m`" in row["reasons"][0]


def test_check_of_a_picture_goes_the_whole_way(penstock: Call, engine: StandIn) -> None:
    """golden.jpg is sent to /image, and what is seen in it must be seen again."""
    folder = save_python(SEEING)
    engine.specs = ("UINT8", [-1, -1, 3])
    refused = penstock("models", "check", "m", "--record", "--url", engine.url)
    assert "--shape x:N,N,3; a golden.jpg in " in refused.stderr
    (folder / "golden.jpg").write_bytes(jpeg())
    (row,) = rows_of(penstock, "m", "--record", "--url", engine.url)
    assert (row["verdict"], row["compared_with"]) == ("ok", ["golden.jpg"])
    engine.result = {"detections": []}
    (row,) = rows_of(penstock, "--url", engine.url)
    assert row["reasons"] == ["golden.jpg: class 0 at [10, 20, 40, 90], score 0.900, is not seen any more"]
    (folder / "golden.jpg").write_bytes(jpeg(width=90))
    assert "is another picture" in rows_of(penstock, "--url", engine.url)[0]["reasons"][0]


@pytest.mark.parametrize(("is_quantised", "verdict"), [(True, "ok"), (False, "differs")])
def test_check_of_a_quantised_model_takes_the_optimised_graphs_steps(
    penstock: Call, engine: StandIn, monkeypatch: pytest.MonkeyPatch, is_quantised: bool, verdict: str
) -> None:
    """8-bit kernels fall on other steps than the plain graph's; in FP32 that would be an error."""
    save()
    plain, optimised = (tensor_from_numpy("y", np.array([row], np.float32)) for row in ([1, 1, 5], [1, 1, 7]))
    reference = Reference((plain,), (optimised,), is_quantised)
    for module in (model_verdict, golden_record):
        monkeypatch.setattr(module, "run_reference", lambda *_: reference)
    engine.spoil = _with_data([1, 1, 7])
    (row,) = rows_of(penstock, "m", "--url", engine.url)
    assert row["verdict"] == verdict
    assert "got 7, expected 5" in (row["notes"] or row["reasons"])[0]
    refused = penstock("models", "check", "m", "--record", "--url", engine.url)
    assert "two ways on this machine to output 'y' are too far apart to judge others by" in refused.stderr


def test_check_of_an_input_whose_shape_varies_asks_for_it(penstock: Call) -> None:
    """Nothing is guessed but one row; the given shape is sent."""
    config = CONFIG.replace("dims: [ 3 ]", "dims: [ -1 ]")
    onnx_models.save(onnx_models.square(("N", "L")), home() / "models", "m", config=config)
    assert rows_of(penstock)[0]["verdict"] == "not judged"
    (row,) = rows_of(penstock, "m")
    assert row["verdict"] == "cannot run"
    assert row["reasons"] == ["input 'x' has shape [-1, -1]: say which to send with --shape x:N,N"]
    assert rows_of(penstock, "--shape", "x:2,5")[0]["verdict"] == "ok"
    (row,) = rows_of(penstock, "m", "--shape", "z:2,5")
    assert row["reasons"] == ["--shape names z; its inputs are x"]
    for wrong in ("x", "x:", f"x:{'9' * 5000}"):
        assert penstock("models", "check", "--shape", wrong).exit_code == 2


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "config.pbtxt").write_text("this is no config"), "config.pbtxt:1:"),
        (lambda folder: (folder / "config.pbtxt").write_text(CONFIG.replace('"y"', '"z"')), "names output 'z'"),
        (lambda folder: (folder / "1" / "model.onnx").unlink(), "model.onnx is not there"),
        (lambda folder: (folder / "1").rename(folder / "new"), "it has no version: put its files into"),
        (lambda folder: (folder / "golden.json").write_text("{"), "golden.json is none that this version"),
    ],
)
def test_check_of_a_broken_folder_tells_what_is_broken(
    penstock: Call, spoil: Callable[[Path], object], why: str
) -> None:
    """Config, tensors, file, version, golden.json: each is named, and the other models are checked all the same."""
    spoil(save(name="bad"))
    save(name="good")
    bad, good = rows_of(penstock)
    assert (bad["verdict"], good["verdict"]) == ("cannot run", "ok")
    assert why in bad["reasons"][0]


def test_check_that_is_stopped_is_one_line(penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says that nothing was changed, and ends with the shell's code for it."""

    async def stop(*_: object) -> None:
        raise KeyboardInterrupt

    save()
    monkeypatch.setattr("penstock.cli.check_result.check_model", stop)
    answer = penstock("models", "check")
    assert (answer.exit_code, answer.stderr.splitlines()[-1]) == (130, "penstock: stopped: no model was changed")


def test_check_of_a_name_that_is_not_here_is_a_failure(penstock: Call) -> None:
    """A misspelt name is not a model that was checked; no models at all is no failure."""
    answer = penstock("models", "check", "absent")
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert "there is no model 'absent' on this machine; `penstock models list` shows" in answer.stderr
    answer = penstock("models", "check", "mnist")
    assert "there is no model 'mnist' on this machine: fetch it with `penstock models pull mnist`" in answer.stderr
    save(name="present")
    answer = penstock("models", "check", "presnt")
    assert "there is no model 'presnt' on this machine: did you mean present?" in answer.stderr
    shutil.rmtree(home() / "models")
    answer = penstock("models", "check")
    assert (answer.exit_code, answer.stdout.split(";")[0]) == (0, "no models on this machine")
