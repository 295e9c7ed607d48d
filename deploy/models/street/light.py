"""Daylight, dusk and night: how much light falls where, and what the air does to distant things."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
