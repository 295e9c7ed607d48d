"""The Triton image that fits a GPU, and whether the driver supports it. Not tested with these images.

Sources, read in November 2026: Triton's release notes rel-24-04 to rel-26-10 and docs/introduction/compatibility.md
(compute capability, driver, CUDA); docs.nvidia.com/deploy/cuda-compatibility (oldest driver of a CUDA major version);
NVIDIA's Unix driver deprecation schedule (R580 is the last for Pascal and Volta); release notes of TensorRT 10 and 10.5
(no Pascal, no Volta); NVIDIA's security bulletin 5875 (r26.07 or later).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NAME = "nvcr.io/nvidia/tritonserver"
LAST_DRIVER_OF_OLD_CARDS = 580
TURING, BLACKWELL = (7, 5), (10, 0)
KNOWN_HOLES = (
    "releases before 26.07 have known vulnerabilities (authentication bypass, path traversal): "
    "let nothing but the gateway reach Triton's ports"
)

Capability = tuple[int, int]


class DriverFit(StrEnum):
    """Whether an NVIDIA driver supports an image."""

    FULL = "full"
    BY_MINOR_VERSION = "by CUDA's minor version compatibility"  # same CUDA major version; cannot compile newer PTX
    BY_PACKAGE = "by the image's CUDA compatibility package, on data-centre GPUs only"
    TOO_OLD = "too old"
    TOO_NEW = "too new for the GPU"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _Release:
    """A Triton release. full_driver: branch of its CUDA version. oldest_driver: first of its CUDA major version."""

    name: str
    cuda: str
    full_driver: int
    oldest_driver: int
    package_drivers: tuple[tuple[int, int], ...] = ()  # older (branch, first minor) on data-centre cards


@dataclass(frozen=True, slots=True)
class _ImageRow:
    """Cards of compute capability from `first` to below `end`, and the last release that supports them."""

    first: Capability
    end: Capability
    cards: str
    release: _Release
    reason: str
    is_last: bool = True


_R24_04 = _Release("24.04", "12.4", full_driver=545, oldest_driver=525, package_drivers=((470, 57),))
_R24_10 = _Release("24.10", "12.6", full_driver=560, oldest_driver=525, package_drivers=((470, 57),))
_R26_07 = _Release("26.07", "13.3", full_driver=610, oldest_driver=580)

_TABLE = (
    _ImageRow((6, 0), (7, 0), "Pascal (P4, P40, P100)", _R24_04, "later images have TensorRT 10, which dropped Pascal"),
    _ImageRow(
        (7, 0), (7, 5), "Volta (V100)", _R24_10,
        "25.01 and later ask for compute capability 7.5; TensorRT plans must be of 10.4 or earlier, 10.5 dropped Volta",
    ),
    _ImageRow(
        TURING, BLACKWELL, "Turing, Ampere, Ada and Hopper (T4, A100, L4, H100, H200)", _R26_07,
        "earlier images have known vulnerabilities", is_last=False,
    ),
    _ImageRow(
        BLACKWELL, (100, 0), "Blackwell and later (B200)", _R26_07,
        "Blackwell is supported from 25.01 on, and images before 26.07 have known vulnerabilities", is_last=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageAdvice:
    """image: a tag to pull; None if no image supports the card. or_later: later releases do, too."""

    image: str | None
    or_later: bool
    cards: str
    reason: str
    cuda: str
    driver_fit: DriverFit
    driver_needed: str  # text; empty without an image
    warnings: tuple[str, ...] = ()


def advise(capability: Capability, driver: str | None) -> ImageAdvice:
    """The image for a compute capability. driver: its version, such as "580.95.05"; None if unknown."""
    row = next((row for row in _TABLE if row.first <= capability < row.end), None)
    if row is None:
        reason = "no Triton image takes a GPU below compute capability 6.0; it can serve on the CPU"
        return ImageAdvice(None, False, "before Pascal", reason, "", DriverFit.UNKNOWN, "")
    return ImageAdvice(
        image=f"{NAME}:{row.release.name}-py3",
        or_later=not row.is_last,
        cards=row.cards,
        reason=row.reason,
        cuda=row.release.cuda,
        driver_fit=_driver_fit(row, driver),
        driver_needed=_driver_needed(row),
        warnings=(KNOWN_HOLES,) if row.is_last else (),
    )


def advise_all(capabilities: Sequence[Capability], driver: str | None) -> ImageAdvice:
    """The image for all cards of a machine, by the oldest. Raises ValueError without a card."""
    oldest, newest = min(capabilities), max(capabilities)
    advice = advise(oldest, driver)
    if oldest >= TURING or newest < BLACKWELL or advice.image is None:
        return advice
    reason = "no image takes both the oldest GPU and a Blackwell one; give each its own Triton with --gpus device=N"
    return ImageAdvice(None, False, f"{advice.cards}, and Blackwell", reason, "", DriverFit.UNKNOWN, "")


def _driver_fit(row: _ImageRow, driver: str | None) -> DriverFit:
    branch, minor = _branch(driver)
    release = row.release
    if branch is None:
        return DriverFit.UNKNOWN
    if row.first < TURING and branch > LAST_DRIVER_OF_OLD_CARDS:
        return DriverFit.TOO_NEW
    if branch >= release.full_driver:
        return DriverFit.FULL
    if branch >= release.oldest_driver:
        return DriverFit.BY_MINOR_VERSION
    if any(branch == old and minor >= first for old, first in release.package_drivers):
        return DriverFit.BY_PACKAGE
    return DriverFit.TOO_OLD


def _driver_needed(row: _ImageRow) -> str:
    release = row.release
    most = f", at most R{LAST_DRIVER_OF_OLD_CARDS}" if row.first < TURING else ""
    return f"R{release.full_driver} for CUDA {release.cuda}, or R{release.oldest_driver} and later with limits{most}"


def _branch(driver: str | None) -> tuple[int | None, int]:
    """(580, 95) for "580.95.05"; (None, 0) for other formats."""
    parts = (driver or "").split(".")
    if not parts[0].isdecimal():
        return None, 0
    return int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0
