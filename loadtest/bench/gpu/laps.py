"""What the bench measures, lap by lap, and what becomes of it: a row a point, ratios within a round. Pure but save."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.report import Spread, spread

Key = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Lap:
    """One stretch. part: of the bench. key: what was measured (mode, clients). figures: by name, the unit in it."""

    part: str
    round: int
    key: Key
    figures: Mapping[str, float]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The laps of one key. figures: over the rounds."""

    part: str
    key: Key
    rounds: int
    figures: Mapping[str, Spread]
    model: str = ""


@dataclass
class Ledger:
    """Everything of one run; written after each step, so that a run that is cut still tells what it had.

    model: of the laps that are added now. facts: what is not a figure: MPS clients seen, how long loading took, what
    failed.
    """

    path: Path
    conditions: dict[str, str]
    model: str
    laps: list[Lap] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def take_over(self, parts: Iterable[str]) -> None:
        """What its file has of other parts than these, beside what comes now. Raises OSError, ValueError, KeyError."""
        before = json.loads(self.path.read_text())
        again = tuple(parts)
        self.laps += [lap for lap in laps_of(before) if not lap.part.startswith(again)]
        self.faults += [] if "faults" in again else faults_of(before)
        self.facts |= {name: fact for name, fact in before["facts"].items() if not name.startswith(again)}
        for name in ("command", "at"):
            self.conditions[name] = f"{before['conditions'][name]}; {self.conditions[name]}"

    def add(self, part: str, number: int, key: Key, figures: Mapping[str, float], model: str = "") -> None:
        """A lap; figures that are no number are left out. model: the ledger's own by default."""
        told = {name: round(value, 6) for name, value in figures.items() if math.isfinite(value)}
        self.laps.append(Lap(part, number, dict(key), told, model or self.model))

    def save(self) -> None:
        """The file, whole or as it was."""
        body = {
            "conditions": self.conditions,
            "model": self.model,
            "results": results_of(self.laps) + [{"kind": "fault", "model": self.model} | f for f in self.faults],
            "facts": self.facts,
            "laps": [asdict(lap) for lap in self.laps],
        }
        staged = self.path.with_suffix(".part")
        staged.write_text(json.dumps(body, indent=1) + "\n")
        staged.replace(self.path)


def laps_of(content: Mapping[str, Any]) -> list[Lap]:
    """Of a ledger's file. Raises KeyError."""
    told: list[dict[str, Any]] = content["laps"]
    return [Lap(lap["part"], lap["round"], lap["key"], lap["figures"], lap.get("model", "")) for lap in told]


def faults_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a ledger's file. Raises KeyError."""
    return [row for row in content["results"] if row["kind"] == "fault"]


def rows_of(laps: Iterable[Lap]) -> list[Row]:
    """A row a key, in the order of their first laps."""
    grouped: dict[tuple[str, tuple[tuple[str, str | int], ...]], list[Lap]] = {}
    for lap in laps:
        grouped.setdefault((lap.part, tuple(sorted(lap.key.items()))), []).append(lap)
    return [_row(same) for same in grouped.values()]


def _row(laps: Sequence[Lap]) -> Row:
    names = [name for name in laps[0].figures if all(name in lap.figures for lap in laps)]
    figures = {name: spread([lap.figures[name] for lap in laps]) for name in names}
    return Row(laps[0].part, laps[0].key, len(laps), figures, laps[0].model)


def results_of(laps: Sequence[Lap]) -> list[dict[str, Any]]:
    """What stands under "results": a row a point, then the ratios that targets speak of."""
    points = [
        {"kind": row.part, "model": row.model, **row.key, "rounds": row.rounds}
        | {name: asdict(figure) for name, figure in row.figures.items()}
        for row in rows_of(laps)
    ]
    ratios = [
        {
            "kind": "ratio",
            "model": _model_of(name, laps),
            "measure": name,
            "of": words,
            "rounds": len(found),
            "value": asdict(spread(found)),
        }
        for name, words, found in ratios_of(laps)
        if found
    ]
    return points + ratios


def _model_of(measure: str, laps: Sequence[Lap]) -> str:
    part = "served" if measure == "raw_share" else "jpeg" if measure == "knee_per_s" else "chart"
    return next(lap.model for lap in laps if lap.part == part)


def ratios_of(laps: Sequence[Lap]) -> list[tuple[str, str, list[float]]]:
    """(measure, of what, the ratio of each round). A ratio is of two laps of the same round."""
    chart = [lap for lap in laps if lap.part == "chart"]
    clients = sorted({int(lap.key["clients"]) for lap in chart})
    found = [
        (f"mps_ratio_{count}", f"MPS by no MPS at {count} clients", _by_round(chart, ("mps", count), ("none", count)))
        for count in clients
    ]
    if clients:
        best = [(count, _by_round(chart, ("mps", count), ("none", count))) for count in clients]
        count, ratios = max(best, key=lambda one: _median(one[1]))
        found.append(("mps_ratio", f"MPS by no MPS at its best, {count} clients", ratios))
        most = clients[-1]
        ratios = _by_round(chart, ("mps+batching", most), ("mps", most))
        found.append(("batching_over_mps", f"batching with MPS by MPS alone at {most} clients", ratios))
    raw = [lap for lap in laps if lap.part == "raw"]
    served = [lap for lap in laps if lap.part == "served"]
    if raw and served:
        found.append(_raw_share(raw, served))
    jpeg = [lap for lap in laps if lap.part == "jpeg" and "held_per_s" in lap.figures]
    ways: list[tuple[str, str, list[float]]] = []
    for way in dict.fromkeys(str(lap.key["decoded_by"]) for lap in jpeg):
        rates = [lap.figures["held_per_s"] for lap in jpeg if lap.key["decoded_by"] == way]
        ways.append(("knee_per_s", f"pictures/s over HTTP within the SLO, decoded by the {way}", rates))
    if ways:
        found.append(max(ways, key=lambda one: _median(one[2])))
    return found


def _raw_share(raw: Sequence[Lap], served: Sequence[Lap]) -> tuple[str, str, list[float]]:
    """Each side as it is best over the rounds, whatever its batch, processes and memory."""
    best_raw, best_served = _best(raw), _best(served)
    rates = {lap.round: lap.figures["rate"] for lap in raw if lap.key == best_raw}
    ratios = [lap.figures["rate"] / rates[lap.round] for lap in served if lap.key == best_served and lap.round in rates]
    return "raw_share", f"served ({in_words(best_served)}) by raw ({in_words(best_raw)})", ratios


def in_words(key: Key) -> str:
    """ "processes 8, batch 64, memory cuda"."""
    return ", ".join(f"{name} {value}" for name, value in key.items())


def _best(laps: Sequence[Lap]) -> Key:
    return max(rows_of(laps), key=lambda row: row.figures["rate"].median).key


def _by_round(chart: Sequence[Lap], over: tuple[str, int], under: tuple[str, int]) -> list[float]:
    rates = {(lap.round, lap.key["mode"], lap.key["clients"]): lap.figures["rate"] for lap in chart}
    rounds = sorted({lap.round for lap in chart})
    pairs = [(rates.get((number, *over)), rates.get((number, *under))) for number in rounds]
    return [one / other for one, other in pairs if one and other]


def _median(figures: Sequence[float]) -> float:
    return spread(figures).median if figures else 0.0
