"""`penstock models build`: refusals in one sentence, the fusion table, one JSON object."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock.cli import build as command
from penstock.cli.build import build, use_note
from penstock.engines.ort_serving.placement import Precision
from penstock.gpu.tensorrt import capability_text
from penstock.models.tensorrt_rtx.build import CannotBuild
from tests.models.optimize.conftest import write_model
from tests.models.tensorrt_rtx.conftest import needs_tensorrt

pytestmark = pytest.mark.xdist_group("tensorrt-rtx")


def run(*words: object) -> Result:
    """`penstock models build WORDS…`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(build)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def model() -> Path:
    """The ONNX file of the small classifier in PENSTOCK_HOME."""
    models = Path(os.environ["PENSTOCK_HOME"]) / "models"
    write_model(models, "small")
    return models / "small" / "1" / "model.onnx"


@needs_tensorrt
def test_build_of_a_model_writes_engine_and_page(model: Path) -> None:
    """The batch is the model's; the table, the file and the page are shown."""
    done = run("small", "--for", "8.9")
    assert done.exit_code == 0, done.output
    engine, page = sorted((model.parent / "tensorrt-rtx").iterdir(), key=lambda file: file.suffix, reverse=True)
    assert engine.name.startswith("model-sm89-fp32-")
    assert "# small: engine for 8.9 in FP32" in page.read_text()
    assert "Conv + BatchNormalization + Relu" in done.stdout
    assert str(page) in done.stdout
    assert "note:" not in done.stdout
    assert done.stderr == ""


@needs_tensorrt
def test_build_as_json_is_one_object(model: Path) -> None:
    """Two architectures are two engines; --max-batch overrides the model's."""
    done = run(model, "--for", "8.9, 12.0", "--max-batch", 3, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["model"], [one["architecture"] for one in report["engines"]]) == ("model", ["8.9", "12.0"])
    assert "`penstock models add` does not copy these engines" in report["note"]
    first = report["engines"][0]
    assert first["layer_count"] < first["onnx_nodes"]
    (shape,) = first["shapes"].values()
    assert (shape["least"][0], shape["greatest"][0]) == (1, 3)
    assert Path(first["file"]).is_file()


def test_build_that_fails_for_one_gpu_builds_for_the_others(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 and the reason, after the engines that were built."""
    tried: list[str] = []

    def refuse(source: object, capability: tuple[int, int], options: object) -> None:
        tried.append(capability_text(capability))
        raise CannotBuild(f"no memory for {capability_text(capability)}")

    monkeypatch.setattr(command, "_build", refuse)
    done = run("small", "--for", "T4,L4", "--json")
    assert (done.exit_code, done.stdout, tried) == (1, "", ["7.5", "8.9"])
    assert done.stderr == "penstock: no memory for 7.5; no memory for 8.9\n"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ("small", "--for", "9.0"),
            2,
            "--for: TensorRT-RTX builds no engine for 9.0 (Hopper: H100, H200), and nothing was",
        ),
        (("small", "--for", "8.9,6.1"), 2, "TensorRT-RTX builds no engine for 6.1 (Pascal: P4, P40, P100)"),
        (("small", "--for", "H100"), 2, "--for: TensorRT-RTX builds no engine for 9.0 (Hopper: H100, H200), and"),
        (("small", "--for", "ada"), 2, "--for 'ada' should be a GPU's compute capability or name: 7.5 T4, RTX 20; 8.0"),
        (("small", "--for", "8.9", "--precision", "int8"), 2, "--precision int8 is not possible: give fp32 (keeps"),
        (("smal", "--for", "8.9"), 1, "there is no model 'smal' on this machine: did you mean small?"),
        (("./none.onnx", "--for", "8.9"), 2, "there is no file ./none.onnx"),
        (("./\udcff.onnx", "--for", "8.9"), 2, r"'\udcff.onnx' cannot be a file's name here: it is too long or not"),
        (("x" * 300 + ".onnx", "--for", "8.9"), 2, "cannot be a file's name here: it is too long or not UTF-8"),
        (("people", "--for", "8.9"), 1, "model 'people' is of backend 'python': engines are built of ONNX models"),
    ],
)
def test_build_that_cannot_be_is_one_sentence(model: Path, words: tuple[str, ...], code: int, sentence: str) -> None:
    """No child process is started for an architecture or a model that does not exist."""
    done = run(*words)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("penstock: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("built", "configured", "note"),
    [
        (Precision.FP16, "fp16", ""),
        (
            Precision.FP16,
            "fp32",
            'write parameters { key: "precision" value { string_value: "fp16" } } into its config',
        ),
        (Precision.FP32, "fp16", "or build with --precision fp16"),
        (Precision.FP32, None, "after it, run `penstock models build NAME`"),
    ],
)
def test_engine_that_is_not_used_yet_gets_a_note(built: Precision, configured: str | None, note: str) -> None:
    """Of another precision than the model's, or beside a file that is no model yet."""
    sentence = use_note(built, configured)
    assert note in sentence
    assert bool(sentence) is bool(note)
