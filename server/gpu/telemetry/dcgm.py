"""A card's activity as a dcgm-exporter tells it: its text page, in the words of deploy/monitoring/dcgm-counters.csv."""

import urllib.request
from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from server.gpu.telemetry.line import Activity, CardLoad, Source

TIMEOUT_S = 2.0
_MOST_BYTES = 8 << 20
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
_NOT_TOLD = "the dcgm-exporter does not tell of this card"

Figures = dict[str, float]


class DcgmUnread(Exception):
    """The exporter's page cannot be had. The message says why."""


def read_dcgm(url: str) -> tuple[CardLoad, ...]:
    """The exporter's cards. Blocks for 2 s at most for each wait on the network. Raises DcgmUnread."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            text = page.read(_MOST_BYTES).decode("utf-8", "replace")
        return cards_of(text)
    except (OSError, ValueError) as error:
        raise DcgmUnread(f"{url}: {error}") from error


def cards_of(text: str) -> tuple[CardLoad, ...]:
    """Of the exporter's page. A card that MIG cuts up has its whole's figures only. Raises ValueError."""
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
        source=Source.DCGM if shares else None,
        activity=Activity(**shares),
        why_no_activity="" if "sm" in shares else _NO_SM_ACTIVITY,
        memory_used_bytes=None if used is None else int(used * _MIB),
        memory_bytes=None if used is None or free is None else int((used + free) * _MIB),
    )


def joined(of_nvml: tuple[CardLoad, ...], of_dcgm: tuple[CardLoad, ...]) -> tuple[CardLoad, ...]:
    """NVML's cards with the exporter's activity, found by UUID; the exporter's own where NVML sees none."""
    if not of_nvml:
        return of_dcgm
    told = {card.uuid: card for card in of_dcgm}
    return tuple(_with_activity(card, told.get(card.uuid)) for card in of_nvml)


def _with_activity(card: CardLoad, told: CardLoad | None) -> CardLoad:
    if told is None:
        return card if card.lost else msgspec.structs.replace(card, why_no_activity=_NOT_TOLD)
    return msgspec.structs.replace(
        card, source=told.source, activity=told.activity, why_no_activity=told.why_no_activity
    )
