"""Sky, fronts, road and pavements, and street furniture that belongs to no class."""

import math
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.camera import Bgr, Camera, Layout, Light
from deploy.models.street.people import sample_cloth
from deploy.models.street.picture import Brush, Vector

KINDS = ("lamp", "sign", "bin", "bench", "tree", "bollard", "box", "board", "planter", "hydrant", "railing")
_METAL: Bgr = (105, 105, 100)


@dataclass(frozen=True, slots=True)
class PropLook:
    """A thing of a kind of KINDS. size: around 1. seed: of its leaves and the like."""

    kind: str
    size: float
    color: Bgr
    seed: int

    @property
    def half_length(self) -> float:
        return {"bench": 0.8, "planter": 0.7, "railing": 1.2}.get(self.kind, 0.25) * self.size

    @property
    def half_width(self) -> float:
        return 0.3 if self.kind in ("planter", "bench") else 0.2

    @property
    def height(self) -> float:
        return {"lamp": 5.0, "tree": 5.0, "sign": 2.6}.get(self.kind, 1.0) * self.size

    def draw(self, brush: Brush, phase: float) -> None:
        """phase: not of interest to things that stand still."""
        getattr(self, f"_{self.kind}")(brush)

    def _lamp(self, brush: Brush) -> None:
        top = 5.2 * self.size
        brush.limb((0, 0, 0), (0, 0, top), (0.09, 0.06), self.color)
        brush.limb((0, 0, top), (0, 1.0, top + 0.25), (0.05, 0.05), self.color)
        brush.limb((0, 0.8, top + 0.2), (0, 1.3, top + 0.25), (0.08, 0.1), (90, 90, 90))
        if brush.light.is_dark:
            brush.glow((0, 1.1, top + 0.15), 0.9, (170, 225, 255))

    def _sign(self, brush: Brush) -> None:
        top = 2.5 * self.size
        brush.limb((0, 0, 0), (0, 0, top), (0.04, 0.04), _METAL)
        around = np.linspace(0, 2 * math.pi, (3, 4, 16)[self.seed % 3], endpoint=False) + math.pi / 2
        for radius, color in ((0.34, self.color), (0.25, (235.0, 235.0, 235.0))):
            points = np.stack([radius * np.cos(around), np.full_like(around, -0.05), top + radius * np.sin(around)], 1)
            brush.face(points, color)

    def _bin(self, brush: Brush) -> None:
        high = 0.95 * self.size
        brush.limb((0, 0, 0.28), (0, 0, high - 0.2), (0.24, 0.26), self.color)
        brush.limb(
            (0, 0, high - 0.06),
            (0, 0, high),
            (0.27, 0.2),
            (self.color[0] * 0.7, self.color[1] * 0.7, self.color[2] * 0.7),
        )

    def _bench(self, brush: Brush) -> None:
        for end in (-0.7, 0.7):
            brush.limb((end, 0, 0), (end, 0, 0.45), (0.05, 0.05), _METAL)
        for z, depth in ((0.45, -0.2), (0.47, 0.1), (0.65, 0.25), (0.82, 0.28)):
            brush.limb((-0.85, depth, z), (0.85, depth, z), (0.06, 0.06), self.color)

    def _tree(self, brush: Brush) -> None:
        generator = np.random.default_rng(self.seed)
        trunk = 2.2 * self.size
        brush.limb((0, 0, 0), (0, 0, trunk + 0.6), (0.16 * self.size, 0.1), (50, 70, 85))
        green = generator.uniform((30, 70, 35), (60, 130, 90))
        for step in range(16):
            shade = 0.65 + 0.5 * step / 16
            offset = generator.normal(0, (0.7, 0.7, 0.45)) * self.size
            centre: Vector = (
                float(offset[0]),
                float(offset[1]),
                trunk + 1.3 * self.size + float(offset[2]) + step * 0.04,
            )
            leaf = (float(green[0] * shade), float(green[1] * shade), float(green[2] * shade))
            brush.ball(centre, float(generator.uniform(0.4, 0.8)) * self.size, leaf)

    def _bollard(self, brush: Brush) -> None:
        brush.limb((0, 0, 0), (0, 0, 0.85 * self.size), (0.08, 0.08), self.color)
        brush.limb((0, 0, 0.7 * self.size), (0, 0, 0.76 * self.size), (0.085, 0.085), (225, 225, 225))

    def _box(self, brush: Brush) -> None:
        """A post box, a switch cabinet."""
        half, high = 0.26 * self.size, 1.3 * self.size
        for normal, face in _box_faces(half, 0.22, 0.0, high):
            brush.face(face, self.color, normal=normal)
        wide, low, top = half * 0.7, high * 0.7, high * 0.78
        slot: list[Vector] = [(-wide, -0.222, low), (wide, -0.222, low), (wide, -0.222, top), (-wide, -0.222, top)]
        brush.face(slot, (40, 40, 40), normal=(0, -1, 0))

    def _board(self, brush: Brush) -> None:
        """An advertiser's easel."""
        brush.face([(-0.3, 0, 0), (0.3, 0, 0), (0.3, 0.2, 1.05), (-0.3, 0.2, 1.05)], self.color)
        brush.face([(-0.24, -0.01, 0.15), (0.24, -0.01, 0.15), (0.24, 0.17, 0.95), (-0.24, 0.17, 0.95)], (60, 70, 65))

    def _planter(self, brush: Brush) -> None:
        for normal, face in _box_faces(0.65 * self.size, 0.28, 0.0, 0.5):
            brush.face(face, self.color, normal=normal)
        for x in np.linspace(-0.5, 0.5, 6) * self.size:
            brush.ball((float(x), 0.0, 0.62), 0.22, (50, 110, 60))

    def _hydrant(self, brush: Brush) -> None:
        brush.limb((0, 0, 0), (0, 0, 0.6), (0.13, 0.12), self.color)
        brush.ball((0, 0, 0.66), 0.13, self.color)

    def _railing(self, brush: Brush) -> None:
        for x in np.linspace(-1.2, 1.2, 7):
            brush.limb((float(x), 0, 0), (float(x), 0, 1.0), (0.02, 0.02), self.color)
        for z in (0.3, 1.0):
            brush.limb((-1.2, 0, z), (1.2, 0, z), (0.03, 0.03), self.color)


def _box_faces(half: float, deep: float, low: float, high: float) -> list[tuple[Vector, list[Vector]]]:
    """(normal, corners) of a box's five visible faces."""
    a, b = half, deep
    return [
        ((0, -1, 0), [(-a, -b, low), (a, -b, low), (a, -b, high), (-a, -b, high)]),
        ((0, 1, 0), [(-a, b, low), (a, b, low), (a, b, high), (-a, b, high)]),
        ((-1, 0, 0), [(-a, -b, low), (-a, b, low), (-a, b, high), (-a, -b, high)]),
        ((1, 0, 0), [(a, -b, low), (a, b, low), (a, b, high), (a, -b, high)]),
        ((0, 0, 1), [(-a, -b, high), (a, -b, high), (a, b, high), (-a, b, high)]),
    ]


def sample_prop(generator: np.random.Generator, kind: str | None = None) -> PropLook:
    """A thing of the kind, or of any."""
    chosen = KINDS[generator.integers(len(KINDS))] if kind is None else kind
    color = _METAL if chosen in ("lamp", "railing") else sample_cloth(generator)
    return PropLook(chosen, float(generator.uniform(0.85, 1.15)), color, int(generator.integers(1 << 30)))


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
