"""A profile that someone measured, from a TOML or JSON file."""

import json
import tomllib
from pathlib import Path

import msgspec

from server.planning.profile import BUILT_IN, Profile, line


class ProfileError(ValueError):
    """A profile cannot be used; says which, why and what to do."""


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says: either points of [rows, milliseconds], or alpha_ms and beta_ms."""

    name: str = ""
    max_batch_size: int = 0
    points: list[tuple[int, float]] = []
    alpha_ms: float | None = None
    beta_ms: float | None = None


def find_profile(name: str) -> Profile:
    """One of those that are built in, or that of a file. Raises ProfileError."""
    built_in = BUILT_IN.get(name.lower())
    if built_in is not None:
        return built_in
    path = Path(name)
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        raise ProfileError(f"there is no profile {name!r}: name one of {known}, or a TOML or JSON file")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """The file's profile, its name the file's where it says none. Raises ProfileError."""
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return _profile(msgspec.convert(plain, _Written), path.stem)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ProfileError(
            f"{path} is no profile: {error}; it needs points = [[rows, milliseconds], …], or alpha_ms, beta_ms and "
            "max_batch_size"
        ) from error


def _profile(written: _Written, stem: str) -> Profile:
    name = written.name or stem
    if written.points:
        if written.alpha_ms is not None or written.beta_ms is not None:
            raise ValueError("it has points and a line")
        points = tuple((rows, took_ms / 1e3) for rows, took_ms in written.points)
        return Profile(name, points, written.max_batch_size or points[-1][0])
    if written.alpha_ms is None or written.beta_ms is None or not written.max_batch_size:
        raise ValueError("something of it is missing")
    return line(
        name, alpha_s=written.alpha_ms / 1e3, beta_s=written.beta_ms / 1e3, max_batch_size=written.max_batch_size
    )
