"""What the command line says, and how it changes what the file says: a flag wins."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from deepstream_pipeline.settings.complaints import did_you_mean, shown
from deepstream_pipeline.settings.places import PlaceRefused, places
from deepstream_pipeline.settings.records import SourceSettings
from deepstream_pipeline.settings.section import Plain, Reading, Section
from deepstream_pipeline.settings.sinks import SinkOptions, read_sink
from deepstream_pipeline.settings.sources import Draft
from deepstream_pipeline.types import DecoderKind, SourceConfig

_FILE_SINKS = ("jsonl", "mp4", "hls", "preview")
_FORMS = ("jsonl", "mp4", "hls", "preview", "rtsp://", "kafka://", "mqtt://", "redis://", "webhook=")
_NUMBER = r"-?\d+(?:\.\d+)?"
_LINE = re.compile(rf"([^=]{{1,64}})=({_NUMBER}),({_NUMBER}),({_NUMBER}),({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Flags:
    """As they were given; None and empty for those that were not. lines: NAME=x1,y1,x2,y2."""

    sources: tuple[str, ...] = ()
    model: str = ""
    out: Path | None = None
    interval: int | None = None
    rules: Path | None = None
    lines: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    batch_size: int | None = None
    shard: str = ""
    gateway: str = ""
    engine: str = ""
    api_port: int | None = None
    has_api: bool = True
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_outbound: tuple[str, ...] = ()
    is_loop: bool = False
    is_realtime: bool = False
    decoder: DecoderKind | None = None


def drafts_of(flags: Flags, reading: Reading) -> tuple[Draft, ...]:
    """The sources of the command line."""
    found: list[Draft] = []
    for given in flags.sources:
        uri, fault = reading.variables.substituted(given)
        try:
            uris = places(uri, Path()) if not fault else ()
        except PlaceRefused as refused:
            uris, fault = (), str(refused)
        if fault:
            reading.complaints.add("--source", fault)
        found += [Draft(SourceSettings(SourceConfig(one, "")), "--source") for one in uris]
    return tuple(found)


def sinks_of(flags: Flags, reading: Reading) -> tuple[SinkOptions, ...]:
    """The sinks of the command line; with a folder and none of them, the picture and both lists go there."""
    given = flags.sinks or (("mp4", "jsonl") if flags.out is not None else ())
    found = (_quick_sink(text, flags, reading) for text in given)
    return tuple(sink for sink in found if sink is not None)


def with_lines(flags: Flags, section: Plain | None, reading: Reading) -> Plain | None:
    """The analytics section, with the quick lines of the command line."""
    rows: list[dict[str, object]] = []
    for text in flags.lines:
        found = _LINE.fullmatch(text)
        if found is None:
            reading.complaints.add("--line", f"{shown(text)}: NAME=x1,y1,x2,y2 is needed, in pixels of the picture")
        else:
            x1, y1, x2, y2 = map(float, found.groups()[1:])
            rows.append({"name": found[1], "line": [[x1, y1], [x2, y2]]})
    if not rows:
        return section
    content = section.content if section is not None else {}
    if not isinstance(content, dict):
        return section
    lines = content.get("line-crossing") or []
    lines = lines if isinstance(lines, list) else [lines]
    where = dict(section.where) if section is not None else {"analytics": "--line"}
    where |= {f"analytics.line-crossing[{len(lines) + number}]": "--line" for number in range(len(rows))}
    return replace(
        section or Plain({}, "analytics"), content={**content, "line-crossing": [*lines, *rows]}, where=where
    )


def _quick_sink(text: str, flags: Flags, reading: Reading) -> SinkOptions | None:
    """A sink in its short form, read as the section that it stands for."""
    if text not in _FILE_SINKS and not text.startswith(_FORMS[4:]):
        reading.complaints.add("--sink", f"{shown(text)}: {did_you_mean(text.partition(':')[0], _FORMS)}")
        return None
    try:
        fields = _fields(text)
    except ValueError:
        reading.complaints.add("--sink", f"{shown(text)}: this is no address")
        return None
    pairs: list[tuple[yaml.Node, yaml.Node]] = [(_scalar(key), _scalar(value)) for key, value in fields.items()]
    here = replace(reading, file="--sink", folder=Path())
    return read_sink(Section(yaml.MappingNode("tag:yaml.org,2002:map", pairs), "", here), flags.out)


def _fields(text: str) -> dict[str, str]:
    """The keys of the section `sink` that the short form stands for. Raises ValueError."""
    if text in _FILE_SINKS:
        return {"type": text}
    if text.startswith("webhook="):
        return {"type": "webhook", "url": text.removeprefix("webhook=")}
    parts = urlsplit(text, allow_fragments=False)  # a # is a topic's, or a mistake; nothing is lost
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
    """Typed as YAML types it: 1883 is a number."""
    style = None if re.fullmatch(r"\d+|true|false", text) else "'"
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style=style)
