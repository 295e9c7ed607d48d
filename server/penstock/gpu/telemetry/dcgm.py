"""GPU activity from a dcgm-exporter, with the counters of deploy/monitoring/dcgm-counters.csv."""

import urllib.request
from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad

TIMEOUT_S = 2.0
_MAX_BYTES = 8 << 20
_MIB = 1 << 20
_SHARES = {  # from 0 to 1
    "DCGM_FI_PROF_SM_ACTIVE": "sm",
    "DCGM_FI_PROF_SM_OCCUPANCY": "sm_occupancy",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor",
    "DCGM_FI_PROF_DRAM_ACTIVE": "memory_bandwidth",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "graphics_engine",
}
_PERCENTS = {"DCGM_FI_DEV_GPU_UTIL": "kernel_running", "DCGM_FI_DEV_DEC_UTIL": "nvdec"}
_NO_SM_ACTIVITY = "the dcgm-exporter does not tell DCGM_FI_PROF_SM_ACTIVE; give it deploy/monitoring/dcgm-counters.csv"
_CARD_NOT_REPORTED = "the dcgm-exporter does not report this GPU"

Figures = dict[str, float]


class DcgmUnavailable(Exception):
    """The exporter's page could not be read. The message has the reason."""


def read_dcgm(url: str) -> tuple[CardLoad, ...]:
    """The exporter's cards. Each network operation blocks for at most TIMEOUT_S. Raises DcgmUnavailable."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            text = page.read(_MAX_BYTES).decode("utf-8", "replace")
        return cards_of(text)
    except (OSError, ValueError) as error:
        raise DcgmUnavailable(f"{url}: {error}") from error


def cards_of(text: str) -> tuple[CardLoad, ...]:
    """Parses the exporter's page. Cards with MIG only have totals. Raises ValueError."""
    figures: dict[int, Figures] = {}
    names: dict[int, tuple[str, str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            index = sample.labels.get("gpu", "")
            if not sample.name.startswith("DCGM_FI_") or not index.isdecimal() or sample.labels.get("GPU_I_ID"):
                continue
            names[int(index)] = sample.labels.get("UUID", ""), sample.labels.get("modelName", "")
            figures.setdefault(int(index), {})[sample.name] = sample.value
    return tuple(_card(index, *names[index], figures[index]) for index in sorted(figures))


def _card(index: int, uuid: str, name: str, figures: Mapping[str, float]) -> CardLoad:
    shares = {field: figures[metric] for metric, field in _SHARES.items() if metric in figures}
    shares |= {field: figures[metric] / 100 for metric, field in _PERCENTS.items() if metric in figures}
    used, free = figures.get("DCGM_FI_DEV_FB_USED"), figures.get("DCGM_FI_DEV_FB_FREE")
    return CardLoad(
        index,
        uuid,
        name,
        kernel_running=shares.pop("kernel_running", None),
        source=ActivitySource.DCGM if shares else None,
        activity=Activity(**shares),
        why_no_activity="" if "sm" in shares else _NO_SM_ACTIVITY,
        memory_used_bytes=None if used is None else int(used * _MIB),
        memory_bytes=None if used is None or free is None else int((used + free) * _MIB),
    )


def with_dcgm_activity(of_nvml: tuple[CardLoad, ...], of_dcgm: tuple[CardLoad, ...]) -> tuple[CardLoad, ...]:
    """NVML's cards with the exporter's activity, matched by UUID; the exporter's own cards if NVML has none."""
    if not of_nvml:
        return of_dcgm
    by_uuid = {card.uuid: card for card in of_dcgm}
    return tuple(_with_activity(card, by_uuid.get(card.uuid)) for card in of_nvml)


def _with_activity(card: CardLoad, reported: CardLoad | None) -> CardLoad:
    if reported is None:
        return card if card.lost else msgspec.structs.replace(card, why_no_activity=_CARD_NOT_REPORTED)
    return msgspec.structs.replace(
        card, source=reported.source, activity=reported.activity, why_no_activity=reported.why_no_activity
    )
