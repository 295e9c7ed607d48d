"""Seeded random weights whose activations stay of one size through any depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Normalisation:
    """A batch normalisation as inference sees it, each (C,): scale * (x - mean) / sqrt(variance + epsilon) + bias."""

    scale: FloatArray
    bias: FloatArray
    mean: FloatArray
    variance: FloatArray
    epsilon: float = 1e-5


class RandomWeights:
    """He's initialisation: normal, variance 2 / fan-in. The same seed and the same calls give the same numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def conv(self, out_channels: int, in_channels: int, kernel: int, *, group: int = 1) -> FloatArray:
        """(out, in / group, kernel, kernel)."""
        return self._normal((out_channels, in_channels // group, kernel, kernel), gain=2.0)

    def linear(self, out_features: int, in_features: int) -> FloatArray:
        """(out, in), variance 1 / fan-in: no ReLU follows."""
        return self._normal((out_features, in_features), gain=1.0)

    def bias(self, count: int) -> FloatArray:
        """(count,), small."""
        return self._uniform(count, -0.05, 0.05)

    def normalisation(self, channels: int, *, gain: float = 1.0) -> Normalisation:
        """Near the identity times gain, but no number is 0 or 1: one that is folded wrongly can be seen."""
        return Normalisation(
            scale=self._uniform(channels, 0.9 * gain, 1.1 * gain),
            bias=self.bias(channels),
            mean=self._uniform(channels, -0.05, 0.05),
            variance=self._uniform(channels, 0.9, 1.1),
        )

    def _normal(self, shape: Sequence[int], *, gain: float) -> FloatArray:
        fan_in = int(np.prod(shape[1:]))
        return self._generator.standard_normal(tuple(shape), np.float32) * np.float32((gain / fan_in) ** 0.5)

    def _uniform(self, count: int, low: float, high: float) -> FloatArray:
        return self._generator.uniform(low, high, count).astype(np.float32)
