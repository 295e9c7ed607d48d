"""Where the engine is."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """run_dir: of a stack of this user on this host (server.local.running), which is joined over its socket and its
    slab; None for a gateway that is reached by its ports alone.

    http_url: https:// makes both ports TLS. grpc_address: host:port. api_key: told to a gateway reached by its ports.
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
        """For people: where it is and how it is reached."""
        way = "its run directory" if self.run_dir is not None else f"gRPC {self.grpc_address}"
        return f"{self.http_url} by {way}"

    @property
    def title(self) -> str:
        """Which it is, in a few words: "its own" is of a run that started one."""
        if self.is_own:
            return "its own"
        return f"the {'gateway' if self.run_dir is None else 'stack'} at {self.http_url}"
