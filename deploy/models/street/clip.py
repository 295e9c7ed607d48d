"""Clips: a fixed camera, traffic, and the true boxes, tracks and line crossings of each frame."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np

from deploy.models.street.camera import Layout, sample_camera, sample_layout, visible_span
from deploy.models.street.cars import sample_car
from deploy.models.street.people import PersonLook, sample_bicycle, sample_person
from deploy.models.street.picture import Picture, Position, sample_lens
from deploy.models.street.scene import sample_stage
from deploy.models.street.stage import (
    BICYCLE,
    CAR,
    LABELS,
    PERSON,
    FrameTruth,
    Item,
    Look,
    Progress,
    Stage,
    draw,
    shoot,
)

_CLEAR_OF_LINE_M = {PERSON: 2.0, BICYCLE: 4.0, CAR: 7.0}
_APART_S = 0.8  # between a car and any other object on the line
_SPEEDS = {PERSON: (0.9, 1.7), BICYCLE: (3.0, 5.5), CAR: (5.0, 9.0)}  # m/s
_STRIDE_M = {PERSON: 1.4, BICYCLE: 5.0, CAR: 2.0}  # forward in one turn of the gait, the pedals, the wheels


@dataclass(frozen=True, slots=True)
class Mover:
    """One who goes along the street. speed: m/s, negative towards -x. x_at_start: at second 0."""

    track_id: int
    class_id: int
    look: Look
    y: float
    x_at_start: float
    speed: float
    phase: float

    def x_at(self, second: float) -> float:
        """Where he is then."""
        return self.x_at_start + self.speed * second

    def item_at(self, second: float) -> Item:
        """He and his gait, then."""
        turns = abs(self.speed) * second / _STRIDE_M[self.class_id]
        heading = 0.0 if self.speed > 0 else math.pi
        place = Position(self.x_at(second), self.y, heading, self.phase + 2 * math.pi * turns)
        return Item(self.look, place, self.class_id, self.track_id)

    def crosses_at(self, line_x: float) -> float:
        """The second at which he is on the line, perhaps before the clip or after it."""
        return (line_x - self.x_at_start) / self.speed


@dataclass(frozen=True, slots=True)
class Lane:
    """Where movers of a class follow each other. gap_s: the least and the most time between two on the line."""

    class_id: int
    y: float
    direction: int
    gap_s: tuple[float, float]
    spread_m: float


def lanes_of(layout: Layout) -> list[Lane]:
    """Two for cars, two for bicycles, two on each pavement."""
    lanes = [Lane(CAR, y, direction, (5.0, 13.0), 0.1) for y, direction in layout.lanes]
    lanes += [Lane(BICYCLE, y, direction, (7.0, 17.0), 0.1) for y, direction in layout.bicycle_lanes]
    for low, high in ((0.3, layout.near_kerb - 0.9), (layout.far_kerb + 0.9, layout.fronts - 0.3)):
        width = high - low
        for share, direction in ((0.25, 1), (0.75, -1)):
            lanes.append(Lane(PERSON, low + share * width, direction, (6.0, 15.0), 0.12 * width))
    return lanes


def sample_traffic(generator: np.random.Generator, layout: Layout, line_x: float, seconds: float) -> list[Mover]:
    """Movers whose crossings of the line are spread over the clip, and those on their way when it begins or ends."""
    movers: list[Mover] = []
    for lane in lanes_of(layout):
        for mover in _lane_traffic(generator, lane, line_x, seconds):
            if not _is_covered(mover, movers, line_x):
                movers.append(dataclasses.replace(mover, track_id=len(movers) + 1))
    return movers


def _is_covered(mover: Mover, others: list[Mover], line_x: float) -> bool:
    """Whether one of the others, who are cars first, is on the line at about the same time."""
    least_s = _APART_S if mover.class_id != CAR else 2 * _APART_S
    when = mover.crosses_at(line_x)
    cars = (other for other in others if other.class_id == CAR)
    return any(abs(other.crosses_at(line_x) - when) < least_s and other.y != mover.y for other in cars)


def _lane_traffic(generator: np.random.Generator, lane: Lane, line_x: float, seconds: float) -> Iterator[Mover]:
    """All objects of a lane have nearly the same speed, so that none overtakes within the picture."""
    common = float(generator.uniform(*_SPEEDS[lane.class_id]))
    on_line_s = -14.0 + float(generator.uniform(*lane.gap_s))
    while on_line_s < seconds + 14.0:
        speed = common * float(generator.uniform(0.97, 1.03)) * lane.direction
        clear_s = _CLEAR_OF_LINE_M[lane.class_id] / abs(speed)
        is_whole = abs(on_line_s) > clear_s and abs(on_line_s - seconds) > clear_s
        if is_whole:
            y = lane.y + float(generator.uniform(-lane.spread_m, lane.spread_m))
            phase = float(generator.uniform(0, 2 * math.pi))
            yield Mover(0, lane.class_id, _look(generator, lane.class_id), y, line_x - speed * on_line_s, speed, phase)
        on_line_s += float(generator.uniform(*lane.gap_s))


def _look(generator: np.random.Generator, class_id: int) -> Look:
    if class_id == PERSON:
        person: PersonLook = sample_person(generator)
        return person
    return sample_car(generator) if class_id == CAR else sample_bicycle(generator, is_ridden=True)


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
    """Everything but the pictures."""

    seed: int
    fps: float
    frame_count: int
    stage: Stage
    line: Line
    line_x: float
    movers: tuple[Mover, ...]
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
        return [
            mover.item_at(second) for mover in self.movers if camera.sees(mover.x_at(second), mover.y, margin=_BEYOND)
        ]


def make_clip(
    seed: int, seconds: float, fps: float, *, size: tuple[int, int] = (640, 360), scenario: str = "plain"
) -> Clip:
    """The seed's clip. size: (width, height). scenario: of the light, the furniture and the lens."""
    generator = np.random.default_rng([seed, 0])
    stage, line_x = _stage_with_line(generator, size, scenario)
    movers = sample_traffic(generator, stage.layout, line_x, seconds)
    line = _line_in_picture(stage, line_x)
    frame_count = round(seconds * fps)
    return Clip(seed, fps, frame_count, stage, line, line_x, tuple(movers), scenario)


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
    """The stage without the furniture that would hide objects that cross the line."""
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
