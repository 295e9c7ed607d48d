"""What clients want of results: thresholds, classes and counts instead of the card's."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, DepthMap, Detections, Embedding, TextLine, TextLines, VisionResult
from penstock.vision.card import VisionCard
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import Geometry
from penstock.vision.results import CARD_DEFAULTS, ResultOptions, card_for, parse
from penstock.vision.spec import NetworkType
from tests.vision.test_card import card

GEOMETRY = Geometry(640, 352, 640, 352, 1.0, 1.0)
BOXES = InferResponse(
    "street",
    "1",
    (
        tensor_from_numpy(
            "boxes", np.array([[0, 0, 10, 10], [0, 1, 10, 10], [20, 0, 30, 10], [40, 0, 50, 9]], np.float32)
        ),
        tensor_from_numpy("scores", np.array([0.9, 0.6, 0.5, 0.01], np.float32)),
        tensor_from_numpy("class_ids", np.array([0, 0, 2, 1], np.int64)),
    ),
)
LABELLED = {"labels": "person;bicycle;Car;person;;a, b"}


def detector(**options: str) -> VisionCard:
    return card({"network-type": "0", **LABELLED, **{key.replace("_", "-"): value for key, value in options.items()}})


def found(wanted: ResultOptions, made: VisionCard | None = None) -> list[float]:
    """The scores that come."""
    result = parse(card_for(made or detector(), wanted), BOXES, None, GEOMETRY)
    assert isinstance(result, Detections)
    return [round(score, 2) for score in result.score.tolist()]


@pytest.mark.parametrize(
    ("wanted", "scores"),
    [
        (CARD_DEFAULTS, [0.9, 0.5]),
        (ResultOptions(conf=0.005), [0.9, 0.5, 0.01]),
        (ResultOptions(conf=0.0), [0.9, 0.5, 0.01]),
        (ResultOptions(conf=0.7), [0.9]),
        (ResultOptions(conf=1.0), []),
        (ResultOptions(iou=0.95), [0.9, 0.6, 0.5]),
        (ResultOptions(max_detections=1), [0.9]),
        (ResultOptions(classes=("2",)), [0.5]),
        (ResultOptions(classes=("car", "1"), conf=0.001), [0.5, 0.01]),
        (ResultOptions(classes=("5",)), []),
    ],
)
def test_card_for_wanted_options_changes_the_result(wanted: ResultOptions, scores: list[float]) -> None:
    """A threshold below the card's finds more; the others select among what is found."""
    assert found(wanted) == scores


def test_conf_replaces_thresholds_of_single_classes() -> None:
    """conf holds for all classes."""
    made = detector(class_thresholds="2:0.7")
    assert found(CARD_DEFAULTS, made) == [0.9]
    assert found(ResultOptions(conf=0.4), made) == [0.9, 0.5]
    assert found(ResultOptions(max_detections=1000), detector(topk="1")) == [0.9, 0.5]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("persn", "classes: the model has no label 'persn'; did you mean 'person'"),
        ("zebra", "classes: the model has no label 'zebra'; its labels begin with 'person', 'bicycle', 'Car'"),
        ("-1", "classes: the model has no label '-1'"),
        ("²", "classes: the model has no label '²'"),
        ("6", "classes: the model has no class 6; its class ids are 0 to 5"),
        ("99999999", "classes: the model has no class 99999999; its class ids are 0 to 5"),
        ("9" * 5000, "classes: the model has no class 9999"),
        ("x" * 5000, "classes: the model has no label 'xxx"),
    ],
)
def test_card_for_an_unknown_class_names_near_ones(name: str, why: str) -> None:
    """The message is short whatever the client sent."""
    with pytest.raises(InvalidRequest) as refused:
        card_for(detector(), ResultOptions(classes=("person", name)))
    assert refused.value.message.startswith(why)
    assert len(refused.value.message) < 300


def test_card_for_a_label_without_labels_wants_ids() -> None:
    """A model without labels can be asked for class ids only."""
    plain = card({"network-type": "0"})
    with pytest.raises(InvalidRequest, match="this model has no labels; use class ids"):
        card_for(plain, ResultOptions(classes=("car",)))
    assert card_for(plain, ResultOptions(classes=("2",))).layout_options.class_filter == {2}


def test_card_for_a_class_id_of_the_cards_class_ids() -> None:
    """With class-ids and no labels, the largest of them is the last one."""
    numbered = card({"network-type": "0", "class-ids": "7;90"})
    assert card_for(numbered, ResultOptions(classes=("90",))).layout_options.class_filter == {90}
    with pytest.raises(InvalidRequest, match="the model has no class 91; its class ids are 0 to 90"):
        card_for(numbered, ResultOptions(classes=("91",)))


def test_card_for_a_label_of_several_classes_has_all() -> None:
    """Labels are compared without regard to case; a label that stands twice means both classes."""
    assert card_for(detector(), ResultOptions(classes=("PERSON",))).layout_options.class_filter == {0, 3}


@pytest.mark.parametrize(
    ("layout", "wanted", "why"),
    [
        (
            "classification",
            ResultOptions(iou=0.5),
            "iou has no effect on this model (classifier, layout 'classification')",
        ),
        ("classification", ResultOptions(needs_masks=False), "masks has no effect on this model"),
        ("boxes", ResultOptions(needs_masks=True), "it can use classes, conf, iou, max_detections"),
        ("rt-detr", ResultOptions(iou=0.5), "it can use classes, conf, max_detections"),
        ("semantic", ResultOptions(conf=0.5), "conf has no effect on this model (segmentation, layout 'semantic')"),
        ("embedding", ResultOptions(conf=0.5), "(other, layout 'embedding'); leave it out"),
        ("depth", ResultOptions(classes=("1",)), "classes has no effect on this model (other, layout 'depth')"),
    ],
)
def test_card_for_an_option_without_effect_is_refused(layout: str, wanted: ResultOptions, why: str) -> None:
    """A parameter that changes nothing would mislead; the message says which can be used."""
    made = replace(detector(), layout=LAYOUTS[layout], network_type=LAYOUTS[layout].network_type)
    with pytest.raises(InvalidRequest) as refused:
        card_for(made, wanted)
    assert why in refused.value.message


def test_card_for_a_segmentation_without_masks_still_has_areas() -> None:
    """masks=none leaves out the pixels in the answer; the areas need them."""
    semantic = replace(detector(), layout=LAYOUTS["semantic"], network_type=NetworkType.SEGMENTATION)
    assert card_for(semantic, ResultOptions(needs_masks=False)).layout_options.needs_masks
    instances = replace(detector(), layout=replace(LAYOUTS["boxes"], network_type=NetworkType.INSTANCE_SEGMENTATION))
    assert not card_for(instances, ResultOptions(needs_masks=False)).layout_options.needs_masks
    assert card_for(instances, ResultOptions(conf=0.5)).layout_options.needs_masks


def test_classifier_conf_is_a_threshold_of_scores() -> None:
    """Classes with a lower score are left out; max_detections replaces topk."""
    made = card({"network-type": "1", "topk": "2", "labels": "a;b;c", "output-blob-names": "758"})
    response = InferResponse("m", "1", (tensor_from_numpy("758", np.array([0.2, 0.5, 0.3], np.float32)),))

    def classes(wanted: ResultOptions) -> list[int]:
        result = parse(card_for(made, wanted), response, None, GEOMETRY)
        assert isinstance(result, Classes)
        return result.class_id.tolist()

    assert classes(CARD_DEFAULTS) == [1, 2]
    assert classes(ResultOptions(conf=0.4)) == [1]
    assert classes(ResultOptions(max_detections=3)) == [1, 2, 0]
    assert classes(ResultOptions(classes=("A", "c"))) == [2, 0]


ONE = np.ones(1, np.float32)
NAN = np.full(1, np.nan, np.float32)
BOX = np.ones((1, 4), np.float32)
ID = np.zeros(1, np.int64)


@pytest.mark.parametrize(
    "result",
    [
        Detections(np.full((1, 4), np.inf, np.float32), ONE, ID),
        Detections(BOX, NAN, ID),
        Detections(BOX, ONE, ID, keypoints=np.full((1, 2, 3), np.nan, np.float32)),
        Detections(BOX, ONE, ID, xywhr=np.full((1, 5), -np.inf, np.float32)),
        Classes(NAN, ID),
        Embedding(NAN),
        TextLines((TextLine("a", float("nan")),)),
        TextLines((TextLine("a", 1.0, np.full((4, 2), np.nan, np.float32)),)),
        DepthMap(NAN.reshape(1, 1)),
    ],
)
def test_result_with_numbers_that_json_has_not_is_an_error_of_the_model(result: VisionResult) -> None:
    """NaN and infinity never reach a client: the message names the layout."""
    made = replace(detector(), layout=replace(LAYOUTS["boxes"], decode=lambda *_: result))
    with pytest.raises(EngineFailed, match="layout 'boxes' computes numbers that are NaN or infinite"):
        parse(made, BOXES, None, GEOMETRY)
