"""Who goes along the street during a clip: everybody at a speed of his own, nobody through another.

A line lies across the street at line_x. Nobody is near it when the clip begins or ends, and nobody passes it together
with a car: a crossing that no camera could see would be no truth to hold a counter to.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deploy.models.street.bicycles import sample_bicycle
from deploy.models.street.brush import Place
from deploy.models.street.cars import sample_car
from deploy.models.street.layout import Layout
from deploy.models.street.people import PersonLook, sample_person
from deploy.models.street.stage import BICYCLE, CAR, PERSON, Item, Look

_CLEAR_OF_LINE_M = {PERSON: 2.0, BICYCLE: 4.0, CAR: 7.0}
_APART_S = 0.8  # between a car and somebody else on the line
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
        place = Place(self.x_at(second), self.y, heading, self.phase + 2 * math.pi * turns)
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
    """In one lane all go at nearly the same speed, so that nobody overtakes within the picture."""
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
