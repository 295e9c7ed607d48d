"""A source as it is at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepstream_pipeline.sources.messages import Opened
from deepstream_pipeline.types import SourceConfig, SourceState


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A decode process. decoder: cpu or nvdec. cameras: that it has now."""

    pid: int
    decoder: str
    cameras: int


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """fps: decoded over the last seconds. frames: decoded, over all processes. drops: by types.DropReason, of those
    that happened before a frame came here. pts_s: of the last frame. opened: None before the first time. decode_s,
    prepare_s: seconds of CPU. start_s: from the last process' start to its first word. waiting_frames: that came, and
    were not released. pid: of its process, None where it has none. is_open: whether its process has it open and is
    wanted, so that a recording that is asked for now comes about; packets from before went with the former process."""

    config: SourceConfig
    state: SourceState
    reason: str = ""
    fps: float = 0.0
    frames: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    is_frozen: bool = False
    opened: Opened | None = None
    pts_s: float = 0.0
    bad_packets: int = 0
    decode_s: float = 0.0
    prepare_s: float = 0.0
    start_s: float | None = None
    waiting_frames: int = 0
    pid: int | None = None
    is_open: bool = False

    @property
    def decoder(self) -> str:
        """cpu or nvdec, empty until it is open."""
        return self.opened.decoder if self.opened is not None else ""

    @property
    def source_id(self) -> str:
        return self.config.source_id
