"""Draws solid shapes with their visibility masks; optical effects: glare, weather, blur, noise, compression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.camera import NEAREST_M, Bgr, Camera, Floats, Light

_SHIFT = 4  # fixed-point bits of OpenCV's drawing
_SCALE = 1 << _SHIFT
_FARTHEST_PX = 20_000.0

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a thing stands: metres; heading: radians from +x towards +y; phase: of its gait or wheels, radians."""

    x: float
    y: float
    heading: float = 0.0
    phase: float = 0.0


@dataclass(frozen=True, slots=True)
class Glow:
    """A light that shines into the lens where its owner is seen: pixel, radius in pixels, colour."""

    owner: int
    u: float
    v: float
    radius_px: float
    color: Bgr


class Brush:
    """Draws one thing after the other, far ones first, in the thing's own axes: forward, left, up, in metres.

    canvas: (H, W, 3) uint8 BGR, drawn into. owners: (H, W) uint16, the object of each pixel; 0 for none.
    """

    def __init__(self, camera: Camera, light: Light, canvas: npt.NDArray[np.uint8]) -> None:
        self.camera = camera
        self.light = light
        self.canvas = canvas
        self.owners = np.zeros(canvas.shape[:2], np.uint16)
        self.glows: list[Glow] = []
        self._owner = 0
        self._axes = np.eye(3)
        self._start = np.zeros(3)
        self._gain: Bgr = (1.0, 1.0, 1.0)
        self._clear = 1.0
        self._turn = (1.0, 0.0)
        self._low, self._high = [math.inf, math.inf], [-math.inf, -math.inf]

    def begin(self, owner: int, place: Position) -> None:
        """What is drawn from here on is the owner's (at least 1), and stands there."""
        self._owner = owner
        cos, sin = math.cos(place.heading), math.sin(place.heading)
        self._turn = (cos, sin)
        turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
        self._axes = self.camera.rotation @ turn
        offset = np.array([place.x, place.y, 0.0]) - self.camera.origin
        self._start = self.camera.rotation @ offset
        self._gain = self.light.gain_at(place.x, place.y)
        self._clear = self.light.clearness(float(np.linalg.norm(offset)))
        self._low, self._high = [math.inf, math.inf], [-math.inf, -math.inf]

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """xyxy of all that was drawn since begin(), also outside of the picture; infinite where nothing was."""
        return self._low[0], self._low[1], self._high[0], self._high[1]

    @property
    def viewpoint(self) -> Vector:
        """The camera in the thing's own axes."""
        forward, left, up = -self._axes.T @ self._start
        return float(forward), float(left), float(up)

    def face(self, points: Floats | list[Vector], color: Bgr, *, normal: Vector | None = None) -> None:
        """A convex face, shaded by its normal; not drawn where it is turned away or behind the camera."""
        corners = np.asarray(points, np.float64)
        if normal is not None and np.dot(np.asarray(self.viewpoint) - corners[0], normal) <= 0:
            return
        pixels, depth = self._project(corners)
        if depth.min() > NEAREST_M:
            self._fill(pixels, self._lit(color, 1.0 if normal is None else self.light.shade(self._world(normal))))

    def limb(self, start: Vector, end: Vector, radii_m: tuple[float, float], color: Bgr) -> None:
        """A rounded bar, as thick at its ends as the radii say."""
        pixels, depth = self._project(np.array([start, end]))
        if depth.min() <= NEAREST_M:
            return
        radii = np.maximum(np.array(radii_m) * self.camera.focal_px / depth, 0.4)
        along = pixels[1] - pixels[0]
        length = max(float(np.hypot(*along)), 1e-6)
        across = np.array([-along[1], along[0]]) / length
        lit = self._lit(color, 1.0)
        quad = [
            pixels[0] + across * radii[0],
            pixels[1] + across * radii[1],
            pixels[1] - across * radii[1],
            pixels[0] - across * radii[0],
        ]
        self._fill(np.array(quad), lit)
        for centre, radius in zip(pixels, radii, strict=True):
            if radius > 0.8:
                self._disc(centre, float(radius), lit)

    def ball(self, centre: Vector, radius_m: float, color: Bgr) -> None:
        """A disc that faces the camera."""
        pixels, depth = self._project(np.array([centre]))
        if depth[0] > NEAREST_M:
            self._disc(pixels[0], max(radius_m * self.camera.focal_px / float(depth[0]), 0.5), self._lit(color, 1.0))

    def line(self, points: Floats | list[Vector], width_m: float, color: Bgr, *, is_closed: bool = False) -> None:
        """A line of even width through the points."""
        pixels, depth = self._project(np.asarray(points, np.float64))
        if depth.min() <= NEAREST_M:
            return
        width = max(1, round(width_m * self.camera.focal_px / float(depth.mean())))
        fixed = self._fixed(pixels, width / 2)
        cv2.polylines(self.canvas, [fixed], is_closed, self._lit(color, 1.0), width, cv2.LINE_AA, _SHIFT)
        cv2.polylines(self.owners, [fixed], is_closed, self._owner, width, cv2.LINE_8, _SHIFT)

    def glow(self, point: Vector, radius_m: float, color: Bgr) -> None:
        """A light at the point, painted when all things are in their places."""
        pixels, depth = self._project(np.array([point]))
        if depth[0] > NEAREST_M:
            radius = radius_m * self.camera.focal_px / float(depth[0])
            self.glows.append(Glow(self._owner, float(pixels[0, 0]), float(pixels[0, 1]), radius, color))

    def _project(self, points: Floats) -> tuple[Floats, Floats]:
        seen = points @ self._axes.T + self._start
        depth = seen[:, 2]
        pixels = seen[:, :2] * (self.camera.focal_px / np.maximum(depth, NEAREST_M))[:, None]
        return pixels + np.array([self.camera.width / 2, self.camera.height / 2]), depth

    def _world(self, normal: Vector) -> Vector:
        cos, sin = self._turn
        return cos * normal[0] - sin * normal[1], sin * normal[0] + cos * normal[1], normal[2]

    def _lit(self, color: Bgr, shade: float) -> Bgr:
        haze = self.light.haze
        blue, green, red = (
            min(own * gain * shade, 255.0) * self._clear + air * (1 - self._clear)
            for own, gain, air in zip(color, self._gain, haze, strict=True)
        )
        return blue, green, red

    def _fixed(self, pixels: Floats, reach: float) -> npt.NDArray[np.int32]:
        low, high = pixels.min(axis=0) - reach, pixels.max(axis=0) + reach
        self._low = [min(self._low[0], float(low[0])), min(self._low[1], float(low[1]))]
        self._high = [max(self._high[0], float(high[0])), max(self._high[1], float(high[1]))]
        clipped = np.clip(pixels - 0.5, -_FARTHEST_PX, _FARTHEST_PX)  # OpenCV counts from pixels' centres
        return np.rint(clipped * _SCALE).astype(np.int32)

    def _fill(self, pixels: Floats, color: Bgr) -> None:
        fixed = self._fixed(pixels, 0.0)
        cv2.fillConvexPoly(self.canvas, fixed, color, cv2.LINE_AA, _SHIFT)
        cv2.fillConvexPoly(self.owners, fixed, self._owner, cv2.LINE_8, _SHIFT)

    def _disc(self, centre: Floats, radius: float, color: Bgr) -> None:
        fixed = self._fixed(centre[None], radius)[0]
        place, size = (int(fixed[0]), int(fixed[1])), max(round(radius * _SCALE), 1)
        cv2.circle(self.canvas, place, size, color, cv2.FILLED, cv2.LINE_AA, _SHIFT)
        cv2.circle(self.owners, place, size, self._owner, cv2.FILLED, cv2.LINE_8, _SHIFT)


Picture = npt.NDArray[np.uint8]

_MARGIN = 64


@dataclass(frozen=True, slots=True)
class Lens:
    """noise: standard deviation in grey values. blur_px, smear_px: at 640 pixels' width. quality: of the JPEG, or None.

    rain, snow: drops and flakes a picture of 640 x 360. gains: BGR. gamma: over 1 is darker.
    """

    noise: float = 0.0
    blur_px: float = 0.0
    smear_px: float = 0.0
    smear_angle: float = 0.0
    quality: int | None = None
    rain: int = 0
    snow: int = 0
    gains: tuple[float, float, float] = (1.0, 1.0, 1.0)
    gamma: float = 1.0
    contrast: float = 1.0
    vignette: float = 0.0


def sample_lens(generator: np.random.Generator, *, is_noisy: bool, is_dark: bool) -> Lens:
    """Any camera; is_noisy: a bad one."""
    noise = float(generator.uniform(8, 18) if is_noisy else generator.gamma(1.5, 1.6)) + (2.0 if is_dark else 0.0)
    smears = generator.random() < (0.3 if is_noisy else 0.08)
    falls = generator.random() < (0.3 if is_noisy else 0.1)
    is_snow = falls and generator.random() < 0.35
    tint = generator.normal(1.0, 0.025, 3)
    exposure = float(np.exp(generator.normal(0.0, 0.14)))
    return Lens(
        noise=noise,
        blur_px=float(generator.uniform(0, 1.3) if is_noisy else generator.uniform(0, 0.7)),
        smear_px=float(generator.uniform(1.5, 4.0)) if smears else 0.0,
        smear_angle=float(generator.uniform(0, 180)),
        quality=int(generator.integers(22, 60) if is_noisy else generator.integers(45, 97)),
        rain=int(generator.integers(60, 350)) if falls and not is_snow else 0,
        snow=int(generator.integers(60, 300)) if is_snow else 0,
        gains=(float(tint[0]) * exposure, float(tint[1]) * exposure, float(tint[2]) * exposure),
        gamma=float(np.exp(generator.normal(0.0, 0.12))),
        contrast=float(generator.uniform(0.75, 1.1)),
        vignette=float(generator.uniform(0, 0.35)),
    )


def take(picture: Picture, lens: Lens, generator: np.random.Generator) -> Picture:
    """The picture as the camera delivers it; the picture given is used up."""
    height, width = picture.shape[:2]
    zoom = width / 640
    if lens.rain:
        _let_rain(picture, round(lens.rain * zoom), zoom, generator)
    if lens.snow:
        _let_snow(picture, lens.snow, zoom, generator)
    if lens.blur_px * zoom > 0.25:
        picture = cv2.GaussianBlur(picture, (0, 0), lens.blur_px * zoom)
    if lens.smear_px * zoom > 1:
        picture = cv2.filter2D(picture, -1, _smear(lens.smear_px * zoom, lens.smear_angle))
    picture = cv2.LUT(picture, _curves(lens))
    if lens.vignette:
        picture = cv2.multiply(picture, _vignette(width, height, lens.vignette), dtype=cv2.CV_8U)
    if lens.noise:
        picture = cv2.add(picture, _noise(width, height, lens.noise, generator), dtype=cv2.CV_8U)
    if lens.quality is not None:
        picture = _through_jpeg(picture, lens.quality)
    return picture


def paint_glows(picture: Picture, owners: npt.NDArray[np.uint16], glows: Sequence[Glow]) -> None:
    """Adds the lights whose owners are seen where they are."""
    height, width = picture.shape[:2]
    for glow in glows:
        column, row = int(glow.u), int(glow.v)
        if not (0 <= column < width and 0 <= row < height) or owners[row, column] != glow.owner:
            continue
        reach = max(int(glow.radius_px * 2), 2)
        left, right = max(column - reach, 0), min(column + reach + 1, width)
        top, bottom = max(row - reach, 0), min(row + reach + 1, height)
        down, across = np.ogrid[top:bottom, left:right]
        square = ((across - glow.u) ** 2 + (down - glow.v) ** 2) / max(glow.radius_px * 0.5, 0.7) ** 2
        shine = (np.exp(-square) * 0.9 + 0.12 * np.exp(-square / 6)).astype(np.float32)
        patch = picture[top:bottom, left:right]
        patch[:] = np.clip(patch + shine[..., None] * np.array(glow.color, np.float32), 0, 255).astype(np.uint8)


def _through_jpeg(picture: Picture, quality: int) -> Picture:
    _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    decoded: Picture | None = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    if decoded is None:
        raise ValueError("OpenCV cannot read the JPEG that it wrote")
    return decoded


def _curves(lens: Lens) -> npt.NDArray[np.uint8]:
    values = np.arange(256) / 255.0
    curve = ((values**lens.gamma) - 0.5) * lens.contrast + 0.5
    table: Picture = np.clip(curve[:, None] * np.array(lens.gains) * 255, 0, 255).astype(np.uint8).reshape(1, 256, 3)
    return table


def _vignette(width: int, height: int, strength: float) -> npt.NDArray[np.float32]:
    across = np.linspace(-1, 1, width, dtype=np.float32)[None]
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    fall = 1 - np.float32(strength) * (across**2 + down**2) / 2
    whole: npt.NDArray[np.float32] = cv2.merge([fall, fall, fall])
    return whole


def _noise(width: int, height: int, deviation: float, generator: np.random.Generator) -> npt.NDArray[np.int16]:
    """Of brightness mostly, of colour a little."""
    grain = generator.standard_normal((height + _MARGIN, width + _MARGIN), dtype=np.float32) * np.float32(deviation)
    whole = grain.astype(np.int16)
    small = (grain * np.float32(0.45)).astype(np.int16)
    channels = []
    for shift in ((7, 31), (41, 3), (19, 59)):
        own = small[shift[0] : shift[0] + height, shift[1] : shift[1] + width]
        channels.append(cv2.add(whole[:height, :width], own))
    noise: npt.NDArray[np.int16] = cv2.merge(channels)
    return noise


def _smear(length: float, angle: float) -> npt.NDArray[np.float32]:
    side = int(length) | 1
    kernel = np.zeros((side, side), np.float32)
    kernel[side // 2] = 1
    turn = cv2.getRotationMatrix2D((side / 2 - 0.5, side / 2 - 0.5), angle, 1)
    turned: npt.NDArray[np.float32] = cv2.warpAffine(kernel, turn, (side, side))
    return turned / np.float32(max(float(turned.sum()), 1e-6))


def _let_rain(picture: Picture, count: int, zoom: float, generator: np.random.Generator) -> None:
    height, width = picture.shape[:2]
    layer = np.zeros((height, width), np.uint8)
    starts = generator.uniform((0, -20), (width, height), (count, 2))
    lengths = generator.uniform(6, 22, count) * zoom
    slant = float(generator.normal(0, 0.2))
    for (x, y), length in zip(starts, lengths, strict=True):
        cv2.line(layer, (int(x), int(y)), (int(x + slant * length), int(y + length)), 90, 1, cv2.LINE_AA)
    layer = cv2.GaussianBlur(layer, (3, 3), 0)
    cv2.add(picture, cv2.merge([layer, layer, layer]), dst=picture)


def _let_snow(picture: Picture, count: int, zoom: float, generator: np.random.Generator) -> None:
    height, width = picture.shape[:2]
    for x, y, radius in generator.uniform((0, 0, 0.6), (width, height, 2.2), (count, 3)):
        cv2.circle(picture, (int(x), int(y)), max(1, round(radius * zoom)), (235, 235, 235), cv2.FILLED, cv2.LINE_AA)
