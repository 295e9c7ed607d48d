"""What the bench measures, lap by lap, and what becomes of it: a row a point, ratios within a round. Pure but save."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.report import Spread, spread
from loadtest.bench.wire import BadAnswer

Key = Mapping[str, str | int]
RAW_AND_SERVED, FAULTS = "raw and served", "faults"
_GROUPS = {"raw": RAW_AND_SERVED, "served": RAW_AND_SERVED, "jpeg rate": "jpeg"}
SAME = ("machine", "gpu versions", "slo_p99_ms")  # conditions that two runs in one file have in common


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


@dataclass(frozen=True, slots=True)
class Before:
    """What a file had of an earlier run. Its failures are not among the facts."""

    conditions: Mapping[str, str]
    laps: Sequence[Lap]
    faults: Sequence[dict[str, Any]]
    facts: Mapping[str, Any]
    failures: Sequence[str]


@dataclass
class Ledger:
    """Everything of one run; written after each step, so that a run that is cut still tells what it had.

    model: of the laps that are added now. facts: what is not a figure, the part's name first: MPS clients seen, how
    long loading took. failures: "PART: why". before: of an earlier run; each of its parts stands until it is measured
    anew. tried: parts that were begun.
    """

    path: Path
    conditions: dict[str, str]
    model: str
    laps: list[Lap] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    before: Before | None = None
    tried: set[str] = field(default_factory=set)

    def take_over(self) -> None:
        """What its file has stays beside what comes now. Raises BadAnswer for another file, or of other conditions."""
        try:
            told = json.loads(self.path.read_text())
            before = Before(told["conditions"], laps_of(told), faults_of(told), *_facts_of(told))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadAnswer(f"{self.path} cannot be added to, it is no file of this bench: {error!r}") from error
        for name in SAME:
            if before.conditions.get(name) != self.conditions.get(name):
                was, now = before.conditions.get(name), self.conditions.get(name)
                raise BadAnswer(f"{self.path} is of {name} {was!r} and this run of {now!r}; write another file")
        self.before = before

    def add(self, part: str, number: int, key: Key, figures: Mapping[str, float], model: str = "") -> None:
        """A lap; figures that are no number are left out. model: the ledger's own by default."""
        told = {name: round(value, 6) for name, value in figures.items() if math.isfinite(value)}
        self.laps.append(Lap(part, number, dict(key), told, model or self.model))

    def save(self) -> None:
        """The file, whole or as it was."""
        content = self._content()
        staged = self.path.with_suffix(".part")
        staged.write_text(json.dumps(content, indent=1) + "\n")
        staged.replace(self.path)

    def _content(self) -> dict[str, Any]:
        new = {group_of(lap.part) for lap in self.laps} | ({FAULTS} if self.faults else set())
        before = self.before or Before({}, (), (), {}, ())
        kept = [lap for lap in before.laps if group_of(lap.part) not in new]
        kept_faults = [] if FAULTS in new else list(before.faults)
        laps, faults = kept + self.laps, kept_faults + self.faults
        conditions = dict(self.conditions)
        if kept or kept_faults:
            conditions |= {name: f"{before.conditions[name]}; {self.conditions[name]}" for name in ("command", "at")}
        facts = {name: fact for name, fact in before.facts.items() if not name.startswith(tuple(new))} | self.facts
        failures = [why for why in before.failures if why.partition(":")[0] not in new | self.tried] + self.failures
        return {
            "conditions": conditions,
            "model": self.model,
            "results": results_of(laps) + [{"kind": "fault", "model": self.model} | fault for fault in faults],
            "facts": facts | {"failures": failures},
            "laps": [asdict(lap) for lap in laps],
        }


def group_of(part: str) -> str:
    """The part of the bench that a lap's belongs to: raw and served are held against one another."""
    return _GROUPS.get(part, part)


def _facts_of(told: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    facts = dict(told["facts"])
    return facts, list(facts.pop("failures", []))


def laps_of(content: Mapping[str, Any]) -> list[Lap]:
    """Of a ledger's file. Raises KeyError."""
    told: list[dict[str, Any]] = content["laps"]
    return [
        Lap(lap["part"], lap["round"], lap["key"], lap["figures"], lap.get("model") or content["model"]) for lap in told
    ]


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
            "model": ratio.model,
            "measure": ratio.measure,
            "of": ratio.of,
            "rounds": len(ratio.values),
            "value": asdict(spread(ratio.values)),
        }
        for ratio in ratios_of(laps)
        if ratio.values
    ]
    return points + ratios


@dataclass(frozen=True, slots=True)
class Ratio:
    """What targets speak of. of: what by what. values: of each round; a ratio is of two laps of the same one."""

    measure: str
    of: str
    values: list[float]
    model: str


def ratios_of(laps: Sequence[Lap]) -> list[Ratio]:
    """Those that the laps allow."""
    chart = _chart_ratios([lap for lap in laps if lap.part == "chart"])
    return [*chart, *_over_whole(laps), *_raw_share(laps), *_jpeg_rate(laps)]


def _chart_ratios(chart: Sequence[Lap]) -> list[Ratio]:
    clients = sorted({int(lap.key["clients"]) for lap in chart})
    if not clients:
        return []
    model = chart[0].model
    by_count = {count: _by_round(chart, ("mps", count), ("none", count)) for count in clients}
    found = [
        Ratio(f"mps_ratio_{count}", f"MPS by no MPS at {count} clients", values, model)
        for count, values in by_count.items()
    ]
    best = max(clients, key=lambda count: _median(by_count[count]))
    found.append(Ratio("mps_ratio", f"MPS by no MPS at its best, {best} clients", by_count[best], model))
    most = clients[-1]
    values = _by_round(chart, ("mps+batching", most), ("mps", most))
    return [*found, Ratio("batching_over_mps", f"batching with MPS by MPS alone at {most} clients", values, model)]


def _over_whole(laps: Sequence[Lap]) -> list[Ratio]:
    """Batching by MPS as it is without a limit of threads: at the most clients that both have."""
    found = [lap for lap in laps if lap.part in ("chart", "whole")]
    batching, alone = (
        {int(lap.key["clients"]) for lap in found if lap.key["mode"] == mode} for mode in ("batching", "mps-whole")
    )
    if not batching & alone:
        return []
    most = max(batching & alone)
    words = f"by MPS alone without a limit of threads at {most} clients, measured after it"
    return [
        Ratio(measure, f"{batched} {words}", _by_round(found, (mode, most), ("mps-whole", most)), found[0].model)
        for measure, mode, batched in (
            ("batching_over_whole_mps", "batching", "batching without MPS"),
            ("mps_batching_over_whole_mps", "mps+batching", "batching with MPS"),
        )
    ]


def _raw_share(laps: Sequence[Lap]) -> list[Ratio]:
    """Each side as it is best over the rounds, whatever its batch, processes and memory."""
    raw, served = ([lap for lap in laps if lap.part == part] for part in ("raw", "served"))
    if not raw or not served:
        return []
    best_raw, best_served = _best(raw), _best(served)
    rates = {lap.round: lap.figures["rate"] for lap in raw if lap.key == best_raw}
    values = [lap.figures["rate"] / rates[lap.round] for lap in served if lap.key == best_served and lap.round in rates]
    return [Ratio("raw_share", f"served ({in_words(best_served)}) by raw ({in_words(best_raw)})", values, raw[0].model)]


def _jpeg_rate(laps: Sequence[Lap]) -> list[Ratio]:
    """Of the way to decode that holds more."""
    by_way: dict[str, list[Lap]] = {}
    for lap in laps:
        if lap.part == "jpeg" and "held_per_s" in lap.figures:
            by_way.setdefault(str(lap.key["decoded_by"]), []).append(lap)
    ways = [
        Ratio("knee_per_s", f"pictures/s over HTTP within the SLO, decoded by the {way}",
              [lap.figures["held_per_s"] for lap in found], found[0].model)
        for way, found in by_way.items()
    ]  # fmt: skip
    return [max(ways, key=lambda one: _median(one.values))] if ways else []


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
