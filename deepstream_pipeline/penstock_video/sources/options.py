"""Options of the sources, their listener Protocol, and the snapshot of a source's state."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_video.sources.admission import DECODER_LIMIT, DecoderReading
from penstock_video.sources.decoder_cards import DecoderCard
from penstock_video.sources.protocol import Beat, Opened, Recorded, Start
from penstock_video.sources.ring import ring_size
from penstock_video.types import DeviceRow, PreparedFrame, SourceConfig, SourceState

DECODER = (sys.executable, "-P", "-m", "penstock_video.sources.child")
SHARED_DECODER = (sys.executable, "-P", "-m", "penstock_video.sources.shared_child")


class DeviceRing(Protocol):
    """GPU memory for the rows of one run, in slots of equal size. handle: CUDA IPC handle for the decode process."""

    @property
    def handle(self) -> bytes: ...

    def row(self, slot: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceRow:
        """The row in a slot. The caller has checked that it fits."""
        ...

    def close(self) -> None:
        """Call it once, when the ring is no longer read."""
        ...


def _never() -> bool:
    return False


def _unmeasured() -> Sequence[DecoderReading | None]:
    return ()


@dataclass(frozen=True, slots=True)
class GpuSources:
    """How the GPU decodes sources.

    cameras_per_process: maximum; they restart together. device: GPU index. cards: the GPU, if it is known to NVML, or
    several, which share the sources; new_device_ring is then for those on the GPU at position `device`. read_decoders:
    newest reading of each of `cards`. decoder_limit: see DecoderCards. new_device_ring: creates a ring of slots
    and bytes per slot; rows use host memory if it is None or raises GpuFailed. is_card_lost: whether rows in GPU memory
    are no longer usable. has_pinned_processes: each process reserves a core, if one is free. command: of a shared
    process, before device, 1 or 0 for pinning, and the socket's descriptor.
    """

    cameras_per_process: int = 16
    device: int = 0
    cards: tuple[DecoderCard, ...] = ()
    read_decoders: Callable[[], Sequence[DecoderReading | None]] = _unmeasured
    decoder_limit: float = DECODER_LIMIT
    new_device_ring: Callable[[int, int], DeviceRing] | None = None
    is_card_lost: Callable[[], bool] = _never
    has_pinned_processes: bool = True
    command: tuple[str, ...] = SHARED_DECODER


@dataclass(frozen=True, slots=True)
class SourcesOptions:
    """Limits of all sources.

    ring_frames, ring_bytes: waiting decoded frames per source; both apply. max_pixels: larger frames are refused.
    max_opening: sources opened at the same time. command: of a decode process, without our process ID and the
    descriptors of its socket and ring. gpu: None if no GPU decodes; gpu_absence says why.
    """

    max_sources: int = 200
    ring_frames: int = 6
    ring_bytes: int = 64 << 20
    max_pixels: int = 3840 * 2160
    max_opening: int = max(2, min(8, os.cpu_count() or 2))
    command: tuple[str, ...] = DECODER
    gpu: GpuSources | None = None
    gpu_absence: str = "no GPU was searched for"
    allowed_outbound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceNeeds:
    """How a source's frames are prepared. spec: PrepareSpec.pack() of the network, empty for none. row_bytes,
    row_dtype: of its input. interval: frames between two inferred frames. wants_images: full pictures are sent too, at
    most one each image_interval_s."""

    spec: bytes = b""
    row_bytes: int = 0
    row_dtype: npt.DTypeLike = np.uint8
    interval: int = 0
    wants_images: bool = False
    image_interval_s: float = 0.0


def start_of(config: SourceConfig, needs: SourceNeeds, options: SourcesOptions) -> Start:
    """A source's first message to a decode process, without what differs from run to run."""
    size = ring_size(options.ring_frames, needs.row_bytes, options.max_pixels * 3)
    return Start(
        uri=config.uri,
        spec=needs.spec,
        ring_frames=size.frames,
        slot_bytes=size.slot_bytes,
        ring_bytes=options.ring_bytes,
        policy="",
        interval=needs.interval,
        is_loop=config.is_loop,
        is_realtime=config.is_realtime,
        is_udp=config.is_udp,
        open_timeout_s=config.open_timeout_s,
        record_cache_s=config.record_cache_s,
        max_pixels=options.max_pixels,
        row_bytes=needs.row_bytes,
        allowed_outbound=options.allowed_outbound,
        is_from_api=config.is_from_api,
    )


class SourceListener(Protocol):
    """Receives events on the sources' thread: it must not block. A source's on_ended is its last event."""

    @property
    def on_frame(self) -> Callable[[PreparedFrame], None]:
        """Called with each frame. The receiver calls its `release`, from any thread."""
        ...

    def on_lost(self, source_id: str, reason: str, count: int) -> None:
        """Decoded frames were lost. reason: of types.DropReason."""
        ...

    def on_state(self, source_id: str, state: SourceState, reason: str) -> None:
        """The state or its reason changed."""
        ...

    def on_opened(self, source_id: str, opened: Opened) -> None:
        """The source is open; again after a change of resolution, rate or codec, and after each reconnection."""
        ...

    def on_beat(self, source_id: str, beat: Beat) -> None:
        """Once a second. Sums continue over the source's processes."""
        ...

    def on_ended(self, source_id: str) -> None:
        """The source ended, failed or was removed; no frames follow."""
        ...

    def on_recorded(self, source_id: str, recorded: Recorded) -> None:
        """A recording ended."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A decode process. decoder: cpu or nvdec. cameras: their current number."""

    pid: int
    decoder: str
    cameras: int


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """State of a source. fps: decoded over the last seconds. frames: decoded by all processes. drops: by
    types.DropReason, before frames reached the parent. pts_s: of the last frame. opened: None before the first time.
    decode_s, prepare_s: CPU seconds. start_s: from the last process's start until it opened the source, or sent a beat.
    waiting_frames: received and not released. pid: of its process, or None. is_open: whether it can be recorded now.
    decoder_reason: why the CPU decodes a source that a GPU might."""

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
    decoder_reason: str = ""

    @property
    def decoder(self) -> str:
        """cpu or nvdec, empty until it is open."""
        return self.opened.decoder if self.opened is not None else ""

    @property
    def source_id(self) -> str:
        return self.config.source_id
