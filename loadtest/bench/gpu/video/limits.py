"""What kept a number of streams from being held, told from what was read beside the window. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from loadtest.report.wording import percent

FULL_NVDEC, FULL_SM, FULL_ENGINE, FULL_CORES, FULL_THREAD, FULL_PYTHON = 0.95, 0.95, 0.95, 0.92, 0.85, 0.95
FULL_INTERRUPTED = 0.95  # of the core that the card's interrupts go to, where the others have time left
_PYTHON = ("video program", "gateway")


def cores_of(machine: str) -> int:
    """From "1 × NVIDIA H200, Intel Xeon, 16 cores"; 0 where it is not said."""
    found = re.search(r"(\d+) cores?$", machine)
    return int(found[1]) if found else 0


def decoders_in_words(full_at: int) -> str:
    """Why a card makes no more of them, for who never heard of it."""
    return (
        f"The card was full at **{full_at} decoders**. A stream that NVDEC decodes holds a decoder of its own as long "
        "as it runs, however small its pictures are, and the card's driver makes only so many: each takes channels "
        "(queues by which programs hand work to the card), one for every video engine of the card, seven of an H200; "
        "the driver has about 2,048, and each process that uses the card takes some, too. So an H200 has at most 288 "
        "decoders, fewer beside other processes, however idle NVDEC, its memory and the cores are. One stream more "
        "finds no decoder, says so, and gives no frame."
    )


def limit_in_words(tried: Mapping[str, Any], cores: int, decoders: int = 0, *, is_most: bool = True) -> str:
    """One sentence on a window: what was full, and how full the rest was. decoders: at which the card was full, where
    that kept more streams from being held. is_most: more was tried, and missed; else what is full bounds nothing yet.
    """
    card, used, engine = tried.get("card", {}), tried.get("cores", {}), tried.get("engine", {})
    nvdec = max(card.get("nvdec", 0.0), card.get("decoder_utilisation", 0.0))
    machine, interrupts = used.get("machine", 0.0), tried.get("interrupts", {})
    what, share = _busiest(tried, "threads")
    is_shared = tried.get("decode_processes", {}).get("nvdec", 0) > 0  # its cameras are threads of one Python
    python, python_share = _busiest(tried, "processes", (*_PYTHON, "decode process") if is_shared else _PYTHON)
    so = "the limit" if is_most else "full"
    reasons = [
        (decoders > 0, f"the driver's decoders are the limit: {decoders} at once"),
        (nvdec >= FULL_NVDEC, f"NVDEC is {so}"),
        (bool(cores) and machine >= FULL_CORES * cores, f"the CPU's cores are {so}"),
        (_is_interrupted_full(interrupts), "the one core that has all of the card's interrupts is full"),
        (card.get("sm", 0.0) >= FULL_SM, f"the card's SMs are {so}"),
        (
            engine.get("busy", 0.0) >= FULL_ENGINE,
            f"the model's {engine.get('instances', 0):.0f} instances are {so}",
        ),
        (share >= FULL_THREAD, f"one thread is {so} ({what})"),
        (python_share >= FULL_PYTHON, f"one Python process is full ({python}), whose threads take turns"),
    ]
    full = [words for is_full, words in reasons if is_full]
    waits = ": an answer's way is too long, or something waits" if tried.get("complaint") else ""
    why = " and ".join(full) or f"nothing that was read is full{waits}"
    why += "" if is_most else ", and more was not tried"
    figures = [f"{machine:.1f} of {cores} cores" if cores else f"{machine:.1f} cores"]
    if engine:
        figures = [f"the model's {engine['instances']:.0f} instances {percent(engine['busy'])}", *figures]
    if card:
        figures = [f"NVDEC {percent(nvdec)}", f"SMs {percent(card.get('sm', 0.0))}", *figures]
        if "pcie_to_host_mb_s" in card:
            both = f"{card.get('pcie_to_card_mb_s', 0.0):,.0f} and {card['pcie_to_host_mb_s']:,.0f} MB/s"
            figures.append(f"PCIe to and from the card {both}")
    if interrupts:
        others = percent(interrupts["others_busy"])
        figures.append(
            f"core {interrupts['core']}, to which the card's {interrupts['per_s']:,.0f} interrupts/s go, "
            f"{percent(interrupts['busy'])} busy, the others {others}"
        )
    figures.append(f"the busiest thread {percent(share)} of a core, Python process {percent(python_share)}")
    return f"{why} ({'; '.join(figures)})."


def _is_interrupted_full(interrupts: Mapping[str, float]) -> bool:
    """And it is that core, not all of them."""
    return interrupts.get("busy", 0.0) >= FULL_INTERRUPTED and interrupts.get("others_busy", 1.0) < FULL_CORES


def _busiest(tried: Mapping[str, Any], group: str, kinds: tuple[str, ...] = ("",)) -> tuple[str, float]:
    """(who, cores) of those whose name begins so."""
    found = [(str(what), float(cores)) for what, cores, *_ in tried.get(group, ()) if str(what).startswith(kinds)]
    return found[0] if found else ("none", 0.0)
