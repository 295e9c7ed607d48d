"""How long an engine takes for so many rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Profile:
    """An engine's service times: straight lines between measured points of (rows, seconds), rows growing.

    Before the first point and after the last one the nearest line goes on. max_batch_size: rows of one call at most.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    max_batch_size: int
    _table: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for points that no engine has."""
        rows = [point[0] for point in self.points]
        times = [point[1] for point in self.points]
        if not rows or rows[0] < 1 or sorted(set(rows)) != rows:
            raise ValueError(f"the profile {self.name!r} has the rows {rows}: name each once, growing, from 1 on")
        if min(times) <= 0 or sorted(times) != times:
            raise ValueError(f"the profile {self.name!r} has the times {times}: they must be above 0 and not fall")
        if self.max_batch_size < 1:
            raise ValueError(f"the profile {self.name!r} has max_batch_size {self.max_batch_size}: give 1 or more")
        table = tuple(_between(self.points, size) for size in range(self.max_batch_size + 1))
        object.__setattr__(self, "_table", table)

    def seconds(self, rows: int) -> float:
        """What a call of 1 to max_batch_size rows takes."""
        return self._table[rows]

    def largest_within(self, seconds: float) -> int:
        """The most rows that one call answers in that time; 0 where not even one does."""
        fitting = (size for size in range(self.max_batch_size, 0, -1) if self._table[size] <= seconds)
        return next(fitting, 0)


def line(name: str, *, alpha_s: float, beta_s: float, max_batch_size: int) -> Profile:
    """The profile t(b) = alpha_s + beta_s * b."""
    ends = sorted({1, max_batch_size})
    return Profile(name, tuple((rows, alpha_s + beta_s * rows) for rows in ends), max_batch_size)


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    if len(points) == 1:
        return points[0][1]
    at = next((i for i, point in enumerate(points[1:-1], start=1) if rows <= point[0]), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


V100 = line("v100", alpha_s=1.98e-3, beta_s=0.1475e-3, max_batch_size=512)
H200 = Profile("h200", ((1, 0.90e-3), (8, 1.16e-3), (64, 4.23e-3)), max_batch_size=64)
BUILT_IN = {profile.name: profile for profile in (V100, H200)}
