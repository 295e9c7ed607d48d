"""What lies in the model repositories: read from disk at each call, as Triton's index is."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from server.core.errors import InvalidRequest
from server.core.model_files import is_version

CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1 << 20  # the parser is slow: about a second
MAX_REASON = 500  # characters of a parser's words, which may quote a whole line
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder. versions: the numbered sub-folders, rising. twin: another repository's folder of that name."""

    name: str
    path: Path
    versions: tuple[int, ...]
    twin: Path | None = None

    @property
    def is_empty(self) -> bool:
        """Neither a version nor a config: Triton takes it for no model at all."""
        return not self.versions and not (self.path / CONFIG_FILE).is_file()

    @property
    def conflict(self) -> str:
        """Why nobody can tell which model the name means; empty where one can."""
        if self.twin is None:
            return ""
        return f"it is in {self.path} and in {self.twin}; one name may stand in one repository"


def scan(repositories: Iterable[Path]) -> dict[str, ModelFolder]:
    """The models on disk by name, sorted. Hidden folders are left out: downloads on their way live there.

    A repository that cannot be read holds nothing.
    """
    found: dict[str, ModelFolder] = {}
    for repository in repositories:
        for path in _folders(repository):
            first = found.get(path.name)
            twin = path if first is not None else None
            where = first.path if first is not None else path
            found[path.name] = ModelFolder(path.name, where, _versions(where), twin)
    return dict(sorted(found.items()))


def read_config(folder: ModelFolder) -> model_config_pb2.ModelConfig:
    """config.pbtxt as it stands; an empty config where there is none. Raises InvalidRequest as "path:line: why"."""
    path = folder.path / CONFIG_FILE
    proto = model_config_pb2.ModelConfig()
    try:
        _check_file(path)
        text_format.Parse(path.read_text(encoding="utf-8"), proto)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except text_format.ParseError as error:
        raise InvalidRequest(f"{path}:{str(error)[:MAX_REASON]}") from error
    return proto


def _check_file(path: Path) -> None:
    """What is no file would be waited for, and a long one read for as long as it is. Raises OSError, InvalidRequest."""
    seen = path.stat()
    if not stat.S_ISREG(seen.st_mode):
        raise InvalidRequest(f"{path}: it is no file")
    if seen.st_size > MAX_CONFIG_BYTES:
        raise InvalidRequest(f"{path}: it has {seen.st_size} bytes (limit {MAX_CONFIG_BYTES})")


def chosen_versions(folder: ModelFolder, config: model_config_pb2.ModelConfig) -> tuple[int, ...]:
    """What version_policy serves of the versions on disk: by default the highest one."""
    policy = config.version_policy
    if policy.HasField("all"):
        return folder.versions
    if policy.HasField("specific"):
        return tuple(version for version in folder.versions if version in set(policy.specific.versions))
    return folder.versions[-(policy.latest.num_versions or 1) :]


def fingerprint(folder: ModelFolder) -> Fingerprint:
    """Changes whenever a file of the model does: path, time, size and inode of each. A version may be a link."""
    files = set()
    for top in (folder.path, *(folder.path / str(version) for version in folder.versions)):
        for parent, _, names in os.walk(top):
            for name in names:
                path = Path(parent, name)
                try:
                    seen = path.stat()
                except OSError:  # gone meanwhile, or a dangling link
                    continue
                files.add((str(path), seen.st_mtime_ns, seen.st_size, seen.st_ino))
    return tuple(sorted(files))


def _folders(repository: Path) -> list[Path]:
    try:
        return [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _versions(path: Path) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(entry.name) for entry in path.iterdir() if is_version(entry.name) and entry.is_dir()))
    except OSError:
        return ()
