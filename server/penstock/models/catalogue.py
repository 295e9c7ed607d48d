"""The catalogue of public models, and the models installed in this machine's repositories."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from penstock.engines.config_pbtxt import read_config
from penstock.engines.ort_serving.tensorrt_rtx import FOLDER
from penstock.gateway.batching.options import DeclaredOptions
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import BatchOwner
from penstock.protocol.request_checks import is_version


class CatalogueError(Exception):
    """Root of this package's errors. Commands print its text and exit with a non-zero code."""


class UnknownCatalogueModel(CatalogueError):
    """The catalogue has no such model."""


class PullFailed(CatalogueError):
    """A model could not be fetched, verified or installed; the repository is unchanged."""


class DownloadInterrupted(PullFailed):
    """The download broke off or timed out; the partial file stays and can be resumed."""


class WrongContent(PullFailed):
    """The file's size or SHA-256 differs from the catalogue's."""


HERE = Path(__file__).resolve().parent
CATALOGUE_FILE = HERE / "models.toml"
FOLDERS = HERE / "folders"
DEFAULT_DETECTOR = "yolox-nano"  # of the documentation and the examples


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that can be pulled. url, size_bytes and sha256 are of the model file; licence is an SPDX identifier.

    layout: the output layout of its card. untried: its real weights have never been decoded by this project.
    freed_sha256: of the file with a dynamic batch, which `pull` writes; empty if the published file is served.
    """

    name: str
    about: str
    url: str
    size_bytes: int
    sha256: str
    licence: str
    layout: str = ""
    untried: bool = False
    freed_sha256: str = ""

    @property
    def served_sha256(self) -> str:
        """SHA-256 of the file that is served."""
        return self.freed_sha256 or self.sha256

    @property
    def file_name(self) -> str:
        """File name of the download: the last part of the URL."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def folder(self) -> Path:
        """The model's folder without its file: config.pbtxt, labels.txt, MODEL.md."""
        return FOLDERS / self.name


def read_catalogue(path: Path = CATALOGUE_FILE) -> Mapping[str, CatalogueEntry]:
    """Entries by name, in the file's order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: CatalogueEntry(name=name, **row) for name, row in table.items()}


def find_entry(name: str, catalogue: Mapping[str, CatalogueEntry]) -> CatalogueEntry:
    """The entry of that name. Raises UnknownCatalogueModel with similar names, or all."""
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
    """A model folder of a repository."""

    name: str
    repository: Path
    versions: tuple[str, ...]
    owner: BatchOwner | None  # what forms the batches; None if unknown
    problem: str  # why the folder or config.pbtxt is invalid or cannot be read; else empty
    has_random_weights: bool = False  # parameter `weights` is `random`: for speed measurements only
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)  # of the model's files, by version
    licence: str = ""  # from MODEL.md's table; empty if unknown


def scan(repositories: Iterable[Path], options: DeclaredOptions | None = None) -> list[InstalledModel]:
    """All models by repository and name. Skips missing repositories. Raises CatalogueError for an unreadable one."""
    return [read_folder(folder, options) for repository in repositories for folder in _model_folders(repository)]


def _model_folders(repository: Path) -> list[Path]:
    try:
        found = sorted(repository.iterdir()) if repository.is_dir() else []
        return [folder for folder in found if folder.is_dir() and not folder.name.startswith(".")]
    except OSError as error:
        raise CatalogueError(f"{repository} cannot be read ({error.strerror}): let this user read it") from error


def read_folder(folder: Path, options: DeclaredOptions | None = None) -> InstalledModel:
    """A model folder's versions, and the relevant parts of its config.pbtxt."""
    path = folder / "config.pbtxt"
    owner: BatchOwner | None = BatchOwner.OFF
    problem, has_random_weights = "", False
    try:
        versions = sorted((item.name for item in folder.iterdir() if is_version(item.name) and item.is_dir()), key=int)
        sizes_bytes = {version: _size_bytes(folder / version) for version in versions}
        has_config = path.exists()  # else Triton completes the configuration, without batching
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
    try:
        return options.of(config).owner, ""
    except InvalidRequest as error:
        return None, error.message


def _size_bytes(folder: Path) -> int:
    """Total size of all files below. Follows links to files; ignores __pycache__ and TensorRT-RTX engines."""
    size_bytes = 0
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", FOLDER)]
        size_bytes += sum(path.stat().st_size for path in (Path(top, name) for name in names) if path.is_file())
    return size_bytes


def _licence(card: Path) -> str:
    """The bare licence name: `Apache-2.0` for `| licence | Apache-2.0, OpenCV's |`."""
    try:
        found = _LICENCE_ROW.search(card.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # missing or unreadable; it is optional
        return ""
    return found[1].strip() if found else ""
