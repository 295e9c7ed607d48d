"""Where pavements, lanes and fronts lie, and from where the camera looks at them."""

import math
from dataclasses import dataclass

import numpy as np

from deploy.models.street.camera import Camera

FARTHEST_M = 34.0  # things farther away are not set up: nobody could name them


@dataclass(frozen=True, slots=True)
class Layout:
    """All y in metres from the near fronts' side: near pavement 0 to near_kerb, road to far_kerb, pavement to fronts.

    lanes, bicycle_lanes: (y, direction), direction 1 towards +x. parking: the y of parked cars' middles.
    crossing_x: where the zebra crossing is, None without one.
    """

    near_kerb: float
    far_kerb: float
    fronts: float
    lanes: tuple[tuple[float, int], ...]
    bicycle_lanes: tuple[tuple[float, int], ...]
    parking: tuple[float, ...]
    crossing_x: float | None
    has_marked_bicycle_lanes: bool


def sample_layout(generator: np.random.Generator) -> Layout:
    """A street with a lane each way, of any usual width."""
    near_kerb = float(generator.uniform(2.2, 4.5))
    has_near_parking, has_far_parking = generator.random() < 0.2, generator.random() < 0.45
    bicycle_width = float(generator.uniform(1.5, 1.9))
    lane_width = float(generator.uniform(3.0, 3.5))
    keeps_right = 1 if generator.random() < 0.75 else -1
    y, parking = near_kerb, []
    if has_near_parking:
        parking.append(y + 1.1)
        y += 2.2
    near_bicycle, near_lane = y + bicycle_width / 2, y + bicycle_width + lane_width / 2
    y += bicycle_width + 2 * lane_width
    far_lane, far_bicycle = y - lane_width / 2, y + bicycle_width / 2
    y += bicycle_width
    if has_far_parking:
        parking.append(y + 1.1)
        y += 2.2
    return Layout(
        near_kerb=near_kerb,
        far_kerb=y,
        fronts=y + float(generator.uniform(2.2, 4.5)),
        lanes=((near_lane, keeps_right), (far_lane, -keeps_right)),
        bicycle_lanes=((near_bicycle, keeps_right), (far_bicycle, -keeps_right)),
        parking=tuple(parking),
        crossing_x=float(generator.uniform(-6, 6)) if generator.random() < 0.35 else None,
        has_marked_bicycle_lanes=bool(generator.random() < 0.5),
    )


def sample_camera(
    generator: np.random.Generator, layout: Layout, size: tuple[int, int], *, most_yaw: float = 1.1
) -> Camera:
    """A camera on a post or a wall of the near side. size: (width, height). most_yaw: radians off straight across."""
    width, height = size
    yaw = float(generator.uniform(-most_yaw, most_yaw))
    above = float(generator.uniform(3.2, 7.5))
    back = float(generator.uniform(1.0, 6.0))
    field = math.radians(float(generator.uniform(48, 72)))
    focal_px = width / 2 / math.tan(field / 2)
    middle = (layout.near_kerb + layout.far_kerb) / 2
    aim = math.atan2(above, (middle + back) / max(math.cos(yaw), 0.45))
    lift = math.atan2(height / 2, focal_px) * float(generator.uniform(-0.05, 0.25))
    roll = float(generator.normal(0, 0.015))
    return Camera((0.0, -back, above), yaw, aim - lift, roll, focal_px, width, height)


def visible_span(camera: Camera, y: float, *, margin: float = 0.0) -> tuple[float, float] | None:
    """The least and the greatest x, along the line at y, that the picture shows; None where it shows none."""
    x = np.linspace(-FARTHEST_M, FARTHEST_M, 169)
    pixels, depth = camera.project(np.stack([x, np.full_like(x, y), np.zeros_like(x)], 1))
    across, down = pixels[:, 0] / camera.width, pixels[:, 1] / camera.height
    is_seen = (depth > 2.0) & (depth < FARTHEST_M) & (np.abs(across - 0.5) < 0.5 + margin) & (down < 1.1)
    if not is_seen.any():
        return None
    return float(x[is_seen].min()), float(x[is_seen].max())
