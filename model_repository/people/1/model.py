"""People by OpenCV's HOG descriptor and the linear SVM that ships inside OpenCV (4.x; OpenCV 5 has none).

Runs in Triton's python backend. `image`: (height, width, 3) uint8, any size. The answer: `boxes` (n, 4) float32 xyxy in
pixels of that image, `scores` (n,) float32 falling, `class_ids` (n,) int64, all 0. MODEL.md tells what it finds.
"""

import json
import math

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

WINDOW_WIDTH, WINDOW_HEIGHT = 64, 128  # of the descriptor that the SVM was trained on
PERSON_WIDTH, PERSON_HEIGHT = 0.54, 0.76  # share of the window that the person fills: measured, see MODEL.md
WINDOW_STRIDE = (8, 8)  # the descriptor's cell; a finer stride costs 3.3 times the work
PADDING = (16, 16)  # the margin of the training windows: people who touch the picture's edge
PYRAMID_STEP = 1.08
MAX_ENLARGEMENT = 1.25  # the window wants people of about 96 pixels; surveillance pictures have smaller ones
MAX_WORKING_SIDE = 1280  # pixels; bounds the work, whatever comes
MAX_CONTAINED = 0.75  # a box this far inside a stronger one is the same person at another scale
MAX_DETECTIONS = 256
SCORE_SLOPE, SCORE_CENTRE = 2.0, 0.3  # score = 1 / (1 + exp(-slope · (margin - centre)))


class TritonPythonModel:
    """One instance; Triton runs each in a process of its own."""

    def initialize(self, args):
        """Reads `nms-iou-threshold` from config.pbtxt, the same word the gateway reads."""
        cv2.setNumThreads(1)  # the instances are the parallelism
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_overlap = float(parameters["nms-iou-threshold"]["string_value"])
        self._hog = cv2.HOGDescriptor()
        self._hog.setSVMDetector(cv2.HOGDescriptor_getDefaultPeopleDetector())

    def execute(self, requests):
        """One answer a request; a request that fails fails alone."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
        try:
            boxes, scores = find_people(self._hog, image, self._max_overlap)
        except cv2.error as error:
            reason = f"OpenCV failed on an image of shape {list(image.shape)}: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(reason))
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("boxes", boxes),
                pb_utils.Tensor("scores", scores),
                pb_utils.Tensor("class_ids", np.zeros(len(scores), np.int64)),
            ]
        )


def find_people(hog, image, max_overlap):
    """Boxes (n, 4) and scores (n,), both float32, strongest first; empty where the window does not fit the image."""
    scale = working_scale(image.shape)
    working = resize(image, scale)
    if working is None:
        return np.zeros((0, 4), np.float32), np.zeros(0, np.float32)
    windows, margins = hog.detectMultiScale(
        working, hitThreshold=0.0, winStride=WINDOW_STRIDE, padding=PADDING, scale=PYRAMID_STEP, groupThreshold=0
    )
    windows = np.asarray(windows, np.float32).reshape(-1, 4) / scale
    margins = np.asarray(margins, np.float32).reshape(-1)
    boxes = boxes_of_windows(windows, image.shape)
    kept = suppress(boxes, margins, max_overlap)
    scores = 1.0 / (1.0 + np.exp(-SCORE_SLOPE * (margins[kept] - SCORE_CENTRE)))
    return np.ascontiguousarray(boxes[kept], np.float32), scores.astype(np.float32)


def working_scale(shape):
    """How much the image is enlarged (at most 1.25) or shrunk (to 1280 pixels) before the search."""
    return min(MAX_ENLARGEMENT, MAX_WORKING_SIDE / max(shape[0], shape[1], 1))


def resize(image, scale):
    """The image resized by scale, or None if it is then smaller than the detector's window."""
    height, width = math.floor(image.shape[0] * scale), math.floor(image.shape[1] * scale)
    if height < WINDOW_HEIGHT or width < WINDOW_WIDTH:
        return None
    if scale == 1.0:
        return np.ascontiguousarray(image)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if scale < 1.0 else cv2.INTER_LINEAR)


def boxes_of_windows(windows, shape):
    """Windows (x, y, width, height), cut to the person inside them and to the image, as xyxy."""
    centres = windows[:, :2] + windows[:, 2:] / 2
    halves = windows[:, 2:] * (PERSON_WIDTH / 2, PERSON_HEIGHT / 2)
    corners = np.concatenate([centres - halves, centres + halves], axis=1)
    return np.clip(corners, 0.0, (shape[1], shape[0], shape[1], shape[0])).astype(np.float32)


def suppress(boxes, margins, max_overlap):
    """Indices of the boxes that stay, strongest first: greedy, by overlap and by containment."""
    areas = np.maximum(boxes[:, 2] - boxes[:, 0], 0) * np.maximum(boxes[:, 3] - boxes[:, 1], 0)
    order = np.argsort(-margins, kind="stable")
    order = order[areas[order] > 0]
    kept = []
    while order.size and len(kept) < MAX_DETECTIONS:
        first, rest = order[0], order[1:]
        kept.append(int(first))
        sides = np.minimum(boxes[first, 2:], boxes[rest, 2:]) - np.maximum(boxes[first, :2], boxes[rest, :2])
        shared = np.prod(np.maximum(sides, 0), axis=1)
        overlap = shared / (areas[first] + areas[rest] - shared)
        contained = shared / np.minimum(areas[first], areas[rest])
        order = rest[(overlap <= max_overlap) & (contained <= MAX_CONTAINED)]
    return np.asarray(kept, np.int64)
