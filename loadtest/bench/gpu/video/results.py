"""From the pieces of a folder to figures with their spread, and what targets speak of. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.verdict import below
from loadtest.bench.report import Spread, spread

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


def held_try(body: Body) -> Body | None:
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


def figures(bodies: Iterable[Body], *way: str) -> Spread | None:
    """Of all bodies' found, down that way; None where none has it."""
    values = []
    for body in bodies:
        value: Any = body["found"]
        for name in way:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            values.append(float(value))
    return spread(values) if values else None
