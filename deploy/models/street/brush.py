"""Drawing of solid things into a picture, and at the same time of who is seen where."""

import math
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.camera import NEAREST_M, Camera, Floats
from deploy.models.street.light import Bgr, Light

_SHIFT = 4  # fixed-point bits of OpenCV's drawing
_SCALE = 1 << _SHIFT
_FARTHEST_PX = 20_000.0

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Place:
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

    canvas: (H, W, 3) uint8 BGR, drawn into. owners: (H, W) uint16, whose pixel it is; 0 is nobody's.
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

    def begin(self, owner: int, place: Place) -> None:
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

    def px_per_m(self, point: Vector) -> float:
        """The picture's scale where the point is."""
        depth = float(self._axes[2] @ point + self._start[2])
        return self.camera.focal_px / max(depth, NEAREST_M)

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
