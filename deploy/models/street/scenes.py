"""Many scenes at once, as the network sees them: rendered by all cores, kept in memory."""

import multiprocessing
import os
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.progress import Progress
from deploy.models.street.scene import make_scene

MOST_OBJECTS = 64
NOBODY = -1
_SIZES = ((640, 360),) * 6 + ((1280, 720), (960, 540), (768, 576), (480, 270))
_MIX = ("plain", "plain", "crowd", "crowd", "crowd", "occlusion", "occlusion", "noise", "noise", "night")


@dataclass(frozen=True, slots=True)
class Scenes:
    """pictures: (n, height, width, 3) uint8 BGR, padded with black at the right and the bottom.

    boxes: (n, MOST_OBJECTS, 4) float32 in those pixels. classes: (n, MOST_OBJECTS) int8: the class, minus 1 where there
    is nothing, minus 2 - class for what is ignored.
    """

    pictures: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class _Job:
    seed: int
    number: int
    width: int
    height: int


def render_scenes(seed: int, count: int, size: tuple[int, int], *, processes: int) -> Scenes:
    """The seed's first scenes of the training mix. size: the network's (width, height). Prints progress."""
    width, height = size
    scenes = Scenes(
        np.zeros((count, height, width, 3), np.uint8),
        np.zeros((count, MOST_OBJECTS, 4), np.float32),
        np.full((count, MOST_OBJECTS), NOBODY, np.int8),
    )
    jobs = [_Job(seed, number, width, height) for number in range(count)]
    progress = Progress(count, "scenes")
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_settle) as pool:
        for done, (picture, boxes, classes) in enumerate(pool.imap(_render, jobs, chunksize=16)):
            scenes.pictures[done], scenes.boxes[done], scenes.classes[done] = picture, boxes, classes
            progress.reached(done + 1)
    return scenes


def training_scene(seed: int, number: int) -> tuple[str, tuple[int, int]]:
    """The scenario and the size (width, height) of that scene of the training mix."""
    generator = np.random.default_rng([seed, number])
    return _MIX[generator.integers(len(_MIX))], _SIZES[generator.integers(len(_SIZES))]


def fit(picture: npt.NDArray[np.uint8], size: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], float]:
    """The picture as the gateway hands it to the network (bilinear, padded), and the scale. size: (width, height)."""
    height, width = picture.shape[:2]
    scale = min(size[0] / width, size[1] / height)
    fitted = (max(round(width * scale), 1), max(round(height * scale), 1))
    whole = np.zeros((size[1], size[0], 3), np.uint8)
    whole[: fitted[1], : fitted[0]] = cv2.resize(picture, fitted, interpolation=cv2.INTER_LINEAR)
    return whole, scale


def _settle() -> None:
    cv2.setNumThreads(1)
    os.nice(5)


def _render(job: _Job) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.int8]]:
    scenario, size = training_scene(job.seed, job.number)
    picture, truth = make_scene(job.seed, job.number, size=size, scenario=scenario)
    fitted, scale = fit(picture, (job.width, job.height))
    order = np.argsort(-truth.visible, kind="stable")[:MOST_OBJECTS]
    boxes = np.zeros((MOST_OBJECTS, 4), np.float32)
    classes = np.full(MOST_OBJECTS, NOBODY, np.int8)
    boxes[: len(order)] = truth.xyxy[order] * scale
    classes[: len(order)] = np.where(truth.is_ignored, -2 - truth.class_id, truth.class_id)[order]
    return fitted, boxes, classes
