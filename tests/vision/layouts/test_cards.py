"""Cards of the layouts beyond boxes: their network types, their defaults, and the query parameters that they take."""

import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.card import VisionCard, card_from_config

BOXES = {"conf", "iou", "classes", "max_detections"}
FINAL = BOXES - {"iou"}


def card_of(layout: str, network_type: str, **more: str) -> VisionCard:
    inputs, outputs = (TensorSpec("images", Datatype.FP32, (3, 64, 64)),), (TensorSpec("a", Datatype.FP32, (8, 84)),)
    parameters = {"network-type": network_type, "layout": layout, "maintain-aspect-ratio": "1"}
    card = card_from_config(ModelConfig("any", "onnxruntime", 0, inputs, outputs, {**parameters, **more}))
    assert card is not None
    return card


@pytest.mark.parametrize(
    ("layout", "network_type", "thresholds", "usable"),
    [
        ("yolov8-seg", "instance_segmentation", (0.25, 0.45, 0.5), BOXES | {"masks"}),
        ("yolov5-seg", "instance_segmentation", (0.25, 0.45, 0.5), BOXES | {"masks"}),
        ("yolo-end2end-seg", "instance_segmentation", (0.25, 0.45, 0.5), FINAL | {"masks"}),
        ("rf-detr-seg", "instance_segmentation", (0.25, 0.45, 0.5), FINAL | {"masks"}),
        ("yolov8-pose", "detector", (0.25, 0.45, 0.5), BOXES),
        ("yolo-end2end-pose", "detector", (0.25, 0.45, 0.5), FINAL),
        ("rtmo", "detector", (0.25, 0.45, 0.5), FINAL),
        ("yolov8-obb", "detector", (0.25, 0.45, 0.5), BOXES),
        ("yolo-end2end-obb", "detector", (0.25, 0.45, 0.5), FINAL),
        ("semantic", "segmentation", (0.25, 0.45, 0.5), {"classes", "masks"}),
        ("semantic-multilabel", "segmentation", (0.25, 0.45, 0.5), {"classes", "masks"}),
        ("depth", "other", (0.25, 0.45, 0.5), set()),
        ("embedding", "other", (0.25, 0.45, 0.5), set()),
        ("ctc", "other", (0.0, 0.45, 0.5), {"conf"}),
        ("db", "other", (0.6, 0.45, 0.3), {"conf", "max_detections"}),
    ],
)
def test_card_has_its_layouts_defaults(
    layout: str, network_type: str, thresholds: tuple[float, ...], usable: set[str]
) -> None:
    """Thresholds of scores, of the suppression, of masks; parameters of /image that change nothing are not taken."""
    card = card_of(layout, network_type)
    options = card.layout_options
    found = (options.pre_cluster_threshold, options.nms_iou_threshold, options.segmentation_threshold)
    assert (card.layout.name, found, card.layout.usable_options) == (layout, thresholds, usable)
    own = card_of(layout, network_type, **{"segmentation-threshold": "0.4", "pre-cluster-threshold": "0.1"})
    assert own.layout_options.segmentation_threshold == 0.4
    assert own.layout_options.pre_cluster_threshold == 0.1


def test_layout_of_another_network_type_is_refused_with_those_that_fit() -> None:
    """Masks are no boxes."""
    with pytest.raises(InvalidRequest, match="yolov8-pose"):
        card_of("yolov8-seg", "detector")
