"""Speed of objects on the ground: from pixels to metres, and from a trail to a speed."""

import math
import random
from dataclasses import replace

import pytest

from penstock_video.analytics.rules import Ground, Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from tests.deepstream_pipeline.analytics.scenes import LABELS, Place, frame_at, observe, straight, tracks_at

TILT, HEIGHT_M, FOCAL = math.radians(20), 5.0, 1000.0  # a camera 5 m high, pictures of 1000 x 1000 pixels
FRONT, BACK, HALF = 8.0, 30.0, 4.0  # a rectangle on the ground, metres from the camera


def seen_at(east: float, north: float) -> tuple[float, float]:
    """The pixel at which the camera shows a point of the ground."""
    depth = north * math.cos(TILT) + HEIGHT_M * math.sin(TILT)
    below = HEIGHT_M * math.cos(TILT) - north * math.sin(TILT)
    return 500 + FOCAL * east / depth, 500 + FOCAL * below / depth


METRES = ((-HALF, BACK), (HALF, BACK), (HALF, FRONT), (-HALF, FRONT))
PIXELS = tuple(seen_at(*corner) for corner in METRES)
GROUND = Ground(PIXELS, METRES)


def walk(start: tuple[float, float], velocity: tuple[float, float], *, seconds: float = 3.0, jitter: float = 0.0):
    """Feet in pixels, ten a second, of one who walks on the ground."""
    chance = random.Random(7)
    steps = (number / 10 for number in range(int(seconds * 10)))
    places = [seen_at(start[0] + velocity[0] * t, start[1] + velocity[1] * t) for t in steps]
    return [(x + chance.gauss(0, jitter), y + chance.gauss(0, jitter)) for x, y in places]


@pytest.mark.parametrize("start", [(-3.0, 10.0), (-3.0, 25.0)])
@pytest.mark.parametrize("velocity", [(1.4, 0.0), (0.0, 1.4), (0.9, -0.9), (0.0, 0.0), (4.0, 0.0)])
def test_speed_of_a_walker_is_metres_a_second_wherever_he_is(start, velocity: tuple[float, float]) -> None:
    """Near and far, across and away; the trembling of a box changes it little; before half a second it is unknown."""
    true = math.hypot(*velocity)
    exact = [one.speeds_mps for one in observe(Rules(ground=GROUND), {1: walk(start, velocity)})]
    assert exact[:5] == [(None,)] * 5
    assert [speed for (speed,) in exact[5:]] == [pytest.approx(true, abs=0.001)] * 25
    trembling = observe(Rules(ground=GROUND), {1: walk(start, velocity, jitter=0.5)})
    assert all(abs(speed - true) < 0.35 for one in trembling[10:] for speed in one.speeds_mps if speed is not None)


def test_speed_is_that_of_the_last_second() -> None:
    """One who stops has stopped a second later."""
    path = walk((-3.0, 10.0), (1.4, 0.0))
    said = observe(Rules(ground=GROUND), {1: path + [path[-1]] * 15})
    assert said[29].speeds_mps == (pytest.approx(1.4, abs=0.001),)
    assert 0.2 < (said[34].speeds_mps[0] or 0) < 1.2
    assert said[-1].speeds_mps == (pytest.approx(0, abs=0.001),)


def test_speed_follows_the_size_of_the_picture() -> None:
    """Points from 0 to 1, and pixels of config-width: the same walk in half of the pixels has the same speed."""
    path = walk((-3.0, 12.0), (1.4, 0.0))
    relative = Ground(tuple((x / 1000, y / 1000) for x, y in PIXELS), METRES)
    half: list[Place] = [(x / 2, y / 2) for x, y in path]
    for rules in (Rules(ground=relative), Rules(1000, 1000, ground=GROUND)):
        for feet, size in ((path, (1000, 1000)), (half, (500, 500))):
            assert observe(rules, {1: feet}, size=size)[-1].speeds_mps == (pytest.approx(1.4, abs=0.01),)


def test_speed_by_metres_per_pixel() -> None:
    """Of a camera that looks straight down: 100 pixels a second of 2 cm each."""
    path = straight((100, 500), (390, 500), 30)
    assert observe(Rules(ground=Ground(metres_per_pixel=0.02)), {1: path})[-1].speeds_mps == (pytest.approx(2.0),)
    wide = Rules(2000, 1000, ground=Ground(metres_per_pixel=0.02))  # its pixels are half as wide as the source's
    assert observe(wide, {1: path})[-1].speeds_mps == (pytest.approx(4.0),)


def test_speed_above_the_horizon_is_unknown() -> None:
    """There is no ground; nor has an object without identity a speed."""
    horizon = 500 - FOCAL * math.tan(TILT)
    said = observe(Rules(ground=GROUND), {1: straight((400, horizon - 20), (600, horizon - 20), 20)})
    assert said[-1].speeds_mps == (None,)
    assert observe(Rules(ground=GROUND), {-1: walk((0, 10), (1, 0))})[-1].speeds_mps == (None,)


def test_speed_of_a_frame_that_was_not_inferred_is_that_of_the_last_look() -> None:
    """And without a ground no object has one."""
    analytics = SourceAnalytics(Rules(ground=GROUND), LABELS)
    seen = observe(analytics, {1: walk((-3.0, 10.0), (1.4, 0.0))})[-1]
    estimate = replace(tracks_at({2: (10, 900), 1: (500, 500)}), is_estimate=True)
    said = analytics.observe(frame_at(30), estimate)
    assert said.speeds_mps == (None, *seen.speeds_mps)
    assert observe(Rules(), {1: walk((-3.0, 10.0), (1.4, 0.0))})[-1].speeds_mps == ()
