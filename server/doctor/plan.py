"""What `penstock up` would use here, as far as the probes need it."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """ports: flag → port, 0 for one that the system picks. engine: auto, triton, embedded or a URL.

    engine_environment: of Triton's wheel. home: where pulled models are. temp: where the run directory will be.
    """

    host: str
    ports: dict[str, int]
    engine: str
    engine_environment: Path
    home: Path
    repositories: tuple[Path, ...]
    max_inflight_requests: int
    max_inflight_bytes: int
    temp: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))

    @property
    def run_base(self) -> Path:
        """The folder of this user's run directories."""
        return self.temp / f"penstock-{os.getuid()}"
