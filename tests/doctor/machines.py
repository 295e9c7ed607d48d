"""Machines that the tests look at, and how they look."""

from collections.abc import Sequence
from pathlib import Path

from penstock.doctor.finding import Finding, StackPlan
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading

GIB = 1 << 30
P4 = GpuDevice(0, "Tesla P4", (6, 1), 8 * GIB, GIB)
V100 = GpuDevice(0, "Tesla V100-SXM2-16GB", (7, 0), 16 * GIB, GIB)
T4 = GpuDevice(0, "Tesla T4", (7, 5), 16 * GIB, GIB)
A100 = GpuDevice(0, "NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB, GIB, mig=False)
L4 = GpuDevice(0, "NVIDIA L4", (8, 9), 24 * GIB, GIB)
H100 = GpuDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, GIB, mig=False)
B200 = GpuDevice(0, "NVIDIA B200", (10, 0), 180 * GIB, GIB, mig=False)


def reading(*cards: GpuDevice, driver: str = "580.95.05", cuda: tuple[int, int] = (13, 0)) -> NvmlReading:
    """What NVML says of a machine with these cards."""
    return NvmlReading(NvmlOutcome.ANSWERED, driver=driver, cuda=cuda, cards=cards)


def pick(findings: Sequence[Finding], name: str) -> Finding:
    """The finding of that id, which must be there once."""
    (found,) = [one for one in findings if one.id == name]
    return found


def plan(folder: Path, **changed: object) -> StackPlan:
    """A plan of which nothing lies outside the folder."""
    values: dict[str, object] = {
        "host": "127.0.0.1", "ports": {}, "engine": "embedded", "engine_environment": folder / "none",
        "home": folder / "home", "repositories": (), "max_inflight_requests": 512, "max_inflight_bytes": GIB,
        "temp": folder,
    }  # fmt: skip
    return StackPlan(**(values | changed))  # type: ignore[arg-type]
