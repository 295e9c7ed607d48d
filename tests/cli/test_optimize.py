"""`penstock models optimize`: refusals in one sentence, the tables at 80 columns, one JSON object."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock.cli.optimize import optimize
from penstock.models.optimize import profile as timing
from tests.cli.conftest import StandIn
from tests.models.optimize.conftest import write_model, write_pictures

UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """PENSTOCK_HOME with the small classifier, rounds too short to be a measurement."""
    monkeypatch.setattr(timing, "ROUND_S", 0.001)
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path(os.environ["PENSTOCK_HOME"])
    write_model(folder / "models", "small")
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of sixteen."""
    write_pictures(tmp_path / "pictures", 16)
    return tmp_path / "pictures"


def run(*words: object, url: str = UNUSED_URL) -> Result:
    """`penstock models optimize WORDS…`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(optimize)
    return CliRunner().invoke(app, [*map(str, words), "--url", url])


def test_optimize_writes_the_model_loads_it_and_shows_fusion_accuracy_and_speed(
    home: Path, pictures: Path, stand_in: StandIn
) -> None:
    """Every part is there, no line of a table is wider than 80, and what was made is said with its place."""
    done = run("small", "--int8", "--calibrate", pictures, url=stand_in.url)
    assert [asked.path for asked in stand_in.asked] == ["/v2/repository/models/small-int8/load"]
    assert done.exit_code == 0, done.output
    assert (home / "models" / "small-int8" / "1" / "model.onnx").is_file()
    assert f"small-int8 is in {home / 'models' / 'small-int8'}" in done.stdout
    for words in (
        "Conv stem + BatchNormalization stem.norm + Relu stem.norm.relu",
        "with Relu inside",
        "QLinearConv",
        "the same first class in",
        "times as fast",
        f"small-int8 is loaded at {stand_in.url}",
    ):
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line[:1] in "│┃┏┡└") <= 80
    assert done.stderr == ""


def test_optimize_for_tensorrt_writes_a_calibrated_model_and_claims_no_accuracy(
    home: Path, pictures: Path, stand_in: StandIn
) -> None:
    """The folder for engines is --accelerator-cache, and the message says what was not measured."""
    words = ("small", "--int8", "--calibrate", pictures, "--accelerator", "tensorrt", "--accelerator-cache", "/engines")
    done = run(*words, url=stand_in.url)
    assert done.exit_code == 0, done.output
    folder = home / "models" / "small-tensorrt-int8"
    assert 'value: "/engines"' in (folder / "config.pbtxt").read_text()
    assert (folder / "tensorrt" / "calibration.flatbuffers").is_file()
    assert "its accuracy was not measured" in done.stdout
    assert f"copy {folder / 'tensorrt' / 'calibration.flatbuffers'} to /engines as Triton sees it" in done.stdout
    assert f"small-tensorrt-int8 is loaded at {stand_in.url}" in done.stdout
    assert "warning: 8 pictures give rough ranges" in done.stdout
    again = run(*words, "--json", url=stand_in.url)
    assert "small-tensorrt-int8 was made before, and is replaced" in again.stderr
    report = json.loads(again.stdout)
    assert (report["name"], report["calibrating"], report["cache"]) == ("small-tensorrt-int8", 8, "/engines")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--int8", "--accelerator", "tensorrt-fp16"), "tensorrt-fp16 is not for --int8: give --accelerator tensorrt"),
        (("--accelerator", "tensorrt"), "use `penstock models add FILE --accelerator tensorrt`"),
        (("--torch", "--accelerator", "tensorrt"), "tensorrt is not for --torch, which makes a PyTorch program"),
    ],
)
def test_optimize_refuses_an_accelerator_that_does_not_fit(
    home: Path, pictures: Path, words: tuple[str, ...], why: str
) -> None:
    """TensorRT goes with --int8 only, in no other precision; the message names the command for a float model."""
    done = run("small", *words, "--calibrate", pictures)
    assert done.exit_code == 2
    assert why in done.stderr


def test_optimize_whose_result_the_gateway_refuses_fails(home: Path, pictures: Path, stand_in: StandIn) -> None:
    """As a pull does: what was made stays, the reason is the last line, and JSON stays JSON."""
    stand_in.refusals["/load"] = (400, json.dumps({"error": "not now"}), {})
    done = run("small", "--int8", "--calibrate", pictures, "--json", url=stand_in.url)
    sentence = f"small-int8 is in place, but the gateway at {stand_in.url} did not load it: not now"
    assert (done.exit_code, done.stderr) == (1, f"penstock: {sentence}\n")
    report = json.loads(done.stdout)
    assert (report["name"], report["optimized_from"], report["calibrating"]) == ("small-int8", "small", 8)
    assert (report["folder"], report["gateway"]) == (str(home / "models" / "small-int8"), sentence)
    assert report["judgement"]["agreement"]["kind"] == "classes"
    assert {level["level"] for level in report["fusion"]["int8_levels"]} == {"file", "basic", "extended", "all"}


def test_optimize_of_nothing_named_says_what_to_add(home: Path, pictures: Path) -> None:
    """What is made is said, not guessed."""
    done = run("small", "--calibrate", pictures)
    assert (done.exit_code, done.stderr) == (2, "penstock: give either --int8 or --torch\n")


def test_optimize_refuses_in_one_sentence(home: Path, pictures: Path, tmp_path: Path) -> None:
    """An unknown model, no folder, no pictures, too few, annotations that are none: nothing is written."""
    (tmp_path / "empty").mkdir()
    write_pictures(tmp_path / "few", 3)
    write_pictures(tmp_path / "wrong", 16)
    (tmp_path / "wrong" / "annotations.json").write_text("{}")
    config = write_model(home / "models", "other") / "config.pbtxt"
    config.write_text(config.read_text().replace("3, 32, 32", "3, 40, 40"))
    for name, folder, sentence in (
        ("smal", pictures, "there is no model 'smal' on this machine: did you mean small?"),
        ("small", tmp_path / "nowhere", "there is no file or folder "),
        ("small", tmp_path / "few" / "000.jpg", "--calibrate wants a folder of pictures; "),
        ("small", tmp_path / "empty", "holds no pictures"),
        ("small", tmp_path / "few", "3 readable pictures are too few"),
        ("small", tmp_path / "wrong", "annotations.json is not in COCO's format"),
        ("other", pictures, "model 'other' does not run as its config.pbtxt says (Got invalid dimensions for input"),
    ):
        done = run(name, "--int8", "--calibrate", folder)
        assert done.exit_code != 0
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (home / "models" / "small-int8").exists()


def test_optimize_whose_home_cannot_be_written_says_so(home: Path, pictures: Path) -> None:
    """The place and the way out."""
    (home / "downloads").write_text("in the way")
    done = run("small", "--int8", "--calibrate", pictures)
    assert done.exit_code == 1
    assert f"{home / 'downloads'} cannot be written (File exists): make {home} writable or choose" in done.stderr


def test_optimize_to_pytorch_writes_the_twin_and_says_how_near_it_answers(
    home: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pictures; and both forms at once, or neither, are refused."""
    from penstock.models.onnx_to_torch import twin

    def make(source: object, staged: Path) -> twin.ConvertedModel:
        made = 'parameters { key: "added_by" value { string_value: "penstock models optimize --torch" } }'
        (staged / "config.pbtxt").write_text(f'name: "small-torch" backend: "torch" {made}')
        return twin.ConvertedModel("small-torch", 2e-6, "2.11", 1_200_000)

    monkeypatch.setattr(twin, "convert_model", make)
    done = run("small", "--torch", url=stand_in.url)
    assert done.exit_code == 0, done.output
    assert (
        "(1.2 MB), converted by PyTorch 2.11; its outputs differ from ONNX Runtime's in FP32 by at most 2.0e-06"
        in done.stdout
    )
    assert f"small-torch is loaded at {stand_in.url}" in done.stdout
    assert json.loads(run("small", "--torch", "--json", url=stand_in.url).stdout)["largest_difference"] == 2e-6
    for words in (("small",), ("small", "--int8", "--torch")):
        assert "give either --int8 or --torch" in run(*words).stderr
    assert "--int8 needs pictures: --calibrate DIR" in run("small", "--int8").stderr


def test_optimize_does_not_replace_a_model_that_it_did_not_make(
    home: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have a model of the result's name, which is kept as it is."""
    from penstock.models.onnx_to_torch import twin

    monkeypatch.setattr(twin, "convert_model", lambda *_: pytest.fail("it was made"))
    for name, words in (
        ("small-int8", ("--int8", "--calibrate", pictures)),
        ("small-tensorrt-int8", ("--int8", "--calibrate", pictures, "--accelerator", "tensorrt")),
        ("small-torch", ("--torch",)),
    ):
        write_model(home / "models", name)
        before = (home / "models" / name / "config.pbtxt").read_bytes()
        done = run("small", *words)
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"there is a model '{name}' in {home / 'models'} that `models optimize` did not make" in done.stderr
        assert (home / "models" / name / "config.pbtxt").read_bytes() == before
