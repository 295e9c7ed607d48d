"""`penstock models add` and `models remove`, against a stand-in of the gateway."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.gpu.telemetry.reader import has_driver
from tests.cli.conftest import Call, StandIn
from tests.models.add.test_add import write_yolox
from tests.models.inspect.made_models import constant_model

UNUSED_URL = "http://127.0.0.1:9"
FLAGS = ("--layout", "yolox", "--color", "bgr")


def home() -> Path:
    """The home that the fixture gave this test."""
    return Path(os.environ["PENSTOCK_HOME"])


def test_add_writes_the_folder_loads_it_and_shows_how_to_use_it(
    penstock: Call, stand_in: StandIn, tmp_path: Path
) -> None:
    """What was found and why, then a command, a curl line and a Python line."""
    source = write_yolox(tmp_path / "best.onnx")
    answer = penstock("models", "add", source, *FLAGS, "--url", stand_in.url)
    assert answer.exit_code == 0, answer.stderr
    assert f"best: yolox, in {home() / 'models' / 'best'}" in answer.stdout
    assert "up to 8 pictures per call" in answer.stdout
    assert has_driver() or "a GPU was not tried: there is no NVIDIA GPU here" in answer.stdout
    assert f"loaded at {stand_in.url}" in answer.stdout
    assert "penstock infer best photo.jpg --draw out.jpg" in answer.stdout
    assert f"{stand_in.url}/v2/models/best/image" in answer.stdout
    assert [asked.path for asked in stand_in.asked] == ["/v2/repository/models/best/load"]
    assert (home() / "models" / "best" / "golden.json").is_file()


def test_add_as_json_is_one_object_a_model_and_nothing_else(penstock: Call, tmp_path: Path) -> None:
    """Folders of files are added file by file; without a gateway that is no failure."""
    for name in ("a", "b"):
        write_yolox(tmp_path / f"{name}.onnx")
    answer = penstock("models", "add", tmp_path, *FLAGS, "--json", "--url", UNUSED_URL)
    assert answer.exit_code == 0, answer.stderr
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(row["name"], row["layout"], row["max_batch_size"], row["golden"]) for row in rows] == [
        ("a", "yolox", 8, True),
        ("b", "yolox", 8, True),
    ]
    assert "will be loaded at the next `penstock up`" in rows[0]["state"]


def test_add_on_the_cpu_writes_and_says_so(penstock: Call, tmp_path: Path) -> None:
    """--on cpu fixes the device in config.pbtxt, and the JSON has device, precision and reason."""
    answer = penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--on", "cpu", "--no-load", "--json")
    assert answer.exit_code == 0, answer.stderr
    placement = json.loads(answer.stdout)["placement"]
    assert (placement["device"], placement["precision"]) == ("cpu", "fp32")
    assert placement["why"] == "runs on the CPU, as demanded"
    assert "kind: KIND_CPU" in (home() / "models" / "m" / "config.pbtxt").read_text()


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver")
def test_demanded_gpu_that_is_not_here_adds_nothing(penstock: Call, tmp_path: Path) -> None:
    """--on gpu without a GPU is a failure with the reason, and no folder is left."""
    answer = penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--on", "gpu", "--no-load")
    assert answer.exit_code == 1
    assert "--on gpu is not possible: there is no NVIDIA GPU here; run this command on the GPU machine" in answer.stderr
    assert not (home() / "models" / "m").exists()


def test_what_is_assumed_is_a_note_and_in_the_models_page(penstock: Call, tmp_path: Path) -> None:
    """A classifier without metadata gets ImageNet's mean, deviation and labels, listed as assumed."""
    path = constant_model(tmp_path / "c.onnx", {"out": np.zeros((1, 1000), np.float32)}, image=(1, 3, 32, 32))
    answer = penstock("models", "add", path, "--no-load")
    assert answer.exit_code == 0, answer.stderr
    page = (home() / "models" / "c" / "MODEL.md").read_text()
    for text in (answer.stdout, page):
        assert "assumed: ImageNet's mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225" in text
        assert "assumed: ImageNet's labels" in text


def test_added_model_passes_the_check(penstock: Call, tmp_path: Path) -> None:
    """Its recorded answer is compared with the file's, in this process."""
    penstock("models", "add", write_yolox(tmp_path / "m.onnx", batch=1), *FLAGS, "--no-load")
    answer = penstock("models", "check", "m", "--json")
    (row,) = json.loads(answer.stdout)
    assert (answer.exit_code, row["verdict"]) == (0, "ok"), answer.stdout


def test_gateway_that_does_not_load_it_is_a_failure_with_the_reason(
    penstock: Call, stand_in: StandIn, tmp_path: Path
) -> None:
    """The folder stays, so that `models load` can try again; no command is shown that needs the loaded model."""
    why = "'ci' lacks the role admin, which this needs (it has: infer)"
    stand_in.refusals["/load"] = (403, json.dumps({"error": why}), {})
    answer = penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--url", stand_in.url)
    assert answer.exit_code == 1
    refusal = f"added, but not loaded: the gateway at {stand_in.url} did not load it: {why}"
    assert refusal in answer.stdout
    assert f" models load m --url {stand_in.url}\n" in answer.stdout
    assert " infer m " not in answer.stdout
    assert (home() / "models" / "m" / "config.pbtxt").is_file()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("nosuch.onnx",), "there is no file nosuch.onnx"),
        (("{empty}",), "has no .onnx file"),
        (("{file}", "{file2}", "--name", "m"), "is for one model, and there are 2 files"),
        (("{file}", "{twin}"), "would both be the model 'm'"),
        (("{file}", "--layout", "yolo99"), "--layout 'yolo99' is not one of"),
        (("{file}", "--input-size", "big"), "should be a width"),
        (("{file}", "--mean", "1,2"), "one number per channel"),
        (("{file}", "--std", "0.2,0,0.2"), "--std '0.2,0,0.2' has a 0"),
        (("{file}", "--labels", "nosuch.txt"), "there is no file nosuch.txt"),
        (("{file}", "--parameter", "nms-iou-treshold=0.3"), "did you mean 'nms-iou-threshold'?"),
        (("{file}", "--skeleton", "a-b"), "pairs of keypoint numbers"),
        (("{file}", "--picture", "nosuch.jpg"), "there is no file nosuch.jpg"),
        (("{file}", "--on", "cpu", "--precision", "fp16"), "--precision fp16 needs --on gpu"),
    ],
)
def test_flag_that_cannot_be_is_one_sentence(penstock: Call, tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    """Before anything is read or written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("m", "m2", "other/m"):
        (tmp_path / f"{name}.onnx").write_bytes(b"x")
    places = {
        "file": tmp_path / "m.onnx",
        "file2": tmp_path / "m2.onnx",
        "twin": tmp_path / "other" / "m.onnx",
        "empty": tmp_path / "empty",
    }
    answer = penstock("models", "add", *(word.format(**places) for word in words))
    assert answer.exit_code == 2
    assert answer.stderr.count("\n") == 1
    assert why in answer.stderr
    assert not (home() / "models").exists()


def test_bad_file_is_one_sentence_and_the_others_are_added(penstock: Call, tmp_path: Path) -> None:
    """The exit code is 1."""
    write_yolox(tmp_path / "good.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    answer = penstock("models", "add", tmp_path, *FLAGS, "--url", UNUSED_URL)
    assert answer.exit_code == 1
    assert answer.stderr.startswith(f"penstock: {tmp_path / 'bad.onnx'} was not added: ")
    assert answer.stderr.count("\n") == 1
    assert [path.name for path in (home() / "models").iterdir()] == ["good"]


def test_remove_unloads_the_model_and_deletes_its_folder(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """In that order; a model that is not there is a failure."""
    penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--no-load")
    answer = penstock("models", "remove", "m", "--url", stand_in.url)
    assert answer.exit_code == 0, answer.stderr
    assert [asked.path for asked in stand_in.asked] == ["/v2/repository/models/m/unload"]
    assert not (home() / "models" / "m").exists()
    again = penstock("models", "remove", "m", "--url", UNUSED_URL)
    assert (again.exit_code, "there is no model 'm'" in again.stderr) == (1, True)


def test_remove_takes_a_model_out_of_service_whose_folder_is_gone(
    penstock: Call, stand_in: StandIn, tmp_path: Path
) -> None:
    """A removal that did not reach the gateway asks for its address; with it, the model is unloaded afterwards."""
    penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--no-load")
    first = penstock("models", "remove", "m", "--url", UNUSED_URL)
    assert (first.exit_code, "give its --url" in first.stderr) == (0, True)
    stand_in.index = [{"name": "m", "version": "1", "state": "READY"}]
    second = penstock("models", "remove", "m", "--url", stand_in.url)
    assert second.exit_code == 0, second.stderr
    assert stand_in.asked[-1].path == "/v2/repository/models/m/unload"
    assert f"m is unloaded at {stand_in.url}" in second.stdout


def test_remove_of_a_model_that_is_nowhere_fails(penstock: Call, stand_in: StandIn) -> None:
    """Neither a folder nor a served model has that name: a misspelt name is not a success."""
    answer = penstock("models", "remove", "unicorn", "--url", stand_in.url)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert "there is no model 'unicorn'" in answer.stderr


def test_mean_without_a_standard_deviation_is_a_question(penstock: Call, tmp_path: Path) -> None:
    """ImageNet's mean alone would be served with wrong pictures; the message has both answers."""
    answer = penstock(
        "models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--mean", "0.485,0.456,0.406", "--no-load"
    )
    assert answer.exit_code == 1
    assert "a mean is given without a standard deviation; use --std 0.229,0.224,0.225 (ImageNet's) or 1,1,1" in (
        answer.stderr
    )


def test_model_with_a_name_that_is_taken_is_not_added_without_replace(penstock: Call, tmp_path: Path) -> None:
    """With --replace the new file takes its place; `people` is shipped and is never replaced."""
    source = write_yolox(tmp_path / "m.onnx")
    for words, code in ((("--name", "m"), 0), (("--name", "m"), 1), (("--name", "m", "--replace"), 0)):
        assert penstock("models", "add", source, *FLAGS, "--no-load", *words).exit_code == code
    answer = penstock("models", "add", source, *FLAGS, "--no-load", "--name", "people", "--replace")
    assert (answer.exit_code, "choose another with --name" in answer.stderr) == (1, True)


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("models", "remove", LONG), "cannot be a model's name"),
        (("models", "add", LONG), "cannot be a file's name here"),
        (("models", "add", os.fsdecode(b"\xff.onnx")), "cannot be a file's name here"),
        (("models", "add", "FILE", "--input-size", LONG), "--input-size"),
        (("models", "add", "FILE", "--skeleton", f"{LONG}-1"), "--skeleton"),
        (("models", "add", "FILE", "--skeleton", "\u00b2-1"), "--skeleton"),
        (("models", "add", "FILE", "--labels", LONG), "--labels: there is no file"),
        (("models", "add", "FILE", "--picture", LONG), "--picture: there is no file"),
    ],
)
def test_word_of_any_length_or_letters_is_one_sentence(
    penstock: Call, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    """Names that no file can have, and numbers that Python does not convert."""
    source = write_yolox(tmp_path / "m.onnx")
    answer = penstock(*(source if word == "FILE" else word for word in words))
    assert answer.exit_code in (1, 2)
    assert why in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_printed_command_names_the_program_as_it_was_called(
    penstock: Call, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout's command is not on the search path, so the line that can be copied has its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv" / "bin" / "penstock")])
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = penstock("models", "add", write_yolox(tmp_path / "m.onnx"), *FLAGS, "--url", stand_in.url)
    assert "  .venv/bin/penstock infer m photo.jpg" in answer.stdout, answer.stderr
