"""What the settings come to: values that the composer hands to the parts."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deepstream_pipeline.infer.hand_over import HandOver
from deepstream_pipeline.mux import MuxOptions
from deepstream_pipeline.settings.section import Plain
from deepstream_pipeline.settings.sinks import SinkOptions
from deepstream_pipeline.shards import ALONE, Shard
from deepstream_pipeline.sinks.osd import OsdOptions
from deepstream_pipeline.track.options import TrackerOptions
from deepstream_pipeline.types import SourceConfig

API_HOST, API_PORT = "127.0.0.1", 8010


class EngineChoice(StrEnum):
    """auto: the stack that runs on this host, else one of our own. triton, embedded: one of our own, of that kind."""

    AUTO = "auto"
    TRITON = "triton"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """A source. analytics: its own section instead of the one for all; None where it has none."""

    config: SourceConfig
    analytics: Plain | None = None


@dataclass(frozen=True, slots=True)
class MuxSettings:
    """The stream mux. batch_size: None for what fits the model and the number of sources."""

    batch_size: int | None = None
    push_timeout_s: float = 0.0
    max_same_source: int = 0
    max_latency_s: float = 1.0

    def options(self, fitting_batch_size: int) -> MuxOptions:
        """As the mux takes them. fitting_batch_size: what is taken where none was said."""
        return MuxOptions(
            self.batch_size or fitting_batch_size,
            push_timeout_s=self.push_timeout_s,
            max_same_source=self.max_same_source,
            max_latency_s=self.max_latency_s,
        )


@dataclass(frozen=True, slots=True)
class PrimarySettings:
    """The model that sees every picture.

    version: empty for the newest. interval: frames between two that are inferred. operate_on_class_ids: whom to keep,
    by number or label; empty for all; classes_at: where that stands, FILE:LINE:COLUMN. threshold: detections below it
    are dropped, None for the model's own.
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

    operate_on_class_ids, classes_at: of which objects, as of PrimarySettings. threshold: classes below it are not told.
    reinfer_interval: frames until the same object is asked about again, 0 for once only. min_width, min_height: smaller
    objects are not asked about, in pixels.
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
    server.core.outbound.Outbound; its metadata addresses also apply to the other settings."""

    host: str = API_HOST
    port: int = API_PORT
    is_enabled: bool = True
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_outbound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Who infers.

    gateway: the http:// address of a gateway elsewhere, empty for this host's. grpc: its gRPC HOST:PORT, empty for one
    port above. api_key_variable: the environment's variable that holds the key, where the gateway asks for one.
    """

    choice: EngineChoice = EngineChoice.AUTO
    gateway: str = ""
    grpc: str = ""
    api_key_variable: str = "PENSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What holds for the sources that a card decodes.

    cameras_per_process: which fail together. has_pinned_processes: each process keeps to a core of its own, where one
    is free. hand_over: of their rows to the engine. device: the card, as CUDA counts.
    """

    cameras_per_process: int = 16
    has_pinned_processes: bool = True
    hand_over: HandOver = HandOver.AUTO
    device: int = 0


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Everything that `penstock video run` was told.

    sources: this replica's. elsewhere: how many others belong to other replicas. analytics: for sources without a
    section of their own. osd: what is drawn. out: the folder of what is written.
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
        """The analytics section that holds for the source, as plain values for rules_from."""
        section = source.analytics if source.analytics is not None else self.analytics
        return section.content if section is not None else None

    @property
    def rules_sections(self) -> tuple[Plain, ...]:
        """Every analytics section, each once: of the videos of a folder one stands for all."""
        found = (self.analytics, *(source.analytics for source in self.sources))
        return tuple({id(section): section for section in found if section is not None}.values())
