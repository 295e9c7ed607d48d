"""From a YAML file and flags to VideoSettings, or to every fault at once."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepstream_pipeline.decode.uri import is_live
from deepstream_pipeline.settings.complaints import Complaints, shown
from deepstream_pipeline.settings.document import read_document
from deepstream_pipeline.settings.flags import Flags, drafts_of, sinks_of, with_lines
from deepstream_pipeline.settings.networks import (
    MODEL_FORM,
    MODEL_PATTERN,
    gateway_fault,
    outbound_fault,
    read_api,
    read_engine,
    read_gpu,
    read_mux,
    read_osd,
    read_primary,
    read_secondary,
    read_tracker,
)
from deepstream_pipeline.settings.records import (
    ApiSettings,
    EngineChoice,
    EngineSettings,
    PrimarySettings,
    SourceSettings,
    VideoSettings,
)
from deepstream_pipeline.settings.rules import check_section
from deepstream_pipeline.settings.section import Plain, Reading, Section, plain_of
from deepstream_pipeline.settings.sinks import SinkOptions, read_sink
from deepstream_pipeline.settings.sources import Draft, named_sources, read_sources
from deepstream_pipeline.settings.variables import Variables
from deepstream_pipeline.shards import Shard, shard_here, shard_of
from deepstream_pipeline.types import SourceConfig

NO_FLAGS = Flags()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is not said but there: the environment's variables, and the machine's name."""

    environ: Mapping[str, str]
    hostname: str


def here() -> Surroundings:
    """Of this process."""
    return Surroundings(os.environ, socket.gethostname())


def read_settings(
    path: Path | None, flags: Flags = NO_FLAGS, *, surroundings: Surroundings | None = None
) -> VideoSettings:
    """What the file and the flags come to. path: None for flags alone. Raises SettingsRefused with every fault."""
    around = surroundings or here()
    complaints = Complaints()
    variables = Variables(around.environ)
    reading = Reading(str(path or ""), path.parent if path is not None else Path(), complaints, variables)
    root = Section(read_document(path) if path is not None else None, "", reading)
    settings = _read(root, flags, around)
    root.close()
    complaints.raise_any()
    return settings


def _read(root: Section, flags: Flags, around: Surroundings) -> VideoSettings:
    reading = root.reading
    primary = _primary(root, flags)
    tracker = read_tracker(root.section("tracker"))
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
    mux = read_mux(root.section("streammux"))
    return VideoSettings(
        sources=mine,
        primary=primary,
        mux=mux if flags.batch_size is None else replace(mux, batch_size=flags.batch_size),
        secondaries=tuple(read_secondary(section) for section in root.sections("secondary-gie")),
        tracker=tracker,
        analytics=analytics,
        osd=read_osd(root.section("osd")),
        sinks=sinks,
        api=api,
        engine=_engine(root, flags),
        gpu=read_gpu(root.section("gpu")),
        shard=shard,
        elsewhere=len(sources) - len(mine),
        out=flags.out,
    )


def _primary(root: Section, flags: Flags) -> PrimarySettings:
    section = root.section("primary-gie")
    if not flags.model and "model" not in section:
        place = root.at("primary-gie") if root.reading.file else ""
        where = root.reading.file or "--model"
        name = f"{place}.model: is missing; name a model" if place else "is missing; name a model"
        root.reading.complaints.add(where, f"{name} of `penstock models list`, such as street")
    primary = read_primary(section)
    if flags.model and not re.fullmatch(MODEL_PATTERN, flags.model):
        root.reading.complaints.add("--model", f"{shown(flags.model)}: {MODEL_FORM}")
    if flags.model:
        primary = replace(primary, model=flags.model)
    return primary if flags.interval is None else replace(primary, interval=flags.interval)


def _sources(drafts: tuple[Draft, ...], flags: Flags, complaints: Complaints) -> tuple[SourceSettings, ...]:
    sources = named_sources(drafts, complaints)
    return tuple(replace(source, config=_flagged(source.config, flags)) for source in sources)


def _flagged(config: SourceConfig, flags: Flags) -> SourceConfig:
    is_loop, is_realtime = config.is_loop or flags.is_loop, config.is_realtime or flags.is_realtime
    decoder = flags.decoder or config.decoder
    return replace(config, is_loop=is_loop, is_realtime=is_realtime, decoder=decoder)


def _complain_of_nothing(reading: Reading, *, has_given: bool) -> None:
    """Not where a source was given and complained of."""
    if has_given and len(reading.complaints):
        return
    if reading.file:
        reading.complaints.add(reading.file, "source: is missing; list the videos, or leave api on and add them there")
    else:
        reading.complaints.add("--source", "is missing; give a video file, a folder, an address, or a CONFIG.yaml")


def _sinks(root: Section, flags: Flags) -> tuple[SinkOptions, ...]:
    """Those of the flags, else of the file, else what --out alone stands for."""
    said = [sink for section in root.sections("sink") if (sink := read_sink(section, flags.out)) is not None]
    if flags.sinks or "sink" not in root:
        return sinks_of(flags, root.reading)
    return tuple(said)


def _analytics(root: Section, flags: Flags) -> Plain | None:
    """The file's section, or that of --rules, and the quick lines."""
    section = root.plain("analytics")
    if flags.rules is not None:
        section = read_rules_file(flags.rules, root.reading)
    return with_lines(flags, section, root.reading)


def read_rules_file(path: Path, reading: Reading) -> Plain | None:
    """The analytics section that a file is, or has under `analytics:` (a source's own is not taken: whose would hold
    for the others?). Raises SettingsRefused."""
    below = replace(reading, file=str(path), folder=path.parent)
    node = read_document(path)
    root = Section(node, "", below)
    if "analytics" in root or node is None:
        return root.plain("analytics")
    if "source" in root:
        below.complaints.add(str(path), "analytics: is missing; rules stand there, or alone in a file of their own")
        below.complaints.raise_any()
    return plain_of(node, "analytics", below)


def read_rules(path: Path | None, lines: tuple[str, ...]) -> Plain | None:
    """The analytics section of a file (of rules alone, or of settings), with quick lines. Raises SettingsRefused."""
    reading = Reading(str(path or ""), Path(), Complaints(), Variables({}))
    section = with_lines(Flags(lines=lines), read_rules_file(path, reading) if path is not None else None, reading)
    check_section(section, reading.complaints)
    reading.complaints.raise_any()
    return section


def _engine(root: Section, flags: Flags) -> EngineSettings:
    settings = read_engine(root.section("engine"))
    complaints = root.reading.complaints
    if flags.gateway and (fault := gateway_fault(flags.gateway)):
        complaints.add("--gateway", fault)
    if flags.gateway and flags.engine not in ("", "auto"):
        complaints.add("--engine", f"{flags.engine} and --gateway exclude each other; leave one out")
    if flags.gateway:
        return replace(settings, gateway=flags.gateway, grpc="", choice=EngineChoice.AUTO)
    return replace(settings, choice=EngineChoice(flags.engine), gateway="", grpc="") if flags.engine else settings


def _api(root: Section, flags: Flags) -> ApiSettings:
    settings = read_api(root.section("api"))
    port = settings.port if flags.api_port is None else flags.api_port
    if fault := outbound_fault(flags.allowed_outbound):
        root.reading.complaints.add("command line", fault)
    return replace(
        settings,
        port=port,
        is_enabled=settings.is_enabled and flags.has_api,
        allowed_hosts=(*settings.allowed_hosts, *flags.allowed_hosts),
        cors_origins=(*settings.cors_origins, *flags.cors_origins),
        allowed_outbound=(*settings.allowed_outbound, *flags.allowed_outbound),
    )


def _shard(flags: Flags, around: Surroundings, complaints: Complaints) -> Shard:
    try:
        return shard_of(flags.shard) if flags.shard else shard_here(around.environ, around.hostname)
    except ValueError as error:
        complaints.add("--shard" if flags.shard else "environment", str(error))
        return Shard()


def is_endless(settings: VideoSettings) -> bool:
    """Whether it runs until it is told to stop: a camera, a loop, or nothing yet but the control API."""
    configs = [source.config for source in settings.sources]
    return not configs or any(config.is_loop or is_live(config.uri) for config in configs)
