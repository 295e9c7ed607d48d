"""`util` beside SM activity on this machine's card, for work of known shape: how far the one is from the other.

    PYTHONPATH=. python -m loadtest.bench.gpu.telemetry [--seconds 2] [--no-mps]

Needs a card and torch. Five loads, one after the other: nothing; a kernel that spins on one SM; FP16 matrix products;
copies inside the device's memory; and, where nvidia-cuda-mps-control is here, two MPS clients, one that spins on one SM
and one that multiplies, with what NVML says of each process. About half a minute.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.programs import MpsDaemon
from loadtest.bench.wire import BadAnswer
from penstock.gpu.mps.control import PROGRAM as CONTROL
from penstock.gpu.telemetry.messages import CardLoad
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable

SPIN_CYCLES = 200_000_000  # a tenth of a second at 2 GHz, on one thread
SETTLE_S = 1.2  # `util` is of the driver's last sampling time, up to a second
COLUMNS = ("load", "util", "graphics", "SM activity", "occupancy", "tensor", "memory bw", "NVDEC", "NVJPG")
_CLIENT = "from loadtest.bench.gpu.telemetry import client; client({name!r}, {seconds})"


def spin(torch: Any) -> None:
    """A tenth of a second of one thread on one SM."""
    torch.cuda._sleep(SPIN_CYCLES)


def multiply(torch: Any) -> None:
    """Some milliseconds of tensor cores."""
    size = 8192
    left, right = (torch.ones((size, size), device="cuda", dtype=torch.float16) for _ in range(2))
    for _ in range(20):
        left @ right


def copy(torch: Any) -> None:
    """Some milliseconds of the device's memory."""
    here = torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
    there = torch.empty_like(here)
    for _ in range(10):
        there.copy_(here)


def idle(torch: Any) -> None:
    """Nothing, for a moment."""
    time.sleep(0.05)


LOADS: dict[str, Callable[[Any], None]] = {
    "nothing": idle,
    "one SM spins": spin,
    "FP16 matrix products": multiply,
    "copies in memory": copy,
}


def keep_busy(load: Callable[[Any], None], seconds: float) -> tuple[float, float]:
    """Runs it again and again; from when to when, by time.monotonic(), without the time in which it settled."""
    import torch

    begin_s = time.monotonic()
    while time.monotonic() - begin_s < SETTLE_S + seconds:
        load(torch)
        torch.cuda.synchronize()
    return begin_s + SETTLE_S, time.monotonic()


def client(name: str, seconds: float) -> None:
    """A client of MPS: prints "ready", waits for a line, works."""
    import torch

    torch.zeros(64 << 20, device="cuda", dtype=torch.uint8)
    print("ready", flush=True)
    sys.stdin.readline()
    keep_busy(LOADS[name], seconds)


def row_of(load: str, card: CardLoad) -> tuple[str, ...]:
    """Of the table, in percent."""
    figures = card.activity
    shares = (
        *(card.kernel_running, figures.graphics_engine, figures.sm, figures.sm_occupancy),
        *(figures.tensor, figures.memory_bandwidth, figures.nvdec, figures.nvjpg),
    )
    return load, *("-" if share is None else f"{100 * share:.2f}" for share in shares)


def table(rows: list[tuple[str, ...]]) -> str:
    """The rows under their names, aligned."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in (COLUMNS, *rows))
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in line) for line in lines)


def processes_of(card: CardLoad) -> str:
    """A line for each."""
    lines = [
        f"  pid {one.pid} {one.name}: {(one.memory_bytes or 0) >> 20} MiB, "
        f"{'time unknown' if one.time_share is None else f'{100 * one.time_share:.0f} % of the time'}"
        f"{', an MPS client' if one.is_mps_client else ''}"
        for one in card.processes
    ]
    return "\n".join(lines) or "  none that NVML shows"


def under_mps(sampler: Sampler, seconds: float) -> CardLoad:
    """Two clients at once."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = os.environ | stack.enter_context(MpsDaemon(folder)).environ
        clients = [_start(stack, name, seconds, environment) for name in ("one SM spins", "FP16 matrix products")]
        for one in clients:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n", "an MPS client did not start"
        for one in clients:
            assert one.stdin is not None
            one.stdin.write(b"go\n")
            one.stdin.flush()
        begin_s = time.monotonic() + SETTLE_S
        return sampler.mean(begin_s, begin_s + seconds - SETTLE_S / 2)[0]


def _start(
    stack: contextlib.ExitStack, name: str, seconds: float, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _CLIENT.format(name=name, seconds=seconds + SETTLE_S)]
    pipe = subprocess.PIPE
    return stack.enter_context(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe))


def main() -> None:
    """Prints the table and each card's processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-mps", action="store_true")
    said = parser.parse_args()
    try:
        with Sampler() as sampler:
            rows, last = [], None
            for name, load in LOADS.items():
                last = sampler.mean(*keep_busy(load, said.seconds))[0]
                rows.append(row_of(name, last))
            if not said.no_mps and shutil.which(CONTROL):
                last = under_mps(sampler, said.seconds)
                rows.append(row_of("two MPS clients", last))
    except (TelemetryUnavailable, BadAnswer) as error:
        raise SystemExit(f"nothing can be read: {error}") from error
    print(f"{last.name if last else ''}, activity by {last.source if last else None}; percent\n{table(rows)}")
    print(f"processes during the last one:\n{processes_of(last) if last else ''}")


if __name__ == "__main__":
    main()
