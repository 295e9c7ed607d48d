"""YAML documents with line numbers, variables in their values, and the list of errors found in them."""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import yaml

from penstock_video.errors import PipelineError

LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class SettingsFault:
    """One fault. where: FILE:LINE:COLUMN, or the flag. text: key path, value and allowed values."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class InvalidSettings(PipelineError):
    """Invalid settings. complaints: all faults, in the order of the file."""

    reason = "bad_settings"

    def __init__(self, complaints: Iterable[SettingsFault]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("\n".join(map(str, self.complaints)))


class SettingsFaults:
    """Collects faults, to report all of them at once."""

    def __init__(self) -> None:
        self._found: list[SettingsFault] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, text: str) -> None:
        self._found.append(SettingsFault(where, text))

    def raise_any(self) -> None:
        """Raises InvalidSettings if there are faults."""
        if self._found:
            raise InvalidSettings(sorted(self._found, key=_in_the_file))


def _in_the_file(complaint: SettingsFault) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.*):(\d+):(\d+)", complaint.where, re.DOTALL)
    return (found[1], int(found[2]), int(found[3])) if found else (complaint.where, 0, 0)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The closest known word, as the end of a sentence; else all known words."""
    names = sorted(known)
    return close_to(word, names) or (f"there are {', '.join(names)}" if names else "nothing may stand here")


def close_to(word: str, known: Iterable[str]) -> str:
    """The closest known word, as a question; empty if none is close."""
    by_form = {_form(name): name for name in sorted(known)}
    close = difflib.get_close_matches(_form(word), by_form, n=1)
    return f"did you mean {by_form[close[0]]}?" if close else ""


def choices(word: str, known: Iterable[str]) -> str:
    """All allowed values, as the end of a sentence, after the closest word."""
    names = tuple(known)
    close, all_names = close_to(word, names), ", ".join(names)
    return f"{close} It takes {all_names}" if close else f"it takes {all_names}"


def _form(name: str) -> str:
    """Normalized spelling: camera-id, camera_id and cameraId are equal."""
    return re.sub(r"[-_ ]", "", name).lower()


def shown(value: str) -> str:
    """The value for an error: short, without control characters and possible passwords."""
    return repr(shortened(without_secrets(value)))


def shortened(text: str) -> str:
    """At most LONGEST_SHOWN characters."""
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def without_secrets(text: str) -> str:
    """The text without what precedes an @, and without an address's query: both may contain a password."""
    before, mark, rest = text.partition("://")
    if not mark:
        before, rest = "", text
    scheme = re.sub(r".*[^a-zA-Z0-9+.-]", "", before, flags=re.DOTALL)
    if "@" in rest:
        rest = f"…@{rest.rpartition('@')[2]}"
    if mark:
        rest = re.sub(r"[?&].*", "?…", rest, flags=re.DOTALL)
    return f"{scheme}{mark}{rest}"


_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Variables:
    """Environment variables for strings."""

    environ: Mapping[str, str]

    def substituted(self, text: str) -> tuple[str, str]:
        """The text with its variables replaced, and errors, which never show a value. In an address a value before the
        @ is percent-encoded, so that a password may have any character."""
        names = _VARIABLE.findall(text)
        for name in names:
            if not _NAME.fullmatch(name):
                return "", "a variable is written ${NAME}, of letters, digits and _"
            if name not in self.environ:
                return "", f"the environment has no variable {name}; set it, or write the value out"
        host_at = text.rfind("@") if "://" in text else -1

        def value_of(match: re.Match[str]) -> str:
            value = self.environ[match[1]]
            return quote(value, safe="") if match.start() < host_at else value

        return _VARIABLE.sub(value_of, text), ""


if TYPE_CHECKING:
    from yaml._yaml import Mark as LibMark

    Mark = yaml.Mark | LibMark

MAX_FILE_BYTES = 1 << 20
_VIDEO_HINT = " (a video is given as --source)"
MAX_DEPTH = 16
MAX_NODES = 100_000  # with aliases expanded: 200 cameras with their own rules have a tenth
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def read_document(path: Path) -> yaml.Node | None:
    """The file's only document; None if it is empty. Raises InvalidSettings."""
    return parse_document(read_text(path), str(path))


def parse_document(text: str, name: str) -> yaml.Node | None:
    """The text's only document. name: of the file, for errors. Raises InvalidSettings."""
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _refusal(
            _position(name, error.problem_mark), _explanation(error)
        ) from None  # its text may show a password
    except yaml.YAMLError as error:
        at = getattr(error, "position", 0)
        line = text.count("\n", 0, at) + 1
        raise _refusal(f"{name}:{line}:{at - text.rfind(chr(10), 0, at)}", "a sign that YAML does not take") from None
    if root is not None:
        _check_size(root, name)
    return root


def position_of(name: str, node: yaml.Node) -> str:
    """FILE:LINE:COLUMN of the node."""
    return _position(name, node.start_mark)


def read_text(path: Path) -> str:
    """The text of a settings file. Raises InvalidSettings."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refusal(str(path), f"cannot be read ({error.strerror}); give an existing YAML file") from None
    if len(content) > MAX_FILE_BYTES:
        raise _refusal(
            str(path), f"is larger than {MAX_FILE_BYTES >> 20} MiB; that is no file of settings{_VIDEO_HINT}"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _refusal(f"{path}:{line}:1", f"is not UTF-8 text{_VIDEO_HINT}") from None


def _check_events(text: str, name: str) -> None:
    """Checks events before anything is built: nesting could overflow the stack, tags could create objects."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        if depth > MAX_DEPTH or count > 2 * MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES} values"
            raise _refusal(_position(name, event.start_mark), f"more than {limit}; that is no file of settings")
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refusal(_position(name, event.start_mark), "tags (!…) are not read; write the value alone")


def _check_size(root: yaml.Node, name: str) -> None:
    sizes: dict[int, int] = {}
    if _size(root, sizes, name, 0) > MAX_NODES:
        raise _refusal(_position(name, root.start_mark), f"its aliases (*) stand for more than {MAX_NODES} values")


def _size(node: yaml.Node, sizes: dict[int, int], name: str, depth: int) -> int:
    """Number of values below the node, with each alias counted where it is used."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    known = sizes.get(id(node))
    if known == 0 or depth > MAX_DEPTH:
        raise _refusal(_position(name, node.start_mark), "an alias (*) that holds itself, or nests too deep")
    if known is None:
        sizes[id(node)] = 0
        below = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known = sizes[id(node)] = 1 + sum(_size(child, sizes, name, depth + 1) for child in below)
    return known


def _explanation(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "not valid YAML"
    if r"'\t'" in problem:
        return "a tab: YAML is indented with blanks"
    if "alias" in problem or "anchor" in problem:
        return "an alias (*) without its anchor (&), or an anchor given twice; put a text that begins so into quotes"
    if "document" in problem:
        return "a second document (---); one file holds one"
    if "mapping values are not allowed" in problem:
        return "a second ': ' in one line, or a line indented unlike its neighbours; put the value into quotes"
    words = re.sub(r"'[^']{2,}'", "…", problem).replace("<block end>", "the end of the section")
    return f"not valid YAML: {words}"


def _position(name: str, mark: "Mark | None") -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name


def _refusal(where: str, text: str) -> InvalidSettings:
    return InvalidSettings([SettingsFault(where, text)])
