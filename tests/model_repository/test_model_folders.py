"""Every model that is shipped or can be pulled is described as Triton and the gateway want it."""

from pathlib import Path

import onnxruntime
import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.models.catalogue import FOLDERS, read_catalogue
from penstock.vision.card import card_from_config

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL_FOLDERS = sorted(
    folder for parent in (CHECKOUT / "model_repository", FOLDERS) for folder in parent.iterdir() if folder.is_dir()
)
VISION_FOLDERS = [folder for folder in MODEL_FOLDERS if folder.name != "identity_fp32"]  # which takes tensors only


@pytest.mark.parametrize("folder", VISION_FOLDERS, ids=lambda folder: folder.name)
def test_model_folder_has_a_card_with_the_labels_of_its_file(folder: Path) -> None:
    """The config is read, says how the model sees images, and its labels are labels.txt's in the same order."""
    card = card_from_config(read_config(folder / "config.pbtxt"))
    assert card is not None
    file = folder / "labels.txt"
    assert list(card.labels) == (file.read_text().splitlines() if file.exists() else [])


@pytest.mark.parametrize("folder", MODEL_FOLDERS, ids=lambda folder: folder.name)
def test_model_folder_tells_where_the_model_is_from(folder: Path) -> None:
    """MODEL.md names source, licence, file, how it was made, the shapes and what was measured."""
    text = (folder / "MODEL.md").read_text()
    for row in ("| source |", "| licence |", "| file |", "| made |", "## Shapes", "| in |", "| out |"):
        assert row in text, row


def test_fastestdet_config_is_what_the_file_is(shared_dir: Path) -> None:
    """Names, types and shapes of config.pbtxt are the ONNX file's, whose batch dimension is fixed: no batching."""
    config = read_config(FOLDERS / "fastestdet" / "config.pbtxt")
    session = onnxruntime.InferenceSession(
        shared_dir / "models" / "FastestDet.onnx", providers=["CPUExecutionProvider"]
    )
    assert config.max_batch_size == 0
    for specs, tensors in ((config.inputs, session.get_inputs()), (config.outputs, session.get_outputs())):
        assert [(spec.name, list(spec.shape)) for spec in specs] == [(item.name, item.shape) for item in tensors]
        assert all(
            spec.datatype == "FP32" and item.type == "tensor(float)" for spec, item in zip(specs, tensors, strict=True)
        )


def test_fastestdet_of_the_real_inputs_is_the_catalogues(shared_dir: Path) -> None:
    """The file beside the checkout has the size of the catalogue's entry."""
    entry = read_catalogue()["fastestdet"]
    assert (shared_dir / "models" / "FastestDet.onnx").stat().st_size == entry.size_bytes
