"""The `sink` sections. A sink's options are imported only when the sink is configured."""

from pathlib import Path
from pkgutil import resolve_name

from penstock_video.settings.document import choices
from penstock_video.settings.section import Section
from penstock_video.sinks.registry import SINKS

_ENCODED = ("mp4", "hls", "rtsp")  # sinks that had the key `encoder`


def read_sink(section: Section, out: Path | None) -> object | None:
    """A sink's options; None if it has a fault. out: default folder."""
    before = len(section.reading.complaints)
    name = section.text("type")
    if name is None:
        return None
    if ":" in name:
        return section.extension(name, ("write", "end_source", "close"), {"folder": out})
    if name not in SINKS:
        section.complain(section["type"], f"{section.at('type')} is {name!r}", choices(name, SINKS))
        return None
    former = ("encoder",) if name in _ENCODED and "encoder" in section else ()
    for key in former:
        section.complain(section[key], section.at(key), "remove this key: x264 encodes videos on the CPU")
    beside = ("type", *former)
    options: object = section.read(resolve_name(SINKS[name].options), beside=beside, defaults={"folder": out})
    return options if len(section.reading.complaints) == before else None
