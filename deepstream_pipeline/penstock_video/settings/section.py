"""Typed reading of one section of the settings file. Each error is collected with its line, and reading continues."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import yaml

from penstock_video.settings.document import (
    SettingsFaults,
    Variables,
    choices,
    did_you_mean,
    position_of,
    shortened,
    shown,
)

_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}
_WHOLE, _NUMBER = re.compile(r"[-+]?\d{1,18}"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}": kind for kind in ("bool", "int", "float", "null")}
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Reading:
    """Shared by all sections of a file. folder: base of its relative paths."""

    file: str
    folder: Path
    complaints: SettingsFaults
    variables: Variables


class Section:
    """A mapping of the file. Each key is read once; `close` reports the keys that were not read."""

    def __init__(self, node: yaml.Node | None, path: str, reading: Reading) -> None:
        self.path, self.reading = path, reading
        self._node = node
        self._asked: set[str] = set()
        self._values: dict[str, yaml.Node] = {}
        self._keys: dict[str, yaml.Node] = {}
        if isinstance(node, yaml.MappingNode):
            self._take(node)
        elif node is not None and not _is_null(node):
            self.complain(node, path, "a section is needed here: KEY: VALUE lines, indented under it")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> yaml.Node:
        return self._values[key]

    def _take(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.complain(key, self.path, "a key is a word")
            elif key.value in self._values:
                line = self._keys[key.value].start_mark.line + 1
                self.complain(key, self.at(shortened(key.value)), f"given twice, first in line {line}; remove one")
            else:
                self._keys[key.value], self._values[key.value] = key, value

    def at(self, key: str) -> str:
        """The key's path from the top of the file."""
        return f"{self.path}.{key}" if self.path else key

    def place(self, key: str) -> str:
        """FILE:LINE:COLUMN of the key's value, or of the section."""
        node = self._values.get(key) or self._node
        return position_of(self.reading.file, node) if node is not None else self.reading.file

    def complain(self, node: yaml.Node | None, path: str, text: str) -> None:
        """Reports a fault at the node, or at the section."""
        node = node or self._node
        where = position_of(self.reading.file, node) if node is not None else self.reading.file
        self.reading.complaints.add(where, f"{path}: {text}" if path else text)

    def require(self, *keys: str) -> None:
        """Reports missing keys."""
        for key in keys if self._node is None or isinstance(self._node, yaml.MappingNode) else ():
            if key not in self._values:
                self.complain(None, self.at(key), "is missing")

    def text(self, key: str, default: str = "", *, pattern: str = "", form: str = "", is_secret: bool = False) -> str:
        """A string. pattern: what it must match; form: the pattern in words. is_secret: ${NAME} is replaced by a
        variable's value."""
        node = self._scalar(key)
        if node is None:
            return default
        value: str = node.value
        if is_secret:
            return self._substituted(key, node)
        if "${" in value:
            self._wrong(key, node, "variables (${…}) are read in addresses, passwords and headers only")
        elif not value.isprintable() or not value:
            self._wrong(key, node, "a printable text of one line is needed")
        elif pattern and not re.fullmatch(pattern, value):
            self._wrong(key, node, form)
        else:
            return value
        return default

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        """A whole number from low to high."""
        found = self._number(key, _WHOLE, "a whole number", low, high)
        return default if found is None else int(found)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number from low to high."""
        found = self._number(key, _NUMBER, "a number", low, high)
        return default if found is None else found

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """A number from low to high; None if not given."""
        return self._number(key, _NUMBER, "a number", low, high)

    def optional_whole(self, key: str, low: int, high: int) -> int | None:
        """A whole number from low to high; None if not given."""
        found = self._number(key, _WHOLE, "a whole number", low, high)
        return None if found is None else int(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false, or DeepStream's 1 and 0."""
        node = self._scalar(key)
        if node is None:
            return default
        found = _TRUTH.get(node.value.lower()) if node.style is None else None
        if found is None:
            self._wrong(key, node, "true or false is needed (or 1, 0)")
        return bool(found)

    def choice(self, key: str, kind: type[E], default: E) -> E:
        """A value of the enumeration."""
        word = self.word(key, tuple(item.value for item in kind), default.value)
        return kind(word)

    def word(self, key: str, words: tuple[str, ...], default: str) -> str:
        """One of the given words."""
        node = self._scalar(key)
        if node is None or node.value in words:
            return node.value if node is not None else default
        self._wrong(key, node, choices(node.value, words))
        return default

    def ids_or_labels(self, key: str) -> tuple[int | str, ...]:
        """A list of classes, by number or label; also DeepStream's form 0;2;5."""
        found: list[int | str] = []
        for node in self._items(key):
            for word in filter(None, (part.strip() for part in node.value.split(";"))):
                is_number = node.style is None and re.fullmatch(r"\d{1,6}", word)
                found.append(int(word) if is_number else word)
        return tuple(found)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; a single one needs no brackets."""
        return tuple(node.value for node in self._items(key))

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        """A mapping of strings. Values may have variables and are never shown."""
        below = self.section(key)
        pairs = tuple((name, below.text(name, is_secret=True)) for name in below._values)
        below.close()
        return pairs

    def section(self, key: str) -> "Section":
        """The mapping below the key; empty if missing."""
        self._asked.add(key)
        return Section(self._values.get(key), self.at(key), self.reading)

    def sections(self, key: str) -> "tuple[Section, ...]":
        """The list of mappings below the key; a single one needs no list."""
        self._asked.add(key)
        node = self._values.get(key)
        if node is None or _is_null(node):
            return ()
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(Section(item, f"{self.at(key)}[{number}]", self.reading) for number, item in enumerate(items))

    def plain(self, key: str) -> "Plain | None":
        """The value of the key as dicts, lists, texts and numbers; None if empty."""
        self._asked.add(key)
        node = self._values.get(key)
        return None if node is None or _is_null(node) else plain_of(node, self.at(key), self.reading)

    @property
    def given(self) -> tuple[str, ...]:
        """The keys that are present."""
        return tuple(self._values)

    def close(self) -> None:
        """Reports every key that was not read."""
        for key in self._values.keys() - self._asked:
            node = self._keys[key]
            hint = "merge keys (<<) are not read" if key == "<<" else did_you_mean(key, self._asked)
            self.complain(node, self.at(shown(key)[1:-1]), f"unknown key; {hint}")

    def _scalar(self, key: str) -> yaml.ScalarNode | None:
        self._asked.add(key)
        node = self._values.get(key)
        if node is None or _is_null(node):
            return None
        if not isinstance(node, yaml.ScalarNode):
            self.complain(node, self.at(key), "one value is needed here, not a list or section")
            return None
        return node

    def _items(self, key: str) -> tuple[yaml.ScalarNode, ...]:
        self._asked.add(key)
        node = self._values.get(key)
        if node is None or _is_null(node):
            return ()
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        wrong = [item for item in items if not isinstance(item, yaml.ScalarNode)]
        for item in wrong:
            self.complain(item, self.at(key), "a list of plain values is needed here, such as [a, b]")
        return tuple(item for item in items if isinstance(item, yaml.ScalarNode)) if not wrong else ()

    def _number(
        self, key: str, pattern: re.Pattern[str], form: str, low: float, high: float
    ) -> float | None:  # None: not given, or complained of
        node = self._scalar(key)
        if node is None:
            return None
        is_number = node.style is None and pattern.fullmatch(node.value)
        value = float(node.value) if is_number else math.nan
        if low <= value <= high:
            return int(node.value) if pattern is _WHOLE else value
        self._wrong(key, node, f"{form} from {low:,} to {high:,} is needed".replace(",", ""))
        return None

    def _wrong(self, key: str, node: yaml.ScalarNode, text: str) -> None:
        self.complain(node, f"{self.at(key)} is {shown(node.value)}", text)

    def _substituted(self, key: str, node: yaml.ScalarNode) -> str:
        value, fault = self.reading.variables.substituted(node.value)
        if not fault and not value.isprintable():
            fault = "it holds a sign that cannot be printed"
        if fault:
            self.complain(node, self.at(key), fault)
        return value


@dataclass(frozen=True, slots=True)
class Plain:
    """A part of the file as plain values, with positions. where: by key path."""

    content: object
    path: str
    where: Mapping[str, str] = field(default_factory=dict)

    def place(self, key_path: str) -> str:
        """FILE:LINE:COLUMN of the key path, or of its nearest parent."""
        while key_path and key_path not in self.where:
            key_path = re.sub(r"(\.|\A|\[)[^.\[]*\Z", "", key_path)
        return self.where.get(key_path) or self.where.get(self.path, "")


def plain_of(node: yaml.Node, path: str, reading: Reading) -> Plain:
    """The node as plain values. Reports duplicate keys."""
    where: dict[str, str] = {}
    content = _plain(node, path, lambda item, at: where.setdefault(at, position_of(reading.file, item)), reading)
    return Plain(content, path, where)


def _plain(node: yaml.Node, path: str, mark: Callable[[yaml.Node, str], object], reading: Reading) -> object:
    mark(node, path)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{number}]", mark, reading) for number, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        section = Section(node, path, reading)
        for key in section.given:
            mark(section._keys[key], section.at(key))
        return {key: _plain(section[key], section.at(key), mark, reading) for key in section.given}
    return _plain_value(node)


def _plain_value(node: yaml.Node) -> object:
    kind, text = _PLAIN_TAGS.get(node.tag, ""), node.value
    if kind == "null":
        return None
    if kind == "bool":
        return _TRUTH[text.lower()]
    if kind and _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if kind and _NUMBER.fullmatch(text) else text


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and _PLAIN_TAGS.get(node.tag) == "null"
