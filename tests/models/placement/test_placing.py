"""The trial in its process, and the choice in the model's folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort
import pytest
from msgspec.structs import replace

from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_serving.placement import Precision
from penstock.models.placement.choice import CannotPlace, Device, ModelPlacement, PlacementTrial, PlacementWish
from penstock.models.placement.placing import NO_CARD, place
from penstock.models.placement.trial import read_replies, try_placements

STREET = Path(__file__).resolve().parents[3] / "server" / "penstock" / "models" / "shipped" / "street"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped detector."""
    return Path(shutil.copytree(STREET, tmp_path / "street"))


def trials_of(*rates: float) -> list[PlacementTrial]:
    """The CPU's trial, and the GPU's in FP32 and FP16 at these pictures a second."""
    placements = [(Device.CPU, Precision.FP32), (Device.GPU, Precision.FP32), (Device.GPU, Precision.FP16)]
    return [
        PlacementTrial(device=device, precision=precision, rows_per_s=((1, rate / 2), (8, rate)), is_compared=True)
        for (device, precision), rate in zip(placements, rates, strict=True)
    ]


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this ONNX Runtime has CUDA")
def test_trial_process_measures_the_cpu_and_says_why_the_gpu_did_not_run(folder: Path) -> None:
    """The child process sends a rate for the CPU, and ONNX Runtime's reason for each placement on the GPU."""
    wanted = [ModelPlacement(Device.GPU), ModelPlacement(Device.GPU, Precision.FP16)]
    cpu, *others = try_placements(folder, wanted, pictures=[], rows=2)
    assert (cpu.device, cpu.problem, cpu.best_rows) == (Device.CPU, "", 2)
    assert cpu.rate > 1
    assert [one.placement for one in others] == wanted
    assert all("onnxruntime-gpu is not installed here" in one.problem for one in others)


def test_trial_process_that_ends_early_leaves_a_reason(tmp_path: Path) -> None:
    """A folder that cannot be opened gives a reason for the CPU, and no placement is without an entry."""
    trials = try_placements(tmp_path, [ModelPlacement(Device.GPU)], pictures=[], rows=1)
    assert len(trials) == 2
    assert all(one.problem for one in trials)


def test_trial_that_takes_too_long_is_stopped(folder: Path) -> None:
    """A trial over its time limit is stopped, and every placement has that reason."""
    trials = try_placements(folder, [ModelPlacement(Device.GPU)], pictures=[], rows=1, wall_s=0.05)
    assert [one.problem for one in trials] == ["its trial took more than 0.05 s; it was stopped"] * 2


def test_broken_reply_ends_the_list() -> None:
    """Lines after a broken one are not read."""
    line = b'{"device":"cpu","precision":"fp32"}\n'
    assert [one.device for one in read_replies(line + b"{broken\n" + line)] == [Device.CPU]


def test_choice_is_written_into_the_folder(folder: Path) -> None:
    """config.pbtxt gets kind, precision and the GPU's batch size, and MODEL.md the reason and what was tried."""
    with (folder / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "max_batch_size_measured_on" value { string_value: "cpu" } }\n')

    def try_there(*_: object) -> list[PlacementTrial]:
        return trials_of(100, 400, 900)

    place(folder, PlacementWish(), pictures=[], rows=1, no_gpu="", try_there=try_there)
    config = read_proto(folder / "config.pbtxt")
    assert [(group.kind, group.count) for group in config.instance_group] == [(1, 2)]
    assert config.parameters["precision"].string_value == "fp16"
    assert config.parameters["max_batch_size"].string_value == "8"
    assert "max_batch_size_measured_on" not in config.parameters
    page = (folder / "MODEL.md").read_text()
    assert "It runs on the GPU in FP16: 9.0 times the CPU's rate" in page
    assert "| the GPU in FP32 | 200/s with 1, 400/s with 8 |" in page


def test_choice_whose_outputs_the_engine_cannot_compare_turns_its_check_off(folder: Path) -> None:
    """FP16 whose results agree although the engine's own check refused it is served without that check."""
    *others, half = trials_of(100, 400, 900)
    trials = [*others, replace(half, is_checked=False)]
    choice = place(folder, PlacementWish(), pictures=[], rows=1, no_gpu="", try_there=lambda *_: trials)
    assert choice.precision is Precision.FP16
    assert read_proto(folder / "config.pbtxt").parameters["check-answers"].string_value == "0"


def test_cpu_that_is_chosen_keeps_its_batch_size(folder: Path) -> None:
    """A slow GPU leaves the model on the CPU, with no precision in its config."""
    place(folder, PlacementWish(), pictures=[], rows=1, no_gpu="", try_there=lambda *_: trials_of(100, 40, 50))
    config = read_proto(folder / "config.pbtxt")
    assert [group.kind for group in config.instance_group] == [2]
    assert not {"precision", "max_batch_size"} & set(config.parameters)


@pytest.mark.parametrize("no_gpu", [NO_CARD, "onnxruntime-gpu is not installed here"])
def test_without_a_usable_gpu_the_page_says_that_none_was_tried(folder: Path, no_gpu: str) -> None:
    """The reason and the CPU's batch size are reported, config.pbtxt stays as it is, and no process is started."""
    before = (folder / "config.pbtxt").read_bytes()

    def try_there(*_: object) -> list[PlacementTrial]:
        raise AssertionError("nothing is to be tried")

    for wish in (PlacementWish(), PlacementWish(precision=Precision.FP32)):
        choice = place(folder, wish, pictures=[], rows=2, no_gpu=no_gpu, try_there=try_there)
        assert (choice.device, choice.best_rows) == (Device.CPU, 2)
        assert choice.why.startswith(f"runs on the CPU, 2 pictures per call; a GPU was not tried: {no_gpu}. Run ")
        assert "`penstock models add --replace` on the GPU machine" in choice.why
        assert f"It {choice.why}.\n" in (folder / "MODEL.md").read_text()
    assert (folder / "config.pbtxt").read_bytes() == before


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (PlacementWish(Device.GPU), "--on gpu is not possible: there is no NVIDIA GPU here"),
        (PlacementWish(precision=Precision.FP16), "--precision fp16 is not possible: there is no NVIDIA GPU here"),
        (PlacementWish(Device.CPU, Precision.TF32), "the CPU computes in fp32: --precision tf32 needs --on gpu"),
    ],
)
def test_demand_without_a_gpu_is_refused(folder: Path, wish: PlacementWish, why: str) -> None:
    """What cannot be done here ends in one sentence."""
    with pytest.raises(CannotPlace, match=why):
        place(folder, wish, pictures=[], rows=1, no_gpu=NO_CARD)


def test_demanded_cpu_is_written_without_a_trial(folder: Path) -> None:
    """--on cpu fixes the model to the CPU also where a GPU is."""
    tried: list[Sequence[object]] = []
    choice = place(
        folder, PlacementWish(Device.CPU), pictures=[], rows=1, no_gpu="", try_there=lambda *a: tried.append(a) or []
    )
    assert choice.why == "runs on the CPU, as demanded"
    assert not tried
    assert [group.kind for group in read_proto(folder / "config.pbtxt").instance_group] == [2]
