"""Results of the GPU video bench: rows, what limited them, plots."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.bench.gpu.plots import PIXELS_PER_INCH
from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.verdict import below
from loadtest.bench.report import BenchSpread, spread
from penstock_load.report.canvas import canvas, log_latency, new_figure, slo_line, widen
from penstock_load.report.document import percent

Body = Mapping[str, Any]
SHARE_OF = "h264-720p"  # the camera that nvdec_share speaks of
PARTS_OF_CPU = {
    "decode processes": ("decode process",),
    "video programs": ("video program", "video helper"),
    "gateway": ("gateway",),
    "engine": ("triton", "model instance"),
}


def of_part(bodies: Iterable[Body], part: str, camera: str = "") -> list[Body]:
    """What was found, by round. camera: of that one alone."""
    return [one for one in bodies if one["part"] == part and camera in ("", one["camera"])]


def sustained_trial(body: Body) -> Body | None:
    """The window of the highest number held in a search."""
    held = [one for one in body["found"]["tries"] if not one["complaint"]]
    return max(held, key=lambda one: int(one["streams"])) if held else None


def missed_try(body: Body) -> Body | None:
    """The lowest number that was not held: its window, or what is said where the card had no decoder left."""
    missed = [one for one in body["found"]["tries"] if one["complaint"]]
    return min(missed, key=lambda one: int(one["streams"])) if missed else None


def decoders_limit(body: Body) -> int:
    """The decoders at which the card was full, where that kept more streams from being held; else 0."""
    found, missed = body["found"], missed_try(body)
    if missed is not None:
        return int(missed.get("full_at", 0))
    known = int(found.get("decoders", 0))  # by another search, or the command: no more were tried
    return known if known and found["held"] >= below(known) else 0


def cpu_by_part(tried: Mapping[str, Any]) -> dict[str, float]:
    """CPU ms a frame, by PARTS_OF_CPU; a part that was not there is left out."""
    spent: Mapping[str, float] = tried["cpu_ms_a_frame"]
    found = {part: [ms for kind, ms in spent.items() if kind.startswith(kinds)] for part, kinds in PARTS_OF_CPU.items()}
    return {part: sum(ms) for part, ms in found.items() if ms}


def shares_of_alone(bodies: Sequence[Body], camera: str) -> list[float]:
    """Of each round that has both: the held streams' frames by what NVDEC alone decoded."""
    found = []
    for body in of_part(bodies, "streams", camera):
        alone = float(body["found"].get("alone_per_s") or 0.0)
        if alone:
            found.append(float(body["found"]["held"]) * FPS / alone)
    return found


def servers(bodies: Sequence[Body]) -> float:
    """How many times what these cores decode the card holds; 0 where either is not there."""
    cpu = of_part(bodies, "cpu")
    card = [one for one in of_part(bodies, "streams", SHARE_OF) if one["found"].get("decoder") == "nvdec"]
    if not cpu or not card:
        return 0.0
    of_cpu = median(float(one["found"]["held"]) for one in cpu)
    return median(float(one["found"]["held"]) for one in card) / of_cpu if of_cpu else 0.0


def results_of(bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """What stands under "results": a row a camera and part, the ratios that targets speak of, then every piece."""
    rows: list[dict[str, Any]] = []
    for name, camera in CAMERAS.items():
        held = [float(one["found"]["held"]) for one in of_part(bodies, "streams", name)]
        rows += _ratio(bodies, camera.measure, held, f"{camera.words}, held in each round")
    shares = shares_of_alone(bodies, SHARE_OF)
    rows += _ratio(bodies, "nvdec_share", shares, f"{CAMERAS[SHARE_OF].words}, by NVDEC alone in the same round")
    rows += [{"kind": one["part"], "model": _model(bodies), **one} for one in bodies]
    return rows


def _ratio(bodies: Sequence[Body], measure: str, values: Sequence[float], of: str) -> list[dict[str, Any]]:
    if not values:
        return []
    row = {"kind": "ratio", "model": _model(bodies), "measure": measure, "of": of, "rounds": len(values)}
    return [row | {"value": asdict(spread(values))}]


def _model(bodies: Sequence[Body]) -> str:
    return str(bodies[0]["conditions"].get("model", "")).partition(" ")[0] if bodies else ""


def figures(bodies: Iterable[Body], *way: str) -> BenchSpread | None:
    """The spread of that value over all bodies' `found`; None if no body has it."""
    values = []
    for body in bodies:
        value: Any = body["found"]
        for name in way:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            values.append(float(value))
    return spread(values) if values else None


FULL_NVDEC, FULL_SM, FULL_ENGINE, FULL_CORES, FULL_THREAD, FULL_PYTHON = 0.95, 0.95, 0.95, 0.92, 0.85, 0.95
FULL_INTERRUPTED = 0.95  # of the core that the card's interrupts go to, where the others have time left
_PYTHON = ("video program", "gateway")


def cores_of(machine: str) -> int:
    """From "1 × NVIDIA H200, Intel Xeon, 16 cores"; 0 where it is not said."""
    found = re.search(r"(\d+) cores?$", machine)
    return int(found[1]) if found else 0


def decoders_text(full_at: int) -> str:
    """Why a card makes no more decoders, as a paragraph of the report."""
    return (
        f"The card was full at **{full_at} decoders**. A stream that NVDEC decodes holds a decoder of its own as long "
        "as it runs, however small its pictures are, and the card's driver makes only so many: each takes channels "
        "(queues by which programs hand work to the card), one for every video engine of the card, seven of an H200; "
        "the driver has about 2,048, and each process that uses the card takes some, too. So an H200 has at most 288 "
        "decoders, fewer beside other processes, however idle NVDEC, its memory and the cores are. One stream more "
        "finds no decoder, says so, and gives no frame."
    )


def stream_limit_text(tried: Mapping[str, Any], cores: int, decoders: int = 0, *, is_most: bool = True) -> str:
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
        (engine.get("busy", 0.0) >= FULL_ENGINE, f"the model's {engine.get('instances', 0):.0f} instances are {so}"),
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


COLORS = ("#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, which colour-blind people tell apart
NAME = "gpu-video.png"


def write_plot(folder: Path, bodies: Sequence[Body], bound_ms: float) -> str:
    """The file's name; empty where no number of streams was tried."""
    with canvas():
        figure = _figure(bodies, bound_ms)
        if figure is None:
            return ""
        FigureCanvasAgg(figure)
        figure.savefig(folder / NAME, dpi=PIXELS_PER_INCH, metadata={"Software": None})
    return NAME


def _figure(bodies: Sequence[Body], bound_ms: float) -> Figure | None:
    latencies = [float(one["p99_ms"]) for body in of_part(bodies, "streams") for one in _tries(body)]
    if not latencies:
        return None
    figure, (axes,) = new_figure(1, 4.2)
    for color, (name, camera) in zip(COLORS, CAMERAS.items(), strict=True):
        of_camera = of_part(bodies, "streams", name)
        for is_held in (True, False):
            dots = [one for body in of_camera for one in _tries(body) if (not one["complaint"]) is is_held]
            if dots:
                words = f"{camera.words}: {'held' if is_held else 'missed'}"
                face = color if is_held else "none"
                counts, p99 = [one["streams"] for one in dots], [one["p99_ms"] for one in dots]
                axes.scatter(counts, p99, facecolors=face, edgecolors=color, label=words)
        alone = figures(of_camera, "alone_per_s")
        if alone and alone.median:
            axes.axvline(alone.median / FPS, color=color, linestyle="--", linewidth=1)
    if full_at := max((decoders_limit(body) for body in of_part(bodies, "streams")), default=0):
        axes.axvline(full_at, color="#555555", linestyle=":", label=f"the card makes no more decoders: {full_at}")
    axes.set_ylim(*widen(min(*latencies, bound_ms), max(*latencies, bound_ms)))
    axes.set_xlim(0)
    log_latency(axes)
    slo_line(axes, bound_ms)
    axes.set_xlabel("streams of 30 frames/s; dashed: what NVDEC alone decodes")
    axes.set_ylabel("p99 from capture to result, ms")
    axes.set_title("Every frame decoded, inferred, tracked")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def _tries(body: Body) -> list[Body]:
    """Those that had answers."""
    return [one for one in body["found"]["tries"] if one.get("p99_ms", 0.0) > 0]
