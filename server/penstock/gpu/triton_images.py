"""Which of NVIDIA's Triton images fits a GPU, and whether this driver carries it.

Sources, read in November 2026:

* compute capability and driver: Triton's release notes rel-24-04, rel-24-10, rel-25-01, rel-26-06 and rel-26-10 under
  docs.nvidia.com/deeplearning/triton-inference-server/release-notes; those of 2026 name a CUDA version and no driver;
* CUDA and the driver an image is built with: docs/introduction/compatibility.md of triton-inference-server/server;
* the oldest driver of a CUDA major version: docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility;
* R580 is the last driver for Pascal and Volta: NVIDIA's Unix driver deprecation schedule;
* TensorRT 10.5 removed Volta: its release notes; TensorRT 10, in the images from 24.05 on, no longer takes Pascal;
* vulnerabilities: NVIDIA's security bulletin 5875 (2026) says "r26.07 or later".

None of these images was run by this project's tests.
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
    """Whether an NVIDIA driver carries an image. BY_MINOR_VERSION: an older driver of the same CUDA major version,
    which cannot compile PTX of the newer toolkit. BY_PACKAGE: by the compatibility package in the image, on
    data-centre cards only."""

    FULL = "full"
    BY_MINOR_VERSION = "by CUDA's minor version compatibility"
    BY_PACKAGE = "by the image's CUDA compatibility package, on data-centre cards only"
    TOO_OLD = "too old"
    TOO_NEW = "too new for the card"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _Release:
    """full_driver: the branch that its CUDA asks for. oldest_driver: the first of the same CUDA major version.

    package_drivers: (branch, first minor) that its release notes allow on data-centre cards below that.
    """

    name: str
    cuda: str
    full_driver: int
    oldest_driver: int
    package_drivers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _ImageRow:
    """Cards of compute capability `first` up to, and without, `end`. newest: the last release that takes them."""

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
    """image: a tag to pull; None if no image supports the card. or_later: later releases do as well.

    cuda: of that image. driver_needed: for a person, empty where there is no image. warnings: one sentence each.
    """

    image: str | None
    or_later: bool
    cards: str
    reason: str
    cuda: str
    driver_fit: DriverFit
    driver_needed: str
    warnings: tuple[str, ...] = ()


def advise(capability: Capability, driver: str | None) -> ImageAdvice:
    """The image for a card of this compute capability. driver: its version, "580.95.05"; None if unknown."""
    row = next((row for row in _TABLE if row.first <= capability < row.end), None)
    if row is None:
        reason = "no Triton image takes a card below compute capability 6.0; it can serve on the CPU"
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
    """The image for every card of a machine: the oldest decides. Raises ValueError without a card."""
    oldest, newest = min(capabilities), max(capabilities)
    advice = advise(oldest, driver)
    if oldest >= TURING or newest < BLACKWELL or advice.image is None:
        return advice
    reason = "no image takes both the oldest card and a Blackwell one; give each its own Triton with --gpus device=N"
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
    """ "580.95.05" → 580, 95; None, 0 where it is not such a version."""
    parts = (driver or "").split(".")
    if not parts[0].isdecimal():
        return None, 0
    return int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0
