"""Settings as values, and readers of the sections streammux, primary-gie, secondary-gie, tracker, osd, engine, api and
gpu."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from penstock.outbound import OutboundPolicy
from penstock_video.infer.options import RowMemory
from penstock_video.mux import MuxOptions
from penstock_video.settings.section import Plain, Section
from penstock_video.settings.sinks import SinkOptions
from penstock_video.sinks.osd import OsdOptions
from penstock_video.source_ids import ALONE, Shard
from penstock_video.track.registry import TrackerOptions, TrackerType
from penstock_video.types import SourceConfig

API_HOST, API_PORT = "127.0.0.1", 8010


class EngineChoice(StrEnum):
    """auto: this host's running stack, else our own. triton, embedded: our own, of that kind."""

    AUTO = "auto"
    TRITON = "triton"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """A source. analytics: its own section instead of the one for all, or None."""

    config: SourceConfig
    analytics: Plain | None = None


@dataclass(frozen=True, slots=True)
class MuxSettings:
    """The stream mux. batch_size: None for a default from the model and the number of sources."""

    batch_size: int | None = None
    push_timeout_s: float = 0.0
    max_same_source: int = 0
    max_latency_s: float = 1.0

    def options(self, fitting_batch_size: int) -> MuxOptions:
        """Options of the mux. fitting_batch_size: the default."""
        return MuxOptions(
            self.batch_size or fitting_batch_size,
            push_timeout_s=self.push_timeout_s,
            max_same_source=self.max_same_source,
            max_latency_s=self.max_latency_s,
        )


@dataclass(frozen=True, slots=True)
class PrimarySettings:
    """The model for every picture.

    version: empty for the newest. interval: frames between two inferred frames. operate_on_class_ids: classes to use,
    by number or label; empty for all. classes_at: its position, FILE:LINE:COLUMN. threshold: detections below it are
    dropped, None for the model's own.
    """

    model: str
    version: str = ""
    interval: int = 0
    operate_on_class_ids: tuple[int | str, ...] = ()
    threshold: float | None = None
    classes_at: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SecondarySettings:
    """A classifier of crops.

    operate_on_class_ids, classes_at: as in PrimarySettings. threshold: classes below it are dropped. reinfer_interval:
    frames until an object is classified again, 0 for once only. min_width, min_height: smaller objects are not
    classified, in pixels.
    """

    model: str
    version: str = ""
    operate_on_class_ids: tuple[int | str, ...] = ()
    threshold: float = 0.0
    reinfer_interval: int = 0
    min_width: int = 0
    min_height: int = 0
    classes_at: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The control API. port: 0 for a free one. allowed_hosts, cors_origins: see BrowserPolicy. allowed_outbound: see
    penstock.outbound.OutboundPolicy; its metadata addresses also apply to the other settings."""

    host: str = API_HOST
    port: int = API_PORT
    is_enabled: bool = True
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_outbound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The inference engine.

    gateway: http:// address of a remote gateway, empty for this host's. grpc: its gRPC HOST:PORT, empty for the next
    port. api_key_variable: the environment variable with the gateway's key.
    """

    choice: EngineChoice = EngineChoice.AUTO
    gateway: str = ""
    grpc: str = ""
    api_key_variable: str = "PENSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Settings of sources that a card decodes.

    cameras_per_process: they fail together. has_pinned_processes: each process has its own core, if one is free.
    hand_over: memory of rows for the engine. device: the card's CUDA number.
    """

    cameras_per_process: int = 16
    has_pinned_processes: bool = True
    hand_over: RowMemory = RowMemory.AUTO
    device: int = 0


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """All settings of `penstock video run`.

    sources: of this replica. elsewhere: number of sources of other replicas. analytics: for sources without their own
    section. osd: what is drawn. out: the output folder.
    """

    sources: tuple[SourceSettings, ...]
    primary: PrimarySettings
    mux: MuxSettings = MuxSettings()
    secondaries: tuple[SecondarySettings, ...] = ()
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    analytics: Plain | None = None
    osd: OsdOptions = field(default_factory=OsdOptions)
    sinks: tuple[SinkOptions, ...] = ()
    api: ApiSettings = ApiSettings()
    engine: EngineSettings = EngineSettings()
    gpu: GpuSettings = GpuSettings()
    shard: Shard = ALONE
    elsewhere: int = 0
    out: Path | None = None

    def rules_section(self, source: SourceSettings) -> object | None:
        """The analytics section of the source, as plain values for rules_from."""
        section = source.analytics if source.analytics is not None else self.analytics
        return section.content if section is not None else None

    @property
    def rules_sections(self) -> tuple[Plain, ...]:
        """Every analytics section once: videos of a folder share one."""
        found = (self.analytics, *(source.analytics for source in self.sources))
        return tuple({id(section): section for section in found if section is not None}.values())


MODEL_PATTERN, MODEL_FORM = r"[^\s/\\]{1,255}", "a model's name is needed, as `penstock models list` shows it"
_GRPC_ADDRESS = r"(\[[0-9a-fA-F:.]+\]|[^\s:/@]+):\d{1,5}"
MAX_BATCH, MAX_INTERVAL = 1024, 10_000
MAX_CAMERAS, LAST_DEVICE = 64, 15


def read_mux(section: Section) -> MuxSettings:
    """streammux. Times in DeepStream's µs (batched-push-timeout; -1 and 0: at once) and in ms (max-latency)."""
    default = MuxSettings()
    settings = MuxSettings(
        batch_size=section.optional_whole("batch-size", 1, MAX_BATCH),
        push_timeout_s=max(section.whole("batched-push-timeout", 0, -1, 60_000_000), 0) / 1e6,
        max_same_source=section.whole("max-same-source-frames", default.max_same_source, 0, MAX_BATCH),
        max_latency_s=section.number("max-latency", default.max_latency_s * 1e3, 1, 600_000) / 1e3,
    )
    section.close()
    return settings


def read_primary(section: Section) -> PrimarySettings:
    """primary-gie; without a name if it has none."""
    settings = PrimarySettings(
        model=_model(section),
        version=_version(section),
        interval=section.whole("interval", 0, 0, MAX_INTERVAL),
        operate_on_class_ids=section.ids_or_labels("operate-on-class-ids"),
        threshold=section.optional_number("pre-cluster-threshold", 0, 1),
        classes_at=section.place("operate-on-class-ids"),
    )
    section.close()
    return settings


def read_secondary(section: Section) -> SecondarySettings:
    """A section secondary-gie."""
    section.require("model")
    settings = SecondarySettings(
        model=_model(section),
        version=_version(section),
        operate_on_class_ids=section.ids_or_labels("operate-on-class-ids"),
        threshold=section.number("classifier-threshold", 0.0, 0, 1),
        reinfer_interval=section.whole("secondary-reinfer-interval", 0, 0, 1_000_000),
        min_width=section.whole("input-object-min-width", 0, 0, 65_535),
        min_height=section.whole("input-object-min-height", 0, 0, 65_535),
        classes_at=section.place("operate-on-class-ids"),
    )
    section.close()
    return settings


def read_tracker(section: Section) -> TrackerOptions:
    """tracker, in nvtracker's terms."""
    default = TrackerOptions()
    options = TrackerOptions(
        type=section.choice("type", TrackerType, TrackerType.BYTETRACK),
        probation_age=section.whole("probationAge", default.probation_age, 1, 1000),
        max_shadow_tracking_age=section.whole("maxShadowTrackingAge", default.max_shadow_tracking_age, 0, 100_000),
        minimum_iou=section.number("minMatchingScore4Iou", default.minimum_iou, 0.001, 1),
        activation_threshold=section.number("minDetectorConfidence", default.activation_threshold, 0, 1),
        high_threshold=section.number("highThreshold", default.high_threshold, 0, 1),
    )
    section.close()
    return options


def read_engine(section: Section) -> EngineSettings:
    """engine: the kind, or a remote gateway; a key only by its variable's name."""
    default = EngineSettings()
    gateway = section.text("gateway", is_secret=True)
    if gateway and (fault := gateway_fault(gateway)):
        section.complain(section["gateway"], section.at("gateway"), fault)
    settings = EngineSettings(
        choice=section.choice("type", EngineChoice, default.choice),
        gateway=gateway,
        grpc=section.text("gateway-grpc", pattern=_GRPC_ADDRESS, form="HOST:PORT is needed"),
        api_key_variable=section.text(
            "api-key-variable",
            default.api_key_variable,
            pattern=r"[A-Za-z_][A-Za-z0-9_]*",
            form="the name of an environment variable is needed, never the key itself",
        ),
    )
    if "type" in section and gateway and settings.choice is not EngineChoice.AUTO:
        section.complain(
            section["type"], section.at("type"), f"{settings.choice} and a gateway exclude each other; leave one out"
        )
    section.close()
    return settings


def read_api(section: Section) -> ApiSettings:
    """api: the control API's address."""
    default = ApiSettings()
    settings = ApiSettings(
        host=section.text("host", default.host, pattern=r"[A-Za-z0-9.:_-]+", form="an address to listen on is needed"),
        port=section.whole("port", default.port, 0, 65_535),
        is_enabled=section.flag("enable", default.is_enabled),
        allowed_hosts=section.texts("allowed-host"),
        cors_origins=section.texts("cors-origin"),
        allowed_outbound=section.texts("allow-outbound"),
    )
    if fault := outbound_fault(settings.allowed_outbound):
        section.complain(section["allow-outbound"], section.at("allow-outbound"), fault)
    section.close()
    return settings


def outbound_fault(allowed: tuple[str, ...]) -> str:
    """What is wrong with the values of --allow-outbound; empty if they are valid."""
    try:
        OutboundPolicy(allowed)
    except ValueError as error:
        return str(error)
    return ""


def read_gpu(section: Section) -> GpuSettings:
    """gpu: processes of sources that a card decodes, and how their rows reach the engine."""
    default = GpuSettings()
    settings = GpuSettings(
        cameras_per_process=section.whole("cameras-per-process", default.cameras_per_process, 1, MAX_CAMERAS),
        has_pinned_processes=section.flag("pin-processes", default.has_pinned_processes),
        hand_over=section.choice("hand-over", RowMemory, default.hand_over),
        device=section.whole("device", default.device, 0, LAST_DEVICE),
    )
    section.close()
    return settings


def read_osd(section: Section) -> OsdOptions:
    """osd: what is drawn, in DeepStream's terms if it has them."""
    default = OsdOptions()
    options = OsdOptions(
        has_boxes=section.flag("display-bbox", default.has_boxes),
        has_labels=section.flag("display-text", default.has_labels),
        has_scores=section.flag("display-score", default.has_scores),
        has_trails=section.flag("display-trail", default.has_trails),
        has_rules=section.flag("display-rules", default.has_rules),
        has_title=section.flag("display-title", default.has_title),
        is_coloured_by_class=section.flag("color-by-class", default.is_coloured_by_class),
        trail_s=section.number("trail-duration", default.trail_s, 0, 60),
    )
    section.close()
    return options


def gateway_fault(url: str) -> str:
    """Why the text is no gateway address; empty if it is one."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or re.search(r"\s", url):
        return "a gateway's address is needed, such as http://127.0.0.1:8000"
    if parts.username is not None or parts.query:
        return "a key stands in an environment variable (api-key-variable), not in the address"
    return ""


def _model(section: Section) -> str:
    return section.text("model", pattern=MODEL_PATTERN, form=MODEL_FORM)


def _version(section: Section) -> str:
    found = section.optional_whole("version", 1, 2**31)
    return "" if found is None else str(found)
