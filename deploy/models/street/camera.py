"""A fixed camera over a street, the positions of lanes and pavements, and the light."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NEAREST_M = 0.4


@dataclass(frozen=True)
class Camera:
    """position: metres. yaw: 0 looks across the street, π/2 along it; pitch: down; roll: clockwise; radians."""

    position: tuple[float, float, float]
    yaw: float
    pitch: float
    roll: float
    focal_px: float
    width: int
    height: int

    @cached_property
    def rotation(self) -> Floats:
        """(3, 3): world axes to the picture's right, down and forward."""
        sin_yaw, cos_yaw = math.sin(self.yaw), math.cos(self.yaw)
        sin_pitch, cos_pitch = math.sin(self.pitch), math.cos(self.pitch)
        right = np.array([cos_yaw, -sin_yaw, 0.0])
        down = -np.array([sin_yaw * sin_pitch, cos_yaw * sin_pitch, cos_pitch])
        forward = np.array([sin_yaw * cos_pitch, cos_yaw * cos_pitch, -sin_pitch])
        sin_roll, cos_roll = math.sin(self.roll), math.cos(self.roll)
        return np.stack([cos_roll * right + sin_roll * down, cos_roll * down - sin_roll * right, forward])

    @cached_property
    def origin(self) -> Floats:
        """(3,): the position as an array."""
        return np.array(self.position)

    def project(self, points: Floats) -> tuple[Floats, Floats]:
        """World points (n, 3) as pixels (n, 2) and distances along the view (n,), which may be negative."""
        seen = (points - self.origin) @ self.rotation.T
        depth = seen[:, 2]
        pixels = seen[:, :2] * (self.focal_px / np.maximum(depth, NEAREST_M))[:, None]
        return pixels + np.array([self.width / 2, self.height / 2]), depth

    def pixel_of(self, x: float, y: float, z: float = 0.0) -> tuple[float, float] | None:
        """Where a point is in the picture's plane, perhaps outside of the picture; None behind the camera."""
        pixels, depth = self.project(np.array([[x, y, z]]))
        return None if depth[0] <= NEAREST_M else (float(pixels[0, 0]), float(pixels[0, 1]))

    def sees(self, x: float, y: float, *, margin: float = 0.0) -> bool:
        """Whether a point of the ground is in the picture; margin: as a share of its width, more (or less) of it."""
        pixel = self.pixel_of(x, y)
        if pixel is None:
            return False
        across, down = pixel[0] / self.width, pixel[1] / self.height
        return -margin <= across <= 1 + margin and -margin <= down <= 1 + 2 * max(margin, 0.0)

    def rays(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The world direction of every pixel's ray, three arrays (height, width)."""
        across = ((np.arange(self.width) + 0.5 - self.width / 2) / self.focal_px).astype(np.float32)
        down = ((np.arange(self.height) + 0.5 - self.height / 2) / self.focal_px).astype(np.float32)
        right, below, forward = self.rotation.astype(np.float32)
        x, y, z = (across[None, :] * right[axis] + down[:, None] * below[axis] + forward[axis] for axis in range(3))
        return x, y, z


FARTHEST_M = 34.0  # things farther away are too small to recognise


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
    """The least and the greatest visible x along the line at y, or None if none is visible."""
    x = np.linspace(-FARTHEST_M, FARTHEST_M, 169)
    pixels, depth = camera.project(np.stack([x, np.full_like(x, y), np.zeros_like(x)], 1))
    across, down = pixels[:, 0] / camera.width, pixels[:, 1] / camera.height
    is_seen = (depth > 2.0) & (depth < FARTHEST_M) & (np.abs(across - 0.5) < 0.5 + margin) & (down < 1.1)
    if not is_seen.any():
        return None
    return float(x[is_seen].min()), float(x[is_seen].max())


Bgr = tuple[float, float, float]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Light:
    """Colours are BGR in 0 to 255, gains around 1.

    ambient: the sky's gain. sun: direction towards it, (0, 0, 0) where it does not shine. lamps: (x, y) of the street
    lamps that burn. haze_per_m: of the air's colour, haze, that comes between.
    """

    name: str
    ambient: Bgr
    sun: tuple[float, float, float]
    sky_top: Bgr
    sky_low: Bgr
    haze: Bgr
    haze_per_m: float
    lamps: tuple[tuple[float, float], ...] = ()
    lamp_gain: Bgr = (0.0, 0.0, 0.0)

    @property
    def is_dark(self) -> bool:
        """Whether lamps and windows are lit."""
        return bool(self.lamps) or max(self.ambient) < 0.6

    def gain_at(self, x: float, y: float) -> Bgr:
        """How bright a thing that stands there is."""
        lamp = float(self.lamplight(np.float32(x), np.float32(y)))
        blue, green, red = (own + lamp * more for own, more in zip(self.ambient, self.lamp_gain, strict=True))
        return blue, green, red

    def lamplight(self, x: Float32s | np.float32, y: Float32s | np.float32) -> Float32s:
        """0 to about 1, of any shape: the lamps' pools of light on the ground."""
        total = np.zeros(np.shape(x), np.float32)
        for lamp_x, lamp_y in self.lamps:
            total += 1.0 / (1.0 + ((x - lamp_x) ** 2 + (y - lamp_y) ** 2) / 12.0)
        return np.minimum(total, 1.2, dtype=np.float32)

    def shade(self, normal: tuple[float, float, float]) -> float:
        """The gain of a face; normal: world, unit length."""
        diffuse = 0.72 + 0.2 * normal[2]
        if self.sun == (0.0, 0.0, 0.0):
            return diffuse
        return diffuse - 0.12 + 0.5 * max(0.0, sum(a * b for a, b in zip(normal, self.sun, strict=True)))

    def clearness(self, distance_m: float) -> float:
        """The share of a thing's own colour that comes through the air."""
        return math.exp(-self.haze_per_m * distance_m)


def sample_light(generator: np.random.Generator, name: str, lamps: tuple[tuple[float, float], ...]) -> Light:
    """name: sunny, overcast, dusk, night or fog. lamps: where there are some, lit or not."""
    haze_per_m = float(generator.uniform(0.0005, 0.004))
    tint = generator.uniform(0.96, 1.04, 3)
    grey = float(generator.uniform(165, 225))
    if name == "sunny":
        return Light(
            name, _tinted(tint, 1.0), _sun(generator), (215, 160, 95), (240, 215, 185), (225, 210, 195), haze_per_m
        )
    if name in ("overcast", "fog"):
        air = (grey + 6, grey, grey - 5)
        thickness = float(generator.uniform(0.012, 0.03)) if name == "fog" else haze_per_m * 2
        return Light(name, _tinted(tint, 0.95), (0.0, 0.0, 0.0), (grey - 20,) * 3, air, air, thickness)
    if name == "dusk":
        gain = float(generator.uniform(0.42, 0.6))
        low = (110.0, 140.0, float(generator.uniform(175, 225)))
        warm = (0.95 * gain, 0.92 * gain, 1.1 * gain)
        return Light(
            name, warm, (0.0, 0.0, 0.0), (120, 85, 70), low, (110, 105, 115), haze_per_m, lamps, (0.25, 0.4, 0.5)
        )
    gain = float(generator.uniform(0.2, 0.34))
    lamp = (0.38, 0.62, 0.8) if generator.random() < 0.6 else (0.72, 0.75, 0.72)
    dark = (1.2 * gain, 1.02 * gain, 0.95 * gain)
    return Light(name, dark, (0.0, 0.0, 0.0), (32, 20, 16), (52, 38, 36), (42, 32, 30), haze_per_m, lamps, lamp)


def _tinted(tint: npt.NDArray[np.float64], gain: float) -> Bgr:
    return float(tint[0] * gain), float(tint[1] * gain), float(tint[2] * gain)


def _sun(generator: np.random.Generator) -> tuple[float, float, float]:
    around, above = generator.uniform(0, 2 * math.pi), generator.uniform(0.5, 1.2)
    return math.cos(around) * math.cos(above), math.sin(around) * math.cos(above), math.sin(above)
