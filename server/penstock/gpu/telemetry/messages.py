"""The message that the telemetry process writes each interval, one JSON object per line. Shares are from 0 to 1."""

from enum import StrEnum

import msgspec


class ActivitySource(StrEnum):
    """Who measured a card's activity. GPM: NVML, on Hopper and later. DCGM: a dcgm-exporter, on Volta and later."""

    GPM = "gpm"
    DCGM = "dcgm"


class Activity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Means over the line's interval; None if the card or the source has no such figure.

    sm: SMs with at least one warp assigned, over all SMs. sm_occupancy: resident warps by those that would fit. tensor:
    tensor pipes that work. memory_bandwidth: of what the device's memory can carry. nvdec, nvjpg: mean over the card's
    video decoders and JPEG decoders. graphics_engine: time in which anything ran at all: `util` over this interval.
    """

    sm: float | None = None
    sm_occupancy: float | None = None
    tensor: float | None = None
    memory_bandwidth: float | None = None
    nvdec: float | None = None
    nvjpg: float | None = None
    graphics_engine: float | None = None


class ProcessLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process with a context on the card. name: a Triton instance's, else the program's, never an id.

    time_share: of the time of NVML's last sample in which a kernel of this process ran, however few SMs it took.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    time_share: float | None = None
    is_mps_client: bool = False


class CardLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU. kernel_running: nvidia-smi's `util`: time in which any kernel ran, over NVML's own 1/6 s to 1 s.

    source: of `activity`; None if it is not measured, with the reason in why_no_activity. lost: why NVML no longer
    reaches the card; empty while it does.
    """

    index: int
    uuid: str = ""
    name: str = ""
    kernel_running: float | None = None
    source: ActivitySource | None = None
    activity: Activity = Activity()
    why_no_activity: str = ""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    processes: tuple[ProcessLoad, ...] = ()
    lost: str = ""


class Xid(msgspec.Struct, frozen=True):
    """An error that the driver reported of a card. number: see docs.nvidia.com/deploy/xid-errors."""

    gpu: int
    number: int


class TelemetryMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """at_s: time.monotonic() when it was read, the same clock in every process of the machine. seconds: the interval
    before it. has_nvml: NVML answered, and these are all of its cards. why: nothing can be read, for this reason."""

    at_s: float
    seconds: float = 0.0
    cards: tuple[CardLoad, ...] = ()
    xids: tuple[Xid, ...] = ()
    has_nvml: bool = False
    why: str = ""
