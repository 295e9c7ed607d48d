"""Single scenes, each from a seed, and many scenes at once for training."""

import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.backdrop import paint_backdrop, sample_prop
from deploy.models.street.camera import Camera, Layout, sample_camera, sample_layout, sample_light, visible_span
from deploy.models.street.cars import sample_car
from deploy.models.street.people import sample_bicycle, sample_person
from deploy.models.street.picture import Picture, Position, sample_lens
from deploy.models.street.stage import BICYCLE, CAR, PERSON, FrameTruth, Item, Progress, Stage, shoot

SCENARIOS = ("plain", "crowd", "occlusion", "noise", "night")

_LIGHTS = {
    "night": (("night", 0.75), ("dusk", 0.25)),
    "": (("sunny", 0.4), ("overcast", 0.35), ("fog", 0.1), ("dusk", 0.15)),
}


@dataclass(frozen=True, slots=True)
class Density:
    """The least and the most of each; groups: of people who go together; close: things right before the camera."""

    people: tuple[int, int]
    groups: tuple[int, int]
    cars: tuple[int, int]
    bicycles: tuple[int, int]
    props: tuple[int, int]
    close: tuple[int, int]


_DENSITIES = {
    "plain": Density((1, 8), (0, 1), (0, 6), (0, 5), (2, 9), (0, 1)),
    "crowd": Density((10, 24), (2, 6), (0, 5), (1, 7), (2, 8), (0, 1)),
    "occlusion": Density((4, 14), (1, 3), (2, 8), (1, 6), (8, 18), (2, 5)),
    "noise": Density((2, 12), (0, 2), (0, 6), (0, 5), (2, 10), (0, 1)),
    "night": Density((2, 12), (0, 2), (0, 6), (0, 5), (2, 10), (0, 1)),
}


def make_scene(
    seed: int, number: int, *, size: tuple[int, int] = (640, 360), scenario: str = "plain"
) -> tuple[Picture, FrameTruth]:
    """A picture (H, W, 3) uint8 BGR and what it shows: the seed's scene of that number and scenario.

    size: (width, height). scenario: one of SCENARIOS.
    """
    generator = np.random.default_rng([seed, number, SCENARIOS.index(scenario)])
    layout = sample_layout(generator)
    stage = sample_stage(generator, layout, sample_camera(generator, layout, size), scenario)
    lens = sample_lens(generator, is_noisy=scenario == "noise", is_dark=stage.light.is_dark)
    return shoot(stage, sample_actors(generator, stage, scenario), lens, generator)


def sample_stage(generator: np.random.Generator, layout: Layout, camera: Camera, scenario: str) -> Stage:
    """A street with its light and its furniture, without anybody on it."""
    names, weights = zip(*_LIGHTS.get(scenario, _LIGHTS[""]), strict=True)
    name = str(generator.choice(names, p=weights))
    lamp_items = _lamp_row(generator, layout)
    lamps = tuple((item.place.x, item.place.y + math.sin(item.place.heading + math.pi / 2)) for item in lamp_items)
    light = sample_light(generator, name, lamps if name in ("dusk", "night") else ())
    density = _DENSITIES[scenario]
    props = [*lamp_items, *_furniture(generator, layout, camera, density)]
    return Stage(camera, layout, light, paint_backdrop(camera, layout, light, generator), tuple(props))


def sample_actors(generator: np.random.Generator, stage: Stage, scenario: str) -> list[Item]:
    """Cars, bicycles and people where such things are, none in another's place."""
    density, layout = _DENSITIES[scenario], stage.layout
    placed: list[Item] = [item for item in stage.props if item.look.height < 4.5]
    first = len(placed)
    cars, bicycles, people, groups = (
        _between(generator, most) for most in (density.cars, density.bicycles, density.people, density.groups)
    )
    for _ in range(cars):
        _add(placed, stage, _car(generator, layout, stage.camera), gap=0.5)
    for _ in range(bicycles):
        _add(placed, stage, _bicycle(generator, layout, stage.camera), gap=0.1)
    for _ in range(groups):
        for person in _group(generator, layout, stage.camera):
            _add(placed, stage, person, gap=0.05)
    for _ in range(people):
        _add(placed, stage, _person(generator, layout, stage.camera), gap=0.05)
    return placed[first:]


def _between(generator: np.random.Generator, least_most: tuple[int, int]) -> int:
    return int(generator.integers(least_most[0], least_most[1] + 1))


def _add(placed: list[Item], stage: Stage, item: Item | None, *, gap: float) -> None:
    """Where there is room and the camera could see it."""
    if item is None or not stage.camera.sees(item.place.x, item.place.y, margin=0.12):
        return
    if not _is_taken(placed, item, gap):
        placed.append(item)


def _is_taken(placed: Sequence[Item], item: Item, gap: float) -> bool:
    reach_x, reach_y = item.reach
    for other in placed:
        other_x, other_y = other.reach
        is_near_x = abs(item.place.x - other.place.x) < reach_x + other_x + gap
        if is_near_x and abs(item.place.y - other.place.y) < reach_y + other_y + min(gap, 0.05):
            return True
    return False


def _along(generator: np.random.Generator, camera: Camera, y: float, *, margin: float = 0.1) -> float | None:
    span = visible_span(camera, y, margin=margin)
    return None if span is None else float(generator.uniform(*span))


def _lamp_row(generator: np.random.Generator, layout: Layout) -> list[Item]:
    """Street lamps at even distances, on one side or both."""
    items = []
    apart, start = float(generator.uniform(14, 24)), float(generator.uniform(0, 14))
    for y, heading in ((layout.far_kerb + 0.5, math.pi), (layout.near_kerb - 0.5, 0.0)):
        if heading == 0.0 and generator.random() < 0.5:
            continue
        look = sample_prop(generator, "lamp")
        items += [Item(look, Position(start + apart * step, y, heading)) for step in range(-3, 4)]
    return items


def _furniture(generator: np.random.Generator, layout: Layout, camera: Camera, density: Density) -> list[Item]:
    items: list[Item] = []
    count, close = _between(generator, density.props), _between(generator, density.close)
    for number in range(count + close):
        is_close = number < close
        is_near = is_close or generator.random() < 0.4
        low, high = (0.2, layout.near_kerb - 0.3) if is_near else (layout.far_kerb + 0.3, layout.fronts - 0.3)
        y = float(generator.choice([low, high, generator.uniform(low, high)]))
        x = _along(generator, camera, y, margin=-0.05 if is_close else 0.05)
        look = sample_prop(
            generator, str(generator.choice(["sign", "tree", "railing", "planter", "box"])) if is_close else None
        )
        if look.kind == "lamp" or x is None:
            continue
        item = Item(look, Position(x, y))
        if not _is_taken(items, item, 0.1):
            items.append(item)
    return items


def _car(generator: np.random.Generator, layout: Layout, camera: Camera) -> Item | None:
    is_parked = bool(layout.parking) and generator.random() < 0.5
    if is_parked:
        y = float(layout.parking[generator.integers(len(layout.parking))] + generator.normal(0, 0.1))
        direction = layout.lanes[0 if y < layout.lanes[0][0] else 1][1]
    else:
        lane_y, direction = layout.lanes[generator.integers(2)]
        y = lane_y + float(generator.normal(0, 0.15))
    x = _along(generator, camera, y, margin=0.25)
    turn = float(generator.normal(0, 0.02)) + (0.0 if direction > 0 else math.pi)
    phase = float(generator.uniform(0, 6))
    return None if x is None else Item(sample_car(generator), Position(x, y, turn, phase), CAR)


def _bicycle(generator: np.random.Generator, layout: Layout, camera: Camera) -> Item | None:
    is_ridden = generator.random() < 0.68
    if is_ridden:
        y, direction = layout.bicycle_lanes[generator.integers(2)]
        y += float(generator.normal(0, 0.15))
        turn = float(generator.normal(0, 0.06)) + (0.0 if direction > 0 else math.pi)
    else:
        is_near = generator.random() < 0.4
        y = layout.near_kerb - 0.5 if is_near else float(generator.choice([layout.far_kerb + 0.5, layout.fronts - 0.5]))
        across = generator.random() < 0.3
        y += (0.3 if y > layout.far_kerb else -0.3) * across
        turn = float(generator.choice([0, math.pi])) + float(generator.normal(0, 0.1)) + across * math.pi / 2
    x = _along(generator, camera, y)
    phase = float(generator.uniform(0, 6.28))
    return (
        None
        if x is None
        else Item(sample_bicycle(generator, is_ridden=is_ridden), Position(x, y, turn, phase), BICYCLE)
    )


def _person(generator: np.random.Generator, layout: Layout, camera: Camera) -> Item | None:
    """On a pavement mostly; some cross the road, where the zebra crossing is if there is one."""
    dice = generator.random()
    if dice < 0.14:
        y = float(generator.uniform(layout.near_kerb, layout.far_kerb))
        x = _along(generator, camera, y, margin=0.0)
        if layout.crossing_x is not None:
            x = layout.crossing_x + float(generator.uniform(-1.4, 1.4))
        heading = float(generator.choice([1, -1])) * math.pi / 2 + float(generator.normal(0, 0.25))
    else:
        low, high = (0.2, layout.near_kerb - 0.2) if dice < 0.5 else (layout.far_kerb + 0.2, layout.fronts - 0.2)
        y = float(generator.uniform(low, high))
        x = _along(generator, camera, y, margin=0.05)
        heading = float(generator.choice([0, math.pi])) + float(generator.normal(0, 0.2))
    is_standing = generator.random() < 0.2
    if is_standing:
        heading = float(generator.uniform(0, 2 * math.pi))
    look = sample_person(generator, is_standing=is_standing)
    return None if x is None else Item(look, Position(x, y, heading, float(generator.uniform(0, 6.28))), PERSON)


def _group(generator: np.random.Generator, layout: Layout, camera: Camera) -> list[Item]:
    """Two to six who keep together."""
    first = _person(generator, layout, camera)
    if first is None:
        return []
    members = [first]
    for _ in range(int(generator.integers(1, 6))):
        x, y = generator.normal(0, (0.8, 0.45))
        place = first.place
        y = min(max(place.y + float(y), 0.15), layout.fronts - 0.15)
        heading = place.heading + float(generator.normal(0, 0.3))
        look = sample_person(generator, is_standing=getattr(first.look, "stride", 1.0) == 0.0)
        members.append(Item(look, Position(place.x + float(x), y, heading, float(generator.uniform(0, 6.28))), PERSON))
    return members


MOST_OBJECTS = 64
NO_OBJECT = -1
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
        np.full((count, MOST_OBJECTS), NO_OBJECT, np.int8),
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
    classes = np.full(MOST_OBJECTS, NO_OBJECT, np.int8)
    boxes[: len(order)] = truth.xyxy[order] * scale
    classes[: len(order)] = np.where(truth.is_ignored, -2 - truth.class_id, truth.class_id)[order]
    return fitted, boxes, classes
