"""How busy this machine's GPUs are, said once a second by a process of its own: a call into a sick driver may block.

`python -m loadtest.witness.gpu` writes one line of JSON each second until its standard input closes.
"""

import select
import sys

import msgspec

INTERVAL_S = 1.0


class GpuLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """busiest: share of the last moment in which the busiest card ran a kernel, by NVML. why: nothing can be read."""

    busiest: float = 0.0
    why: str = ""


def write_lines() -> None:
    """Until standard input closes; one line that says why where there is no card to read."""
    try:
        import pynvml as nvml
    except ImportError:
        _write(GpuLine(why="nvidia-ml-py is not installed"))
        return
    try:
        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not cards:
            _write(GpuLine(why="the driver sees no card"))
        while cards:
            _write(GpuLine(busiest=max(nvml.nvmlDeviceGetUtilizationRates(card).gpu for card in cards) / 100))
            if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                return
    except nvml.NVMLError as error:
        _write(GpuLine(why=str(error)))


def _write(line: GpuLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    write_lines()
