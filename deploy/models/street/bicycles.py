"""Bicycles: parked ones, and ridden ones. A rider is part of the bicycle and no person of his own."""

import math
from dataclasses import dataclass

import numpy as np

from deploy.models.street.brush import Brush, Vector
from deploy.models.street.cars import PAINTS
from deploy.models.street.light import Bgr
from deploy.models.street.people import HAIRS, SKINS, sample_cloth

_RADIUS, _HALF_BASE = 0.34, 0.53
_CRANK, _CRANK_LENGTH, _SADDLE = (-0.08, 0.29), 0.17, (-0.24, 0.95)
_BARS, _HEAD_TUBE = (0.38, 1.02), (0.4, 0.75)
_AROUND = np.linspace(0, 2 * math.pi, 20, endpoint=False)


@dataclass(frozen=True, slots=True)
class RiderLook:
    """Who rides. lean: how far the shoulders are ahead of the hips, metres."""

    size: float
    lean: float
    skin: Bgr
    hair: Bgr
    top: Bgr
    bottom: Bgr
    helmet: Bgr | None
    backpack: Bgr | None


@dataclass(frozen=True, slots=True)
class BicycleLook:
    """One bicycle. lights: whether its lamps burn in the dark."""

    frame: Bgr
    tyre: Bgr
    has_basket: bool
    rider: RiderLook | None

    half_length = 0.9
    half_width = 0.3

    @property
    def height(self) -> float:
        return 1.05 if self.rider is None else 1.75

    def draw(self, brush: Brush, phase: float) -> None:
        """The far leg, the bicycle, the rider. phase: of the pedals."""
        near = 1.0 if brush.viewpoint[1] > 0 else -1.0
        if self.rider is not None:
            self._leg(brush, self.rider, -near, phase)
        self._frame(brush)
        if self.rider is not None:
            self._body(brush, self.rider, near)
            self._leg(brush, self.rider, near, phase)
            self._arm(brush, self.rider, near)
            self._head(brush, self.rider)
            if brush.light.is_dark:
                brush.glow((_HALF_BASE, 0.0, 0.9), 0.15, (200, 225, 245))

    def _frame(self, brush: Brush) -> None:
        for centre in (-_HALF_BASE, _HALF_BASE):
            rim = np.stack([centre + _RADIUS * np.cos(_AROUND), np.zeros(20), _RADIUS + _RADIUS * np.sin(_AROUND)], 1)
            brush.line(rim, 0.05, self.tyre, is_closed=True)
            for turn in (0, 5):
                brush.line(rim[[turn, turn + 10]], 0.012, (140, 140, 140))
        tubes = (
            ((-_HALF_BASE, _RADIUS), _CRANK), (_CRANK, (-0.2, 0.85)), (_CRANK, _HEAD_TUBE), ((-0.18, 0.78), _HEAD_TUBE),
            ((-_HALF_BASE, _RADIUS), (-0.19, 0.8)), ((_HALF_BASE, _RADIUS), _BARS),
        )  # fmt: skip
        for (from_x, from_z), (to_x, to_z) in tubes:
            brush.line([(from_x, 0.0, from_z), (to_x, 0.0, to_z)], 0.045, self.frame)
        brush.line([(_BARS[0], 0.27, _BARS[1]), (_BARS[0], -0.27, _BARS[1])], 0.04, (40, 40, 40))
        brush.limb(
            (_SADDLE[0] - 0.1, 0.0, _SADDLE[1]), (_SADDLE[0] + 0.12, 0.0, _SADDLE[1]), (0.07, 0.04), (25, 25, 30)
        )
        if self.has_basket:
            brush.limb((0.6, 0.0, 0.78), (0.6, 0.0, 0.95), (0.13, 0.16), (70, 100, 130))

    def _leg(self, brush: Brush, rider: RiderLook, side: float, phase: float) -> None:
        """Hip, knee and foot in the bicycle's plane; the knee is where both bones reach."""
        turn = phase if side > 0 else phase + math.pi
        hip = (_SADDLE[0] + 0.04, _SADDLE[1] + 0.06)
        foot = (_CRANK[0] + _CRANK_LENGTH * math.cos(turn), _CRANK[1] - _CRANK_LENGTH * math.sin(turn))
        thigh, shin = 0.45, 0.46
        run, rise = foot[0] - hip[0], foot[1] - hip[1]
        reach = min(math.hypot(run, rise), thigh + shin - 1e-3)
        bend = math.acos((thigh**2 + reach**2 - shin**2) / (2 * thigh * reach))
        aim = math.atan2(rise, run) + bend
        knee = (hip[0] + thigh * math.cos(aim), hip[1] + thigh * math.sin(aim))
        left = 0.1 * side
        brush.limb((hip[0], left, hip[1]), (knee[0], left, knee[1]), (0.095, 0.07), rider.bottom)
        brush.limb((knee[0], left, knee[1]), (foot[0], left, foot[1]), (0.065, 0.045), rider.bottom)
        brush.limb((foot[0] - 0.04, left, foot[1]), (foot[0] + 0.14, left, foot[1]), (0.045, 0.035), (35, 35, 40))

    def _shoulder(self, rider: RiderLook) -> tuple[float, float]:
        return _SADDLE[0] + rider.lean, _SADDLE[1] + math.sqrt(max((0.56 * rider.size) ** 2 - rider.lean**2, 0.05))

    def _body(self, brush: Brush, rider: RiderLook, near: float) -> None:
        x, z = self._shoulder(rider)
        forward, left, _ = brush.viewpoint
        frontal = abs(forward) / max(math.hypot(forward, left), 1e-6)
        wide = 0.12 + 0.08 * frontal
        self._arm(brush, rider, -near)
        brush.limb((x, 0.0, z - 0.05), (_SADDLE[0], 0.0, _SADDLE[1] + 0.08), (wide, wide * 0.85), rider.top)
        if rider.backpack is not None:
            brush.limb(
                (x - 0.2, 0.0, z - 0.05), (_SADDLE[0] - 0.08, 0.0, _SADDLE[1] + 0.3), (0.15, 0.15), rider.backpack
            )

    def _arm(self, brush: Brush, rider: RiderLook, side: float) -> None:
        x, z = self._shoulder(rider)
        shoulder: Vector = (x, 0.18 * side, z - 0.02)
        hand: Vector = (_BARS[0] - 0.02, 0.24 * side, _BARS[1] + 0.03)
        elbow: Vector = ((x + hand[0]) / 2 - 0.02, 0.26 * side, (z + hand[2]) / 2 - 0.07)
        brush.limb(shoulder, elbow, (0.06, 0.05), rider.top)
        brush.limb(elbow, hand, (0.05, 0.04), rider.skin)

    def _head(self, brush: Brush, rider: RiderLook) -> None:
        x, z = self._shoulder(rider)
        centre: Vector = (x + 0.08, 0.0, z + 0.2)
        brush.limb((x, 0.0, z), centre, (0.06, 0.06), rider.skin)
        brush.ball((centre[0] - 0.02, 0.0, centre[2] + 0.02), 0.115, rider.hair)
        if brush.viewpoint[0] > -0.3 * abs(brush.viewpoint[1]):
            brush.ball((centre[0] + 0.04, 0.0, centre[2] - 0.02), 0.095, rider.skin)
        if rider.helmet is not None:
            brush.limb(
                (centre[0] - 0.06, 0.0, centre[2] + 0.07),
                (centre[0] + 0.07, 0.0, centre[2] + 0.08),
                (0.1, 0.09),
                rider.helmet,
            )


def sample_bicycle(generator: np.random.Generator, *, is_ridden: bool) -> BicycleLook:
    """A bicycle, with a rider or without."""
    dark = float(generator.uniform(20, 60))
    rider = _sample_rider(generator) if is_ridden else None
    frame = PAINTS[generator.integers(len(PAINTS))]
    return BicycleLook(frame, (dark, dark, dark), bool(generator.random() < 0.3), rider)


def _sample_rider(generator: np.random.Generator) -> RiderLook:
    return RiderLook(
        size=float(generator.uniform(0.95, 1.1)),
        lean=float(generator.uniform(0.12, 0.4)),
        skin=SKINS[generator.integers(len(SKINS))],
        hair=HAIRS[generator.integers(len(HAIRS))],
        top=sample_cloth(generator),
        bottom=sample_cloth(generator),
        helmet=sample_cloth(generator) if generator.random() < 0.5 else None,
        backpack=sample_cloth(generator) if generator.random() < 0.3 else None,
    )
