"""Settings as values: models of the sections, whose aliases are the keys of the file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from penstock.gpu.cards import ALL, checked_gpus
from penstock.network import is_loopback
from penstock.outbound import OutboundPolicy
from penstock_video.infer.options import RowMemory
from penstock_video.interfaces import INTERNAL, SECRET, Extension
from penstock_video.mux import MuxOptions
from penstock_video.settings.section import Plain
from penstock_video.sinks.osd import OsdOptions
from penstock_video.source_ids import ALONE, Shard
from penstock_video.sources.admission import DECODER_LIMIT
from penstock_video.store.options import EventsOptions
from penstock_video.track.registry import TrackerOptions
from penstock_video.types import SourceConfig

MODEL_PATTERN, MODEL_FORM = r"[^\s/\\]{1,255}", "a model's name is needed, as `penstock models list` shows it"
MAX_BATCH = 1024


def outbound_fault(allowed: tuple[str, ...]) -> str:
    """What is wrong with the values of --allow-outbound; empty if they are valid."""
    try:
        OutboundPolicy(allowed)
    except ValueError as error:
        return str(error)
    return ""


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


def _checked_gateway(url: str) -> str:
    if fault := gateway_fault(url):
        raise ValueError(fault)
    return url


def _checked_outbound(allowed: tuple[str, ...]) -> tuple[str, ...]:
    OutboundPolicy(allowed)
    return allowed


def _version(number: int) -> str:
    if not 1 <= number <= 2**31:
        raise ValueError(f"a whole number from 1 to {2**31} is needed")
    return str(number)


def _class_names(given: Iterable[int | str]) -> tuple[int | str, ...]:
    """Numbers and labels; also DeepStream's form 0;2;5."""
    found: list[int | str] = []
    for one in given:
        parts = [one] if isinstance(one, int) or ";" not in one else filter(None, map(str.strip, one.split(";")))
        found += (int(part) if part is not one and re.fullmatch(r"\d{1,6}", str(part)) else part for part in parts)
    return tuple(found)


ModelName = Annotated[str, Field(pattern=f"^{MODEL_PATTERN}$", description=MODEL_FORM)]
Version = Annotated[str, BeforeValidator(_version), WithJsonSchema({"type": "integer"})]
ClassNames = Annotated[tuple[int | str, ...], BeforeValidator(_class_names), Field(alias="operate-on-class-ids")]


class EngineChoice(StrEnum):
    """auto: this host's running stack, else our own. triton, embedded: our own, of that kind."""

    AUTO = "auto"
    TRITON = "triton"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """A source. analytics: its own section instead of the common one, or None."""

    config: SourceConfig
    analytics: Plain | None = None


@dataclass(frozen=True, slots=True)
class MuxSettings:
    """The stream mux. batch_size: None for a default. push_timeout_us: DeepStream's, 0 and -1 for at once.
    former_max_latency_ms: the key before max_latency_s, None if not given."""

    batch_size: Annotated[int | None, Field(alias="batch-size", ge=1, le=MAX_BATCH)] = None
    push_timeout_us: Annotated[int, Field(alias="batched-push-timeout", ge=-1, le=60_000_000)] = 0
    max_same_source: Annotated[int, Field(alias="max-same-source-frames", ge=0, le=MAX_BATCH)] = 0
    max_latency_s: Annotated[float, Field(alias="max-latency-s", ge=0.001, le=600)] = 1.0
    former_max_latency_ms: Annotated[float | None, Field(alias="max-latency", ge=1, le=600_000)] = None

    def options(self, fitting_batch_size: int) -> MuxOptions:
        """Options of the mux. fitting_batch_size: the default."""
        return MuxOptions(
            self.batch_size or fitting_batch_size,
            push_timeout_s=max(self.push_timeout_us, 0) / 1e6,
            max_same_source=self.max_same_source,
            max_latency_s=self.max_latency_s
            if self.former_max_latency_ms is None
            else self.former_max_latency_ms / 1e3,
        )


@dataclass(frozen=True, slots=True)
class PrimarySettings:
    """The model for every picture. version: empty for the newest. interval: frames between two inferred frames.
    operate_on_class_ids: classes to use, by number or label; empty for all. classes_at: its FILE:LINE:COLUMN.
    threshold: detections below it are dropped; iou: threshold of NMS; None for the model's own."""

    model: ModelName
    version: Version = ""
    interval: Annotated[int, Field(ge=0, le=10_000)] = 0
    operate_on_class_ids: ClassNames = ()
    threshold: Annotated[float | None, Field(alias="pre-cluster-threshold", ge=0, le=1)] = None
    iou: Annotated[float | None, Field(alias="nms-iou-threshold", ge=0, le=1)] = None
    classes_at: Annotated[str, Field(json_schema_extra=INTERNAL)] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SecondarySettings:
    """A model for crops of objects. operate_on_class_ids, classes_at: as in PrimarySettings. threshold: results below
    it are dropped. reinfer_interval: frames until it looks at an object again, 0 for once only. min_width, min_height:
    of objects, in pixels."""

    model: ModelName
    version: Version = ""
    operate_on_class_ids: ClassNames = ()
    threshold: Annotated[float, Field(alias="classifier-threshold", ge=0, le=1)] = 0.0
    reinfer_interval: Annotated[int, Field(alias="secondary-reinfer-interval", ge=0, le=1_000_000)] = 0
    min_width: Annotated[int, Field(alias="input-object-min-width", ge=0, le=65_535)] = 0
    min_height: Annotated[int, Field(alias="input-object-min-height", ge=0, le=65_535)] = 0
    classes_at: Annotated[str, Field(json_schema_extra=INTERNAL)] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The control API. port: 0 for a free one. allowed_hosts, cors_origins: see BrowserPolicy. allowed_outbound: see
    OutboundPolicy; its metadata addresses also apply to the other settings."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]+$", description="an address to listen on is needed")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=0, le=65_535)] = 8010
    is_enabled: Annotated[bool, Field(alias="enable")] = True
    allowed_hosts: Annotated[tuple[str, ...], Field(alias="allowed-host")] = ()
    cors_origins: Annotated[tuple[str, ...], Field(alias="cors-origin")] = ()
    allowed_outbound: Annotated[tuple[str, ...], AfterValidator(_checked_outbound), Field(alias="allow-outbound")] = ()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The inference engine. gateway: URL of a remote gateway, empty for this host's. grpc: its gRPC HOST:PORT, empty
    for the next port. api_key_variable: environment variable with the gateway's key."""

    choice: Annotated[EngineChoice, Field(alias="type")] = EngineChoice.AUTO
    gateway: Annotated[str, AfterValidator(_checked_gateway), Field(json_schema_extra=SECRET)] = ""
    grpc: Annotated[
        str,
        Field(
            alias="gateway-grpc", pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/@]+):\d{1,5}$", description="HOST:PORT is needed"
        ),
    ] = ""
    api_key_variable: Annotated[
        str,
        Field(
            alias="api-key-variable",
            pattern="^[A-Za-z_][A-Za-z0-9_]*$",
            description="the name of an environment variable is needed, never the key itself",
        ),
    ] = "PENSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Settings of sources that a GPU decodes. cameras_per_process: they fail together. has_pinned_processes: each
    process has its own core, if one is free. hand_over: memory of rows for the engine. gpus: those that decode, as in
    `penstock up --gpus`. device: CUDA index among them, of previews and of rows in GPU memory. decoder_limit: share of
    decoder time at which a GPU refuses further sources; 1: never."""

    cameras_per_process: Annotated[int, Field(alias="cameras-per-process", ge=1, le=64)] = 16
    has_pinned_processes: Annotated[bool, Field(alias="pin-processes")] = True
    hand_over: Annotated[RowMemory, Field(alias="hand-over")] = RowMemory.AUTO
    device: Annotated[int, Field(ge=0, le=15)] = 0
    gpus: Annotated[str, AfterValidator(checked_gpus)] = ALL
    decoder_limit: Annotated[float, Field(alias="decoder-limit", ge=0.1, le=1.0)] = DECODER_LIMIT


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """All settings of `penstock video run`. sources: of this replica. elsewhere: number of sources of other replicas.
    analytics: for sources without their own section. osd: what is drawn. out: the output folder. events: the event
    store, with its folder; None without one. is_api_port_given: whether the API's port is not just the default."""

    sources: tuple[SourceSettings, ...]
    primary: PrimarySettings
    mux: MuxSettings = MuxSettings()
    secondaries: tuple[SecondarySettings, ...] = ()
    tracker: TrackerOptions | Extension = field(default_factory=TrackerOptions)
    analytics: Plain | None = None
    osd: OsdOptions = field(default_factory=OsdOptions)
    sinks: tuple[object, ...] = ()
    api: ApiSettings = ApiSettings()
    is_api_port_given: bool = False
    engine: EngineSettings = EngineSettings()
    gpu: GpuSettings = GpuSettings()
    shard: Shard = ALONE
    elsewhere: int = 0
    out: Path | None = None
    events: EventsOptions | None = None

    def rules_section(self, source: SourceSettings) -> object | None:
        """The analytics section of the source, as plain values for rules_from."""
        section = source.analytics if source.analytics is not None else self.analytics
        return section.content if section is not None else None

    @property
    def rules_sections(self) -> tuple[Plain, ...]:
        """Every analytics section once: videos of a folder share one."""
        found = (self.analytics, *(source.analytics for source in self.sources))
        return tuple({id(section): section for section in found if section is not None}.values())
