"""Clips: a fixed camera, traffic along the street, and the truth about every frame and every crossing of a line."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np

from deploy.models.street.layout import sample_camera, sample_layout, visible_span
from deploy.models.street.lens import Picture, sample_lens
from deploy.models.street.progress import Progress
from deploy.models.street.scene import sample_stage
from deploy.models.street.stage import LABELS, FrameTruth, Item, Stage, draw, shoot
from deploy.models.street.traffic import Mover, sample_traffic

_MOST_YAW = 0.45  # radians: at the line everybody passes before the camera, not towards it
_CODEC = "mp4v"
_LINE_START_Y = 0.1  # metres; the near pavement begins at 0
_LEAST_ROOM_M = 2.0  # of the places where the line may be
_MOST_TRIES = 200
_CLEAR_M = 2.5  # along the street, on both sides of the line
_MOST_COVER = 0.01  # of that part of the picture, by one thing
_MARGIN = 0.12  # of the picture's width, between the line's ends and the picture's edge
_BEYOND = 0.3  # of the picture's width: who is farther off than that is not drawn


@dataclass(frozen=True, slots=True)
class Line:
    """Across the street, in pixels: from its near to its far end. direction "right" is towards the street's +x."""

    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Crossing:
    """frame: the first in which the track's middle is beyond the line. direction: right or left."""

    track_id: int
    label: str
    direction: str
    frame: int


@dataclass(frozen=True, slots=True)
class Clip:
    """Everything but the pictures. Those who stand still are among the frames' truth and never cross."""

    seed: int
    fps: float
    frame_count: int
    stage: Stage
    line: Line
    line_x: float
    movers: tuple[Mover, ...]
    still: tuple[Item, ...]
    scenario: str

    def crossings(self) -> list[Crossing]:
        """By frame."""
        found = []
        for mover in self.movers:
            frame = math.ceil(mover.crosses_at(self.line_x) * self.fps)
            if 0 < frame < self.frame_count:
                direction = "right" if mover.speed > 0 else "left"
                found.append(Crossing(mover.track_id, LABELS[mover.class_id], direction, frame))
        return sorted(found, key=lambda crossing: (crossing.frame, crossing.track_id))

    def frames(self) -> Iterator[tuple[Picture, FrameTruth]]:
        """One after the other; always the same."""
        generator = np.random.default_rng([self.seed, 1])
        lens = sample_lens(generator, is_noisy=self.scenario == "noise", is_dark=self.stage.light.is_dark)
        for number in range(self.frame_count):
            yield shoot(self.stage, self._items(number / self.fps), lens, generator)

    def _items(self, second: float) -> list[Item]:
        camera = self.stage.camera
        moving = [
            mover.item_at(second) for mover in self.movers if camera.sees(mover.x_at(second), mover.y, margin=_BEYOND)
        ]
        return [*self.still, *moving]


def make_clip(
    seed: int, seconds: float, fps: float, *, size: tuple[int, int] = (640, 360), scenario: str = "plain"
) -> Clip:
    """The seed's clip. size: (width, height). scenario: of the light, the furniture and the lens."""
    generator = np.random.default_rng([seed, 0])
    stage, line_x = _stage_with_line(generator, size, scenario)
    movers = sample_traffic(generator, stage.layout, line_x, seconds)
    line = _line_in_picture(stage, line_x)
    frame_count = round(seconds * fps)
    return Clip(seed, fps, frame_count, stage, line, line_x, tuple(movers), (), scenario)


def write_clip(
    path: Path, seed: int, seconds: float, fps: float, *, size: tuple[int, int] = (640, 360), scenario: str = "plain"
) -> Clip:
    """path (MPEG-4 Part 2 in MP4) and its truth beside it, path with .json. Prints progress.

    Raises OSError where the video cannot be written.
    """
    clip = make_clip(seed, seconds, fps, size=size, scenario=scenario)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*_CODEC), fps, size)
    if not writer.isOpened():
        raise OSError(f"{path} cannot be written as {_CODEC} by this OpenCV")
    frames, progress = [], Progress(clip.frame_count, "frames", reports=10)
    for number, (picture, truth) in enumerate(clip.frames(), 1):
        writer.write(picture)
        frames.append(_frame_row(truth))
        progress.reached(number)
    writer.release()
    document = {
        "seed": seed, "fps": fps, "width": size[0], "height": size[1], "labels": LABELS,
        "line": asdict(clip.line), "crossings": [asdict(crossing) for crossing in clip.crossings()], "frames": frames,
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(document))
    return clip


def _frame_row(truth: FrameTruth) -> list[dict[str, object]]:
    return [
        {
            "track_id": int(truth.track_id[row]),
            "class_id": int(truth.class_id[row]),
            "xyxy": [round(float(value), 1) for value in truth.xyxy[row]],
            "visible": round(float(truth.visible[row]), 3),
            "is_ignored": bool(truth.is_ignored[row]),
        }
        for row in range(len(truth.class_id))
    ]


def _stage_with_line(generator: np.random.Generator, size: tuple[int, int], scenario: str) -> tuple[Stage, float]:
    """A street and the x of a line across it that the picture shows from the near pavement's edge to the fronts."""
    for _ in range(_MOST_TRIES):
        layout = sample_layout(generator)
        camera = sample_camera(generator, layout, size, most_yaw=_MOST_YAW)
        near, far = (visible_span(camera, y, margin=-_MARGIN) for y in (_LINE_START_Y, layout.fronts))
        if near is None or far is None:
            continue
        low, high = max(near[0], far[0]), min(near[1], far[1])
        if high - low > _LEAST_ROOM_M:
            line_x = low + float(generator.uniform(0.4, 0.6)) * (high - low)
            return _without_cover(sample_stage(generator, layout, camera, scenario), line_x), line_x
    raise ValueError(f"no camera of {_MOST_TRIES} sees a whole line at {size[0]} x {size[1]}")


def _without_cover(stage: Stage, line_x: float) -> Stage:
    """The stage without the furniture that would hide who crosses the line; nobody counts behind a tree."""
    camera, layout = stage.camera, stage.layout
    corners = [
        (line_x + x, y, z)
        for x in (-_CLEAR_M, _CLEAR_M)
        for y in (layout.near_kerb / 2, layout.fronts - 0.2)
        for z in (0.0, 1.7)
    ]
    pixels, _ = camera.project(np.array(corners))
    band = np.zeros((camera.height, camera.width), np.uint8)
    cv2.fillConvexPoly(band, cv2.convexHull(np.rint(pixels).astype(np.int32)), 1)
    brush, drawn = draw(stage, ())
    covered = np.bincount(brush.owners[band > 0], minlength=len(drawn) + 1) / max(int(band.sum()), 1)
    kept = tuple(thing.item for thing in drawn if covered[thing.owner] < _MOST_COVER)
    return dataclasses.replace(stage, props=kept)


def _line_in_picture(stage: Stage, line_x: float) -> Line:
    """From the near pavement's edge, or from where the line comes into the picture, to the fronts."""
    start, end = (_pixel(stage, line_x, y) for y in (_LINE_START_Y, stage.layout.fronts))
    bottom = stage.camera.height - 1.0
    if start[1] > bottom:
        share = (start[1] - bottom) / (start[1] - end[1])
        start = (start[0] + share * (end[0] - start[0]), bottom)
    return Line(start, end)


def _pixel(stage: Stage, x: float, y: float) -> tuple[float, float]:
    pixel = stage.camera.pixel_of(x, y)
    if pixel is None:
        raise ValueError(f"the point ({x}, {y}) is behind the camera")
    return pixel
