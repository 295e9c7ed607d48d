"""Sky, fronts, road and pavements: what is behind all things, computed a pixel at a time."""

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.camera import Camera
from deploy.models.street.layout import Layout
from deploy.models.street.light import Light

Float32s = npt.NDArray[np.float32]

_FAR = np.float32(1e6)


@dataclass(frozen=True, slots=True)
class Fronts:
    """A row of buildings. starts: (n,) x of their left edges, rising; the others by building."""

    starts: Float32s
    heights: Float32s
    colors: Float32s
    window_width: Float32s
    window_share: Float32s
    storey: Float32s
    salt: int


def paint_backdrop(
    camera: Camera, layout: Layout, light: Light, generator: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """(height, width, 3) uint8 BGR."""
    x, y, z = camera.rays()
    start_x, start_y, start_z = (np.float32(value) for value in camera.position)
    with np.errstate(divide="ignore", invalid="ignore"):
        to_ground = np.where(z < -1e-4, -start_z / z, _FAR)
        to_far = np.where(y > 1e-4, (np.float32(layout.fronts) - start_y) / y, _FAR)
        to_near = np.where(y < -1e-4, np.float32(-1.5) / y, _FAR)
    to_wall = np.minimum(to_far, to_near)
    is_ground = to_ground < to_wall
    picture = _sky(z, light, generator)
    for to_row in (to_far, to_near):
        fronts = sample_fronts(generator, light)
        is_row = ~is_ground & (to_row < _FAR * 0.5) & (to_row == to_wall)
        if is_row.any():
            away = to_row[is_row]
            color, is_front = _fronts_color(
                fronts, start_x + away * x[is_row], start_z + away * z[is_row], light, layout
            )
            is_row[is_row] = is_front
            picture[is_row] = _hazed(color[is_front], away[is_front], light)
    away = to_ground[is_ground]
    ground_x, ground_y = start_x + away * x[is_ground], start_y + away * y[is_ground]
    color = _ground(ground_x, ground_y, away, layout, generator)
    color *= _gain(light, ground_x, ground_y)
    picture[is_ground] = _hazed(color, away, light)
    sharp = np.clip(picture, 0, 255).astype(np.uint8)
    soft: npt.NDArray[np.uint8] = cv2.GaussianBlur(sharp, (0, 0), 0.55 * camera.width / 640)
    return soft


def sample_fronts(generator: np.random.Generator, light: Light) -> Fronts:
    """Buildings of all heights, garden walls and gaps among them."""
    widths = generator.uniform(6, 18, 60)
    starts = np.cumsum(widths) - widths.sum() / 2
    heights = np.where(generator.random(60) < 0.15, generator.uniform(1.0, 2.2, 60), generator.uniform(5, 16, 60))
    base = generator.uniform(60, 215, (60, 1))
    colors = np.clip(base * generator.uniform(0.8, 1.12, (60, 3)) - np.array([22, 8, 0]), 25, 240)
    return Fronts(
        starts=starts.astype(np.float32),
        heights=heights.astype(np.float32),
        colors=colors.astype(np.float32),
        window_width=generator.uniform(1.5, 3.5, 60).astype(np.float32),
        window_share=generator.uniform(0.35, 0.75, 60).astype(np.float32),
        storey=generator.uniform(2.7, 3.6, 60).astype(np.float32),
        salt=int(generator.integers(1 << 20)),
    )


def _sky(z: Float32s, light: Light, generator: np.random.Generator) -> Float32s:
    share = np.clip(z * 2.2, 0, 1)[..., None]
    sky: Float32s = np.asarray(light.sky_low, np.float32) * (1 - share) + np.asarray(light.sky_top, np.float32) * share
    if light.name in ("sunny", "dusk"):
        small = generator.normal(0, 1, (7, 14)).astype(np.float32)
        clouds = cv2.resize(small, z.shape[::-1], interpolation=cv2.INTER_CUBIC)
        sky += np.clip(clouds - 0.2, 0, 1.2)[..., None] * np.float32(28 if light.name == "sunny" else 14)
    return sky


def _fronts_color(
    fronts: Fronts, x: Float32s, z: Float32s, light: Light, layout: Layout
) -> tuple[Float32s, npt.NDArray[np.bool_]]:
    """The row's colour where its plane is hit, (n, 3), and whether a building is there. x, z: (n,) metres."""
    index = np.clip(np.searchsorted(fronts.starts, x) - 1, 0, len(fronts.starts) - 1)
    color = fronts.colors[index].copy()
    width, storey, share = fronts.window_width[index], fronts.storey[index], fronts.window_share[index]
    column = (x - fronts.starts[index]) / width
    level = z / storey
    across, up = column % 1.0, level % 1.0
    is_shop = level < 1.0
    reach = np.where(is_shop, 0.46, share / 2)
    is_window = (np.abs(across - 0.5) < reach) & (np.abs(up - 0.52) < np.where(is_shop, 0.36, 0.3))
    is_tall = fronts.heights[index] > 3.0
    is_window &= is_tall
    is_sill = (np.abs(across - 0.5) < reach + 0.06) & (np.abs(up - 0.17) < 0.035) & is_tall & ~is_shop
    dice = _dice(index, column, level, fronts.salt)
    color[is_sill] *= 0.78
    color[is_tall & is_shop] *= 0.85
    color[(up < 0.05) & is_tall] *= 0.8
    glass = np.stack([70 + 60 * dice, 62 + 55 * dice, 55 + 50 * dice], 1)
    color[is_window] = glass[is_window]
    shade = np.float32(0.8 if light.sun == (0.0, 0.0, 0.0) else 0.7 + 0.25 * max(0.0, -light.sun[1]))
    color = color * _gain(light, x, np.full_like(x, layout.fronts - 1.0)) * shade
    if light.is_dark:
        is_lit = is_window & (dice > np.where(is_shop, 0.45, 0.72))
        color[is_lit] = np.array((90, 165, 205), np.float32) * (0.6 + 0.5 * dice[is_lit, None])
    is_front: npt.NDArray[np.bool_] = z <= fronts.heights[index]
    return color, is_front


def _dice(index: npt.NDArray[np.int64], column: Float32s, level: Float32s, salt: int) -> Float32s:
    """A number in [0, 1) a window, always the same for the same window."""
    mixed = index * 7919 + column.astype(np.int64) * 104729 + level.astype(np.int64) * 1299709 + salt
    dice: Float32s = ((mixed * 2654435761 >> 8) % 1024).astype(np.float32) / np.float32(1024)
    return dice


def _ground(x: Float32s, y: Float32s, distance: Float32s, layout: Layout, generator: np.random.Generator) -> Float32s:
    """The ground's own colour, (n, 3), at n places."""
    asphalt: Float32s = np.float32(generator.uniform(80, 135)) * np.array((1.0, 0.99, 0.97), np.float32)
    paving: Float32s = np.float32(generator.uniform(115, 185)) * generator.uniform(0.93, 1.04, 3).astype(np.float32)
    is_road = (y > layout.near_kerb) & (y < layout.far_kerb)
    color: Float32s = np.where(is_road[:, None], asphalt, paving)
    closeness = np.clip(14.0 / distance, 0, 1)
    color += (_grain(x, y, generator) * (3 + 6 * closeness))[:, None]
    side = np.float32(generator.uniform(0.4, 1.0))
    is_joint = ((x % side) < 0.035) | ((y % side) < 0.035)
    color *= np.where(is_joint & ~is_road, 1 - np.float32(0.22) * closeness, np.float32(1.0))[:, None]
    kerb = np.minimum(np.abs(y - layout.near_kerb), np.abs(y - layout.far_kerb))
    color[kerb < 0.09] = paving * np.float32(1.12)
    color[(kerb > 0.09) & (kerb < 0.3) & is_road] *= np.float32(0.86)
    is_paint = _road_paint(x, y, layout)
    color[is_paint] = color[is_paint] * np.float32(0.25) + np.float32(165)
    return color.astype(np.float32, copy=False)


def _grain(x: Float32s, y: Float32s, generator: np.random.Generator) -> Float32s:
    """Roughness of two sizes, around 0."""
    tile = generator.standard_normal((128, 128), dtype=np.float32)
    patch = cv2.resize(generator.standard_normal((32, 32), dtype=np.float32), (128, 128), interpolation=cv2.INTER_CUBIC)
    fine = tile[(y * 14).astype(np.int32) & 127, (x * 14).astype(np.int32) & 127]
    coarse = patch[(y * 4).astype(np.int32) & 127, (x * 3).astype(np.int32) & 127]
    rough: Float32s = 0.55 * fine + 0.8 * coarse
    return rough


def _road_paint(x: Float32s, y: Float32s, layout: Layout) -> npt.NDArray[np.bool_]:
    """Whether a place is painted white."""
    middle = (layout.lanes[0][0] + layout.lanes[1][0]) / 2
    is_paint: npt.NDArray[np.bool_] = (np.abs(y - middle) < 0.07) & (x % 5.0 < 2.6)
    for (bicycle_y, _), (lane_y, _) in zip(layout.bicycle_lanes, layout.lanes, strict=True):
        if layout.has_marked_bicycle_lanes:
            edge = (bicycle_y + lane_y) / 2 - np.sign(lane_y - bicycle_y) * 0.75
            is_paint |= (np.abs(y - edge) < 0.06) & (x % 2.0 < 1.2)
    for parked in layout.parking:
        is_paint |= (np.abs(y - parked) < 1.0) & (x % 5.6 < 0.1)
    if layout.crossing_x is not None:
        is_zebra = (np.abs(x - layout.crossing_x) < 1.6) & (y % 1.0 < 0.5)
        is_paint |= is_zebra & (y > layout.near_kerb + 0.2) & (y < layout.far_kerb - 0.2)
    return is_paint


def _gain(light: Light, x: Float32s, y: Float32s) -> Float32s:
    ambient = np.asarray(light.ambient, np.float32)
    if not light.lamps:
        return np.broadcast_to(ambient, (*x.shape, 3))
    lamp: Float32s = ambient + light.lamplight(x, y)[..., None] * np.asarray(light.lamp_gain, np.float32)
    return lamp


def _hazed(color: Float32s, distance: Float32s, light: Light) -> Float32s:
    clear = np.exp(-np.float32(light.haze_per_m) * np.minimum(distance, 500))[:, None]
    mixed: Float32s = np.minimum(color, 255) * clear + np.asarray(light.haze, np.float32) * (1 - clear)
    return mixed
