"""A section of the settings file, read into its pydantic model. Every fault is collected with its position."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from penstock.protocol.extensions import ExtensionError, load_extension
from penstock_video.errors import needed_value, resolved_schema
from penstock_video.interfaces import Extension
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
_LIST_NEEDED = "a list of plain values is needed here, such as [a, b]"
T = TypeVar("T")
Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Reading:
    """Shared by all sections of a file. folder: base of its relative paths."""

    file: str
    folder: Path
    complaints: SettingsFaults
    variables: Variables

    @classmethod
    def of(cls, path: Path, environ: Mapping[str, str]) -> "Reading":
        """For a file."""
        return cls(str(path), path.parent, SettingsFaults(), Variables(environ))


class InvalidValue(ValueError):
    """What a value must be instead. is_shown: whether the message may have the value."""

    def __init__(self, text: str, *, is_shown: bool = True, node: yaml.Node | None = None) -> None:
        super().__init__(text)
        self.is_shown, self.node = is_shown, node


class _NoOptions(BaseModel):
    """Options of a class without `Options`."""


class Section:
    """A mapping of the file. `close` reports the keys that were not read."""

    def __init__(self, node: yaml.Node | None, path: str, reading: Reading) -> None:
        self.path, self.reading = path, reading
        self._node = node
        self._known: set[str] = set()
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

    def read(
        self,
        model: type[T],
        *,
        beside: Sequence[str] = (),
        defaults: Mapping[str, object | None] = MappingProxyType({}),
    ) -> T | None:
        """The section as its model, a dataclass or BaseModel whose aliases are the keys. Closes the section. Faulty
        keys are reported and get their defaults; None if the model needs them. beside: keys that the caller reads.
        defaults: values of missing keys."""
        adapter, properties = _model(model)  # type: ignore[arg-type]  # mypy: a class is Hashable
        self._known |= {*properties, *beside}
        self.close()
        values = {key: value for key, value in defaults.items() if key in properties and value is not None}
        faulty: set[str] = set()
        for key, node in self._values.items():
            if key in properties and not _is_null(node):
                try:
                    values[key] = self._value(key, node, properties[key])
                except InvalidValue as wrong:
                    faulty.add(key)
                    self._wrong(key, wrong)
        while True:
            try:
                settings: T = adapter.validate_python(values)
                return settings
            except ValidationError as error:
                found = {self._report(fault, properties, faulty) for fault in error.errors(include_url=False)}
                if not found & values.keys():
                    return None
                faulty |= found
                values = {key: value for key, value in values.items() if key not in found}

    def text(self, key: str) -> str | None:
        """The key's text; None, reported, if it is missing or no text."""
        self._known.add(key)
        node = self._values.get(key)
        if node is None or _is_null(node):
            if self._node is None or isinstance(self._node, yaml.MappingNode):
                self.complain(None, self.at(key), "is missing")
            return None
        try:
            return str(self._value(key, node, {"type": "string"}))
        except InvalidValue as wrong:
            self._wrong(key, wrong)
            return None

    def extension(self, name: str, methods: Sequence[str], defaults: Mapping[str, object]) -> Extension | None:
        """The user's class that `type` names, with the other keys as its `Options`; None, reported, for a fault."""
        try:
            found = load_extension(name)
            absent = [method for method in methods if not callable(getattr(found, method, None))]
            if absent:
                raise ExtensionError(f"it has no method {absent[0]}; it needs {', '.join(methods)}")
        except ExtensionError as error:
            self._wrong("type", InvalidValue(str(error)))
            return None
        before = len(self.reading.complaints)
        options = self.read(getattr(found, "Options", _NoOptions), beside=("type",), defaults=defaults)
        if len(self.reading.complaints) > before:
            return None
        return Extension(name, found, None if isinstance(options, _NoOptions) else options)

    def section(self, key: str) -> "Section":
        """The mapping below the key; empty if missing."""
        self._known.add(key)
        return Section(self._values.get(key), self.at(key), self.reading)

    def sections(self, key: str) -> "tuple[Section, ...]":
        """The list of mappings below the key; a single one needs no list."""
        self._known.add(key)
        node = self._values.get(key)
        if node is None or _is_null(node):
            return ()
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(Section(item, f"{self.at(key)}[{number}]", self.reading) for number, item in enumerate(items))

    def plain(self, key: str) -> "Plain | None":
        """The value of the key as dicts, lists, texts and numbers; None if empty."""
        self._known.add(key)
        node = self._values.get(key)
        return None if node is None or _is_null(node) else plain_of(node, self.at(key), self.reading)

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(self._values)

    def close(self) -> None:
        """Reports every key that was not read."""
        for key in self._values.keys() - self._known:
            node = self._keys[key]
            hint = "merge keys (<<) are not read" if key == "<<" else did_you_mean(key, self._known)
            self.complain(node, self.at(shown(key)[1:-1]), f"unknown key; {hint}")

    def _report(self, fault: ErrorDetails, properties: Mapping[str, Schema], faulty: set[str]) -> str:
        """Reports a fault of the model; returns its key."""
        key = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "missing":
            if key not in faulty and (self._node is None or isinstance(self._node, yaml.MappingNode)):
                description = properties[key].get("description")
                self.complain(None, self.at(key), f"is missing; {description}" if description else "is missing")
        elif key:
            error = fault.get("ctx", {}).get("error")
            schema = properties[key]
            self._wrong(key, InvalidValue(str(error or needed_value(schema)), is_shown=not _is_secret(schema)))
        else:
            self.complain(None, self.path, fault["msg"])
        return key

    def _wrong(self, key: str, wrong: InvalidValue) -> None:
        node = wrong.node or self._values[key]
        is_shown = wrong.is_shown and isinstance(node, yaml.ScalarNode)
        self.complain(node, f"{self.at(key)} is {shown(node.value)}" if is_shown else self.at(key), str(wrong))

    def _value(self, key: str, node: yaml.Node, schema: Schema) -> object:
        """The node's value for the model. Raises InvalidValue."""
        kind = schema.get("type")
        if kind == "object":
            below = Section(node, self.at(key), self.reading)
            return {name: below._scalar_value(item, schema) for name, item in below._values.items()}
        if kind != "array":
            return self._scalar_value(node, schema)
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(_item(item, schema.get("items")) for item in items)

    def _scalar_value(self, node: yaml.Node, schema: Schema) -> object:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidValue("one value is needed here, not a list or section", is_shown=False, node=node)
        kind, words, text = schema.get("type"), schema.get("enum"), str(node.value)
        if isinstance(words, list):
            if text not in words:
                raise InvalidValue(choices(text, words), node=node)
            return text
        if convert := _CONVERSIONS.get(str(kind)):
            value = convert(text) if node.style is None else None
            if value is None:
                also = " (or 1, 0)" if kind == "boolean" else ""
                raise InvalidValue(needed_value(schema) + also, node=node)
            return value
        if _is_secret(schema):
            return self._substituted(text)
        if "${" in text:
            raise InvalidValue("variables (${…}) are read in addresses, passwords and headers only")
        if not text.isprintable() or not text:
            raise InvalidValue("a printable text of one line is needed")
        return self.reading.folder / text if schema.get("format") == "path" else text

    def _substituted(self, text: str) -> str:
        value, fault = self.reading.variables.substituted(text)
        if not fault and not value.isprintable():
            fault = "it holds a sign that cannot be printed"
        if fault:
            raise InvalidValue(fault, is_shown=False)
        return value


def _item(node: yaml.Node, schema: object) -> int | str:
    """An item of a list. Variables are not substituted in it."""
    if not isinstance(node, yaml.ScalarNode):
        raise InvalidValue(_LIST_NEEDED, is_shown=False, node=node)
    words = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(words, list) and node.value not in words:
        raise InvalidValue(choices(node.value, words), node=node)
    is_number = isinstance(schema, Mapping) and "anyOf" in schema and node.style is None
    return int(node.value) if is_number and re.fullmatch(r"\d{1,6}", node.value) else str(node.value)


def _is_secret(schema: Schema) -> bool:
    return bool(schema.get("writeOnly"))


def _number(text: str) -> float | None:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


_CONVERSIONS: Mapping[str, Callable[[str], object]] = {
    "integer": lambda text: int(text) if _WHOLE.fullmatch(text) else None,
    "number": _number,
    "boolean": lambda text: _TRUTH.get(text.lower()),
}


@functools.cache
def _model(model: Any) -> tuple[TypeAdapter[Any], Mapping[str, Schema]]:
    """The model's validator, and JSON schemas by key. readOnly fields are set by the program."""
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    schema = adapter.json_schema()
    definitions = schema.get("$defs", {})
    found = {key: resolved_schema(value, definitions) for key, value in schema.get("properties", {}).items()}
    return adapter, {key: value for key, value in found.items() if not value.get("readOnly")}


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
