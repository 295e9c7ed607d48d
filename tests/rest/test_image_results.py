"""The JSON of each kind of result, exactly."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import cv2
import jsonschema_rs
import msgspec
import numpy as np
import pytest

from penstock.client.arrays import vision_result
from penstock.gateway.rest.image_results import result_json
from penstock.protocol.image_answer import ImageResult, MaskForm
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
    VisionResult,
)
from penstock.vision.masks import mask_of
from tests.rest.harness import Front, described_by

COMPONENTS = described_by(Front())["components"]
LABELS = ("background", "", "person")
L_SHAPE = Mask(4, 6, 1, 1, np.array([[1, 0], [1, 0], [1, 1]], np.bool_))
RING = np.ones((5, 5), np.bool_)
RING[2, 2] = False


def written(result: VisionResult, masks: MaskForm = MaskForm.RLE, labels: Sequence[str] = LABELS) -> Any:
    """The result as a client reads it, checked against the API's description."""
    encoded = json.loads(msgspec.json.encode(result_json(result, labels, masks)))
    schema = {**COMPONENTS["schemas"]["ImageAnswer"]["properties"]["results"]["items"], "components": COMPONENTS}
    jsonschema_rs.validate(schema, encoded)
    return encoded


def boxes(**more: Any) -> Detections:
    """Two boxes of classes 2 and 1."""
    return Detections(
        np.array([[1.23456, 2, 3, 4], [0, 0, 6, 4]], np.float32),
        np.array([0.87654321, 0.5], np.float32),
        np.array([2, 1], np.int64),
        **more,
    )


FIRST = {"xyxy": [1.235, 2.0, 3.0, 4.0], "class_id": 2, "label": "person", "score": 0.876543}
SECOND = {"xyxy": [0.0, 0.0, 6.0, 4.0], "class_id": 1, "label": "1", "score": 0.5}


def test_detections_are_rounded_and_labelled() -> None:
    """Corners have three decimals, scores six; an empty label becomes the class id; other members are absent."""
    assert written(boxes()) == {"detections": [FIRST, SECOND]}
    assert written(boxes(), labels=())["detections"][0]["label"] == "2"
    assert written(Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))) == {
        "detections": []
    }


def test_detections_with_masks_as_run_lengths_are_read_back_equal() -> None:
    """COCO's compressed counts and the picture's [height, width] give the same pixels again."""
    found = written(boxes(masks=(L_SHAPE, Mask(4, 6, 0, 0, np.zeros((0, 0), np.bool_)))))["detections"]
    assert {key: value for key, value in found[0].items() if key != "mask"} == FIRST
    assert found[0]["mask"]["size"] == [4, 6]
    read = mask_of(found[0]["mask"]["counts"], 4, 6)
    assert (read.left, read.top, read.bits.tolist()) == (1, 1, L_SHAPE.bits.tolist())
    assert not mask_of(found[1]["mask"]["counts"], 4, 6).bits.size


def test_detections_with_masks_as_polygons_have_their_outlines() -> None:
    """Points are [x, y] in pixels of the picture; holes are left out; an empty mask has no outline."""
    masks = (Mask(20, 30, 10, 5, RING), Mask(20, 30, 0, 0, np.zeros((0, 0), np.bool_)))
    first, second = written(boxes(masks=masks), MaskForm.POLYGON)["detections"]
    assert first["polygons"] == [[[10.0, 5.0], [10.0, 9.0], [14.0, 9.0], [14.0, 5.0]]]
    assert second["polygons"] == []
    assert "mask" not in first


def test_detections_without_masks_have_no_such_member() -> None:
    """With masks=none neither form is written."""
    assert written(boxes(masks=(L_SHAPE, L_SHAPE)), MaskForm.NONE) == {"detections": [FIRST, SECOND]}


def test_detections_with_keypoints_and_turned_boxes_have_them() -> None:
    """Keypoints are [x, y, score] with three decimals, oriented boxes [x, y, width, height, radians] with five."""
    keypoints = np.array([[[1, 2, 0.98765], [3.00049, 4, 0]], [[0, 0, 0], [5, 6, 1]]], np.float32)
    xywhr = np.array([[10, 20, 30, 40, 0.7853981], [1, 2, 3, 4, -1.5]], np.float32)
    first, second = written(boxes(keypoints=keypoints, xywhr=xywhr))["detections"]
    assert first == FIRST | {
        "keypoints": [[1.0, 2.0, 0.988], [3.0, 4.0, 0.0]],
        "xywhr": [10.0, 20.0, 30.0, 40.0, 0.7854],
    }
    assert second["keypoints"] == [[0.0, 0.0, 0.0], [5.0, 6.0, 1.0]]


def test_classes_keep_their_order() -> None:
    """A class beyond the labels has its id as label."""
    assert written(Classes(np.array([0.7500001, 0.1], np.float32), np.array([0, 9]))) == {
        "classes": [{"class_id": 0, "label": "background", "score": 0.75}, {"class_id": 9, "label": "9", "score": 0.1}]
    }


def test_embedding_is_a_list_of_numbers() -> None:
    """Six decimals; no label belongs to it."""
    assert written(Embedding(np.array([0.12345678, -1, 0], np.float32))) == {"embedding": [0.123457, -1.0, 0.0]}


def test_text_has_a_polygon_if_it_has_a_place() -> None:
    """A line that fills the picture has none; a place that is not read has an empty text."""
    polygon = np.array([[1, 2], [3, 2], [3, 4], [1, 4.0004]], np.float32)
    assert written(TextLines((TextLine("EXIT 12 é", 0.98765432), TextLine("", 0.5, polygon)))) == {
        "text": [
            {"text": "EXIT 12 é", "score": 0.987654},
            {"text": "", "score": 0.5, "polygon": [[1.0, 2.0], [3.0, 2.0], [3.0, 4.0], [1.0, 4.0]]},
        ]
    }


@pytest.mark.parametrize("masks", list(MaskForm))
def test_segmentation_has_areas_of_classes(masks: MaskForm) -> None:
    """Each class has its number of pixels and, unless masks=none, its pixels in the form that was asked for."""
    found = SegmentationMap(4, 6, np.array([0, 2]), (Mask(4, 6, 0, 0, np.ones((4, 1), np.bool_)), L_SHAPE))
    answer = written(found, masks)["segmentation"]
    assert answer["size"] == [4, 6]
    assert [(one["class_id"], one["label"], one["area"]) for one in answer["classes"]] == [
        (0, "background", 4),
        (2, "person", 4),
    ]
    members = {MaskForm.RLE: {"counts"}, MaskForm.POLYGON: {"polygons"}, MaskForm.NONE: set()}[masks]
    assert set(answer["classes"][1]) == {"class_id", "label", "area"} | members
    if masks is MaskForm.RLE:
        assert mask_of(answer["classes"][1]["counts"], 4, 6).bits.tolist() == L_SHAPE.bits.tolist()


@pytest.mark.parametrize(
    "values",
    [np.linspace(-3, 40, 12, dtype=np.float32), np.full(12, 7, np.float32), np.array([-3e38, 3e38] * 6, np.float32)],
)
def test_depth_is_read_back_within_a_step(values: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
    """pixel × scale + offset is the depth, within half a step of the 16 bits; also if all is equal or very large."""
    answer = written(DepthMap(values.reshape(3, 4)))["depth"]
    assert answer["size"] == [3, 4]
    png = np.frombuffer(base64.b64decode(answer["png16"]), np.uint8)
    pixels = cv2.imdecode(png, cv2.IMREAD_UNCHANGED)
    assert pixels is not None
    assert pixels.dtype == np.uint16
    back = pixels.astype(np.float64) * answer["scale"] + answer["offset"]
    assert np.abs(back.ravel() - values).max() <= answer["scale"] * 0.501


POINTS = np.arange(12, dtype=np.float32).reshape(2, 2, 3) / 16
TURNED = np.array([[10, 20, 30, 40, 0.5], [1, 2, 3, 4, -1.5]], np.float32)
FILLED = np.zeros((4, 6), np.bool_)
FILLED[1:3, 2:5] = True
BLOCK = Mask(4, 6, 0, 0, FILLED)
ALL_KINDS: dict[str, VisionResult] = {
    "boxes": Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)),
    "masks": boxes(masks=(BLOCK, BLOCK), keypoints=POINTS, xywhr=TURNED),
    "classes": Classes(np.array([0.75, 0.125], np.float32), np.array([0, 9])),
    "embedding": Embedding(np.array([0.5, -1, 0], np.float32)),
    "text": TextLines((TextLine("EXIT", 0.5), TextLine("", 0.25, np.array([[1, 2], [3, 2], [3, 4]], np.float32)))),
    "areas": SegmentationMap(4, 6, np.array([2]), (BLOCK,)),
    "depth": DepthMap(np.linspace(-1, 3, 24, dtype=np.float32).reshape(4, 6)),
}


@pytest.mark.parametrize("masks", [MaskForm.RLE, MaskForm.POLYGON])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_result_of_every_kind_is_read_back_equal(kind: str, masks: MaskForm) -> None:
    """The JSON of what is read is the JSON that was written, with masks as run lengths and as outlines."""
    encoded = msgspec.json.encode(result_json(ALL_KINDS[kind], LABELS, masks))
    read = vision_result(msgspec.json.decode(encoded, type=ImageResult), 6, 4)
    assert type(read) is type(ALL_KINDS[kind])
    assert msgspec.json.encode(result_json(read, LABELS, masks)) == encoded
