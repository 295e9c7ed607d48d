"""A picture goes in, labelled results in its own pixels come out, through the real Triton."""

import json
import subprocess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.integration.pictures import Picture, fastestdet_boxes, fastestdet_input, frames, iou, jpeg
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack
from tests.vision import images
from tests.vision.test_decode import UPRIGHT

pytestmark = pytest.mark.xdist_group("stack")
INPUT, OUTPUT = "input.1", "758"


@pytest.fixture(scope="module")
def pictures(shared_dir: Path) -> tuple[Picture, ...]:
    return frames(shared_dir / "media" / "vtest.avi")


@pytest.fixture(scope="module")
def reference(shared_dir: Path) -> onnxruntime.InferenceSession:
    """FastestDet in plain onnxruntime."""
    return onnxruntime.InferenceSession(str(shared_dir / "models" / "FastestDet.onnx"))


def thresholds(stack: RunningStack) -> tuple[float, float]:
    """What fastestdet's own config says."""
    config = call("GET", f"{stack.http_url}/v2/models/fastestdet/config").json
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    return float(parameters["pre-cluster-threshold"]), float(parameters["nms-iou-threshold"])


def assert_same_boxes(
    detections: list[dict[str, object]], expected: list[tuple[int, float, tuple[float, float, float, float]]]
) -> None:
    assert len(detections) == len(expected)
    for found in detections:
        best = max((e for e in expected if e[0] == found["class_id"]), key=lambda e: iou(e[2], tuple(found["xyxy"])))
        assert iou(best[2], tuple(found["xyxy"])) >= 0.99
        assert abs(best[1] - found["score"]) <= 1e-3


def test_people_by_curl_finds_the_people_of_a_street_picture(
    stack: RunningStack, pictures: tuple[Picture, ...], tmp_path: Path
) -> None:
    """README's curl command, as a user types it, on a frame of a real street."""
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(jpeg(pictures[1]))
    command = ["curl", "-s", "--data-binary", f"@{photo}", "-H", "content-type: image/jpeg"]
    url = f"{stack.http_url}/v2/models/people/image"
    answer = json.loads(subprocess.run([*command, url], capture_output=True, check=True).stdout)
    assert (answer["model_name"], answer["model_version"], answer["batch_size"]) == ("people", "1", 1)
    detections = answer["results"][0]["detections"]
    assert len(detections) >= 2
    height, width = pictures[1].shape[:2]
    for found in detections:
        x1, y1, x2, y2 = found["xyxy"]
        assert 0 <= x1 < x2 <= width
        assert 0 <= y1 < y2 <= height
        assert (found["label"], found["class_id"]) == ("person", 0)
        assert 0 < found["score"] <= 1
    assert set(answer["timings_ms"]) == {"decode", "preprocess", "queue", "infer", "postprocess", "total"}
    assert answer["timings_ms"]["infer"] > 0
    assert answer["timings_ms"]["decode"] > 0


def test_fastestdet_image_equals_plain_onnxruntime(
    stack: RunningStack, pictures: tuple[Picture, ...], reference: onnxruntime.InferenceSession
) -> None:
    """Boxes within IoU 0.99 and scores within 1e-3 of onnxruntime with the documented decoding and filter."""
    assert_answers_as_plain_onnxruntime(stack, pictures, reference)


def assert_answers_as_plain_onnxruntime(
    stack: RunningStack, pictures: tuple[Picture, ...], reference: onnxruntime.InferenceSession
) -> None:
    """Each picture's boxes by /image are the reference's, with the documented decoding and the filter in use."""
    score_threshold, iou_threshold = thresholds(stack)
    boxes = 0
    for picture in pictures:
        body = jpeg(picture)
        answer = call("POST", f"{stack.http_url}/v2/models/fastestdet/image", body, {"content-type": "image/jpeg"})
        assert answer.status == 200, answer.body
        decoded = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
        (output,) = reference.run([OUTPUT], {INPUT: fastestdet_input(decoded)})
        height, width = decoded.shape[:2]
        expected = fastestdet_boxes(
            output, width=width, height=height, score_threshold=score_threshold, iou_threshold=iou_threshold
        )
        assert_same_boxes(answer.json["results"][0]["detections"], expected)
        boxes += len(expected)
    assert boxes >= 5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_with_an_exif_orientation_is_answered_in_display_pixels(
    stack: RunningStack, pictures: tuple[Picture, ...], orientation: int
) -> None:
    """FAULTS 83: this holds for Triton and all eight orientations."""
    assert_oriented_is_answered_as_upright(stack, pictures[1], orientation)


def assert_oriented_is_answered_as_upright(stack: RunningStack, upright: Picture, orientation: int) -> None:
    """A PNG with an EXIF orientation gets the same answer as the upright one.

    A JPEG, which is lossy, gets the same boxes and labels for objects with high scores.
    """
    stored = np.ascontiguousarray(UPRIGHT[{6: 8, 8: 6}.get(orientation, orientation)](upright[:, :, ::-1]))
    tiff = images.exif(orientation)
    url = f"{stack.http_url}/v2/models/fastestdet/image"

    def asked(body: bytes, kind: str) -> list[dict[str, Any]]:
        answer = call("POST", url, body, {"content-type": f"image/{kind}"})
        assert answer.status == 200, answer.body
        detections: list[dict[str, Any]] = answer.json["results"][0]["detections"]
        return detections

    expected = asked(images.png(upright[:, :, ::-1], color_type=2), "png")
    assert max(one["score"] for one in expected) > 0.5
    assert asked(images.png(stored, color_type=2, before_pixels=images.png_chunk(b"eXIf", tiff)), "png") == expected
    found = asked(images.jpeg_with_exif(jpeg(stored[:, :, ::-1]), tiff), "jpeg")
    for one in (one for one in expected if one["score"] > 0.5):
        matches = [other for other in found if other["label"] == one["label"]]
        assert max(iou(tuple(one["xyxy"]), tuple(other["xyxy"])) for other in matches) > 0.5


def test_fastestdet_raw_tensors_equal_plain_onnxruntime_by_rest_and_grpc(
    stack: RunningStack, pictures: tuple[Picture, ...], reference: onnxruntime.InferenceSession
) -> None:
    """The v2 tensor path gives the same numbers over both protocols."""
    array = fastestdet_input(pictures[0])
    (expected,) = reference.run([OUTPUT], {INPUT: array})
    for module, address in (
        (tritonclient.http, stack.http_url.removeprefix("http://")),
        (tritonclient.grpc, stack.grpc_address),
    ):
        client = module.InferenceServerClient(address)
        tensor = module.InferInput(INPUT, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        output = client.infer("fastestdet", [tensor]).as_numpy(OUTPUT)
        client.close()
        assert output.shape == expected.shape
        np.testing.assert_allclose(output, expected, atol=1e-4)


def test_image_multipart_of_several_pictures_answers_each_in_order(
    stack: RunningStack, pictures: tuple[Picture, ...]
) -> None:
    """Two pictures in one form: two results, each equal to the picture's own."""
    url = f"{stack.http_url}/v2/models/fastestdet/image"
    bodies = [jpeg(picture) for picture in pictures[:2]]
    single = [call("POST", url, body, {"content-type": "image/jpeg"}).json["results"][0] for body in bodies]
    form = b"".join(
        b'--x\r\ncontent-disposition: form-data; name="f"; filename="a.jpg"\r\ncontent-type: image/jpeg\r\n\r\n'
        + body
        + b"\r\n"
        for body in bodies
    )
    answer = call("POST", url, form + b"--x--\r\n", {"content-type": "multipart/form-data; boundary=x"})
    assert answer.status == 200, answer.body
    assert answer.json["results"] == single


def test_image_for_model_without_vision_card_is_refused_with_the_reason(
    stack: RunningStack, pictures: tuple[Picture, ...]
) -> None:
    """A tensor model says what is missing; an unknown one is 404."""
    headers = {"content-type": "image/jpeg"}
    answer = call("POST", f"{stack.http_url}/v2/models/identity_fp32/image", jpeg(pictures[0]), headers)
    assert answer.status == 400
    assert "network-type" in answer.json["error"]
    answer = call("POST", f"{stack.http_url}/v2/models/missing/image", jpeg(pictures[0]), headers)
    assert answer.status == 404
    assert "missing" in answer.json["error"]


def test_image_with_draw_is_the_photo_with_its_boxes(stack: RunningStack) -> None:
    """An annotated JPEG of the photo's size; a threshold below the model's finds more, and max_detections bounds it."""
    photo = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
    url = f"{stack.http_url}/v2/models/street/image"
    headers = {"content-type": "image/jpeg"}

    def found(query: str) -> list[dict[str, Any]]:
        answer = call("POST", f"{url}?{query}", photo, headers)
        assert answer.status == 200, answer.body
        boxes: list[dict[str, Any]] = answer.json["results"][0]["detections"]
        return boxes

    usual = found("draw=0")
    assert len(found("conf=0.01")) > len(usual) > len(found("conf=0.8"))
    assert found("max_detections=1") == usual[:1]
    label = usual[0]["label"]
    assert {one["label"] for one in found(f"classes={label}&conf=0.01")} == {label}
    drawn = call("POST", f"{url}?draw=1", photo, headers)
    assert (drawn.status, drawn.headers["content-type"]) == (200, "image/jpeg")
    before, after = (cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) for data in (photo, drawn.body))
    assert before is not None
    assert after is not None
    assert before.shape == after.shape
    x1, y1, x2, _ = (round(value) for value in usual[0]["xyxy"])
    edge = (slice(max(y1, 0), y1 + 2), slice(max(x1, 0) + 4, x2 - 4))
    assert np.abs(before[edge].astype(int) - after[edge]).mean() > 20
