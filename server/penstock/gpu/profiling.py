"""Starts the engine under an NVIDIA profiler: `penstock up --profile`.

Options of Nsight Systems and Nsight Compute 2024+ from their user guides; not run by this project.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

NVTX_VARIABLE = "PENSTOCK_NVTX"
REPORT_GRACE_S = 60.0  # a profiler writes its report once the engine has ended
_SYSTEMS = (
    *("nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
    *("--trace-fork-before-exec=true", "--kill=sigterm", "--wait=all", "--force-overwrite=true"),
)
# ncu replays each kernel several times, so it profiles only a few hundred of a warm server.
_COMPUTE = ("ncu", "--target-processes", "all", "--nvtx", "--launch-skip", "1000", "--launch-count", "200", "-f")
_GET = "install NVIDIA Nsight {name}, or use --profile nvtx and a profiler of your own"


class ProfilerMode(StrEnum):
    """AUTO: Nsight Systems if it is on PATH, else NVTX ranges alone."""

    OFF = "off"
    AUTO = "auto"
    NVTX = "nvtx"
    NSYS = "nsys"
    NCU = "ncu"


class ProfilerMissing(Exception):
    """The requested profiler is not on PATH. The message has the fix."""


@dataclass(frozen=True, slots=True)
class Profiling:
    """How to start the engine under a profiler."""

    prefix: tuple[str, ...]  # before the engine's command line; empty without a profiler
    environment: dict[str, str]  # additional variables
    report: Path | None  # one file per start of the engine; None without a profiler


def plan_profiling(
    profile: ProfilerMode, folder: Path, name: str, *, which: Callable[[str], str | None] = shutil.which
) -> Profiling | None:
    """How to start the engine, or None without profiling. name: of the reports. Raises ProfilerMissing."""
    if profile is ProfilerMode.OFF:
        return None
    environment = {NVTX_VARIABLE: "1"}
    if profile is ProfilerMode.AUTO and which("nsys"):
        profile = ProfilerMode.NSYS
    if profile in (ProfilerMode.AUTO, ProfilerMode.NVTX):
        return Profiling((), environment, None)
    command = _SYSTEMS if profile is ProfilerMode.NSYS else _COMPUTE
    program = which(command[0])
    if program is None:
        product = "Systems" if profile is ProfilerMode.NSYS else "Compute"
        raise ProfilerMissing(f"{command[0]} is not on PATH; {_GET.format(name=product)}")
    report = folder / f"{name}-%p"  # both replace %p by the process id
    return Profiling((program, *command[1:], "-o", str(report)), environment, report)
