"""Reads sinks: sections of the settings file, and the short forms of `--sink`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from penstock_video.settings.document import choices, did_you_mean, shown
from penstock_video.settings.section import Reading, Section
from penstock_video.sinks.registry import SINKS

_FILE_SINKS = ("jsonl", "mp4", "poster", "summary", "hls", "preview")
_ADDRESS_FORMS = ("rtsp://", "kafka://", "mqtt://", "redis://", "webhook=")
_FORMS = (*_FILE_SINKS, *_ADDRESS_FORMS)
_DEFAULT_SINKS = ("mp4", "jsonl", "poster")  # with --out


def sinks_of(given: tuple[str, ...], out: Path | None, reading: Reading) -> tuple[object, ...]:
    """Sinks of the command line; a folder without sinks means the default ones."""
    found = (quick_sink(text, out, reading) for text in given or (_DEFAULT_SINKS if out is not None else ()))
    return tuple(sink for sink in found if sink is not None)


def quick_sink(text: str, out: Path | None, reading: Reading) -> object | None:
    """A sink in short form, read as a section."""
    if text not in _FILE_SINKS and not text.startswith(_ADDRESS_FORMS):
        reading.complaints.add("--sink", f"{shown(text)}: {did_you_mean(text.partition(':')[0], _FORMS)}")
        return None
    try:
        fields = _fields(text)
    except ValueError:
        reading.complaints.add("--sink", f"{shown(text)}: this is not an address")
        return None
    return read_sink(section_of(fields, "--sink", reading), out)


def section_of(fields: Mapping[str, str], flag: str, reading: Reading) -> Section:
    """A section with the values of a flag."""
    pairs: list[tuple[yaml.Node, yaml.Node]] = [(_scalar(key), _scalar(value)) for key, value in fields.items()]
    return Section(yaml.MappingNode("tag:yaml.org,2002:map", pairs), "", replace(reading, file=flag, folder=Path()))


def read_sink(section: Section, out: Path | None) -> object | None:
    """A sink's options, which are imported only here; None if it has a fault. out: default folder."""
    before = len(section.reading.complaints)
    name = section.text("type")
    if name is None:
        return None
    if ":" in name:
        return section.extension(name, ("write", "end_source", "close"), {"folder": out})
    if name not in SINKS:
        section.complain(section["type"], f"{section.at('type')} is {name!r}", choices(name, SINKS))
        return None
    options: object = section.read(resolve_name(SINKS[name].options), beside=("type",), defaults={"folder": out})
    return options if len(section.reading.complaints) == before else None


def _fields(text: str) -> dict[str, str]:
    """Keys of the `sink` section for the short form. Raises ValueError."""
    if text in _FILE_SINKS:
        return {"type": text}
    if text.startswith("webhook="):
        return {"type": "webhook", "url": text.removeprefix("webhook=")}
    parts = urlsplit(text, allow_fragments=False)  # keeps a # in the topic
    more = dict(parse_qsl(parts.query))
    if parts.scheme == "rtsp":
        return {"type": "rtsp", "url": text}
    if parts.scheme == "redis":
        return {"type": "redis", "url": parts._replace(query="").geturl(), **more}
    topic = {"topic": unquote(parts.path.strip("/"))} if parts.path.strip("/") else {}
    if parts.scheme == "kafka":
        return {"type": "kafka", "brokers": parts.netloc, **topic, **more}
    found = {"type": "mqtt", "host": parts.hostname or "", "port": str(parts.port or 1883), **topic, **more}
    user = {"username": unquote(parts.username or ""), "password": unquote(parts.password or "")}
    return found | {name: value for name, value in user.items() if value}


def _scalar(text: str) -> yaml.ScalarNode:
    """Converts like YAML: 1883 is a number."""
    style = None if re.fullmatch(r"\d+|true|false", text) else "'"
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style=style)
