"""Draws the items of a street in depth order, with the visible extent of each; progress lines."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cmp_to_key, partial
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.camera import Camera, Layout, Light
from deploy.models.street.picture import Brush, Lens, Picture, Position, paint_glows, take


def print_line(line: str) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Progress:
    """Tells how far a long work is, how fast it goes and how long it still takes, some twenty times in all."""

    def __init__(self, total: int, noun: str, *, reports: int = 20) -> None:
        self._total = total
        self._noun = noun
        self._every = max(total // reports, 1)
        self._started = time.perf_counter()

    def reached(self, done: int, remark: str = "") -> None:
        """done of the total are finished."""
        if done % self._every and done != self._total:
            return
        rate = done / max(time.perf_counter() - self._started, 1e-9)
        left_s = (self._total - done) / rate
        print_line(f"{done}/{self._total} {self._noun}{remark}, {rate:.3g}/s, {left_s:.0f} s left")


LABELS = ("person", "bicycle", "car")
PERSON, BICYCLE, CAR = range(3)

LEAST_VISIBLE = 0.25
LEAST_HEIGHT = 1 / 27  # of the picture's: 8 pixels of 216


class Look(Protocol):
    """How a thing is drawn, in its own axes, and how much ground it takes."""

    @property
    def half_length(self) -> float: ...
    @property
    def half_width(self) -> float: ...
    @property
    def height(self) -> float: ...
    def draw(self, brush: Brush, phase: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Item:
    """One thing at its position. class_id: None for what is no person, bicycle or car. track_id: 0 if unused."""

    look: Look
    place: Position
    class_id: int | None = None
    track_id: int = 0

    @property
    def reach(self) -> tuple[float, float]:
        """Half of the ground it takes along x and along y, metres."""
        cos, sin = abs(math.cos(self.place.heading)), abs(math.sin(self.place.heading))
        length, width = self.look.half_length, self.look.half_width
        return cos * length + sin * width, sin * length + cos * width


@dataclass(frozen=True, slots=True)
class Stage:
    """What does not move. backdrop: (H, W, 3) BGR."""

    camera: Camera
    layout: Layout
    light: Light
    backdrop: Picture
    props: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class FrameTruth:
    """Of each person, bicycle and car of which at least one pixel is seen.

    xyxy: (n, 4) float32, the extents of the pixels that are seen. whole_xyxy: as if nothing hid it and the picture had
    no edge. visible: (n,) float32, the share of its pixels that is seen (the part beyond the edge is taken for hidden).
    is_ignored: (n,) bool, visible < LEAST_VISIBLE or lower than LEAST_HEIGHT of the picture.
    """

    xyxy: npt.NDArray[np.float32]
    whole_xyxy: npt.NDArray[np.float32]
    class_id: npt.NDArray[np.int64]
    track_id: npt.NDArray[np.int64]
    visible: npt.NDArray[np.float32]
    is_ignored: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Drawn:
    owner: int
    item: Item
    extent: tuple[float, float, float, float]
    pixels: int


def shoot(
    stage: Stage, actors: Sequence[Item], lens: Lens, generator: np.random.Generator
) -> tuple[Picture, FrameTruth]:
    """A picture (H, W, 3) uint8 BGR of the stage with the actors on it, and the truth about them.

    generator: of the noise alone; the truth does not depend on it.
    """
    brush, drawn = draw(stage, actors)
    truth = _truth(brush.owners, drawn)
    paint_glows(brush.canvas, brush.owners, brush.glows)
    return take(brush.canvas, lens, generator), truth


def draw(stage: Stage, actors: Sequence[Item]) -> tuple[Brush, list[_Drawn]]:
    """The things drawn, before any lens; the brush knows whose each pixel is: 1 + the place in the list returned."""
    canvas = stage.backdrop.copy()
    in_order: Callable[[Item, Item], int] = partial(_compare, camera=stage.camera)
    everything = sorted([*stage.props, *actors], key=cmp_to_key(in_order))
    _cast_shadows(canvas, stage, everything)
    brush = Brush(stage.camera, stage.light, canvas)
    drawn = []
    for owner, item in enumerate(everything, 1):
        brush.begin(owner, item.place)
        item.look.draw(brush, item.place.phase)
        extent = brush.extent
        drawn.append(_Drawn(owner, item, extent, int(np.count_nonzero(_cut(brush.owners, extent) == owner))))
    return brush, drawn


def _compare(one: Item, other: Item, camera: Camera) -> int:
    """Negative where the one is drawn first: beyond the other across the street, else farther off along it."""
    (one_x, one_y), (other_x, other_y) = one.reach, other.reach
    apart = one.place.y - other.place.y
    if abs(apart) >= one_y + other_y:
        return -1 if apart > 0 else 1
    along = abs(one.place.x - camera.position[0]) - abs(other.place.x - camera.position[0])
    if abs(one.place.x - other.place.x) < one_x + other_x:  # they touch: the middle decides
        along = apart
    return -1 if along > 0 else 1 if along < 0 else 0


def _cut(owners: npt.NDArray[np.uint16], extent: tuple[float, float, float, float]) -> npt.NDArray[np.uint16]:
    left, top, right, bottom = _window(owners.shape, extent)
    return owners[top:bottom, left:right]


def _window(shape: tuple[int, ...], extent: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
    if not math.isfinite(extent[0]):
        return 0, 0, 0, 0
    height, width = shape[:2]
    left, top = max(math.floor(extent[0]) - 2, 0), max(math.floor(extent[1]) - 2, 0)
    return left, top, min(math.ceil(extent[2]) + 2, width), min(math.ceil(extent[3]) + 2, height)


def _truth(owners: npt.NDArray[np.uint16], drawn: Sequence[_Drawn]) -> FrameTruth:
    height, width = owners.shape
    rows: list[tuple[tuple[float, ...], tuple[float, ...], int, int, float]] = []
    for thing in drawn:
        if thing.item.class_id is None or thing.pixels == 0:
            continue
        left, top, _, _ = _window(owners.shape, thing.extent)
        mask = _cut(owners, thing.extent) == thing.owner
        seen = int(np.count_nonzero(mask))
        if seen == 0:
            continue
        columns, lines = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
        box = (left + columns[0], top + lines[0], left + columns[-1] + 1, top + lines[-1] + 1)
        share = seen / thing.pixels * _inside(thing.extent, width, height)
        rows.append((tuple(map(float, box)), thing.extent, thing.item.class_id, thing.item.track_id, share))
    xyxy = np.array([row[0] for row in rows], np.float32).reshape(-1, 4)
    visible = np.array([row[4] for row in rows], np.float32)
    return FrameTruth(
        xyxy=xyxy,
        whole_xyxy=np.array([row[1] for row in rows], np.float32).reshape(-1, 4),
        class_id=np.array([row[2] for row in rows], np.int64),
        track_id=np.array([row[3] for row in rows], np.int64),
        visible=visible,
        is_ignored=(visible < LEAST_VISIBLE) | (xyxy[:, 3] - xyxy[:, 1] < LEAST_HEIGHT * height),
    )


def _inside(extent: tuple[float, float, float, float], width: int, height: int) -> float:
    """The share of a box that lies in the picture."""
    left, top, right, bottom = extent
    across = max(min(right, width) - max(left, 0), 0) / max(right - left, 1e-6)
    down = max(min(bottom, height) - max(top, 0), 0) / max(bottom - top, 1e-6)
    return min(across * down, 1.0)


def _cast_shadows(canvas: Picture, stage: Stage, items: Sequence[Item]) -> None:
    """Darkens the ground: under everything a little, away from the sun more."""
    mask = np.zeros(canvas.shape[:2], np.uint8)
    sun = stage.light.sun
    for item in items:
        length, width = item.look.half_length, item.look.half_width
        cos, sin = math.cos(item.place.heading), math.sin(item.place.heading)
        corners = np.array([(1, 1), (1, -1), (-1, -1), (-1, 1)]) * (length, width) @ np.array([[cos, sin], [-sin, cos]])
        base = corners + np.array([item.place.x, item.place.y])
        _darken(mask, stage.camera, base, 70)
        if sun[2] > 0:
            shift = -np.array(sun[:2]) / sun[2] * min(item.look.height, 3.0)
            narrow = (base - base.mean(axis=0)) * 0.7 + base.mean(axis=0)
            _darken(mask, stage.camera, np.concatenate([narrow, narrow + shift]), 105)
    soft = cv2.GaussianBlur(mask, (0, 0), 0.0022 * canvas.shape[1])
    keep = 255 - soft
    cv2.multiply(canvas, cv2.merge([keep, keep, keep]), dst=canvas, scale=1 / 255)


def _darken(mask: npt.NDArray[np.uint8], camera: Camera, ground: npt.NDArray[np.float64], depth: int) -> None:
    pixels, distance = camera.project(np.concatenate([ground, np.zeros((len(ground), 1))], axis=1))
    if distance.min() > 0.5:
        hull = cv2.convexHull(np.rint(np.clip(pixels, -9000, 9000)).astype(np.int32))
        cv2.fillConvexPoly(mask, hull, depth, cv2.LINE_AA)
