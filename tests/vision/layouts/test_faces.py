"""UltraFace, YuNet and CenterFace, against a plain decoding in loops; UltraFace also with its real weights."""

import math
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import Datatype
from penstock.protocol.vision_results import Detections
from penstock.vision.card import card_from_config
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from tests.support.plain_detections import PlainBox, assert_same_detections, plain_iou, plain_nms
from tests.vision.layouts.pictures import BOXES, HEIGHT, WIDTH, Array, Case, assert_harmless, batch_of, seen
from tests.vision.test_parsers import answer

FACES = tuple(box._replace(class_id=0) for box in BOXES)
PARTS = ((0.3, 0.4), (0.7, 0.4), (0.5, 0.6), (0.35, 0.8), (0.65, 0.8))  # keypoints, in sizes of the box
STRIDES = (8, 16, 32)
Point = tuple[float, float]


def case_of(layout: str) -> Case:
    """YuNet keeps the picture's aspect ratio, the others stretch it."""
    return Case(layout, width=128, height=96, is_padded=layout == "yunet")


def network_faces(layout: str, faces: tuple[PlainBox, ...]) -> list[tuple[PlainBox, list[Point]]]:
    """Boxes and keypoints in network pixels."""
    found = []
    for box in map(case_of(layout).fit.to_network, faces):
        points = [(box.x0 + x * (box.x1 - box.x0), box.y0 + y * (box.y1 - box.y0)) for x, y in PARTS]
        found.append((box, points))
    return found


def ultraface(faces: tuple[PlainBox, ...] = FACES) -> dict[str, Array]:
    scores, boxes = np.tile(np.array([0.99, 0.01], np.float32), (50, 1)), np.zeros((50, 4), np.float32)
    for row, box in enumerate(faces):
        scores[row] = [1 - box.score, box.score]
        boxes[row] = [box.x0 / WIDTH, box.y0 / HEIGHT, box.x1 / WIDTH, box.y1 / HEIGHT]
    return {"scores": scores, "boxes": boxes}


def yunet(faces: tuple[PlainBox, ...] = FACES) -> dict[str, Array]:
    outputs: dict[str, Array] = {}
    for kind, width in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10)):
        for stride in STRIDES:
            outputs[f"{kind}_{stride}"] = np.full((128 // stride * 96 // stride, width), 0.04, np.float32)
    for place, (box, points) in enumerate(network_faces("yunet", faces)):
        stride = STRIDES[place % 3]
        x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        column, row = int(x / stride), int(y / stride)
        cell = row * (128 // stride) + column
        outputs[f"cls_{stride}"][cell], outputs[f"obj_{stride}"][cell] = box.score**2 / 0.9, 0.9
        width, height = box.x1 - box.x0, box.y1 - box.y0
        outputs[f"bbox_{stride}"][cell] = [
            x / stride - column,
            y / stride - row,
            math.log(width / stride),
            math.log(height / stride),
        ]
        outputs[f"kps_{stride}"][cell] = [value for x, y in points for value in (x / stride - column, y / stride - row)]
    return outputs


def centerface(faces: tuple[PlainBox, ...] = FACES) -> dict[str, Array]:
    maps = {
        name: np.full((channels, 24, 32), 0.05, np.float32)
        for name, channels in (("537", 1), ("538", 2), ("539", 2), ("540", 10))
    }
    for box, _ in network_faces("centerface", faces):
        x, y = (box.x0 + box.x1) / 8, (box.y0 + box.y1) / 8
        column, row = int(x), int(y)
        maps["537"][0, row, column] = box.score
        maps["538"][:, row, column] = [math.log((box.y1 - box.y0) / 4), math.log((box.x1 - box.x0) / 4)]
        maps["539"][:, row, column] = [y - row - 0.5, x - column - 0.5]
        maps["540"][:, row, column] = [value for x, y in PARTS for value in (y, x)]
    return maps


MAKERS: dict[str, Callable[..., dict[str, Array]]] = {"ultraface": ultraface, "yunet": yunet, "centerface": centerface}
WITH_POINTS = ("yunet", "centerface")
Face = tuple[PlainBox, list[Point]]


def plain_ultraface(outputs: dict[str, Array], threshold: float) -> list[Face]:
    case = case_of("ultraface")
    found = []
    for (_, score), row in zip(outputs["scores"].tolist(), outputs["boxes"].tolist(), strict=True):
        if score > threshold:
            x0, y0, x1, y1 = row[0] * case.width, row[1] * case.height, row[2] * case.width, row[3] * case.height
            found.append((PlainBox(x0, y0, x1, y1, 0, score), []))
    return found


def plain_yunet(outputs: dict[str, Array], threshold: float) -> list[Face]:
    found = []
    for stride in STRIDES:
        for cell in range(128 // stride * 96 // stride):
            column, row = cell % (128 // stride), cell // (128 // stride)
            likelihood, objectness = (
                min(max(float(outputs[f"{kind}_{stride}"][cell, 0]), 0.0), 1.0) for kind in ("cls", "obj")
            )
            score = math.sqrt(likelihood * objectness)
            if score <= threshold:
                continue
            x, y, width, height = (float(value) for value in outputs[f"bbox_{stride}"][cell])
            x, y, width, height = (
                (column + x) * stride,
                (row + y) * stride,
                math.exp(width) * stride,
                math.exp(height) * stride,
            )
            box = PlainBox(x - width / 2, y - height / 2, x + width / 2, y + height / 2, 0, score)
            values = [float(value) for value in outputs[f"kps_{stride}"][cell]]
            points = [((column + values[2 * k]) * stride, (row + values[2 * k + 1]) * stride) for k in range(5)]
            found.append((box, points))
    return found


def plain_centerface(outputs: dict[str, Array], threshold: float) -> list[Face]:
    heat, scale, offset, landmarks = outputs.values()
    found = []
    for row in range(24):
        for column in range(32):
            score = float(heat[0, row, column])
            if score <= threshold:
                continue
            height, width = (math.exp(float(value)) * 4 for value in scale[:, row, column])
            y0 = (row + float(offset[0, row, column]) + 0.5) * 4 - height / 2
            x0 = (column + float(offset[1, row, column]) + 0.5) * 4 - width / 2
            values = [float(value) for value in landmarks[:, row, column]]
            points = [(values[2 * k + 1] * width + x0, values[2 * k] * height + y0) for k in range(5)]
            found.append((PlainBox(x0, y0, x0 + width, y0 + height, 0, score), points))
    return found


PLAIN = {"ultraface": plain_ultraface, "yunet": plain_yunet, "centerface": plain_centerface}


def noise(layout: str, seed: int) -> dict[str, Array]:
    """Random outputs: overlapping boxes, scores on both sides of the threshold, also beyond 0 to 1."""
    random = np.random.default_rng(seed)
    if layout == "ultraface":
        low = random.uniform(0, 0.7, (200, 2))
        boxes = np.hstack([low, low + random.uniform(0.05, 0.4, (200, 2))]).astype(np.float32)
        score = random.uniform(0, 1, 200).astype(np.float32)
        return {"boxes": boxes, "scores": np.stack([1 - score, score], axis=1)}
    outputs = MAKERS[layout](())
    for name, array in outputs.items():
        array[:] = random.normal(0.3, 0.6, array.shape)
        if name == "537":
            array[:] = np.clip(array, 0, 1)
        elif name == "538":
            array[:] += 1
    return outputs


def assert_same_faces(found: Detections, wanted: list[Face]) -> None:
    """Boxes and scores, and keypoints within a pixel of the picture, each with score 1. wanted: in its pixels."""
    assert_same_detections(found, [box for box, _ in wanted])
    if not any(points for _, points in wanted):
        return
    assert found.keypoints is not None
    assert found.keypoints.shape == (len(wanted), 5, 3)
    assert (found.keypoints[:, :, 2] == 1).all()
    for xyxy, points in zip(found.xyxy.tolist(), found.keypoints.tolist(), strict=True):
        (_, expected) = max(wanted, key=lambda face: plain_iou(face[0], xyxy))
        for (x, y, _), (wanted_x, wanted_y) in zip(points, expected, strict=True):
            assert math.hypot(x - wanted_x, y - wanted_y) <= 1


def to_picture(layout: str, faces: list[Face]) -> list[Face]:
    """In pixels of the picture, clipped to it; faces outside it are left out."""
    fit = case_of(layout).fit
    found = []
    for box, points in faces:
        whole = [fit.to_picture(PlainBox(x, y, x, y, 0, 1)) for x, y in points]
        clipped = fit.to_picture(box)
        if clipped.x1 > clipped.x0 and clipped.y1 > clipped.y0:
            found.append((clipped, [(point.x0, point.y0) for point in whole]))
    return found


@pytest.mark.parametrize("layout", MAKERS)
def test_faces_that_are_known_come_back(layout: str) -> None:
    """Corners and keypoints in pixels of the picture, clipped to it, by falling score."""
    found = case_of(layout).detect(MAKERS[layout](), None)
    wanted = to_picture(layout, network_faces(layout, FACES))
    assert_same_detections(found, seen(FACES)[:4])
    if layout in WITH_POINTS:
        assert_same_faces(found, wanted)
    else:
        assert found.keypoints is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", MAKERS)
def test_faces_equal_the_plain_decoding(layout: str, seed: int) -> None:
    """Over 0.5; of two that overlap by more than 0.3, the one with the higher score."""
    outputs = noise(layout, seed)
    faces = PLAIN[layout](outputs, 0.5)
    chosen = plain_nms([box for box, _ in faces], 0.3)
    wanted = to_picture(layout, [face for face in faces if face[0] in chosen])
    assert 10 < len(wanted) < len(faces)
    assert_same_faces(case_of(layout).detect(outputs), wanted)


@pytest.mark.parametrize("layout", MAKERS)
def test_faces_of_a_batch_are_taken_by_row(layout: str) -> None:
    """Each picture has its own row."""
    batch = batch_of(MAKERS[layout](FACES[:1]), MAKERS[layout](FACES[1:]))
    assert_same_detections(case_of(layout).detect(batch, 0), seen(FACES[:1]))
    assert_same_detections(case_of(layout).detect(batch, 1), seen(FACES[1:]))


@pytest.mark.parametrize("layout", MAKERS)
def test_faces_with_hostile_values_are_refused_or_bounded(layout: str) -> None:
    """NaN, infinity, huge numbers, empty outputs, wrong shapes and types."""
    assert_harmless(case_of(layout), MAKERS[layout](FACES[:1]))


def test_yunet_finds_its_outputs_in_any_order_and_by_any_name() -> None:
    """Each stride has a number of cells of its own, and each output a number of columns."""
    outputs = {str(place): array for place, array in enumerate(reversed(yunet().values()))}
    assert_same_detections(case_of("yunet").detect(outputs), seen(FACES))


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        ("ultraface", {"scores": np.zeros((50, 3), np.float32)}, r"output 'scores' .*\[n, 2\] was expected"),
        ("ultraface", {"boxes": np.zeros((49, 4), np.float32)}, r"output 'boxes' .*\[50, 4\] was expected"),
        ("yunet", {"kps_8": np.zeros((192, 9), np.float32)}, r"output 'kps_8' .*\[cells, 1, 4 or 10\]"),
        ("yunet", {"kps_8": np.zeros((191, 10), np.float32)}, "a grid over the network's 128x96 pixels was expected"),
        ("yunet", {"obj_8": np.zeros((192, 4), np.float32)}, r"two \[192, 1\], a \[192, 4\] and a \[192, 10\]"),
        ("centerface", {"538": np.zeros((2, 24, 31), np.float32)}, r"output '538' .*\[2, 24, 32\] was expected"),
    ],
)
def test_faces_of_another_shape_are_refused_with_what_is_needed(
    layout: str, change: dict[str, Array], sentence: str
) -> None:
    """The error names the output."""
    with pytest.raises(EngineFailed, match=sentence):
        case_of(layout).detect({**MAKERS[layout](), **change})


def test_ultraface_on_real_photos_equals_plain_onnxruntime(shared_dir: Path) -> None:
    """JPEG → decode → resize → network → faces: the astronaut's face is found."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(shared_dir / "models" / "ultraface_rfb320.onnx"), options)
    parameters = {
        "network-type": "0",
        "layout": "ultraface",
        "offsets": "127;127;127",
        "net-scale-factor": repr(1 / 128),
    }
    inputs = (TensorSpec("input", Datatype.FP32, (1, 3, 240, 320)),)
    outputs = (TensorSpec("scores", Datatype.FP32, (1, 4420, 2)), TensorSpec("boxes", Datatype.FP32, (1, 4420, 4)))
    card = card_from_config(ModelConfig("faces", "onnxruntime", 0, inputs, outputs, parameters))
    assert card is not None
    for name, count in (("astronaut", 1), ("chelsea", None), ("coffee", 0)):
        encoded = (shared_dir / "media" / f"{name}.jpg").read_bytes()
        array, geometry = prepare(decode(encoded, card.prepare_spec.color), card.prepare_spec)
        scores, boxes = session.run(None, {"input": array[np.newaxis]})
        found = parse(card, answer(scores=scores, boxes=boxes), None, geometry)
        assert isinstance(found, Detections)
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
        height, width = picture.shape[:2]
        plain_input = (cv2.resize(picture, (320, 240)).astype(np.float32) - 127) / 128
        scores, boxes = session.run(None, {"input": np.ascontiguousarray(plain_input.transpose(2, 0, 1)[np.newaxis])})
        rows = zip(scores[0, :, 1].tolist(), boxes[0].tolist(), strict=True)
        over = [
            PlainBox(row[0] * width, row[1] * height, row[2] * width, row[3] * height, 0, score)
            for score, row in rows
            if score > 0.5
        ]
        wanted = [
            box._replace(x0=max(box.x0, 0), y0=max(box.y0, 0), x1=min(box.x1, width), y1=min(box.y1, height))
            for box in plain_nms(over, 0.3)
        ]
        assert count is None or len(wanted) == count
        assert_same_detections(found, wanted)
