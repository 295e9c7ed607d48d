"""People on foot, bicycles and riders. A rider and the bicycle are one `bicycle`."""

import math
from dataclasses import dataclass

import numpy as np

from deploy.models.street.camera import Bgr
from deploy.models.street.cars import PAINTS
from deploy.models.street.picture import Brush, Vector

SKINS: tuple[Bgr, ...] = ((150, 180, 225), (120, 155, 205), (95, 130, 185), (60, 90, 140), (40, 60, 100))
HAIRS: tuple[Bgr, ...] = ((20, 20, 25), (30, 45, 70), (50, 80, 130), (90, 150, 190), (150, 150, 150), (40, 50, 110))
CLOTHES: tuple[Bgr, ...] = (
    (40, 40, 45),
    (70, 65, 60),
    (110, 105, 100),
    (200, 200, 205),
    (120, 60, 40),
    (150, 110, 70),
    (50, 50, 160),
    (60, 110, 60),
    (60, 150, 190),
    (40, 90, 150),
    (130, 60, 110),
    (70, 60, 45),
    (190, 150, 120),
    (80, 190, 210),
    (90, 110, 130),
)


@dataclass(frozen=True, slots=True)
class PersonLook:
    """One person's looks. height, girth: metres; stride: the legs' swing in radians, 0 for one who stands."""

    height: float
    girth: float
    stride: float
    skin: Bgr
    hair: Bgr
    top: Bgr
    bottom: Bgr
    shoes: Bgr
    garment: str
    hat: str
    bag: str
    bag_color: Bgr
    arms_bent: float

    half_length = 0.25
    half_width = 0.25

    def draw(self, brush: Brush, phase: float) -> None:
        """From the feet up, the far limbs first. phase: of the gait."""
        near = 1.0 if brush.viewpoint[1] > 0 else -1.0
        swing = math.sin(phase) * self.stride
        self._arm(brush, -near, swing)
        for side in (-near, near):
            self._leg(brush, side, swing * side, phase)
        self._torso(brush)
        if self.bag == "backpack":
            brush.limb(self._at(-0.1, 0, 0.6), self._at(-0.1, 0, 0.76), (0.15 * self.girth,) * 2, self.bag_color)
            if brush.viewpoint[0] > 0:  # seen from the front: the chest hides most of it
                self._torso(brush)
        self._arm(brush, near, -swing)
        self._head(brush)

    def _at(self, forward: float, left: float, up: float) -> Vector:
        """A point in shares of the person's height."""
        return forward * self.height, left * self.height * self.girth, up * self.height

    def _leg(self, brush: Brush, side: float, swing: float, phase: float) -> None:
        hip = self._at(0, 0.055 * side, 0.5)
        lifted = max(0.0, math.cos(phase) * side) * self.stride * 1.5
        knee_x, knee_z = 0.245 * math.sin(swing), 0.245 * math.cos(swing)
        shin = swing - lifted
        knee = self._at(knee_x, 0.055 * side, 0.5 - knee_z)
        ankle = self._at(
            knee_x + 0.225 * math.sin(shin), 0.05 * side, max(0.5 - knee_z - 0.225 * math.cos(shin), 0.025)
        )
        thick, thin = 0.05 * self.height * self.girth, 0.034 * self.height * self.girth
        is_bare = self.garment in ("shorts", "skirt", "dress")
        brush.limb(knee, ankle, (thick * 0.85, thin), self.skin if is_bare else self.bottom)
        brush.limb(hip, knee, (thick * 1.15, thick * 0.9), self.bottom if self.garment != "dress" else self.top)
        toe = (ankle[0] + 0.07 * self.height, ankle[1], max(ankle[2] - 0.01 * self.height, 0.02))
        brush.limb(ankle, toe, (thin, thin * 0.8), self.shoes)

    def _arm(self, brush: Brush, side: float, swing: float) -> None:
        shoulder = self._at(0, 0.118 * side, 0.8)
        reach = swing * 0.8 + self.arms_bent * 0.3
        elbow = self._at(0.16 * math.sin(reach), 0.135 * side, 0.8 - 0.16 * math.cos(reach))
        bend = reach + 0.25 + self.arms_bent
        hand = (
            elbow[0] + 0.15 * self.height * math.sin(bend),
            elbow[1],
            elbow[2] - 0.15 * self.height * math.cos(bend),
        )
        thick = 0.033 * self.height * self.girth
        sleeve = self.skin if self.garment in ("dress", "shorts") else self.top
        brush.limb(shoulder, elbow, (thick * 1.1, thick), self.top)
        brush.limb(elbow, hand, (thick, thick * 0.75), sleeve)
        brush.ball(hand, thick, self.skin)
        if self.bag == "carrier" and side > 0:
            low = (hand[0], hand[1], hand[2] - 0.16)
            brush.limb(low, (hand[0], hand[1], hand[2] - 0.22), (0.12, 0.14), self.bag_color)

    def _torso(self, brush: Brush) -> None:
        """Its width is between the shoulders' and the chest's, as one sees it."""
        forward, left, _ = brush.viewpoint
        frontal = abs(forward) / max(math.hypot(forward, left), 1e-6)
        wide = self.height * self.girth * (0.068 + 0.045 * frontal)
        skirt_end = {"coat": 0.3, "skirt": 0.28, "dress": 0.27}.get(self.garment)
        if skirt_end is not None:
            color = self.bottom if self.garment == "skirt" else self.top
            brush.limb(self._at(0, 0, 0.52), self._at(0, 0, skirt_end + 0.06), (wide * 0.9, wide * 1.1), color)
        brush.limb(self._at(0, 0, 0.755), self._at(0, 0, 0.52), (wide, wide * 0.82), self.top)
        brush.limb(self._at(0, 0, 0.8), self._at(0.01, 0, 0.87), (0.035 * self.height, 0.03 * self.height), self.skin)

    def _head(self, brush: Brush) -> None:
        size = 0.064 * self.height
        centre = self._at(0.015, 0, 0.925)
        brush.limb(self._at(0.0, 0, 0.94), self._at(-0.012, 0, 0.92), (size * 1.03, size * 1.05), self.hair)
        if brush.viewpoint[0] > -0.3 * abs(brush.viewpoint[1]):
            brush.ball((centre[0] + size * 0.35, 0.0, centre[2] - size * 0.2), size * 0.82, self.skin)
        if self.hat == "hat":
            brush.limb(self._at(0.0, 0, 0.965), self._at(0, 0, 0.985), (size * 1.05, size * 0.9), self.bag_color)
        elif self.hat == "hood":
            brush.ball(self._at(-0.015, 0, 0.93), size * 1.15, self.top)


def sample_person(generator: np.random.Generator, *, is_standing: bool = False) -> PersonLook:
    """A person like any other; one in eight is a child."""
    is_child = generator.random() < 0.12
    height = float(generator.uniform(1.05, 1.45) if is_child else generator.normal(1.71, 0.09))
    garment = str(generator.choice(["trousers", "trousers", "coat", "shorts", "skirt", "dress"]))
    return PersonLook(
        height=min(max(height, 1.0), 2.0),
        girth=float(generator.uniform(0.88, 1.3)),
        stride=0.0 if is_standing else float(generator.uniform(0.3, 0.55)),
        skin=SKINS[generator.integers(len(SKINS))],
        hair=HAIRS[generator.integers(len(HAIRS))],
        top=sample_cloth(generator),
        bottom=sample_cloth(generator),
        shoes=(30, 30, 35) if generator.random() < 0.7 else (210, 210, 215),
        garment=garment,
        hat=str(generator.choice(["", "", "", "hat", "hood"])),
        bag=str(generator.choice(["", "", "backpack", "carrier"])),
        bag_color=sample_cloth(generator),
        arms_bent=float(generator.choice([0.0, 0.0, 0.4, 1.2])),
    )


def sample_cloth(generator: np.random.Generator) -> Bgr:
    """A cloth's colour, a little off the usual ones."""
    blue, green, red = (
        float(np.clip(value * generator.uniform(0.75, 1.3) + generator.uniform(-12, 12), 12, 245))
        for value in CLOTHES[generator.integers(len(CLOTHES))]
    )
    return blue, green, red


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
