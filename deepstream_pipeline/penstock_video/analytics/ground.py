"""Maps pixels to metres on the ground, and computes the speed of objects. Sans-IO."""

import numpy as np

from penstock_video.analytics.rules import Ground
from penstock_video.analytics.scene import Array, Scale, Trail, scaled

LEAST_S = 0.5  # minimum duration of a trail for a speed


class GroundPlane:
    """The ground plane of a source. Points above the horizon are not on it."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.fit((1.0, 1.0))

    def fit(self, scale: Scale) -> None:
        """Scales the ground's points to source pixels."""
        if self._ground.metres_per_pixel:
            across, down = (self._ground.metres_per_pixel / factor for factor in scale)
            self._to_metres, self._side = np.diag([across, down, 1.0]), 1.0
            return
        pixels, metres = scaled(self._ground.picture, scale), np.array(self._ground.metres)
        self._to_metres = _homography(pixels, metres)
        self._side = float(np.sign((pixels.mean(axis=0) @ self._to_metres[2, :2]) + self._to_metres[2, 2]))

    def speed_mps(self, trail: Trail) -> float | None:
        """Speed of an object in m/s: the slope of a line fitted to its positions of the last second, which is robust to
        jitter. None for a trail shorter than LEAST_S or outside the ground plane."""
        steps = np.array(trail)
        times = steps[:, 0] - steps[:, 0].mean()
        if steps[-1, 0] - steps[0, 0] < LEAST_S:
            return None
        places = np.column_stack((steps[:, 1:], np.ones(len(steps)))) @ self._to_metres.T
        if (places[:, 2] * self._side <= 0).any():
            return None
        velocity = times @ (places[:, :2] / places[:, 2:]) / (times @ times)
        return float(np.hypot(*velocity))


def _homography(pixels: Array, metres: Array) -> Array:
    """The (3, 3) homography that maps four points to four; no three of them on a line."""
    rows = []
    for (x, y), (east, north) in zip(pixels, metres, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -east * x, -east * y], [0, 0, 0, x, y, 1, -north * x, -north * y]]
    solved = np.linalg.solve(np.array(rows), metres.reshape(-1))
    matrix: Array = np.append(solved, 1.0).reshape(3, 3)
    return matrix
