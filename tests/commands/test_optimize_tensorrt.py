"""`penstock models optimize --tensorrt`: as --int8 in every word, by stand-ins of TensorRT and CUDA."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from server.optimize import timing
from server.optimize.tensorrt import cuda
from server.optimize.tensorrt.binding import load_tensorrt
from server.optimize.tensorrt.errors import NoEngineHereError
from tests.commands.conftest import StandIn
from tests.commands.test_optimize import NOBODY, home, pictures, run
from tests.optimize.conftest import RANDOM, write_model
from tests.optimize.tensorrt.conftest import stand_in as install
from tests.optimize.tensorrt.fake_cuda import NO_DEVICE, FakeCuda
from tests.optimize.tensorrt.fake_tensorrt import fake_tensorrt

__all__ = ["home", "pictures"]  # fixtures


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of Hopper's capability and TensorRT 10.4."""
    monkeypatch.setattr(timing, "ROUND_S", 0.001)
    install(monkeypatch, fake_tensorrt(), FakeCuda())


@pytest.mark.usefixtures("engines")
def test_optimize_tensorrt_writes_the_model_and_shows_fusion_accuracy_and_speed(home: Path, pictures: Path) -> None:
    """The place, what it fits, fusions, agreement, speed, and what the gateway made of it; 80 columns."""
    done = run("small", "--tensorrt", "--calibrate", pictures)
    assert done.exit_code == 0, done.output
    made = home / "models" / "small-tensorrt-fp16"
    assert (made / "1" / "model.plan").is_file()
    for words in (
        f"small-tensorrt-fp16 is in {made}",
        "for NVIDIA Fake and TensorRT 10.4.0.26 only; built in 0 s",
        "example: stem + stem.norm + stem.norm.relu",
        "CaskConvolution in FP16",
        "the same first class in 16 of 16 pictures",
        "16 pictures judged",
        "lowest cosine of an output with the float model's: logits 1.00000",
        "pictures/s",
        f"no gateway runs at {NOBODY}: small-tensorrt-fp16 will be loaded at the next `penstock up`",
    ):
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line[:1] in "│┃┏┡└") <= 80
    assert done.stderr == ""


@pytest.mark.usefixtures("engines")
def test_optimize_tensorrt_int8_json_is_one_object(home: Path, pictures: Path) -> None:
    """With the quantiser's choice, and the engine where the other twin's JSON says int8."""
    told = json.loads(run("small", "--tensorrt", "--int8", "--calibrate", pictures, "--json").stdout)
    assert (told["name"], told["calibrating"], told["held_out"]) == ("small-tensorrt-int8", 8, 8)
    assert told["folder"] == str(home / "models" / "small-tensorrt-int8")
    assert told["quantised"]["ranges"] in ("minmax", "percentile", "entropy")
    assert (told["key"]["tensorrt"], told["key"]["precision"]) == ("10.4.0.26", "int8")
    assert [item["batch_size"] for item in told["timings"]] == [1, 8, 16]
    assert told["layers"]["kinds"]["Reformat"] == 1


@pytest.mark.usefixtures("engines")
def test_optimize_tensorrt_again_says_that_the_plan_was_built_before(home: Path, pictures: Path) -> None:
    """Minutes saved are told, so that nobody wonders."""
    write_model(home / "models", "noise", more=RANDOM)
    for words in ("built in 0 s", "built before, in 0 s"):
        done = run("noise", "--tensorrt", "--calibrate", pictures)
        assert words in done.stdout
        assert "random weights: accuracy means nothing, not judged" in done.stdout


@pytest.mark.usefixtures("engines")
def test_optimize_tensorrt_loads_the_result_into_the_running_gateway(
    home: Path, pictures: Path, stand_in: StandIn
) -> None:
    """As a pull does; a Triton without the backend says so, and the plan stays."""
    stand_in.refusals["/load"] = (400, json.dumps({"error": "unable to find backend library"}), {})
    done = run("small", "--tensorrt", "--calibrate", pictures, url=stand_in.url)
    assert (done.exit_code, (home / "models" / "small-tensorrt-fp16").is_dir()) == (1, True)
    assert "is in place, but the gateway" in done.stderr
    assert "unable to find backend library" in done.stderr


def test_optimize_tensorrt_on_a_machine_without_a_driver_says_so_in_a_line(
    home: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 2, nothing read, nothing written."""
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-nowhere.so.1")
    done = run("small", "--tensorrt", "--calibrate", pictures)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "there is no NVIDIA driver here: see `penstock doctor`" in done.stderr
    assert sorted(path.name for path in home.iterdir()) == ["models"]


def test_optimize_tensorrt_where_it_cannot_be_says_what_would(
    home: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No card, a placeholder of the package, a card that this TensorRT has dropped."""
    placeholder = ModuleType("tensorrt")
    placeholder.__dict__["__version__"] = "10.4.0"
    for module, card, sentence in (
        (fake_tensorrt(), FakeCuda(init=NO_DEVICE), "CUDA sees none here (no CUDA-capable device is detected)"),
        (placeholder, FakeCuda(), "has no Builder: it is a placeholder, NVIDIA's own is needed"),
        (fake_tensorrt("10.13.3.9"), FakeCuda((7, 0)), "(Volta): 10.4 was the last, in Triton's image 24.10"),
    ):
        install(monkeypatch, module, card)
        done = run("small", "--tensorrt", "--calibrate", pictures)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert sentence in done.stderr
    assert not (home / "models" / "small-tensorrt-fp16").exists()


def test_load_tensorrt_where_it_is_not_installed_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Triton's image, whatever the newest is."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(NoEngineHereError, match="install the version that Triton's image has"):
        load_tensorrt()
