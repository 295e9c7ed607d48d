"""What the card did in a window: NVDEC, SMs, memory, copies over PCIe; {} where there is none to ask."""

import time
from contextlib import suppress
from typing import Any, Self

from server.gpu.telemetry import NoTelemetry, Sampler

_ACTIVITY = ("sm", "sm_occupancy", "tensor", "memory_bandwidth", "nvdec", "graphics_engine")
_PAUSE_S = 0.2


class CardMeter:
    """A context. Activity comes from the product's own sampler, PCIe and NVML's decoder utilisation from here."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._sampler = Sampler() if is_gpu else None
        self._nvml: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        """Raises NoTelemetry where there should be a card and nothing can be read."""
        if self._sampler is not None:
            self._sampler.__enter__()
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._sampler.__exit__(None, None, None)

    def during(self, seconds: float) -> dict[str, float]:
        """Waits so long. Shares from 0 to 1; PCIe in MB/s, each way, the mean of NVML's samples of 20 ms."""
        begin_s = time.monotonic()
        samples: list[dict[str, float]] = []
        while (left_s := begin_s + seconds - time.monotonic()) > 0:
            if self._nvml is not None:
                samples.append(self._ask())
            time.sleep(max(min(left_s, _PAUSE_S, begin_s + seconds - time.monotonic()), 0.0))
        names = {name for sample in samples for name in sample}
        means = {name: sum(one.get(name, 0.0) for one in samples) / len(samples) for name in sorted(names)}
        return means | self._activity(begin_s, time.monotonic())

    def _ask(self) -> dict[str, float]:
        nvml, found = self._nvml, {}
        with suppress(nvml.NVMLError):
            found["decoder_utilisation"] = nvml.nvmlDeviceGetDecoderUtilization(self._handle)[0] / 100
        with suppress(nvml.NVMLError):
            to_card = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            found["pcie_to_card_mb_s"] = to_card / 1024
        with suppress(nvml.NVMLError):
            to_host = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
            found["pcie_to_host_mb_s"] = to_host / 1024
        return found

    def _activity(self, begin_s: float, end_s: float) -> dict[str, float]:
        if self._sampler is None:
            return {}
        try:
            card = self._sampler.mean(begin_s, end_s)[0]
        except (NoTelemetry, IndexError):
            return {}
        shares = {name: getattr(card.activity, name) for name in _ACTIVITY} | {"util": card.kernel_running}
        return {name: share for name, share in shares.items() if share is not None}
