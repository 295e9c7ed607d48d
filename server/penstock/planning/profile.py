"""Service times of an engine by batch size: built in, or from a TOML or JSON file."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Service times, interpolated linearly between points of (rows, seconds) and extrapolated beyond. Rows ascend."""

    name: str
    points: tuple[tuple[int, float], ...]
    max_batch_size: int
    _table: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
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
        """Duration of a call of 1 to max_batch_size rows."""
        return self._table[rows]

    def largest_within(self, seconds: float) -> int:
        """Maximum rows of one call within that time, or 0."""
        fitting = (size for size in range(self.max_batch_size, 0, -1) if self._table[size] <= seconds)
        return next(fitting, 0)


def linear_profile(name: str, *, alpha_s: float, beta_s: float, max_batch_size: int) -> EngineProfile:
    """The profile t(b) = alpha_s + beta_s * b."""
    ends = sorted({1, max_batch_size})
    return EngineProfile(name, tuple((rows, alpha_s + beta_s * rows) for rows in ends), max_batch_size)


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    if len(points) == 1:
        return points[0][1]
    at = next((i for i, point in enumerate(points[1:-1], start=1) if rows <= point[0]), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


V100 = linear_profile("v100", alpha_s=1.98e-3, beta_s=0.1475e-3, max_batch_size=512)
H200 = EngineProfile("h200", ((1, 0.90e-3), (8, 1.16e-3), (64, 4.23e-3)), max_batch_size=64)
BUILT_IN_PROFILES = {profile.name: profile for profile in (V100, H200)}


class ProfileError(ValueError):
    """A profile cannot be used. The text has the file, the reason and the fix."""


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """The file's content: either points of [rows, milliseconds], or alpha_ms and beta_ms."""

    name: str = ""
    max_batch_size: int = 0
    points: list[tuple[int, float]] = []
    alpha_ms: float | None = None
    beta_ms: float | None = None


def find_profile(name: str) -> EngineProfile:
    """A built-in profile, or that of a file. Raises ProfileError."""
    built_in = BUILT_IN_PROFILES.get(name.lower())
    if built_in is not None:
        return built_in
    path = Path(name)
    if not path.is_file():
        known = ", ".join(BUILT_IN_PROFILES)
        raise ProfileError(f"there is no profile {name!r}: name one of {known}, or a TOML or JSON file")
    return read_profile(path)


def read_profile(path: Path) -> EngineProfile:
    """The file's profile; its default name is the file's. Raises ProfileError."""
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return _profile(msgspec.convert(plain, _Written), path.stem)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ProfileError(
            f"{path} is no profile: {error}; it needs points = [[rows, milliseconds], …], or alpha_ms, beta_ms and "
            "max_batch_size"
        ) from error


def _profile(written: _Written, stem: str) -> EngineProfile:
    name = written.name or stem
    if written.points:
        if written.alpha_ms is not None or written.beta_ms is not None:
            raise ValueError("it has points and a line")
        points = tuple((rows, took_ms / 1e3) for rows, took_ms in written.points)
        return EngineProfile(name, points, written.max_batch_size or points[-1][0])
    if written.alpha_ms is None or written.beta_ms is None or not written.max_batch_size:
        raise ValueError("something of it is missing")
    return linear_profile(
        name, alpha_s=written.alpha_ms / 1e3, beta_s=written.beta_ms / 1e3, max_batch_size=written.max_batch_size
    )
