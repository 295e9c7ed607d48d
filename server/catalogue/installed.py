"""The models that lie in repositories of this machine, as their folders tell it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from server.backends.config_pbtxt import read_config
from server.core.errors import InvalidRequest


class BatchingOwner(StrEnum):
    """Who forms a model's batches. UNKNOWN: its config.pbtxt cannot be read."""

    TRITON = "triton"
    OFF = "off"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A folder of a model repository. problem: why its config.pbtxt cannot be read, else empty."""

    name: str
    repository: Path
    versions: tuple[str, ...]
    batching: BatchingOwner
    problem: str


def scan(repositories: Iterable[Path]) -> list[InstalledModel]:
    """Every model folder, by repository and name; repositories that do not exist are skipped."""
    folders = [
        folder
        for repository in repositories
        if repository.is_dir()
        for folder in sorted(repository.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
    ]
    return [_read(folder) for folder in folders]


def batching_owner(folder: Path) -> tuple[BatchingOwner, str]:
    """The owner as config.pbtxt declares it, and why it cannot be read where it cannot."""
    path = folder / "config.pbtxt"
    if not path.exists():
        return BatchingOwner.OFF, ""  # Triton completes the configuration by itself, without batching
    try:
        config = read_config(path)
    except InvalidRequest as error:
        return BatchingOwner.UNKNOWN, error.message
    return (BatchingOwner.TRITON if config.has_dynamic_batching else BatchingOwner.OFF), ""


def _read(folder: Path) -> InstalledModel:
    versions = sorted((item.name for item in folder.iterdir() if item.is_dir() and item.name.isdecimal()), key=int)
    batching, problem = batching_owner(folder)
    return InstalledModel(folder.name, folder.parent, tuple(versions), batching, problem)
