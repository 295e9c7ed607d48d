"""`penstock video check`: prints what a settings file would run, or every error in it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import one_line, table_console
from penstock_video.cli.progress import refuse_settings, write_json
from penstock_video.decode.uri import redacted
from penstock_video.errors import PipelineError
from penstock_video.interfaces import Extension
from penstock_video.settings.document import InvalidSettings, without_secrets
from penstock_video.settings.loader import read_settings
from penstock_video.settings.models import GpuSettings, SourceSettings, VideoSettings
from penstock_video.types import DecoderKind, SourceConfig


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the settings")],
    probe: Annotated[bool, typer.Option("--probe", help="open every source once, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Read a settings file and tell what it would run, or everything that is wrong with it, with its lines.

    Nothing is opened outside, no model is asked for and nothing is written; --probe opens each source for a moment.
    Exit code 0: it can be run. 1: it cannot.
    """
    try:
        settings = read_settings(config)
    except InvalidSettings as refused:
        refuse_settings(refused, as_json=as_json, code=1)
    probed = {source.config.source_id: _probed(source.config) for source in settings.sources} if probe else {}
    has_failed = any(fault for fault, _ in probed.values())
    if as_json:
        write_json({"is_valid": True, "exit_code": int(has_failed), **plan_record(settings, probed)})
    else:
        _say(settings, probed)
    raise typer.Exit(int(has_failed))


_OUTCOME_TEXT = {"annotated": "mp4", "rtspout": "rtsp"}  # as people write it
Probed = dict[str, tuple[str, str]]  # by source: why it cannot be opened, or what it is


def plan_record(settings: VideoSettings, probed: Probed) -> dict[str, object]:
    """What would run, for programs. No user, password or key is in it."""
    sources = [
        {
            "source_id": source.config.source_id,
            "uri": redacted(source.config.uri),
            "decoder": source.config.decoder.value,
            "rules": _rules_in(settings.rules_section(source)),
        }
        | _probe_record(probed.get(source.config.source_id))
        for source in settings.sources
    ]
    return {
        "sources": sources,
        "elsewhere": settings.elsewhere,
        "shard": str(settings.shard),
        "model": settings.primary.model,
        "secondary_models": [second.model for second in settings.secondaries],
        "tracker": str(settings.tracker.type),
        "sinks": [sink_name(sink) for sink in settings.sinks],
        "engine": _engine_name(settings),
        "api": _api_name(settings),
        "gpu": {
            "gpus": settings.gpu.gpus,
            "device": settings.gpu.device,
            "cameras_per_process": settings.gpu.cameras_per_process,
            "pin_processes": settings.gpu.has_pinned_processes,
            "hand_over": settings.gpu.hand_over.value,
        },
    }


def sink_name(sink: object) -> str:
    """A sink for people: its kind, and where it goes, without user and password."""
    if isinstance(sink, Extension):
        return one_line(sink.type)
    kind = type(sink).__name__.removesuffix("Options").lower()
    kind = _OUTCOME_TEXT.get(kind, kind)
    parts = [
        without_secrets(str(getattr(sink, name)))
        for name in ("folder", "url", "brokers", "host", "topic", "stream")
        if getattr(sink, name, None)
    ]
    return one_line(" ".join([kind, *parts]))


def _say(settings: VideoSettings, probed: Probed) -> None:
    console = table_console()
    has_decoders = any(source.config.decoder is not DecoderKind.AUTO for source in settings.sources)
    table = Table(
        *("source", "from", *(["decoder"] if has_decoders else []), "rules", *(["opened"] if probed else [])),
        header_style="bold",
    )
    for source in settings.sources:
        fault, seen = probed.get(source.config.source_id, ("", ""))
        cells = [
            source.config.source_id,
            _uri_cell(source),
            *([source.config.decoder.value] if has_decoders else []),
            ", ".join(_rules_in(settings.rules_section(source))) or "–",
        ]
        row = [Text(one_line(cell)) for cell in cells]
        if probed:
            row.append(Text(one_line(fault or seen), style="red" if fault else ""))
        table.add_row(*row)
    if settings.sources:
        console.print(table)
    for name, value in _facts(settings):
        console.print(Text(f"{name}: {one_line(value)}"), soft_wrap=True)


def _facts(settings: VideoSettings) -> list[tuple[str, str]]:
    primary, mux = settings.primary, settings.mux
    facts = [("model", primary.model + (f", one frame in {primary.interval + 1}" if primary.interval else ""))]
    facts += [("secondary", second.model) for second in settings.secondaries]
    size = "as fits the model" if mux.batch_size is None else str(mux.batch_size)
    facts.append(
        ("batches", f"{size}, pushed after {mux.push_timeout_us / 1e3:g} ms" if mux.push_timeout_us > 0 else size)
    )
    facts.append(("tracker", str(settings.tracker.type)))
    facts += [("sink", sink_name(sink)) for sink in settings.sinks] or [("sink", "none: give one, or --out")]
    facts += [("engine", _engine_name(settings)), ("control API", _api_name(settings) or "off")]
    if any(source.config.decoder is not DecoderKind.CPU for source in settings.sources):
        facts.append(("if a GPU decodes", _gpu_text(settings.gpu)))
    if settings.shard.count > 1:
        facts.append(("shard", f"{settings.shard}; {settings.elsewhere} sources belong to the others"))
    return facts


def _uri_cell(source: SourceSettings) -> str:
    return redacted(source.config.uri) + (", looped" if source.config.is_loop else "")


def _rules_in(content: object) -> list[str]:
    """KIND/NAME of each; the section was checked when it was read."""
    if not isinstance(content, dict):
        return []
    rows = ((kind, rule) for kind, rules in content.items() if isinstance(rules, list) for rule in rules)
    return [f"{kind}/{rule['name']}" for kind, rule in rows if isinstance(rule, dict) and "name" in rule]


def _engine_name(settings: VideoSettings) -> str:
    engine = settings.engine
    if engine.gateway:
        return without_secrets(engine.gateway)
    return {"auto": "the stack that runs here, else our own"}.get(engine.choice.value, f"our own, {engine.choice}")


def _gpu_text(gpu: GpuSettings) -> str:
    core = " on a core of its own" if gpu.has_pinned_processes else ""
    return f"GPU {gpu.device}, {gpu.cameras_per_process} sources a process{core}, hand-over: {gpu.hand_over}"


def _api_name(settings: VideoSettings) -> str:
    return f"http://{settings.api.host}:{settings.api.port}" if settings.api.is_enabled else ""


def _probe_record(probed: tuple[str, str] | None) -> dict[str, object]:
    if probed is None:
        return {}
    fault, seen = probed
    return {"fault": fault} if fault else {"opened": seen}


def _probed(config: SourceConfig) -> tuple[str, str]:
    """Why the source cannot be opened, or what it is."""
    from penstock_video.decode.container import DecodeOptions, open_container, pictures_of

    try:
        with open_container(
            config.uri, DecodeOptions(open_timeout_s=config.open_timeout_s, is_udp=config.is_udp)
        ) as opened:
            stream = pictures_of(opened, config.uri)
            rate = f", {float(stream.average_rate):g} fps" if stream.average_rate else ""
            return "", f"{stream.width}x{stream.height} {stream.codec_context.name}{rate}"
    except PipelineError as error:
        return error.message, ""
