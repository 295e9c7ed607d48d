"""Address of the engine, and whether its input rows are in host or GPU memory."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """run_dir: of a stack of this user on this host (penstock.gateway.workers.running_stacks), which is joined over
    its socket and its slab; None for a gateway that is reached by its ports alone.

    http_url: https:// makes both ports TLS. grpc_address: host:port. api_key: sent to a gateway reached by its ports.
    is_own: it was started for this run, and ends with it. mps_directory: of the MPS daemon whose client its engine is;
    empty where it is none's, or not known.
    """

    run_dir: Path | None
    http_url: str
    grpc_address: str
    api_key: str = field(default="", repr=False)
    is_own: bool = False
    mps_directory: str = ""

    @property
    def name(self) -> str:
        """URL and transport for display."""
        way = "its run directory" if self.run_dir is not None else f"gRPC {self.grpc_address}"
        return f"{self.http_url} by {way}"

    @property
    def title(self) -> str:
        """A short name for logs: "its own" is an engine that this run started."""
        if self.is_own:
            return "its own"
        return f"the {'gateway' if self.run_dir is None else 'stack'} at {self.http_url}"


class RowMemory(StrEnum):
    """device: in GPU memory that the engine reads directly. host: in host memory.

    auto: device if a trial succeeds, else host.
    """

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class RowMemoryChoice:
    """kind: DEVICE or HOST. reason: why not on the card, one sentence; empty for DEVICE."""

    kind: RowMemory
    reason: str = ""

    @property
    def is_on_card(self) -> bool:
        return self.kind is RowMemory.DEVICE
