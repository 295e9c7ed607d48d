"""`penstock video`: the Typer application and its options."""

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import fail
from penstock.cli.up import allow_open_files
from penstock.gateway.settings_sources import KEYS_VARIABLE
from penstock.gateway.workers.gateway_process import GATEWAY_ENVIRONMENT
from penstock.gpu.cards import checked_gpus
from penstock.logs import LogFormat, configure_logs
from penstock.process import remove_working_directory
from penstock_video.api.options import DEFAULT_PARTS, KEY_VARIABLE, ApiParts
from penstock_video.cli.access import SecurityFlags, saver_of, security_of, warn_of_short_key
from penstock_video.cli.check import check
from penstock_video.cli.engine import engine_for, may_share_card
from penstock_video.cli.events import events as list_events
from penstock_video.cli.progress import refuse_settings, watch_for
from penstock_video.cli.replay import replay
from penstock_video.cli.run import RunParts, run_to_its_end
from penstock_video.infer.options import EngineAddress
from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.events import EventFlags, OnOff
from penstock_video.settings.loader import Flags, read_settings
from penstock_video.settings.models import EngineChoice, VideoSettings
from penstock_video.store.options import MIB
from penstock_video.types import DecoderKind, EncoderKind

if TYPE_CHECKING:
    from penstock_video.main import Program

LEVELS = ("debug", "info", "warning", "error")
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="settings; flags win over it")]
SourceFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="URI",
        help="file, folder (not those in it), 'pattern*', rtsp://, http://, /dev/video0; repeatable",
    ),
]
ModelFlag = Annotated[
    str, typer.Option("--model", help="the model that looks at every picture: one of `penstock models list`")
]
Out = Annotated[
    Path | None, typer.Option(help="output folder; without --sink: annotated video, poster frame and JSON lines")
]
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", dir_okay=False, help="a YAML file of analytics rules, in place of CONFIG.yaml's"),
]
Line = Annotated[
    list[str] | None,
    typer.Option(
        "--line",
        metavar="NAME=x1,y1,x2,y2",
        help="count crossing objects, as NAME.in (from left to right, seen from the first point to the second) and "
        "NAME.out; in pixels, or from 0 to 1 of the picture; repeatable",
    ),
]
Zone = Annotated[
    list[str] | None,
    typer.Option("--zone", metavar="NAME=x1,y1,x2,y2,…", help="count objects inside the polygon; repeatable"),
]
TrackerFlag = Annotated[
    str, typer.Option("--tracker", metavar="TYPE", help="bytetrack, none, or module:Class [bytetrack]")
]
Conf = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="minimum score of detections; below 0.5 also of new tracks [the model's]"),
]
Iou = Annotated[
    float | None, typer.Option(min=0, max=1, help="IoU threshold of NMS between boxes of a class [the model's]")
]
Classes = Annotated[
    list[str] | None,
    typer.Option("--classes", metavar="LABEL,LABEL", help="labels or numbers of the classes to detect [all]"),
]
SinkFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        metavar="SINK",
        help="jsonl, mp4, poster, summary, hls, preview, rtsp://HOST/PATH, kafka://BROKER/TOPIC, mqtt://HOST/TOPIC, "
        "redis://HOST?stream=NAME, webhook=https://…; repeatable",
    ),
]
SummaryFlag = Annotated[
    bool, typer.Option("--summary", help="also write summary.html: counts, charts, heat map, annotated frame")
]
Engine = Annotated[
    EngineChoice | None,
    typer.Option(help="auto: the stack that runs here, else our own; triton, embedded: our own, of that kind"),
]
Decoder = Annotated[
    DecoderKind | None,
    typer.Option(
        help="decoder of every source; auto: nvdec (the GPU's video decoder) if it can decode the source, else cpu"
    ),
]


GPUS_VARIABLE = "PENSTOCK_GPUS"


def _checked_gpus(text: str) -> str:
    try:
        checked = checked_gpus(text) if text else ""
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error
    if checked:
        os.environ[GPUS_VARIABLE] = checked  # of an engine of this command's own, too
    return checked


Gpus = Annotated[
    str,
    typer.Option(
        envvar=GPUS_VARIABLE,
        callback=_checked_gpus,
        help="GPUs for decoding, and for the engine if this command starts one: all (that CUDA sees), or numbers or "
        "UUIDs of nvidia-smi -L, separated by commas [all]",
        show_default=False,
    ),
]
Encoder = Annotated[
    EncoderKind | None,
    typer.Option(help="encoder of written videos; auto: nvenc (the GPU's video encoder) if the GPU has one, else cpu"),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="host name that clients without a key may use for the control API: a name, *.example.com, or *; "
        "repeatable",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="origin of web pages that may call the control API; repeatable [its own]",
    ),
]
AllowOutbound = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-outbound",
        metavar="NETWORK",
        help="address, network (10.1.0.0/16) or host name that sources added over the control API may use, besides "
        "public hosts. A cloud's metadata address must be allowed for every source and sink; repeatable",
    ),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(envvar="PENSTOCK_TLS_CERT", help="PEM certificate chain: TLS for the control API [none]")
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="PENSTOCK_TLS_KEY", help="the certificate's key, PEM without a password")
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(envvar="PENSTOCK_TLS_CLIENT_CA", help="PEM file of a CA: clients need a certificate signed by it"),
]
AuditFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_AUDIT_LOG",
        help="audit log: JSON lines of changes over the control API and of refused keys [none]",
    ),
]
AccessFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_ACCESS_FILE",
        help="TOML file of API keys of the control API, as for `penstock up`; read views, admin changes [none]",
    ),
]
Anonymous = Annotated[
    str | None,
    typer.Option(
        envvar="PENSTOCK_ANONYMOUS", help="roles of a client without a key: read,admin, or none [all; none with keys]"
    ),
]
Events = Annotated[
    OnOff | None,
    typer.Option("--events", help="store events for the console and `video events` [on with the control API or --out]"),
]
EventsFolder = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="event store's folder [OUT/events, else PENSTOCK_HOME/video/events]"),
]
EventsMaxBytes = Annotated[
    int | None, typer.Option(min=16 * MIB, max=1 << 50, help="size limit of the event store [1 GiB]")
]
EventsMaxDays = Annotated[
    float | None, typer.Option(min=0.001, max=36_500, help="age at which events and their recordings are removed [30]")
]
SaveChanges = Annotated[
    bool,
    typer.Option(
        "--save-changes",
        help="write changes of sources and rules over the control API to CONFIG.yaml; its comments move to "
        "CONFIG.yaml.orig [off]",
    ),
]
Duration = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="end after this time, as after the last file [no limit]")
]
Realtime = Annotated[
    bool, typer.Option("--realtime", help="play files in real time and drop late frames, as for cameras")
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="start, progress and summary as JSON lines; standard error has warnings and errors"),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="show no progress, only warnings and errors")]


@app.command("run", short_help="Read videos, infer, track, apply rules, write results.")
def run(
    config: Config = None,
    source: SourceFlag = None,
    model: ModelFlag = "",
    out: Out = None,
    interval: Annotated[int | None, typer.Option(min=0, help="frames that are skipped between two inferred")] = None,
    rules: RulesFile = None,
    line: Line = None,
    zone: Zone = None,
    classes: Classes = None,
    conf: Conf = None,
    iou: Iou = None,
    tracker: TrackerFlag = "",
    sink: SinkFlag = None,
    summary: SummaryFlag = False,
    batch_size: Annotated[int | None, typer.Option(min=1, max=1024, help="frames in a call of the model")] = None,
    shard: Annotated[str, typer.Option(metavar="i/n", help="take every source of this one of n replicas")] = "",
    url: Annotated[str, typer.Option(help="use this gateway; or PENSTOCK_GATEWAY_URL", show_default=False)] = "",
    former_url: Annotated[str, typer.Option("--gateway", hidden=True, help="former name of --url")] = "",
    engine: Engine = None,
    no_api: Annotated[bool, typer.Option("--no-api", help="without the control API")] = False,
    api_port: Annotated[int | None, typer.Option(min=0, max=65535, help="of the control API; 0: any [8010]")] = None,
    allowed_host: AllowedHosts = None, cors_origin: CorsOrigins = None, allow_outbound: AllowOutbound = None,
    tls_cert: TlsCertificate = None, tls_key: TlsKey = None, tls_client_ca: TlsClientCa = None,
    audit_log: AuditFile = None, access_file: AccessFile = None, anonymous: Anonymous = None,
    save_changes: SaveChanges = False, events: Events = None, events_folder: EventsFolder = None,
    events_max_bytes: EventsMaxBytes = None, events_max_days: EventsMaxDays = None,
    loop: Annotated[bool, typer.Option("--loop", help="begin files anew at their end, until Ctrl-C")] = False,
    duration: Duration = None, realtime: Realtime = False, decoder: Decoder = None,
    encoder: Encoder = None, gpus: Gpus = "",
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    log_format: Annotated[LogFormat, typer.Option(help="of log lines on standard error")] = LogFormat.TEXT,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error", show_default=False)] = None,
) -> None:  # fmt: skip
    """Read videos, infer, track, apply rules and write results, until the last file or --duration ends, or Ctrl-C.

    Frames are inferred by the stack that runs on this host (`penstock up`), else by an engine of this command's own,
    on free ports. A gateway's API key comes from PENSTOCK_API_KEY, or the variable that the settings name.

    Ctrl-C finishes what was decoded and leaves whole files; a second one ends it at once. Exit code 0: all ended well,
    or nothing was there to do. 1: a source, a sink, the engine or the control API's port failed. 2: the settings are
    wrong; so they are where they name a file, a model or a class that is not there. 130: stopped by Ctrl-C.
    """
    flags = Flags(
        sources=tuple(source or ()), model=model, out=out, interval=interval, rules=rules, lines=tuple(line or ()),
        zones=tuple(zone or ()), classes=tuple(classes or ()), conf=conf, iou=iou, tracker=tracker,
        sinks=tuple(sink or ()), has_summary=summary, batch_size=batch_size, shard=shard, gateway=url or former_url,
        engine=engine.value if engine is not None else "", api_port=api_port, has_api=not no_api,
        allowed_hosts=tuple(allowed_host or ()), cors_origins=tuple(cors_origin or ()),
        allowed_outbound=tuple(allow_outbound or ()), is_loop=loop, is_realtime=realtime, decoder=decoder,
        encoder=encoder, gpus=gpus,
        events=EventFlags(events, events_folder, events_max_bytes, events_max_days),
    )  # fmt: skip
    how = Manner(as_json, not no_progress, log_format, log_level or "", duration)
    security = SecurityFlags(tls_cert, tls_key, tls_client_ca, audit_log, access_file, anonymous)
    parts = security_of(security, os.environ)
    parts = replace(parts, saver=saver_of(config, flags, os.environ)) if save_changes else parts
    raise typer.Exit(_run(config, flags, how, parts))


@app.command("beside", hidden=True)
def run_beside(run_dir: Path, config: Path) -> None:
    """The video program of `penstock up --video`, which starts it."""
    from penstock_video.cli.beside import beside

    raise typer.Exit(beside(run_dir, config, program_of))


app.command("check", short_help="Tell what a settings file would run, or all that is wrong with it.")(check)
app.command("events", short_help="List or export the events that a run stored.")(list_events)
app.command("replay", short_help="Hold recorded tracks against other rules.")(replay)


def program_of(settings: VideoSettings, place: EngineAddress, api: ApiParts = DEFAULT_PARTS) -> "Program":
    """The video program. Only here are decoding and drawing imported. api: parts of the control API."""
    from penstock_video.main import Program

    remove_working_directory()
    return Program(settings, place, api)


@dataclass(frozen=True, slots=True)
class Manner:
    """Output and duration of a run. log_level: empty for the default. duration_s: None for no limit."""

    is_json: bool
    has_progress: bool
    log_format: LogFormat
    log_level: str
    duration_s: float | None = None


def _run(config: Path | None, flags: Flags, how: Manner, api: ApiParts) -> int:
    """The exit code."""
    if how.duration_s is not None and not 0 < how.duration_s < math.inf:
        fail(f"--duration is {how.duration_s:g}: give seconds above 0")
    try:
        settings = read_settings(config, flags)
    except InvalidSettings as refused:
        refuse_settings(refused, as_json=how.is_json)
    allow_open_files()
    os.environ.update(GATEWAY_ENVIRONMENT)  # before gRPC is loaded
    watch = watch_for(is_json=how.is_json, has_progress=how.has_progress)
    level = how.log_level or ("info" if how.has_progress and not how.is_json else "warning")
    if level not in LEVELS:
        fail(f"--log-level {level!r}: it takes {', '.join(LEVELS)}")
    configure_logs(how.log_format, level, stream=watch.log_stream)
    models = tuple(dict.fromkeys((settings.primary.model, *(second.model for second in settings.secondaries))))
    shares = may_share_card(settings)
    warn_of_short_key(settings.api, os.environ)
    engine = partial(engine_for, settings.engine, models, dict(os.environ), watch.note, shares_memory=shares)
    for secret in (KEYS_VARIABLE, KEY_VARIABLE):
        os.environ.pop(secret, None)  # no decode process needs it
    parts = RunParts(engine, partial(program_of, api=api), api)
    return run_to_its_end(settings, watch, parts, is_json=how.is_json, duration_s=how.duration_s)
