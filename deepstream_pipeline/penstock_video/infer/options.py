"""Address of the engine, and whether its input rows are in host or GPU memory."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of the engine.

    run_dir: of a stack on this host (penstock.gateway.workers.running_stacks), used by its socket and slab; None for a
    gateway used by its ports. http_url: with https both ports use TLS. api_key: sent to a gateway's ports. is_own:
    started for this run, and ends with it. mps_directory: of the engine's MPS daemon; "" without MPS, or if unknown.
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
    """Where rows are: in GPU memory that the engine reads, or in host memory. auto: device if a trial succeeds."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class RowMemoryChoice:
    """kind: DEVICE or HOST. reason: why not on the GPU; empty for DEVICE."""

    kind: RowMemory
    reason: str = ""

    @property
    def is_on_card(self) -> bool:
        return self.kind is RowMemory.DEVICE
