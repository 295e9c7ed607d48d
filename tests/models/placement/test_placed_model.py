"""A model folder on one engine: its results, and what is refused."""

from pathlib import Path

import onnxruntime as ort
import pytest

from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_serving.placement import Precision
from penstock.models.inspect.trial_session import TrialFailed
from penstock.models.placement.choice import ON_CPU, Device, ModelPlacement
from penstock.models.placement.placed_model import PlacedModel, placed_config
from penstock.protocol.vision_results import Detections
from penstock.vision.decode import decode

STREET = Path(__file__).resolve().parents[3] / "server" / "penstock" / "models" / "shipped" / "street"


def test_model_on_the_cpu_finds_the_same_in_a_batch() -> None:
    """A picture has the same boxes alone and among others, and they are in source pixels."""
    model = PlacedModel(STREET, ON_CPU, threads=1)
    picture = model.prepare(decode((STREET / "golden.jpg").read_bytes(), model.card.prepare_spec.color))
    (alone,), many = model.results([picture]), model.results([picture] * 3)
    assert isinstance(alone, Detections)
    assert len(alone.score) > 5
    for one in many:
        assert isinstance(one, Detections)
        assert one.class_id.tolist() == alone.class_id.tolist()
        assert one.xyxy == pytest.approx(alone.xyxy, abs=0.05)


def test_config_names_device_and_precision_for_every_instance() -> None:
    """The placed config keeps the number of instances and sets kind and precision."""
    config = read_proto(STREET / "config.pbtxt")
    placed = placed_config(config, ModelPlacement(Device.GPU, Precision.FP16))
    assert [(group.count, group.kind) for group in placed.instance_group] == [(2, 1)]
    assert placed.parameters["precision"].string_value == "fp16"
    assert "precision" not in config.parameters


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this ONNX Runtime has CUDA")
def test_model_on_a_missing_gpu_is_refused() -> None:
    """Without CUDA a model is not opened for the GPU, and the reason is the engine's."""
    with pytest.raises(TrialFailed, match="onnxruntime-gpu is not installed here"):
        PlacedModel(STREET, ModelPlacement(Device.GPU))


def test_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    """A model that takes no pictures is named in the reason."""
    with pytest.raises(TrialFailed, match="identity_fp32"):
        PlacedModel(STREET.parent / "identity_fp32", ON_CPU)
