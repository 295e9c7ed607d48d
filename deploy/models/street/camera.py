"""A fixed camera over a street.

World: x along the street, y across it (away from the camera's side), z up; metres. Pixels: (0, 0) is the upper left
corner of the upper left pixel.
"""

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
