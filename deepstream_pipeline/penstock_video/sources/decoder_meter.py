"""Utilisation of the cards' video decoders, by NVML."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

import structlog

from penstock_video.sources.admission import DecoderReading

log = structlog.get_logger(component="video")
INTERVAL_S = 1.0
_KEPT = 5  # readings of a card that are averaged

ReadUtilisation = Callable[[str], float]  # of a card's UUID: 0 to 1. Raises OSError


class DecoderMeter:
    """Reads the utilisation once a second in a daemon thread, since a call into a broken driver may hang: readings are
    old then. `readings` is thread-safe."""

    def __init__(self, uuids: Sequence[str], read: ReadUtilisation | None = None) -> None:
        """uuids: of cards. read: None for NVML."""
        self._uuids, self._read = uuids, read
        self._kept: list[deque[float]] = [deque(maxlen=_KEPT) for _ in uuids]
        self._readings: tuple[DecoderReading | None, ...] = (None,) * len(uuids)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoder-meter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread without waiting for it."""
        self._is_over.set()

    def readings(self) -> tuple[DecoderReading | None, ...]:
        """The mean of the last seconds for each card; None for one that never answered."""
        return self._readings

    def _run(self) -> None:
        try:
            read = self._read or _nvml_reader()
        except OSError as error:
            log.info("the GPU's decoders are not measured", reason=str(error))
            return
        while not self._is_over.wait(INTERVAL_S):
            self.read_once(read, time.monotonic())

    def read_once(self, read: ReadUtilisation, now: float) -> None:
        """One reading of each card. A card that does not answer keeps its last one."""
        found = []
        for uuid, kept, last in zip(self._uuids, self._kept, self._readings, strict=True):
            try:
                kept.append(read(uuid))
            except OSError:
                kept.clear()
                found.append(last)
            else:
                found.append(DecoderReading(fmean(kept), now))
        self._readings = tuple(found)


def _nvml_reader() -> ReadUtilisation:
    """Raises OSError without NVML."""
    try:
        import pynvml as nvml
    except ImportError:
        raise OSError("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error

    def read(uuid: str) -> float:
        try:
            return float(nvml.nvmlDeviceGetDecoderUtilization(nvml.nvmlDeviceGetHandleByUUID(uuid))[0]) / 100
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    return read
