"""How busy this machine's GPUs are, said once a second by a process of its own: a call into a sick driver may block.

`python -m penstock_load.witness.gpu` writes one line of JSON each second until its standard input closes.
Utilisation says
that a kernel ran; SM activity, by the hardware's counters (NVML's GPM, Hopper and later), how much of the card it used.
"""

import math
import select
import sys
from typing import Any

import msgspec

INTERVAL_S = 1.0


class GpuLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """busiest: share of the last moment in which the busiest card ran a kernel, by NVML. why: nothing can be read.

    sm_activity: SMs with work of all SMs since the last line, of the card with most; None if no card reports it.
    """

    busiest: float = 0.0
    sm_activity: float | None = None
    why: str = ""


class SmCounter:
    """A card's SM activity since the last reading. Raises pynvml.NVMLError where the card or the user may not tell."""

    def __init__(self, card: Any) -> None:
        import pynvml as nvml

        if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._card, self._nvml = card, nvml
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(card, self._older)

    def read(self) -> float | None:
        """From 0 to 1."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._card, self._newer)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = self._older, self._newer
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(asked)
        self._older, self._newer = self._newer, self._older
        metric = asked.metrics[0]
        return metric.value / 100 if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value) else None


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
            _write(GpuLine(why="the driver sees no GPU"))
        counters = _counters(cards)
        while cards:
            busiest = max(nvml.nvmlDeviceGetUtilizationRates(card).gpu for card in cards) / 100
            activities = [activity for counter in counters if (activity := counter.read()) is not None]
            _write(GpuLine(busiest=busiest, sm_activity=max(activities, default=None)))
            if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                return
    except nvml.NVMLError as error:
        _write(GpuLine(why=str(error)))


def _counters(cards: list[Any]) -> list[SmCounter]:
    """Of the cards that have them."""
    import pynvml as nvml

    counters = []
    for card in cards:
        try:
            counters.append(SmCounter(card))
        except nvml.NVMLError:
            continue
    return counters


def _write(line: GpuLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    write_lines()
