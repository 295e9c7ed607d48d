"""YOLOX-S with random weights: the folder's card, and, where PyTorch is, both forms of its answers by our decoders."""

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from deploy.models.torch_folder import Form
from deploy.models.yolox_torch import NAME, TOP_NAME, detector, run
from penstock.engines.config_pbtxt import config_from_proto
from penstock.protocol.vision_results import Detections
from penstock.vision.card import card_from_config
from penstock.vision.spec import ResizeMode
from tests.vision.layouts.decoding import decoded, fitted

ISSUES_GFLOPS = 25  # that issue 34 wants a detector to have at least


@pytest.mark.parametrize(("top", "layout", "dims"), [(0, "yolox", [8400, 85]), (300, "deepstream-yolo", [300, 6])])
def test_card_is_that_of_a_detector(top: int, layout: str, dims: list[int]) -> None:
    """BGR pixels, padded right and below, and a layout that does NMS."""
    text = detector("uint8", top).config_text(Form(TOP_NAME if top else NAME))
    proto = text_format.Parse(text, ModelConfig())
    card = card_from_config(config_from_proto(proto))
    assert card is not None
    assert (card.layout.name, list(proto.output[0].dims)) == (layout, dims)
    assert proto.parameters["model-color-format"].string_value == "1"
    assert len(proto.parameters["labels"].string_value.split(";")) == 80


def test_more_rows_than_there_are_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is exported."""
    with pytest.raises(SystemExit, match="2"):
        run(["--top", "8401"])
    assert "--top 8401 is more than the 8400 rows" in capsys.readouterr().err


def test_both_forms_give_the_same_boxes() -> None:
    """By the decoders of their layouts; and the network has the work of a detector of today."""
    torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")
    from torch.utils.flop_counter import FlopCounterMode

    from deploy.models.yolox_network import AsFloats, TopRows, YoloxS

    network = YoloxS(0)
    image = torch.from_numpy(_street())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        rows = AsFloats(network)(image)[0].numpy()
    assert counter.get_total_flops() > ISSUES_GFLOPS * 1e9
    with torch.no_grad():
        top = AsFloats(TopRows(network, 300))(image)[0].float().numpy()
    geometry = fitted((1920, 1080), (640, 640), ResizeMode.PAD_RIGHT_BOTTOM)
    every: Detections = decoded(Detections, "yolox", (rows,), geometry)
    best: Detections = decoded(Detections, "deepstream-yolo", (top,), geometry)
    assert 1 <= len(every.score) <= 200
    np.testing.assert_allclose(best.xyxy, every.xyxy, atol=0.01)
    np.testing.assert_allclose(best.score, every.score, atol=1e-5)
    assert list(best.class_id) == list(every.class_id)


def _street() -> Any:
    """(1, 3, 640, 640) uint8: boxes of one colour each on grey, and grey below."""
    drawn = np.random.default_rng(4)
    image = np.full((1, 3, 640, 640), 114, np.uint8)
    for _ in range(60):
        x, y, width, height = drawn.integers(0, 500), drawn.integers(0, 300), *drawn.integers(10, 120, 2)
        image[0, :, y : min(y + height, 360), x : x + width] = drawn.integers(0, 256, (3, 1, 1))
    return image
