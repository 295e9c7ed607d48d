"""The model `people` in a real Triton, on real pictures."""

import json
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

from tests.model_repository.conftest import ServeModel
from tests.vision.test_parsers import overlap

MARKED = json.loads((Path(__file__).parent / "vtest_people.json").read_text())["frames"]
WORKING_SCORE = 0.5  # config.pbtxt's pre-cluster-threshold
HIT_IOU = 0.4

Image = npt.NDArray[np.uint8]
Box = npt.NDArray[np.float32]

pytestmark = pytest.mark.xdist_group("people")


class People:
    """The model over Triton's own HTTP."""

    def __init__(self, client: triton_http.InferenceServerClient) -> None:
        self._client = client

    def find(self, image: Image) -> tuple[Box, npt.NDArray[np.float32]]:
        """boxes (n, 4) and scores (n,), every one a person."""
        tensor = triton_http.InferInput("image", list(image.shape), "UINT8")
        tensor.set_data_from_numpy(np.ascontiguousarray(image))
        answer = self._client.infer("people", [tensor])
        boxes, scores, class_ids = (answer.as_numpy(name) for name in ("boxes", "scores", "class_ids"))
        assert (boxes.dtype, scores.dtype, class_ids.dtype) == (np.float32, np.float32, np.int64)
        assert boxes.shape == (len(scores), 4)
        assert class_ids.tolist() == [0] * len(scores)
        return boxes, scores

    def find_likely(self, image: Image) -> Box:
        """The boxes that the gateway would show."""
        boxes, scores = self.find(image)
        return boxes[scores > WORKING_SCORE]


@pytest.fixture(scope="module")
def people(serve_model: ServeModel) -> People:
    """The model in a Triton of its own."""
    return People(serve_model("people"))


@pytest.fixture(scope="module")
def frames(shared_dir: Path) -> dict[str, Image]:
    """The marked frames of vtest.avi, by number."""
    video = cv2.VideoCapture(str(shared_dir / "media" / "vtest.avi"))
    found: dict[str, Image] = {}
    for number in range(max(int(name) for name in MARKED) + 1):
        is_there, frame = video.read()
        assert is_there
        if str(number) in MARKED:
            found[str(number)] = frame
    return found


def match(boxes: Box, name: str) -> tuple[int, int]:
    """How many of a frame's marked people are found, and how many boxes are none of them."""
    left = list(MARKED[name]["people"])
    false = 0
    for box in boxes:
        hit = max(left, key=lambda marked: overlap(box, marked), default=None)
        if hit is not None and overlap(box, hit) >= HIT_IOU:
            left.remove(hit)
        elif not any(overlap(box, unclear) > 0.3 for unclear in MARKED[name]["unclear"]):
            false += 1
    return len(MARKED[name]["people"]) - len(left), false


def test_people_in_frames_of_a_real_street_are_found(people: People, frames: dict[str, Image]) -> None:
    """Of 120 people marked in 20 frames it finds as many as MODEL.md says (98), with at most 2 false boxes."""
    results = [match(people.find_likely(frame), name) for name, frame in frames.items()]
    assert len(results) == 20
    assert sum(found for found, _ in results) >= 96
    assert sum(false for _, false in results) <= 2


def test_people_in_an_enlarged_frame_are_boxed_in_its_own_pixels(people: People, frames: dict[str, Image]) -> None:
    """A picture over the working size is shrunk inside; its boxes are still in the pixels that were sent."""
    large = cv2.resize(frames["280"], None, fx=3, fy=3, interpolation=cv2.INTER_CUBIC)
    found, _ = match(people.find_likely(large) / 3, "280")
    assert found >= 6


def test_people_in_rgb_are_found_as_in_bgr(people: People, frames: dict[str, Image]) -> None:
    """The descriptor takes the strongest channel's gradient, so the channels' order does not matter."""
    boxes, scores = people.find(frames["40"])
    swapped_boxes, swapped_scores = people.find(frames["40"][..., ::-1])
    assert len(scores) > 0
    np.testing.assert_array_equal(boxes, swapped_boxes)
    np.testing.assert_allclose(scores, swapped_scores, atol=0.01)


def test_people_scores_fall_and_boxes_lie_in_the_picture(people: People, frames: dict[str, Image]) -> None:
    """Strongest first, scores in (0, 1), corners in order and inside."""
    boxes, scores = people.find(frames["720"])
    assert np.all(np.diff(scores) <= 0)
    assert np.all((scores > 0.3) & (scores <= 1))
    assert np.all((boxes[:, :2] >= 0) & (boxes[:, :2] < boxes[:, 2:]))
    assert np.all(boxes[:, 2:] <= (768, 576))


@pytest.mark.parametrize(
    "shape", [(0, 640, 3), (480, 0, 3), (1, 1, 3), (102, 400, 3), (400, 51, 3), (1, 60_000, 3), (480, 640, 3)], ids=str
)
def test_people_in_a_tiny_or_empty_picture_are_none(people: People, shape: tuple[int, int, int]) -> None:
    """No rows, a picture smaller than the detector's window, a hair's breadth, a grey wall: no boxes and no error."""
    boxes, scores = people.find(np.full(shape, 127, np.uint8))
    assert len(boxes) == len(scores) == 0


@pytest.mark.parametrize("shape", [(480, 640, 4), (480, 640), (1, 480, 640, 3)], ids=str)
def test_people_from_another_shape_are_refused(people: People, shape: tuple[int, ...]) -> None:
    """Another number of channels or dimensions is Triton's own error."""
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'image'"):
        people.find(np.zeros(shape, np.uint8))
