"""The models that lie in repositories of this machine, as their folders tell it."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from server.backends.config_pbtxt import read_config
from server.batching.declared import DeclaredOptions
from server.catalogue.errors import CatalogueError
from server.core.batching import Owner
from server.core.errors import InvalidRequest
from server.core.model import ModelConfig
from server.core.model_files import is_version

_LICENCE_ROW = re.compile(r"^\|\s*licen[cs]e\s*\|([^|,;(]+)", re.IGNORECASE | re.MULTILINE)
WEIGHTS_PARAMETER, RANDOM_WEIGHTS = "weights", "random"


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A folder of a model repository.

    owner: who forms its batches, None where the folder or its config.pbtxt cannot be read. problem: why it or its
    config.pbtxt cannot be read, or what it declares cannot be, else empty.
    sizes_bytes: of a version's files, by version. licence: what its MODEL.md's table says first, empty without one.
    has_random_weights: its config.pbtxt says `weights` = `random`; its speed can be measured, its answers mean nothing.
    """

    name: str
    repository: Path
    versions: tuple[str, ...]
    owner: Owner | None
    problem: str
    has_random_weights: bool = False
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)
    licence: str = ""


def scan(repositories: Iterable[Path], options: DeclaredOptions | None = None) -> list[InstalledModel]:
    """Every model folder, by repository and name; repositories that do not exist are skipped.

    options: what the operator said of models' batches; None where only their configs count.
    Raises CatalogueError for a repository that this user may not read.
    """
    return [read_folder(folder, options) for repository in repositories for folder in _model_folders(repository)]


def _model_folders(repository: Path) -> list[Path]:
    try:
        found = sorted(repository.iterdir()) if repository.is_dir() else []
        return [folder for folder in found if folder.is_dir() and not folder.name.startswith(".")]
    except OSError as error:
        raise CatalogueError(f"{repository} cannot be read ({error.strerror}): let this user read it") from error


def read_folder(folder: Path, options: DeclaredOptions | None = None) -> InstalledModel:
    """What a model's folder tells: its versions, and of config.pbtxt what this machine decides by."""
    path = folder / "config.pbtxt"
    owner: Owner | None = Owner.OFF
    problem, has_random_weights = "", False
    try:
        versions = sorted((item.name for item in folder.iterdir() if is_version(item.name) and item.is_dir()), key=int)
        sizes_bytes = {version: _size_bytes(folder / version) for version in versions}
        has_config = path.exists()  # else Triton completes the configuration by itself, without batching
    except OSError as error:
        problem = f"{folder} cannot be read ({error.strerror}): let this user read it"
        return InstalledModel(folder.name, folder.parent, (), None, problem)
    if not versions:
        problem = f"it has no version: put its files into {folder / '1'}"
    if has_config:
        try:
            config = read_config(path)
        except InvalidRequest as error:
            owner, problem = None, error.message
        else:
            owner, undeclared = _owner(config, options or DeclaredOptions())
            problem = undeclared or problem
            has_random_weights = config.parameters.get(WEIGHTS_PARAMETER) == RANDOM_WEIGHTS
    return InstalledModel(
        folder.name,
        folder.parent,
        tuple(versions),
        owner,
        problem,
        has_random_weights,
        sizes_bytes,
        _licence(folder / "MODEL.md"),
    )


def _owner(config: ModelConfig, options: DeclaredOptions) -> tuple[Owner | None, str]:
    """Who forms the batches, and what cannot be of what is declared."""
    try:
        return options.of(config).owner, ""
    except InvalidRequest as error:
        return None, error.message


def _size_bytes(folder: Path) -> int:
    """Of all files below, links followed to a file; what Python compiles beside a model is none of its."""
    size_bytes = 0
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        size_bytes += sum(path.stat().st_size for path in (Path(top, name) for name in names) if path.is_file())
    return size_bytes


def _licence(card: Path) -> str:
    """The licence's name without what is said of it: `Apache-2.0` of `| licence | Apache-2.0, OpenCV's |`."""
    try:
        found = _LICENCE_ROW.search(card.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # there is none, or it may not be read: it is a description, and no condition
        return ""
    return found[1].strip() if found else ""
