"""What stands in a street and is none of the three classes: posts, signs, bins, benches, trees."""

import math
from dataclasses import dataclass

import numpy as np

from deploy.models.street.brush import Brush, Vector
from deploy.models.street.light import Bgr
from deploy.models.street.people import sample_cloth

KINDS = ("lamp", "sign", "bin", "bench", "tree", "bollard", "box", "board", "planter", "hydrant", "railing")
_METAL: Bgr = (105, 105, 100)


@dataclass(frozen=True, slots=True)
class PropLook:
    """A thing of a kind of KINDS. size: around 1. seed: of its leaves and the like."""

    kind: str
    size: float
    color: Bgr
    seed: int

    @property
    def half_length(self) -> float:
        return {"bench": 0.8, "planter": 0.7, "railing": 1.2}.get(self.kind, 0.25) * self.size

    @property
    def half_width(self) -> float:
        return 0.3 if self.kind in ("planter", "bench") else 0.2

    @property
    def height(self) -> float:
        return {"lamp": 5.0, "tree": 5.0, "sign": 2.6}.get(self.kind, 1.0) * self.size

    def draw(self, brush: Brush, phase: float) -> None:
        """phase: not of interest to things that stand still."""
        getattr(self, f"_{self.kind}")(brush)

    def _lamp(self, brush: Brush) -> None:
        top = 5.2 * self.size
        brush.limb((0, 0, 0), (0, 0, top), (0.09, 0.06), self.color)
        brush.limb((0, 0, top), (0, 1.0, top + 0.25), (0.05, 0.05), self.color)
        brush.limb((0, 0.8, top + 0.2), (0, 1.3, top + 0.25), (0.08, 0.1), (90, 90, 90))
        if brush.light.is_dark:
            brush.glow((0, 1.1, top + 0.15), 0.9, (170, 225, 255))

    def _sign(self, brush: Brush) -> None:
        top = 2.5 * self.size
        brush.limb((0, 0, 0), (0, 0, top), (0.04, 0.04), _METAL)
        around = np.linspace(0, 2 * math.pi, (3, 4, 16)[self.seed % 3], endpoint=False) + math.pi / 2
        for radius, color in ((0.34, self.color), (0.25, (235.0, 235.0, 235.0))):
            points = np.stack([radius * np.cos(around), np.full_like(around, -0.05), top + radius * np.sin(around)], 1)
            brush.face(points, color)

    def _bin(self, brush: Brush) -> None:
        high = 0.95 * self.size
        brush.limb((0, 0, 0.28), (0, 0, high - 0.2), (0.24, 0.26), self.color)
        brush.limb(
            (0, 0, high - 0.06),
            (0, 0, high),
            (0.27, 0.2),
            (self.color[0] * 0.7, self.color[1] * 0.7, self.color[2] * 0.7),
        )

    def _bench(self, brush: Brush) -> None:
        for end in (-0.7, 0.7):
            brush.limb((end, 0, 0), (end, 0, 0.45), (0.05, 0.05), _METAL)
        for z, depth in ((0.45, -0.2), (0.47, 0.1), (0.65, 0.25), (0.82, 0.28)):
            brush.limb((-0.85, depth, z), (0.85, depth, z), (0.06, 0.06), self.color)

    def _tree(self, brush: Brush) -> None:
        generator = np.random.default_rng(self.seed)
        trunk = 2.2 * self.size
        brush.limb((0, 0, 0), (0, 0, trunk + 0.6), (0.16 * self.size, 0.1), (50, 70, 85))
        green = generator.uniform((30, 70, 35), (60, 130, 90))
        for step in range(16):
            shade = 0.65 + 0.5 * step / 16
            offset = generator.normal(0, (0.7, 0.7, 0.45)) * self.size
            centre: Vector = (
                float(offset[0]),
                float(offset[1]),
                trunk + 1.3 * self.size + float(offset[2]) + step * 0.04,
            )
            leaf = (float(green[0] * shade), float(green[1] * shade), float(green[2] * shade))
            brush.ball(centre, float(generator.uniform(0.4, 0.8)) * self.size, leaf)

    def _bollard(self, brush: Brush) -> None:
        brush.limb((0, 0, 0), (0, 0, 0.85 * self.size), (0.08, 0.08), self.color)
        brush.limb((0, 0, 0.7 * self.size), (0, 0, 0.76 * self.size), (0.085, 0.085), (225, 225, 225))

    def _box(self, brush: Brush) -> None:
        """A post box, a switch cabinet."""
        half, high = 0.26 * self.size, 1.3 * self.size
        for normal, face in _box_faces(half, 0.22, 0.0, high):
            brush.face(face, self.color, normal=normal)
        wide, low, top = half * 0.7, high * 0.7, high * 0.78
        slot: list[Vector] = [(-wide, -0.222, low), (wide, -0.222, low), (wide, -0.222, top), (-wide, -0.222, top)]
        brush.face(slot, (40, 40, 40), normal=(0, -1, 0))

    def _board(self, brush: Brush) -> None:
        """An advertiser's easel."""
        brush.face([(-0.3, 0, 0), (0.3, 0, 0), (0.3, 0.2, 1.05), (-0.3, 0.2, 1.05)], self.color)
        brush.face([(-0.24, -0.01, 0.15), (0.24, -0.01, 0.15), (0.24, 0.17, 0.95), (-0.24, 0.17, 0.95)], (60, 70, 65))

    def _planter(self, brush: Brush) -> None:
        for normal, face in _box_faces(0.65 * self.size, 0.28, 0.0, 0.5):
            brush.face(face, self.color, normal=normal)
        for x in np.linspace(-0.5, 0.5, 6) * self.size:
            brush.ball((float(x), 0.0, 0.62), 0.22, (50, 110, 60))

    def _hydrant(self, brush: Brush) -> None:
        brush.limb((0, 0, 0), (0, 0, 0.6), (0.13, 0.12), self.color)
        brush.ball((0, 0, 0.66), 0.13, self.color)

    def _railing(self, brush: Brush) -> None:
        for x in np.linspace(-1.2, 1.2, 7):
            brush.limb((float(x), 0, 0), (float(x), 0, 1.0), (0.02, 0.02), self.color)
        for z in (0.3, 1.0):
            brush.limb((-1.2, 0, z), (1.2, 0, z), (0.03, 0.03), self.color)


def _box_faces(half: float, deep: float, low: float, high: float) -> list[tuple[Vector, list[Vector]]]:
    """(normal, corners) of a box's five visible faces."""
    a, b = half, deep
    return [
        ((0, -1, 0), [(-a, -b, low), (a, -b, low), (a, -b, high), (-a, -b, high)]),
        ((0, 1, 0), [(-a, b, low), (a, b, low), (a, b, high), (-a, b, high)]),
        ((-1, 0, 0), [(-a, -b, low), (-a, b, low), (-a, b, high), (-a, -b, high)]),
        ((1, 0, 0), [(a, -b, low), (a, b, low), (a, b, high), (a, -b, high)]),
        ((0, 0, 1), [(-a, -b, high), (a, -b, high), (a, b, high), (-a, b, high)]),
    ]


def sample_prop(generator: np.random.Generator, kind: str | None = None) -> PropLook:
    """A thing of the kind, or of any."""
    chosen = KINDS[generator.integers(len(KINDS))] if kind is None else kind
    color = _METAL if chosen in ("lamp", "railing") else sample_cloth(generator)
    return PropLook(chosen, float(generator.uniform(0.85, 1.15)), color, int(generator.integers(1 << 30)))
