"""The catalogue: public models, where their files are, and the folders that describe them to Triton."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from server.catalogue.errors import UnknownModel

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
        """The last part of the url: what the file is called where somebody has downloaded it."""
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
    """The entry of that name. Raises UnknownModel with the names that are close, or all of them."""
    entry = catalogue.get(name)
    if entry is not None:
        return entry
    close = difflib.get_close_matches(name, catalogue, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(catalogue)}"
    raise UnknownModel(f"the catalogue has no model {name!r}: {hint}")
