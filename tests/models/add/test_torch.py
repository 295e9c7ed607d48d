"""A program of torch.export becomes a folder for the backend `torch`; where PyTorch is installed, by the real one."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engines.config_pbtxt import read_config, read_proto
from penstock.models.add import AddOptions, NotServable, add_model
from penstock.models.added_folder import CannotAdd
from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.torch_session import torch_python
from penstock.vision.card import card_from_config
from tests.models.inspect.torch_archives import pt2, stand_in_environment, yolox

OPTIONS = AddOptions(Hints(layout="yolox", color="bgr"), allows_code=True)
PYTHON = torch_python()
EXPORT = """
import sys
import torch

class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weights = torch.rand((1, 84, 85), generator=torch.Generator().manual_seed(1)) / 300
        weights[..., :2] *= 20
        weights[..., 2:4] *= -1
        self.register_buffer("weights", weights)

    def forward(self, picture):
        return picture.mean((1, 2, 3)).view(-1, 1, 1) * self.weights

network, sample = Rows().eval(), torch.zeros(2, 3, 64, 64)
rows = {0: torch.export.Dim("rows", min=1, max=64)}
torch.export.save(torch.export.export(network, (sample,), dynamic_shapes=(rows,)), sys.argv[1])
torch.jit.trace(network, sample).save(sys.argv[2])
"""


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, batch: int | str = "s0") -> Path:
    """A .pt2, and an environment in which its program behaves as named."""
    monkeypatch.setenv("PENSTOCK_ENGINE_ENVIRONMENT", str(stand_in_environment(tmp_path / "environment", behaviour)))
    path = tmp_path / "best.pt2"
    path.write_bytes(pt2(yolox(batch)))
    return path


def test_an_added_program_is_a_folder_of_the_torch_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is unchanged, runs in the precision of the trial, and the gateway forms its batches."""
    source = stand_in(tmp_path, monkeypatch, "yolox")
    added = add_model(source, "best", OPTIONS, home=tmp_path / "home")
    config, proto = read_config(added.folder / "config.pbtxt"), read_proto(added.folder / "config.pbtxt")
    assert (added.folder / "1" / "model.pt2").read_bytes() == source.read_bytes()
    assert (config.backend, proto.default_model_filename) == ("torch", "model.pt2")
    assert (config.max_batch_size, config.inputs[0].shape, config.outputs[0].shape) == (8, (3, 64, 64), (84, 85))
    assert (config.parameters["batch_owner"], config.parameters["precision"]) == ("gateway", "fp32")
    assert card_from_config(config) is not None


@pytest.mark.parametrize(
    ("behaviour", "batch", "why"),
    [("mixes", "s0", "differs when it runs in a batch"), ("yolox", 1, "export it with a free first dimension")],
)
def test_a_program_without_proven_batches_takes_one_picture_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, batch: int | str, why: str
) -> None:
    """`batches` has the reason, and the declared batch is 1."""
    source = stand_in(tmp_path, monkeypatch, behaviour, batch)
    added = add_model(source, "best", OPTIONS, home=tmp_path / "home")
    assert why in added.batches.why
    config = read_config(added.folder / "config.pbtxt")
    assert (config.max_batch_size, config.inputs[0].shape) == (0, (1, 3, 64, 64))


def test_a_model_folder_of_the_torch_backend_gets_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the permission only: the backend runs code. Its batches stay as configured."""
    folder = tmp_path / "folder"
    (folder / "1").mkdir(parents=True)
    stand_in(tmp_path, monkeypatch, "yolox").rename(folder / "1" / "model.pt2")
    (folder / "config.pbtxt").write_text('backend: "torch"\nmax_batch_size: 4\n')
    with pytest.raises(CannotAdd, match=r"backend 'torch', which can run code"):
        add_model(folder, "best", replace(OPTIONS, allows_code=False), home=tmp_path / "home")
    added = add_model(folder, "best", OPTIONS, home=tmp_path / "home")
    config = read_config(added.folder / "config.pbtxt")
    assert (config.backend, config.max_batch_size, config.parameters["layout"]) == ("torch", 4, "yolox")
    assert (config.inputs[0].shape, config.outputs[0].shape) == ((3, 64, 64), (84, 85))


def test_a_program_is_not_added_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not run, and nothing is written."""
    source = stand_in(tmp_path, monkeypatch, "ends")
    with pytest.raises(NotServable, match=r"can run any code here, so it was not run; --allow-model-code"):
        add_model(source, "best", replace(OPTIONS, allows_code=False), home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(PYTHON is None, reason="PyTorch is not installed here: PENSTOCK_ENGINE_ENVIRONMENT names where")
def test_the_real_pytorch_runs_and_proves_a_program(tmp_path: Path) -> None:
    """A .pt2 of torch.export is added with batches of 8; the same network as TorchScript is not."""
    program, script = tmp_path / "best.pt2", tmp_path / "best.torchscript"
    subprocess.run([str(PYTHON), "-c", EXPORT, program, script], check=True, capture_output=True)
    added = add_model(program, "best", OPTIONS, home=tmp_path / "home")
    assert (added.batches.max_rows, len(added.inspection.trial.results)) == (8, 2)
    sized = replace(OPTIONS, hints=replace(OPTIONS.hints, input_size=(64, 64)))
    with pytest.raises(CannotAdd, match=r"its layout is yolox, but no engine here serves TorchScript"):
        add_model(script, "script", sized, home=tmp_path / "home")
