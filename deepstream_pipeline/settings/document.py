"""A YAML file as nodes that know their lines; what only an attacker or an accident writes is refused."""

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from deepstream_pipeline.settings.complaints import Complaint, SettingsRefused

if TYPE_CHECKING:
    from yaml._yaml import Mark as LibMark

    Mark = yaml.Mark | LibMark

MAX_FILE_BYTES = 1 << 20
_VIDEO_HINT = " (a video is given as --source)"
MAX_DEPTH = 16
MAX_NODES = 100_000  # with every alias written out: 200 cameras with rules of their own have a tenth
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def read_document(path: Path) -> yaml.Node | None:
    """The file's one document; None where it holds nothing. Raises SettingsRefused."""
    return parse_document(_read(path), str(path))


def parse_document(text: str, name: str) -> yaml.Node | None:
    """The text's one document. name: of the file, for complaints. Raises SettingsRefused."""
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _refusal(_place(name, error.problem_mark), _in_words(error)) from None  # its text may show a password
    except yaml.YAMLError as error:
        at = getattr(error, "position", 0)
        line = text.count("\n", 0, at) + 1
        raise _refusal(f"{name}:{line}:{at - text.rfind(chr(10), 0, at)}", "a sign that YAML does not take") from None
    if root is not None:
        _check_size(root, name)
    return root


def place_of(name: str, node: yaml.Node) -> str:
    """FILE:LINE:COLUMN of the node."""
    return _place(name, node.start_mark)


def _read(path: Path) -> str:
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
    """Before anything is built: nesting would overflow the stack, tags would ask for objects."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        if depth > MAX_DEPTH or count > 2 * MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES} values"
            raise _refusal(_place(name, event.start_mark), f"more than {limit}; that is no file of settings")
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refusal(_place(name, event.start_mark), "tags (!…) are not read; write the value alone")


def _check_size(root: yaml.Node, name: str) -> None:
    sizes: dict[int, int] = {}
    if _size(root, sizes, name, 0) > MAX_NODES:
        raise _refusal(_place(name, root.start_mark), f"its aliases (*) stand for more than {MAX_NODES} values")


def _size(node: yaml.Node, sizes: dict[int, int], name: str, depth: int) -> int:
    """How many values the node stands for, each alias counted where it is used."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    known = sizes.get(id(node))
    if known == 0 or depth > MAX_DEPTH:
        raise _refusal(_place(name, node.start_mark), "an alias (*) that holds itself, or nests too deep")
    if known is None:
        sizes[id(node)] = 0
        below = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known = sizes[id(node)] = 1 + sum(_size(child, sizes, name, depth + 1) for child in below)
    return known


def _in_words(error: yaml.MarkedYAMLError) -> str:
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


def _place(name: str, mark: "Mark | None") -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name


def _refusal(where: str, text: str) -> SettingsRefused:
    return SettingsRefused([Complaint(where, text)])
