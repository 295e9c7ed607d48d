"""Writes changes of sources and rules by API clients to the settings file, so that they survive a restart."""

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
import yaml

from penstock_video.decode.uri import UriKind, kind_of
from penstock_video.errors import ChangeNotSaved
from penstock_video.interfaces import Change, Saved, SourceAdded, SourceChanged, SourceRemoved
from penstock_video.settings.document import MAX_FILE_BYTES, InvalidSettings, parse_document, read_text
from penstock_video.settings.loader import NO_FLAGS, Flags, Surroundings, read_settings
from penstock_video.settings.section import Reading, Section
from penstock_video.settings.sources import SourceSection, entry_sources
from penstock_video.types import SourceConfig

log = structlog.get_logger(component="video")
_ORIGINAL = ".orig"  # suffix of the copy that keeps the comments
_TRANSPORT = "rtsp-transport"
_DEFAULT = SourceConfig("", "")


class SettingsFile:
    """Implements ChangeSaver. Only one program may save to a file. Manual edits in between are kept."""

    def __init__(self, path: Path, environ: Mapping[str, str], flags: Flags = NO_FLAGS) -> None:
        """flags: of the run, beside the file. Raises ChangeNotSaved if the file cannot be written, or another program
        saves to it."""
        self._path, self._environ, self._flags = Path(os.path.realpath(path)), environ, flags
        self._host = socket.gethostname()
        self._writing = threading.Lock()
        self._lock = self._locked(self._path.with_name(f".{self._path.name}.lock"))

    def close(self) -> None:
        os.close(self._lock)

    def apply(self, change: Change, run: Callable[[], None]) -> Saved:
        """Applies the change with `run`, then writes the file.

        Raises ChangeNotSaved, before any change, if the file would become invalid, and what `run` raises.
        """
        with self._writing:
            text = read_text(self._path)
            new = self._with(change, text)
            run()
            try:
                self._write(text, new)
            except OSError as error:
                log.error("cannot save a change", file=str(self._path), reason=error.strerror)
                return Saved.FAILED
            return Saved.YES

    def _with(self, change: Change, text: str) -> str:
        """The text with the change. Raises ChangeNotSaved."""
        try:
            document = _Document(text, self._path, self._environ)
            document.make(change)
            new = document.text()
            read_settings(self._path, self._flags, surroundings=Surroundings(self._environ, self._host), text=new)
        except InvalidSettings as error:
            raise ChangeNotSaved(
                f"{self._path.name} would not be valid, so nothing was changed: {error.complaints[0].text}"
            ) from None
        if len(new.encode()) > MAX_FILE_BYTES:
            raise ChangeNotSaved(f"{self._path.name} would be larger than {MAX_FILE_BYTES >> 20} MiB; remove sources")
        return new

    def _write(self, old: str, new: str) -> None:
        """Replaces the file, readable by its user only. First makes one copy of the original. Raises OSError."""
        original = self._path.with_name(self._path.name + _ORIGINAL)
        if any("#" in line for line in old.splitlines()) and not original.exists():
            _write_private(original, old)
        draft = self._path.with_name(f".{self._path.name}.new")
        with suppress(FileNotFoundError):
            draft.unlink()
        _write_private(draft, new)
        draft.replace(self._path)

    def _locked(self, path: Path) -> int:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ChangeNotSaved(
                f"--save-changes: {path.parent} cannot be written ({error.strerror}); choose a writable folder"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ChangeNotSaved(
                f"--save-changes: another program saves changes to {self._path}; use a separate file"
            ) from None
        return descriptor


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class _Document:
    """The file's YAML nodes. Unchanged parts, including variables, keep their text; comments are lost."""

    def __init__(self, text: str, path: Path, environ: Mapping[str, str]) -> None:
        """Raises InvalidSettings."""
        found = parse_document(text, str(path))
        self._root = found if isinstance(found, yaml.MappingNode) else _node({})
        section = Section(self._root, "", Reading.of(path, environ))
        entries = _items(_get(self._root, "source"))
        self._entries: list[tuple[yaml.MappingNode, tuple[SourceConfig, ...]]] = [
            (node, sources)
            for node, sources in zip(entries, entry_sources(section.sections("source")), strict=True)
            if isinstance(node, yaml.MappingNode)
        ]
        section.reading.complaints.raise_any()

    def make(self, change: Change) -> None:
        """Raises ChangeNotSaved."""
        match change:
            case SourceAdded(config):
                if any(config.source_id in _ids(sources) for _, sources in self._entries):  # one that has ended
                    self._remove(config.source_id)
                self._entries.append((_node({"uri": _uri(config), "camera_id": config.source_id}), (config,)))
                self._fill(self._entries[-1][0], config)
            case SourceChanged(config, is_new_address):
                node = self._entry(config.source_id)
                if is_new_address:
                    _set(node, "uri", _uri(config))
                self._fill(node, config)
            case SourceRemoved(source_id):
                self._remove(source_id)
            case _:
                _set(self._entry(change.source_id), "analytics", _plain(change.section))
        if self._entries:
            name = yaml.ScalarNode("tag:yaml.org,2002:str", "source")
            _put(self._root, name, yaml.SequenceNode("tag:yaml.org,2002:seq", [node for node, _ in self._entries]))
        else:
            _drop(self._root, "source")

    def text(self) -> str:
        found: str = yaml.serialize(self._root, Dumper=yaml.SafeDumper, allow_unicode=True, width=110)
        return found

    def _remove(self, source_id: str) -> None:
        self._entry(source_id)
        self._entries = [row for row in self._entries if source_id not in _ids(row[1])]

    def _entry(self, source_id: str) -> yaml.MappingNode:
        """The entry of the source. A source of a folder entry gets its own entry. Raises ChangeNotSaved."""
        for number, (node, sources) in enumerate(self._entries):
            if source_id not in _ids(sources):
                continue
            if len(sources) == 1:
                _set(node, "camera_id", source_id)
                return node
            own = [(_copied(node), (one,)) for one in sources]
            for each, (one,) in own:
                _set(each, "uri", os.path.abspath(one.uri))
                _set(each, "camera_id", one.source_id)
            self._entries[number : number + 1] = own
            return next(each for each, (one,) in own if one.source_id == source_id)
        raise ChangeNotSaved(f"{source_id!r} is not in the settings file, so nothing was changed; add it there")

    def _fill(self, node: yaml.MappingNode, config: SourceConfig) -> None:
        """Sets options that differ from the defaults, and removes the others."""
        for name, field in SourceSection.model_fields.items():
            if name in ("uri", "source_id", "transport"):
                continue
            value = getattr(config, name)
            key = field.alias or name
            if value == getattr(_DEFAULT, name):
                _drop(node, key)
            else:
                _set(node, key, getattr(value, "value", value))
        (_set(node, _TRANSPORT, "udp") if config.is_udp else _drop(node, _TRANSPORT))


def _uri(config: SourceConfig) -> str:
    """A client's URL for the file. Raises ChangeNotSaved for a URL with `${`, which the file would expand."""
    if "${" in config.uri:
        raise ChangeNotSaved(
            "an address with ${ cannot be saved: the settings file would expand it as a variable; edit the file instead"
        )
    return os.path.abspath(config.uri) if _is_path(config.uri) else config.uri


def _is_path(uri: str) -> bool:
    return kind_of(uri) in (UriKind.FILE, UriKind.DEVICE) and not uri.startswith("file:")


def _plain(section: object) -> object:
    """A client's rules for the file. Raises ChangeNotSaved for the name of a class, which a file would import."""
    if isinstance(section, Mapping) and any(":" in str(key) for key in section):
        raise ChangeNotSaved("a rule of module:Class can be set in the settings file only; add it there")
    return section


def _ids(sources: tuple[SourceConfig, ...]) -> Iterator[str]:
    return (source.source_id for source in sources)


def _node(value: object) -> yaml.MappingNode:
    found = yaml.compose(yaml.safe_dump(value, allow_unicode=True), Loader=yaml.SafeLoader)
    assert isinstance(found, yaml.MappingNode)
    found.flow_style = False
    return found


def _copied(node: yaml.MappingNode) -> yaml.MappingNode:
    return yaml.MappingNode(node.tag, list(node.value), flow_style=node.flow_style)


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return []
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _get(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


def _drop(node: yaml.MappingNode, key: str) -> None:
    node.value = [(name, value) for name, value in node.value if name.value != key]


def _set(node: yaml.MappingNode, key: str, value: object) -> None:
    """Replaces the value of a key, or appends the key."""
    ((name, made),) = _node({key: value}).value
    _put(node, name, made)


def _put(node: yaml.MappingNode, name: yaml.ScalarNode, made: yaml.Node) -> None:
    for number, (known, _) in enumerate(node.value):
        if known.value == name.value:
            node.value[number] = (known, made)
            return
    node.value.append((name, made))
