"""The cards as metrics: what a scrape reads."""

from collections.abc import Callable

from server.gpu.telemetry.line import CardLoad
from server.gpu.telemetry.reader import TelemetryReader
from server.metrics import Readings

_ACTIVITIES = {
    "gpu_sm_activity": "sm",
    "gpu_sm_occupancy": "sm_occupancy",
    "gpu_tensor_activity": "tensor",
    "gpu_memory_bandwidth_activity": "memory_bandwidth",
    "gpu_nvdec_activity": "nvdec",
    "gpu_nvjpg_activity": "nvjpg",
}


def telemetry_readers(telemetry: TelemetryReader | None) -> dict[str, Callable[[], Readings]]:
    """By the metric's name; none where nobody tells. What nobody measures has no series, never a nought."""
    if telemetry is None:
        return {}
    readers: dict[str, Callable[[], Readings]] = {
        name: lambda figure=figure: _activity(telemetry.loads(), figure)  # type: ignore[misc]
        for name, figure in _ACTIVITIES.items()
    }
    health = telemetry.health
    readers["gpu_kernel_running_share"] = lambda: {
        (str(card.index),): card.kernel_running for card in telemetry.loads() if card.kernel_running is not None
    }
    readers["gpu_process_memory_bytes"] = lambda: _by_process(telemetry.loads(), "memory_bytes")
    readers["gpu_process_time_share"] = lambda: _by_process(telemetry.loads(), "time_share")
    readers["gpu_up"] = lambda: {(str(index),): float(not reason) for index, reason in health.cards.items()}
    readers["gpu_xid_errors_total"] = lambda: {(str(gpu), str(xid)): count for (gpu, xid), count in health.xids.items()}
    return readers


def _activity(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    shares = {(str(card.index), card.source): getattr(card.activity, figure) for card in cards}
    return {(index, source): share for (index, source), share in shares.items() if source and share is not None}


def _by_process(cards: tuple[CardLoad, ...], figure: str) -> Readings:
    """Of several processes of one name, their sum."""
    sums: dict[tuple[str, ...], float] = {}
    for card in cards:
        for process in card.processes:
            if (value := getattr(process, figure)) is not None:
                key = str(card.index), process.name
                sums[key] = sums.get(key, 0.0) + value
    return sums
