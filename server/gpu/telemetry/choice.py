"""Where the figures of the cards come from: the setting `gpu_metrics`."""

from pathlib import Path
from urllib.parse import urlsplit

AUTO, OFF = "auto", "off"
_DRIVER_FILES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")))


def checked_source(said: str) -> str:
    """The setting. Raises ValueError, with what it takes, for anything else."""
    if said in (AUTO, OFF) or _is_address(said):
        return said
    raise ValueError("it takes auto, off, or a dcgm-exporter's http://host:9400/metrics")


def _is_address(said: str) -> bool:
    try:
        parts = urlsplit(said)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not match
        return False


def has_driver(files: tuple[Path, ...] = _DRIVER_FILES) -> bool:
    """Whether NVIDIA's driver shows itself here, or Windows' in WSL: without it there is nobody to ask."""
    return any(file.exists() for file in files)
