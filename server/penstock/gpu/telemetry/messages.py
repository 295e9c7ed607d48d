"""The telemetry process's message, one JSON object per line. Shares are from 0 to 1."""

from enum import StrEnum

import msgspec


class ActivitySource(StrEnum):
    """Source of a card's activity. GPM: NVML, from Hopper on. DCGM: dcgm-exporter, from Volta on."""

    GPM = "gpm"
    DCGM = "dcgm"


class Activity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Means over the message's interval; None if the card or the source does not have the figure."""

    sm: float | None = None  # SMs with at least one warp assigned
    sm_occupancy: float | None = None  # resident warps, of the maximum
    tensor: float | None = None  # active tensor pipes
    memory_bandwidth: float | None = None  # of the device memory's maximum
    nvdec: float | None = None  # mean over the video decoders
    nvjpg: float | None = None  # mean over the JPEG decoders
    graphics_engine: float | None = None  # time in which anything ran: utilization over this interval


class ProcessLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process with a context on the card."""

    pid: int
    name: str  # of the Triton model instance or the program; never an id
    memory_bytes: int | None = None
    time_share: float | None = None  # time in which its kernels ran, in NVML's last sample
    is_mps_client: bool = False


class CardLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU."""

    index: int
    uuid: str = ""
    name: str = ""
    kernel_running: float | None = None  # nvidia-smi's utilization: time with any kernel, over 1/6 s to 1 s
    source: ActivitySource | None = None  # of `activity`; None if not measured
    activity: Activity = Activity()
    why_no_activity: str = ""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    processes: tuple[ProcessLoad, ...] = ()
    lost: str = ""  # why NVML cannot reach the card


class Xid(msgspec.Struct, frozen=True):
    """A driver error of a card. number: see docs.nvidia.com/deploy/xid-errors."""

    gpu: int
    number: int


class TelemetryMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reading of all cards."""

    at_s: float  # time.monotonic(), which is the same in all processes of a machine
    seconds: float = 0.0  # length of the interval
    cards: tuple[CardLoad, ...] = ()
    xids: tuple[Xid, ...] = ()
    has_nvml: bool = False  # NVML answered, and `cards` is complete
    why: str = ""  # why nothing can be read
