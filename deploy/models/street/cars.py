"""Cars: hatchbacks, saloons, estates, off-roaders, vans and pick-ups."""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np

from deploy.models.street.camera import Bgr
from deploy.models.street.picture import Brush, Vector

PAINTS: tuple[Bgr, ...] = (
    (235, 235, 235),
    (200, 200, 200),
    (150, 150, 150),
    (95, 95, 95),
    (45, 45, 45),
    (30, 28, 28),
    (40, 40, 175),
    (35, 35, 120),
    (140, 80, 40),
    (90, 50, 25),
    (170, 130, 90),
    (60, 90, 50),
    (50, 150, 200),
    (70, 110, 140),
    (180, 200, 215),
)
GLASS: Bgr = (75, 65, 55)
TYRE: Bgr = (28, 28, 30)


@dataclass(frozen=True, slots=True)
class CarShape:
    """Metres. The cabin's corners are shares of the length from the rear: foot and roof, rear and front."""

    length: float
    width: float
    height: float
    bonnet: float  # the height of its rear edge
    boot: float  # the height of the tail
    cabin: tuple[float, float, float, float]
    has_side_windows: bool = True
    has_bed: bool = False


SHAPES: tuple[CarShape, ...] = (
    CarShape(4.0, 1.74, 1.48, 0.95, 1.0, (0.02, 0.12, 0.55, 0.74)),  # hatchback
    CarShape(3.6, 1.64, 1.52, 0.95, 1.0, (0.02, 0.1, 0.58, 0.78)),  # small
    CarShape(4.6, 1.8, 1.45, 0.92, 0.98, (0.12, 0.26, 0.56, 0.72)),  # saloon
    CarShape(4.65, 1.8, 1.48, 0.93, 1.0, (0.02, 0.08, 0.56, 0.72)),  # estate
    CarShape(4.5, 1.88, 1.72, 1.08, 1.12, (0.02, 0.07, 0.57, 0.73)),  # off-roader
    CarShape(5.0, 1.95, 1.95, 1.12, 1.12, (0.01, 0.03, 0.76, 0.9)),  # van with windows
    CarShape(5.3, 2.0, 2.25, 1.15, 1.15, (0.01, 0.02, 0.76, 0.9), has_side_windows=False),  # van
    CarShape(5.2, 1.88, 1.8, 1.1, 1.05, (0.36, 0.4, 0.58, 0.72), has_bed=True),  # pick-up
)


@dataclass(frozen=True, slots=True)
class CarLook:
    """One car: its shape, its paint, its second colour."""

    shape: CarShape
    paint: Bgr
    trim: Bgr
    rim: Bgr

    @property
    def half_length(self) -> float:
        return self.shape.length / 2

    @property
    def half_width(self) -> float:
        return self.shape.width / 2

    @property
    def height(self) -> float:
        return self.shape.height

    def draw(self, brush: Brush, phase: float) -> None:
        """The body, then the cabin on it. phase: the wheels' turn."""
        side = 1.0 if brush.viewpoint[1] > 0 else -1.0
        self._underbody(brush)
        self._body(brush, side)
        self._wheels(brush, side, phase)
        self._cabin(brush, side)
        self._lamps(brush)

    def _underbody(self, brush: Brush) -> None:
        """What one sees between the wheels: the dark, and the far tyres."""
        length, width = self.half_length, self.half_width
        for forward in (length * 0.62, -length * 0.6):
            for left in (width * 0.82, -width * 0.82):
                brush.limb((forward, left, 0.1), (forward, left, 0.5), (0.13, 0.13), TYRE)
        low = [(length * 0.9, width * 0.9, 0.3), (length * 0.9, -width * 0.9, 0.3)]
        high = [(-length * 0.9, -width * 0.9, 0.3), (-length * 0.9, width * 0.9, 0.3)]
        brush.face(low + high, (25, 25, 25))

    def _body(self, brush: Brush, side: float) -> None:
        shape, length, width = self.shape, self.half_length, self.half_width
        nose, cowl = shape.bonnet * 0.8, self._forward(shape.cabin[3])
        tail = [(-length * 0.98, 0.28), (-length, 0.55), (-length * 0.98, shape.boot)]
        front = [(length * 0.93, nose), (length, 0.6), (length * 0.97, 0.25)]
        profile = [*tail, (self._forward(shape.cabin[0]), shape.boot), (cowl, shape.bonnet), *front]
        for (from_x, from_z), (to_x, to_z) in itertools.pairwise(profile):
            strip: list[Vector] = [
                (from_x, width, from_z),
                (to_x, width, to_z),
                (to_x, -width, to_z),
                (from_x, -width, from_z),
            ]
            run, rise = to_x - from_x, to_z - from_z
            norm = max(math.hypot(run, rise), 1e-6)
            brush.face(strip, self.paint, normal=(-rise / norm, 0.0, run / norm))
        if shape.has_bed:
            floor = [(-length * 0.94, 0.85), (self._forward(0.34), 0.85)]
            top = shape.boot + 0.005
            brush.face(
                [
                    (x, w * width, top)
                    for x, w in ((floor[0][0], 0.85), (floor[1][0], 0.85), (floor[1][0], -0.85), (floor[0][0], -0.85))
                ],
                (50, 50, 50),
                normal=(0, 0, 1),
            )
        self._side(brush, side, [*tail, (cowl, shape.bonnet), *front])
        for x, normal in ((length * 0.995, 1.0), (-length * 0.995, -1.0)):
            bumper: list[Vector] = [
                (x, width * 0.97, 0.26),
                (x, -width * 0.97, 0.26),
                (x, -width * 0.97, 0.45),
                (x, width * 0.97, 0.45),
            ]
            brush.face(bumper, self.trim, normal=(normal, 0.0, 0.0))

    def _side(self, brush: Brush, side: float, flank: list[tuple[float, float]]) -> None:
        """Flank, sill and doors. flank: forward and up of its corners."""
        width, length = self.half_width * side, self.half_length
        belt = min(self.shape.bonnet, self.shape.boot)
        brush.face([(x, width, z) for x, z in flank], self.paint, normal=(0.0, side, 0.0))
        sill = [(-length * 0.7, 0.22), (-length * 0.7, 0.36), (length * 0.7, 0.36), (length * 0.7, 0.22)]
        brush.face([(x, width, z) for x, z in sill], self.trim, normal=(0.0, side, 0.0))
        darker = (self.paint[0] * 0.6, self.paint[1] * 0.6, self.paint[2] * 0.6)
        if abs(brush.viewpoint[1]) > abs(brush.viewpoint[0]) * 0.3:
            for share in (0.33, 0.6) if self.shape.has_side_windows else (0.7,):
                x = self._forward(share)
                brush.line([(x, width * 1.001, 0.4), (x, width * 1.001, belt)], 0.02, darker)

    def _forward(self, share: float) -> float:
        return (share - 0.5) * self.shape.length

    def _wheels(self, brush: Brush, side: float, phase: float) -> None:
        if brush.viewpoint[1] * side <= self.half_width:
            return
        around = np.linspace(0, 2 * math.pi, 14, endpoint=False)
        radius = 0.31 if self.shape.height < 1.7 else 0.36
        for forward in (self.half_length * 0.62, -self.half_length * 0.6):
            for size, color, out in (
                (radius * 1.12, (35, 35, 35), 1.002),
                (radius, TYRE, 1.004),
                (radius * 0.62, self.rim, 1.006),
            ):
                points = np.stack(
                    [
                        forward + size * np.cos(around),
                        np.full(14, self.half_width * side * out),
                        radius + size * np.sin(around),
                    ],
                    1,
                )
                points[:, 2] = np.maximum(points[:, 2], 0.0)
                brush.face(points, color)
            hub = (forward, self.half_width * side * 1.008, radius)
            spoke = (hub[0] + radius * 0.5 * math.cos(phase), hub[1], hub[2] + radius * 0.5 * math.sin(phase))
            brush.line([hub, spoke], 0.05, (60, 60, 60))

    def _cabin(self, brush: Brush, side: float) -> None:
        shape = self.shape
        rear_foot, rear_top, front_top, front_foot = (self._forward(share) for share in shape.cabin)
        foot, top = self.half_width * 0.98, self.half_width * (0.8 if shape.height < 1.8 else 0.92)
        low_rear, low_front, high = shape.boot, shape.bonnet, shape.height
        roof: list[Vector] = [
            (rear_top, top, high),
            (front_top, top, high),
            (front_top, -top, high),
            (rear_top, -top, high),
        ]
        rear: list[Vector] = [
            (rear_foot, foot, low_rear),
            (rear_top, top, high),
            (rear_top, -top, high),
            (rear_foot, -foot, low_rear),
        ]
        front: list[Vector] = [
            (front_foot, foot, low_front),
            (front_foot, -foot, low_front),
            (front_top, -top, high),
            (front_top, top, high),
        ]
        flank: list[Vector] = [
            (rear_foot, foot * side, low_rear),
            (rear_top, top * side, high),
            (front_top, top * side, high),
            (front_foot, foot * side, low_front),
        ]
        lean = 0.35 / max(high - low_front, 0.3)
        brush.face(rear, self.paint, normal=(-0.95, 0.0, 0.3))
        self._pane(brush, rear, 0.82, (-0.95, 0.0, 0.3))
        brush.face(front, self.paint, normal=(0.75, 0.0, 0.66))
        self._pane(brush, front, 0.88, (0.75, 0.0, 0.66))
        normal = (0.0, side * math.cos(lean * 0.5), math.sin(lean * 0.5))
        brush.face(flank, self.paint, normal=normal)
        if shape.has_side_windows:
            self._pane(brush, flank, 0.86, normal)
            middle = (rear_top + front_top) / 2
            brush.line([(middle, foot * side, low_front), (middle, top * side, high)], 0.06, self.paint)
        else:
            door = [(front_top - 0.1, foot * side, low_front), (front_top - 0.1, top * side, high), flank[2], flank[3]]
            self._pane(brush, door, 0.8, normal)
        brush.face(roof, self.paint, normal=(0.0, 0.0, 1.0))

    def _pane(self, brush: Brush, frame: list[Vector], share: float, normal: Vector) -> None:
        """Glass in a frame, smaller by the share, lighter towards the top."""
        corners = np.array(frame)
        inner = corners.mean(axis=0) + (corners - corners.mean(axis=0)) * share
        brush.face(inner, GLASS, normal=normal)
        upper = inner.copy()
        low = inner[:, 2] < inner[:, 2].mean()
        upper[low, 2] = inner[low, 2] * 0.45 + inner[~low, 2].mean() * 0.55
        upper[low, :2] = (
            inner[low, :2] * 0.45 + inner[~low][::-1, :2] * 0.55 if low.sum() == (~low).sum() else inner[low, :2]
        )
        brush.face(upper, (GLASS[0] * 1.5, GLASS[1] * 1.45, GLASS[2] * 1.4), normal=normal)

    def _lamps(self, brush: Brush) -> None:
        length, width, high = self.half_length, self.half_width, self.shape.bonnet * 0.72
        for end, color, height in ((1.0, (225, 235, 240), high), (-1.0, (45, 40, 190), self.shape.boot * 0.82)):
            if (brush.viewpoint[0] - end * length) * end <= 0:
                continue
            x = end * length * 0.998
            for left in (1.0, -1.0):
                inner, outer = width * 0.6 * left, width * 0.95 * left
                lamp: list[Vector] = [
                    (x, inner, height - 0.07),
                    (x, outer, height - 0.09),
                    (x, outer, height + 0.08),
                    (x, inner, height + 0.06),
                ]
                brush.face(lamp, color)
                if brush.light.is_dark:
                    shine = (210.0, 235.0, 255.0) if end > 0 else (40.0, 30.0, 235.0)
                    brush.glow((x, (inner + outer) / 2, height), 0.5 if end > 0 else 0.22, shine)
            plate: list[Vector] = [(x, 0.26, 0.5), (x, -0.26, 0.5), (x, -0.26, 0.62), (x, 0.26, 0.62)]
            brush.face(plate, (215, 225, 225))


def sample_car(generator: np.random.Generator) -> CarLook:
    """A car of any shape; its measures a little off the type's."""
    shape = SHAPES[generator.integers(len(SHAPES))]
    size = float(generator.uniform(0.94, 1.06))
    shape = dataclasses.replace(
        shape,
        length=shape.length * size,
        width=shape.width * float(generator.uniform(0.97, 1.04)),
        height=shape.height * float(generator.uniform(0.96, 1.05)),
    )
    own = PAINTS[generator.integers(len(PAINTS))]
    blue, green, red = (float(np.clip(value * generator.uniform(0.85, 1.15), 15, 245)) for value in own)
    trim = (45.0, 45.0, 48.0) if generator.random() < 0.6 else (blue * 0.8, green * 0.8, red * 0.8)
    rim = (165.0, 165.0, 165.0) if generator.random() < 0.75 else (70.0, 70.0, 70.0)
    return CarLook(shape, (blue, green, red), trim, rim)
