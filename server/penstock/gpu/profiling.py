"""Starts the engine under an NVIDIA profiler: `penstock up --profile`.

Options of Nsight Systems 2024+ and Nsight Compute 2024+, from their user guides; neither was run by this project. The
NVTX ranges that both show are those of torch_serving/instance.py.
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
# Each kernel is run several times over: of a server, a few hundred are enough, once it is warm.
_COMPUTE = ("ncu", "--target-processes", "all", "--nvtx", "--launch-skip", "1000", "--launch-count", "200", "-f")
_GET = "install NVIDIA Nsight {name}, or use --profile nvtx and a profiler of your own"


class ProfilerMode(StrEnum):
    """The setting. AUTO: Nsight Systems where it is on PATH, else ranges alone."""

    OFF = "off"
    AUTO = "auto"
    NVTX = "nvtx"
    NSYS = "nsys"
    NCU = "ncu"


class ProfilerMissing(Exception):
    """The profiler that is asked for is not on PATH. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Profiling:
    """prefix: stands before the engine's command line, empty for no profiler. environment: what the engine gets
    besides. report: where the profiler writes, one file for each start of the engine; None without a profiler."""

    prefix: tuple[str, ...]
    environment: dict[str, str]
    report: Path | None


def plan_profiling(
    profile: ProfilerMode, folder: Path, name: str, *, which: Callable[[str], str | None] = shutil.which
) -> Profiling | None:
    """How the engine is started; None for not at all profiled. name: of the reports. Raises ProfilerMissing."""
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
    report = folder / f"{name}-%p"  # both put the process's id for %p
    return Profiling((program, *command[1:], "-o", str(report)), environment, report)
