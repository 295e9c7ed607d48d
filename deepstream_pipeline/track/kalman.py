"""The library's Kalman filter of a box's corners, written out for one number.

Its four corners move alike and know nothing of each other: one covariance of place and speed serves all four, and the
matrices of 8 × 8 come down to a few products. The same filter in a quarter of the time, held against the library's own
by a test.
"""

import numpy as np
import numpy.typing as npt
from trackers.utils.kalman_filter import KalmanFilter
from trackers.utils.state_representations import XYXYStateEstimator

Array = npt.NDArray[np.float64]

_NOMINAL_STEP = 0.004  # frames; so near to one frame the library takes a step for one
_UNTUNED = KalmanFilter(8, 4)  # its noise is what the library's tracklets scale to their own


class CornerKalman(XYXYStateEstimator):
    """What the library asks of a state estimator; `ahead` is ours."""

    def __init__(self, bbox: Array) -> None:
        self.kf = _UNTUNED
        self._place: list[float] = bbox.tolist()
        self._speed = [0.0, 0.0, 0.0, 0.0]
        self._pp, self._pv, self._vv = 1.0, 0.0, 1.0
        self._noise = self._noise_place = self._noise_speed = 1.0

    def set_kf_covariances(
        self,
        measurement_noise: Array | None = None,
        process_noise: Array | None = None,
        state_covariance: Array | None = None,
    ) -> None:
        """Takes matrices that treat all corners alike, as the library's ByteTrack makes them."""
        if measurement_noise is not None:
            self._noise = float(measurement_noise[0, 0])
        if process_noise is not None:
            self._noise_place, self._noise_speed = float(process_noise[0, 0]), float(process_noise[4, 4])
        if state_covariance is not None:
            self._pp, self._pv = float(state_covariance[0, 0]), float(state_covariance[0, 4])
            self._vv = float(state_covariance[4, 4])

    def predict(self, frame_step: float = 1.0, frame_rate: float | None = None) -> None:
        """Moved on by so many frames."""
        step = frame_step
        self._place = [place + step * speed for place, speed in zip(self._place, self._speed, strict=True)]
        self._pp += step * (2 * self._pv + step * self._vv)
        self._pv += step * self._vv
        if abs(step - 1) <= _NOMINAL_STEP:
            self._pp += self._noise_place
            self._vv += self._noise_speed
            return
        grown = self._noise_speed * step * step
        self._pp += grown * step * step / 4
        self._pv += grown * step / 2
        self._vv += grown

    def update(self, bbox: Array | None) -> None:
        """Drawn towards what was seen."""
        if bbox is None:
            return
        whole = self._pp + self._noise
        gain, speed_gain = self._pp / whole, self._pv / whole
        missed = [seen - place for seen, place in zip(bbox.tolist(), self._place, strict=True)]
        self._place = [place + gain * miss for place, miss in zip(self._place, missed, strict=True)]
        self._speed = [speed + speed_gain * miss for speed, miss in zip(self._speed, missed, strict=True)]
        self._vv -= speed_gain * self._pv
        self._pv *= 1 - gain
        self._pp *= 1 - gain

    def state_to_bbox(self) -> Array:
        """(4,) xyxy, as it is now."""
        return np.array(self._place)

    def ahead(self, frames: int) -> list[float]:
        """xyxy, as it will be so many frames on; the filter stays as it is."""
        return [place + frames * speed for place, speed in zip(self._place, self._speed, strict=True)]
