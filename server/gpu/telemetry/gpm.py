"""A card's activity by NVML's GPU performance monitoring (GPM): hardware counters, Hopper and later.

A sample is a copy of the counters; figures are of the time between two samples. dcgm-exporter reads the same counters:
where one runs, read it instead of both.
"""

import math
from typing import Any

from server.gpu.telemetry.line import Activity

_UNITS = 8  # NVML numbers as many video and JPEG decoders; a card answers for those that it has


class GpmMeter:
    """Of one card. Raises pynvml.NVMLError where the card is not supported, or its counters may not be read."""

    def __init__(self, device: Any) -> None:
        import pynvml as nvml

        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._device = device
        self._nvml = nvml
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(device, self._older)
        nvdec, nvjpg = nvml.NVML_GPM_METRIC_NVDEC_0_UTIL, nvml.NVML_GPM_METRIC_NVJPG_0_UTIL
        self._of_figure: dict[str, tuple[int, ...]] = {
            "sm": (nvml.NVML_GPM_METRIC_SM_UTIL,),
            "sm_occupancy": (nvml.NVML_GPM_METRIC_SM_OCCUPANCY,),
            "tensor": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,),
            "memory_bandwidth": (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,),
            "graphics_engine": (nvml.NVML_GPM_METRIC_GRAPHICS_UTIL,),
            "nvdec": tuple(range(nvdec, nvdec + _UNITS)),
            "nvjpg": tuple(range(nvjpg, nvjpg + _UNITS)),
        }

    def read(self) -> Activity:
        """Since the last call, or since it was made."""
        self._nvml.nvmlGpmSampleGet(self._device, self._newer)
        shares = self._shares()
        self._older, self._newer = self._newer, self._older
        return Activity(**{name: _mean([shares[one] for one in ids]) for name, ids in self._of_figure.items()})

    def _shares(self) -> dict[int, float | None]:
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        ids = [one for several in self._of_figure.values() for one in several]
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
        asked.sample1, asked.sample2 = self._older, self._newer
        for metric, one in zip(asked.metrics, ids, strict=False):
            metric.metricId = one
        nvml.nvmlGpmMetricsGet(asked)
        return {
            metric.metricId: _share(metric.value) if metric.nvmlReturn == nvml.NVML_SUCCESS else None
            for metric in asked.metrics[: len(ids)]
        }


def _share(percent: float) -> float | None:
    """None for what is not a number: a counter that the card has not."""
    return min(1.0, max(0.0, percent / 100)) if math.isfinite(percent) else None


def _mean(shares: list[float | None]) -> float | None:
    """Over the units that answered."""
    told = [share for share in shares if share is not None]
    return sum(told) / len(told) if told else None
