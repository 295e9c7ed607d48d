"""What the parent's side of the sources is told, and whom it tells."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deepstream_pipeline.sources.messages import Beat, Opened, Recorded
from deepstream_pipeline.types import DeviceRow, PreparedFrame, SourceState

DECODER = (sys.executable, "-P", "-m", "deepstream_pipeline.sources.child")
SHARED_DECODER = (sys.executable, "-P", "-m", "deepstream_pipeline.sources.shared_child")


class DeviceRing(Protocol):
    """Memory on the card for the rows of one run of a source: slots of one size, one behind the other.

    handle: by which another process opens it (CUDA IPC).
    """

    @property
    def handle(self) -> bytes: ...

    def row(self, slot: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceRow:
        """What lies in a slot. The caller has seen to it that it fits."""
        ...

    def close(self) -> None:
        """Once; nobody reads it any more."""
        ...


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class GpuSources:
    """How sources are decoded by the card.

    cameras_per_process: at most, which end and begin anew together where their process dies. device: the card's number.
    new_device_ring: for so many slots of so many bytes; None where rows go through the host. It may raise GpuFailed:
    then that run's rows do. is_card_lost: whether rows on the card are handed over no more. has_pinned_processes: each
    takes a core for itself, where one is free; for who has cores enough. command: of a process with several cameras;
    the card's number, 1 or 0 for a core of its own, and the socket's are put behind it.
    """

    cameras_per_process: int = 16
    device: int = 0
    new_device_ring: Callable[[int, int], DeviceRing] | None = None
    is_card_lost: Callable[[], bool] = _never
    has_pinned_processes: bool = True
    command: tuple[str, ...] = SHARED_DECODER


@dataclass(frozen=True, slots=True)
class SourcesOptions:
    """Bounds of all sources together.

    ring_frames, ring_bytes: of decoded frames that wait, for each source; both hold. max_pixels: of a frame; a larger
    one is refused. max_opening: sources that are opened at one moment. decoder_threads: of each source, 0 for the
    decoder's own choice. command: of a decode process; two numbers, of its socket and its ring, are put behind it.
    gpu: None where there is no card that decodes, and gpu_absence says why. allowed_outbound: of --allow-outbound.
    """

    max_sources: int = 200
    ring_frames: int = 6
    ring_bytes: int = 64 << 20
    max_pixels: int = 3840 * 2160
    max_opening: int = max(2, min(8, os.cpu_count() or 2))
    decoder_threads: int = 0
    command: tuple[str, ...] = DECODER
    gpu: GpuSources | None = None
    gpu_absence: str = "no card was looked for"
    allowed_outbound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceNeeds:
    """What a source's frames are made into.

    spec: server.vision.spec.PrepareSpec.pack() of the network, empty where none looks. row_bytes, row_dtype: of one
    row of its input. interval: frames between two that are inferred. wants_images: full pictures travel as well.
    """

    spec: bytes = b""
    row_bytes: int = 0
    row_dtype: npt.DTypeLike = np.uint8
    interval: int = 0
    wants_images: bool = False


class SourceListener(Protocol):
    """Who is told. Called on the thread of the sources, which every camera shares: nothing of it may wait.

    Of each source: any of them, in order, then on_ended once, and nothing after it.
    """

    def on_frame(self, prepared: PreparedFrame) -> None:
        """A frame. Whoever takes it calls its `release`, from any thread."""
        ...

    def on_lost(self, source_id: str, reason: str, count: int) -> None:
        """So many decoded frames did not come. reason: of types.DropReason."""
        ...

    def on_state(self, source_id: str, state: SourceState, reason: str) -> None:
        """It is in another state, or in the same for another reason."""
        ...

    def on_opened(self, source_id: str, opened: Opened) -> None:
        """It is open; again after a change of resolution, rate or codec, and after each reconnection."""
        ...

    def on_beat(self, source_id: str, beat: Beat) -> None:
        """Each second. Its sums go on over the source's processes."""
        ...

    def on_ended(self, source_id: str) -> None:
        """No more frames of it will come: it is over, failed, or was taken out."""
        ...

    def on_recorded(self, source_id: str, recorded: Recorded) -> None:
        """A recording is over."""
        ...
