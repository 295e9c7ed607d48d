"""Reads a YAML file and command-line flags, which override it, into VideoSettings, or reports every error at once."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.gpu.cards import checked_gpus
from penstock_video.decode.uri import is_live
from penstock_video.interfaces import Extension
from penstock_video.settings.document import SettingsFaults, Variables, parse_document, read_text, shown
from penstock_video.settings.events import EventFlags, event_options
from penstock_video.settings.models import (
    MODEL_FORM,
    MODEL_PATTERN,
    ApiSettings,
    EngineChoice,
    EngineSettings,
    GpuSettings,
    MuxSettings,
    PrimarySettings,
    SecondarySettings,
    SourceSettings,
    VideoSettings,
    gateway_fault,
    outbound_fault,
)
from penstock_video.settings.rule_flags import with_rule_flags
from penstock_video.settings.section import Plain, Reading, Section, plain_of
from penstock_video.settings.sinks import quick_sink, read_sink, section_of, sinks_of
from penstock_video.settings.sources import (
    Draft,
    InvalidSourceUri,
    check_section,
    expanded_uris,
    named_sources,
    read_sources,
    with_user_rules,
)
from penstock_video.sinks.osd import OsdOptions
from penstock_video.source_ids import Shard, shard_here, shard_of
from penstock_video.track.registry import TrackerOptions, TrackerType
from penstock_video.types import DecoderKind, EncoderKind, SourceConfig

_NO_MODEL = "-"  # until a flag names one, or the fault is raised
CLASSES_KEY = "operate-on-class-ids"


@dataclass(frozen=True, slots=True)
class Flags:
    """Command-line flags; None or empty if not given. lines, zones: NAME=x1,y1,x2,y2 and more. conf, iou: 0 to 1.
    classes: labels and numbers, comma-separated. tracker: its type, or module:Class. has_summary: writes its page."""

    sources: tuple[str, ...] = ()
    model: str = ""
    out: Path | None = None
    interval: int | None = None
    rules: Path | None = None
    lines: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    tracker: str = ""
    conf: float | None = None
    iou: float | None = None
    classes: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    has_summary: bool = False
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
    gpus: str = ""
    encoder: EncoderKind | None = None  # of every sink that has one
    events: EventFlags = field(default_factory=EventFlags)


def drafts_of(flags: Flags, reading: Reading) -> tuple[Draft, ...]:
    """Sources of the command line."""
    found: list[Draft] = []
    for given in flags.sources:
        uri, fault = reading.variables.substituted(given)
        try:
            uris = expanded_uris(uri, Path()) if not fault else ()
        except InvalidSourceUri as refused:
            uris, fault = (), str(refused)
        if fault:
            reading.complaints.add("--source", fault)
        found += [Draft(SourceSettings(SourceConfig(one, "")), "--source") for one in uris]
    return tuple(found)


NO_FLAGS = Flags()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Environment of the process: variables and host name."""

    environ: Mapping[str, str]
    hostname: str


def here() -> Surroundings:
    """Environment of this process."""
    return Surroundings(os.environ, socket.gethostname())


def read_settings(
    path: Path | None, flags: Flags = NO_FLAGS, *, surroundings: Surroundings | None = None, text: str | None = None
) -> VideoSettings:
    """Settings of the file and the flags. path: None for flags alone. text: in place of the file's own. Raises
    InvalidSettings with every fault."""
    around = surroundings or here()
    reading = Reading(str(path or ""), (path or Path("-")).parent, SettingsFaults(), Variables(around.environ))
    node = None if path is None else parse_document(read_text(path) if text is None else text, str(path))
    root = Section(node, "", reading)
    settings = _read(root, flags, around)
    root.close()
    reading.complaints.raise_any()
    return settings


def _read(root: Section, flags: Flags, around: Surroundings) -> VideoSettings:
    reading = root.reading
    primary = _primary(root, flags)
    tracker = _tracker(root.section("tracker"), flags)
    drafts = read_sources(root.sections("source"), has_tracker=tracker.has_tracks)
    sources = _sources(drafts_of(flags, reading) if flags.sources else drafts, flags, reading.complaints)
    sinks = _sinks(root, flags)
    api = _api(root, flags)
    if not sources and not (api.is_enabled and "source" not in root and not flags.sources and reading.file):
        _complain_of_nothing(reading, has_given=bool(flags.sources) or "source" in root)
    shard = _shard(flags, around, reading.complaints)
    mine = tuple(source for source in sources if shard.has(source.config.source_id))
    analytics = _analytics(root, flags)
    check_section(analytics, reading.complaints, has_tracker=tracker.has_tracks)
    mux = _mux(root.section("streammux"))
    return VideoSettings(
        sources=mine,
        primary=primary,
        mux=mux if flags.batch_size is None else replace(mux, batch_size=flags.batch_size),
        secondaries=_secondaries(root),
        tracker=tracker,
        analytics=analytics,
        osd=root.section("osd").read(OsdOptions) or OsdOptions(),
        sinks=sinks,
        api=api,
        is_api_port_given=flags.api_port is not None or "port" in root.section("api"),
        engine=_engine(root, flags),
        gpu=_gpu(root.section("gpu"), flags),
        shard=shard,
        elsewhere=len(sources) - len(mine),
        out=flags.out,
        events=event_options(root.section("events"), flags.events, flags.out, around.environ, has_api=api.is_enabled),
    )


def _gpu(section: Section, flags: Flags) -> GpuSettings:
    gpu = section.read(GpuSettings) or GpuSettings()
    return replace(gpu, gpus=checked_gpus(flags.gpus)) if flags.gpus else gpu


def _mux(section: Section) -> MuxSettings:
    if "max-latency" in section and "max-latency-s" in section:
        section.complain(section["max-latency"], section.at("max-latency"), "leave it out; max-latency-s is the same")
    return section.read(MuxSettings) or MuxSettings()


def _tracker(section: Section, flags: Flags) -> TrackerOptions | Extension:
    """The tracker of the file, or of the flag, with the file's keys if they are for the same type."""
    name = section.text("type") if "type" in section else None
    if flags.tracker and flags.tracker != (name or TrackerType.BYTETRACK):
        name, section = flags.tracker, section_of({"type": flags.tracker}, "--tracker", section.reading)
    if name is not None and ":" in name:
        return section.extension(name, ("update", "coast", "reset"), {}) or TrackerOptions()
    tracker = section.read(TrackerOptions) or TrackerOptions()
    if flags.conf is None or "minDetectorConfidence" in section or "highThreshold" in section:
        return tracker
    least = min(flags.conf, tracker.activation_threshold)
    return replace(tracker, activation_threshold=least, high_threshold=least)


def _primary(root: Section, flags: Flags) -> PrimarySettings:
    section = root.section("primary-gie")
    if not flags.model and "model" not in section:
        place = root.at("primary-gie") if root.reading.file else ""
        where = root.reading.file or "--model"
        name = f"{place}.model: is missing; name a model" if place else "is missing; name a model"
        root.reading.complaints.add(where, f"{name} of `penstock models list`, such as street")
    primary = section.read(PrimarySettings, defaults={"model": _NO_MODEL})
    primary = replace(primary or PrimarySettings(_NO_MODEL), classes_at=section.place(CLASSES_KEY))
    if flags.model and not re.fullmatch(MODEL_PATTERN, flags.model):
        root.reading.complaints.add("--model", f"{shown(flags.model)}: {MODEL_FORM}")
    if flags.model:
        primary = replace(primary, model=flags.model)
    if flags.classes:
        names = [name for text in flags.classes for name in map(str.strip, text.split(",")) if name]
        class_ids = tuple(int(name) if re.fullmatch(r"\d{1,6}", name) else name for name in names)
        if not names:
            root.reading.complaints.add("--classes", "is empty; give labels of the model, such as person,car")
        primary = replace(primary, operate_on_class_ids=class_ids, classes_at="--classes")
    return replace(
        primary,
        interval=primary.interval if flags.interval is None else flags.interval,
        threshold=primary.threshold if flags.conf is None else flags.conf,
        iou=primary.iou if flags.iou is None else flags.iou,
    )


def _secondaries(root: Section) -> tuple[SecondarySettings, ...]:
    sections = root.sections("secondary-gie")
    found = ((section, section.read(SecondarySettings)) for section in sections)
    return tuple(replace(one, classes_at=section.place(CLASSES_KEY)) for section, one in found if one is not None)


def _sources(drafts: tuple[Draft, ...], flags: Flags, complaints: SettingsFaults) -> tuple[SourceSettings, ...]:
    sources = named_sources(drafts, complaints)
    return tuple(replace(source, config=_flagged(source.config, flags)) for source in sources)


def _flagged(config: SourceConfig, flags: Flags) -> SourceConfig:
    is_loop, is_realtime = config.is_loop or flags.is_loop, config.is_realtime or flags.is_realtime
    decoder = flags.decoder or config.decoder
    return replace(config, is_loop=is_loop, is_realtime=is_realtime, decoder=decoder)


def _complain_of_nothing(reading: Reading, *, has_given: bool) -> None:
    """Reports missing sources, unless a faulty one was given."""
    if has_given and len(reading.complaints):
        return
    if reading.file:
        reading.complaints.add(reading.file, "source: is missing; list the videos, or leave api on and add them there")
    else:
        reading.complaints.add("--source", "is missing; give a video file, a folder, an address, or a CONFIG.yaml")


def _sinks(root: Section, flags: Flags) -> tuple[object, ...]:
    """Sinks of the flags, else of the file, else the defaults of --out."""
    said = [sink for section in root.sections("sink") if (sink := read_sink(section, flags.out)) is not None]
    found = sinks_of(flags.sinks, flags.out, root.reading) if flags.sinks or "sink" not in root else tuple(said)
    if flags.has_summary and (page := quick_sink("summary", flags.out, root.reading)) is not None:
        found = (*(one for one in found if type(one) is not type(page)), page)
    return tuple(_with_encoder(sink, flags.encoder) for sink in found)


def _with_encoder(sink: Any, kind: EncoderKind | None) -> object:
    return replace(sink, encoder=kind) if kind is not None and hasattr(sink, "encoder") else sink


def _analytics(root: Section, flags: Flags) -> Plain | None:
    """The file's section, or that of --rules, with the rules of --line and --zone."""
    section = root.plain("analytics")
    if flags.rules is not None:
        section = read_rules_file(flags.rules, root.reading)
    complaints = root.reading.complaints
    return with_rule_flags(with_user_rules(section, complaints), complaints, lines=flags.lines, zones=flags.zones)


def read_rules_file(path: Path, reading: Reading) -> Plain | None:
    """The analytics section in a file, alone or under `analytics:`. Raises InvalidSettings."""
    below = replace(reading, file=str(path), folder=path.parent)
    node = parse_document(read_text(path), str(path))
    root = Section(node, "", below)
    if "analytics" in root or node is None:
        return root.plain("analytics")
    if "source" in root:
        below.complaints.add(str(path), "analytics: is missing; rules stand there, or alone in a file of their own")
        below.complaints.raise_any()
    return plain_of(node, "analytics", below)


def read_rules(path: Path | None, lines: tuple[str, ...], zones: tuple[str, ...] = ()) -> Plain | None:
    """The analytics section of a rules or settings file, with the rules of --line and --zone. Raises
    InvalidSettings."""
    reading = Reading(str(path or ""), Path(), SettingsFaults(), Variables({}))
    section = with_user_rules(read_rules_file(path, reading) if path is not None else None, reading.complaints)
    section = with_rule_flags(section, reading.complaints, lines=lines, zones=zones)
    check_section(section, reading.complaints)
    reading.complaints.raise_any()
    return section


def _engine(root: Section, flags: Flags) -> EngineSettings:
    section = root.section("engine")
    settings = section.read(EngineSettings) or EngineSettings()
    if settings.gateway and settings.choice is not EngineChoice.AUTO:
        text = f"{settings.choice} and a gateway exclude each other; leave one out"
        section.complain(section["type"], section.at("type"), text)
    complaints = root.reading.complaints
    if flags.gateway and (fault := gateway_fault(flags.gateway)):
        complaints.add("--url", fault)
    if flags.gateway and flags.engine not in ("", "auto"):
        complaints.add("--engine", f"{flags.engine} and --url exclude each other; leave one out")
    if flags.gateway:
        return replace(settings, gateway=flags.gateway, grpc="", choice=EngineChoice.AUTO)
    return replace(settings, choice=EngineChoice(flags.engine), gateway="", grpc="") if flags.engine else settings


def _api(root: Section, flags: Flags) -> ApiSettings:
    settings = root.section("api").read(ApiSettings) or ApiSettings()
    if fault := outbound_fault(flags.allowed_outbound):
        root.reading.complaints.add("command line", fault)
    return replace(
        settings,
        port=settings.port if flags.api_port is None else flags.api_port,
        is_enabled=settings.is_enabled and flags.has_api,
        allowed_hosts=(*settings.allowed_hosts, *flags.allowed_hosts),
        cors_origins=(*settings.cors_origins, *flags.cors_origins),
        allowed_outbound=(*settings.allowed_outbound, *flags.allowed_outbound),
    )


def _shard(flags: Flags, around: Surroundings, complaints: SettingsFaults) -> Shard:
    try:
        return shard_of(flags.shard) if flags.shard else shard_here(around.environ, around.hostname)
    except ValueError as error:
        complaints.add("--shard" if flags.shard else "environment", str(error))
        return Shard()


def is_endless(settings: VideoSettings) -> bool:
    """Whether it runs until it is stopped: a camera, a loop, or no source but the control API."""
    configs = [source.config for source in settings.sources]
    return not configs or any(config.is_loop or is_live(config.uri) for config in configs)
