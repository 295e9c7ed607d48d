"""The catalogue of public models, and the models that are installed in repositories of this machine."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from penstock.engines.config_pbtxt import read_config
from penstock.gateway.batching.options import DeclaredOptions
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import BatchOwner
from penstock.protocol.request_checks import is_version


class CatalogueError(Exception):
    """The root; the commands print its text and end with an exit code that is not 0."""


class UnknownCatalogueModel(CatalogueError):
    """The catalogue has no such model."""


class PullFailed(CatalogueError):
    """A model could not be fetched, verified or put in its place; the repository is as it was."""


class DownloadInterrupted(PullFailed):
    """The other side broke off or fell silent in the middle of the file: what came is kept, and can be continued."""


class WrongContent(PullFailed):
    """What came is not the file that the catalogue describes: another size or another SHA-256."""


HERE = Path(__file__).resolve().parent
CATALOGUE_FILE = HERE / "models.toml"
FOLDERS = HERE / "folders"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that can be pulled.

    url: of the model file. size_bytes, sha256: of that file. licence: an SPDX name.
    """

    name: str
    about: str
    url: str
    size_bytes: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        """The last part of the URL, which is a downloaded file's name."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def folder(self) -> Path:
        """The model's folder without its file: config.pbtxt, labels.txt, MODEL.md."""
        return FOLDERS / self.name


def read_catalogue(path: Path = CATALOGUE_FILE) -> Mapping[str, CatalogueEntry]:
    """Every entry by its name, in the file's order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: CatalogueEntry(name=name, **row) for name, row in table.items()}


def find_entry(name: str, catalogue: Mapping[str, CatalogueEntry]) -> CatalogueEntry:
    """The entry of that name. Raises UnknownCatalogueModel with the names that are close, or all of them."""
    entry = catalogue.get(name)
    if entry is not None:
        return entry
    close = difflib.get_close_matches(name, catalogue, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(catalogue)}"
    raise UnknownCatalogueModel(f"the catalogue has no model {name!r}: {hint}")


_LICENCE_ROW = re.compile(r"^\|\s*licen[cs]e\s*\|([^|,;(]+)", re.IGNORECASE | re.MULTILINE)
WEIGHTS_PARAMETER, RANDOM_WEIGHTS = "weights", "random"


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A folder of a model repository.

    owner: who forms its batches, or None if unknown. problem: why the folder or its config.pbtxt cannot be read or is
    invalid, else empty. sizes_bytes: of a version's files, by version. licence: from the table of MODEL.md, else empty.
    has_random_weights: config.pbtxt has `weights` = `random`: for speed measurements only.
    """

    name: str
    repository: Path
    versions: tuple[str, ...]
    owner: BatchOwner | None
    problem: str
    has_random_weights: bool = False
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)
    licence: str = ""


def scan(repositories: Iterable[Path], options: DeclaredOptions | None = None) -> list[InstalledModel]:
    """Every model folder, by repository and name; repositories that do not exist are skipped.

    options: the operator's batching options; None to use only the configs.
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
    owner: BatchOwner | None = BatchOwner.OFF
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


def _owner(config: ModelConfig, options: DeclaredOptions) -> tuple[BatchOwner | None, str]:
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
