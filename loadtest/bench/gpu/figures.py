"""Figures of the GPU bench, point by point, and what limited each."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.report import BenchSpread, spread
from loadtest.bench.wire import BadAnswer
from penstock_load.report.document import percent, plain_number

Key = Mapping[str, str | int]
RAW_AND_SERVED, FAULTS = "raw and served", "faults"
_GROUPS = {"raw": RAW_AND_SERVED, "served": RAW_AND_SERVED, "jpeg rate": "jpeg"}
SAME = ("machine", "gpu versions", "slo_p99_ms")  # conditions that two runs in one file have in common


@dataclass(frozen=True, slots=True)
class PointRun:
    """One stretch. part: of the bench. key: what was measured (mode, clients). figures: by name, the unit in it."""

    part: str
    round: int
    key: Key
    figures: Mapping[str, float]
    model: str = ""


@dataclass(frozen=True, slots=True)
class PointRow:
    """The runs of one key. figures: over the rounds."""

    part: str
    key: Key
    rounds: int
    figures: Mapping[str, BenchSpread]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Before:
    """What a file had of an earlier run. Its failures are not among the facts."""

    conditions: Mapping[str, str]
    runs: Sequence[PointRun]
    faults: Sequence[dict[str, Any]]
    facts: Mapping[str, Any]
    failures: Sequence[str]


@dataclass
class PointLedger:
    """Everything of one run; written after each step, so that a run that is cut still tells what it had.

    model: of the runs that are added now. facts: what is not a figure, the part's name first: MPS clients seen, how
    long loading took. failures: "PART: why". before: of an earlier run; each of its parts stands until it is measured
    anew. tried: parts that were begun.
    """

    path: Path
    conditions: dict[str, str]
    model: str
    runs: list[PointRun] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    before: Before | None = None
    tried: set[str] = field(default_factory=set)

    def take_over(self) -> None:
        """What its file has stays beside what comes now. Raises BadAnswer for another file, or of other conditions."""
        try:
            content = json.loads(self.path.read_text())
            before = Before(content["conditions"], runs_of(content), faults_of(content), *_facts_of(content))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadAnswer(f"{self.path} cannot be added to, it is no file of this bench: {error!r}") from error
        for name in SAME:
            if before.conditions.get(name) != self.conditions.get(name):
                was, now = before.conditions.get(name), self.conditions.get(name)
                raise BadAnswer(f"{self.path} is of {name} {was!r} and this run of {now!r}; write another file")
        self.before = before

    def add(self, part: str, number: int, key: Key, figures: Mapping[str, float], model: str = "") -> None:
        """Adds a run; figures that are no number are left out. model: the ledger's own by default."""
        finite = {name: round(value, 6) for name, value in figures.items() if math.isfinite(value)}
        self.runs.append(PointRun(part, number, dict(key), finite, model or self.model))

    def save(self) -> None:
        """The file, whole or as it was."""
        content = self._content()
        staged = self.path.with_suffix(".part")
        staged.write_text(json.dumps(content, indent=1) + "\n")
        staged.replace(self.path)

    def _content(self) -> dict[str, Any]:
        new = {group_of(run.part) for run in self.runs} | ({FAULTS} if self.faults else set())
        before = self.before or Before({}, (), (), {}, ())
        kept = [run for run in before.runs if group_of(run.part) not in new]
        kept_faults = [] if FAULTS in new else list(before.faults)
        runs, faults = kept + self.runs, kept_faults + self.faults
        conditions = dict(self.conditions)
        if kept or kept_faults:
            conditions |= {name: f"{before.conditions[name]}; {self.conditions[name]}" for name in ("command", "at")}
        facts = {name: fact for name, fact in before.facts.items() if not name.startswith(tuple(new))} | self.facts
        failures = [why for why in before.failures if why.partition(":")[0] not in new | self.tried] + self.failures
        return {
            "conditions": conditions,
            "model": self.model,
            "results": results_of(runs) + [{"kind": "fault", "model": self.model} | fault for fault in faults],
            "facts": facts | {"failures": failures},
            "laps": [asdict(run) for run in runs],  # plain-english: ok
        }


def group_of(part: str) -> str:
    """The part of the bench that a run belongs to: raw and served are compared with each other."""
    return _GROUPS.get(part, part)


def _facts_of(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    facts = dict(content["facts"])
    return facts, list(facts.pop("failures", []))


def runs_of(content: Mapping[str, Any]) -> list[PointRun]:
    """Of a ledger's file. Raises KeyError."""
    rows: list[dict[str, Any]] = content["laps"]  # plain-english: ok
    return [
        PointRun(row["part"], row["round"], row["key"], row["figures"], row.get("model") or content["model"])
        for row in rows
    ]


def faults_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a ledger's file. Raises KeyError."""
    return [row for row in content["results"] if row["kind"] == "fault"]


def rows_of(runs: Iterable[PointRun]) -> list[PointRow]:
    """A row for each key, in the order of their first runs."""
    grouped: dict[tuple[str, tuple[tuple[str, str | int], ...]], list[PointRun]] = {}
    for run in runs:
        grouped.setdefault((run.part, tuple(sorted(run.key.items()))), []).append(run)
    return [_row(same) for same in grouped.values()]


def _row(runs: Sequence[PointRun]) -> PointRow:
    names = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    figures = {name: spread([run.figures[name] for run in runs]) for name in names}
    return PointRow(runs[0].part, runs[0].key, len(runs), figures, runs[0].model)


def results_of(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """What stands under "results": a row a point, then the ratios that targets speak of."""
    points = [
        {"kind": row.part, "model": row.model, **row.key, "rounds": row.rounds}
        | {name: asdict(figure) for name, figure in row.figures.items()}
        for row in rows_of(runs)
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
        for ratio in ratios_of(runs)
        if ratio.values
    ]
    return points + ratios


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio that targets use. of: what by what. values: of each round; a ratio is of two runs of the same round."""

    measure: str
    of: str
    values: list[float]
    model: str


def ratios_of(runs: Sequence[PointRun]) -> list[Ratio]:
    """Those that the runs allow."""
    chart = _chart_ratios([run for run in runs if run.part == "chart"])
    return [*chart, *_over_whole(runs), *_raw_share(runs), *_jpeg_rate(runs)]


def _chart_ratios(chart: Sequence[PointRun]) -> list[Ratio]:
    clients = sorted({int(run.key["clients"]) for run in chart})
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


def _over_whole(runs: Sequence[PointRun]) -> list[Ratio]:
    """Batching by MPS as it is without a limit of threads: at the most clients that both have."""
    found = [run for run in runs if run.part in ("chart", "whole")]
    batching, alone = (
        {int(run.key["clients"]) for run in found if run.key["mode"] == mode} for mode in ("batching", "mps-whole")
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


def _raw_share(runs: Sequence[PointRun]) -> list[Ratio]:
    """Each side as it is best over the rounds, whatever its batch, processes and memory."""
    raw, served = ([run for run in runs if run.part == part] for part in ("raw", "served"))
    if not raw or not served:
        return []
    best_raw, best_served = _best(raw), _best(served)
    rates = {run.round: run.figures["rate"] for run in raw if run.key == best_raw}
    values = [run.figures["rate"] / rates[run.round] for run in served if run.key == best_served and run.round in rates]
    return [
        Ratio("raw_share", f"served ({ratio_text(best_served)}) by raw ({ratio_text(best_raw)})", values, raw[0].model)
    ]


def _jpeg_rate(runs: Sequence[PointRun]) -> list[Ratio]:
    """Of the way to decode that holds more."""
    by_way: dict[str, list[PointRun]] = {}
    for run in runs:
        if run.part == "jpeg" and "held_per_s" in run.figures:
            by_way.setdefault(str(run.key["decoded_by"]), []).append(run)
    ways = [
        Ratio("knee_per_s", f"pictures/s over HTTP within the SLO, decoded by the {way}",
              [run.figures["held_per_s"] for run in found], found[0].model)
        for way, found in by_way.items()
    ]  # fmt: skip
    return [max(ways, key=lambda one: _median(one.values))] if ways else []


def ratio_text(key: Key) -> str:
    """ "processes 8, batch 64, memory cuda"."""
    return ", ".join(f"{name} {value}" for name, value in key.items())


def _best(runs: Sequence[PointRun]) -> Key:
    return max(rows_of(runs), key=lambda row: row.figures["rate"].median).key


def _by_round(chart: Sequence[PointRun], over: tuple[str, int], under: tuple[str, int]) -> list[float]:
    rates = {(run.round, run.key["mode"], run.key["clients"]): run.figures["rate"] for run in chart}
    rounds = sorted({run.round for run in chart})
    pairs = [(rates.get((number, *over)), rates.get((number, *under))) for number in rounds]
    return [one / other for one, other in pairs if one and other]


def _median(figures: Sequence[float]) -> float:
    return spread(figures).median if figures else 0.0


FULL_SM, FULL_CORES, FULL_MEMORY = 0.9, 0.9, 0.8


def limit_text(row: PointRow, cores: int) -> str:
    """One sentence. cores: of the machine; 0 where that is not known."""
    middle = {name: spread.median for name, spread in row.figures.items()}
    busy, sm, clients = middle.get("machine_cores", 0.0), middle.get("sm_activity"), int(row.key["clients"])
    details = [f"{plain_number(busy)} of {cores} cores busy"] if cores else []
    if sm is not None:
        tensor, occupancy = (percent(middle.get(name, 0.0)) for name in ("tensor_activity", "sm_occupancy"))
        details.insert(0, f"SMs {percent(sm)} active, {occupancy} occupied, tensor cores {tensor}")
    if middle.get("memory_bandwidth_activity", 0.0) >= FULL_MEMORY:
        why = "the card's memory bandwidth is the limit"
    elif sm is not None and sm >= FULL_SM:
        why = "the card's SMs hold work nearly all the time, in kernels too small to fill them"
    elif cores and busy >= FULL_CORES * cores:
        why = "the CPU is the limit: copies, Triton and the models' Python, and the load generator, share its cores"
    elif "mps" not in str(row.key["mode"]) and clients > 1:
        why = "the processes take turns on the card, one context at a time, and none of them fills it"
    else:
        each = plain_number(middle.get("p50_ms", 0.0))
        why = f"neither card nor cores are full: an answer takes {each} ms, by way of Triton and the model's process"
    return f"{why} ({'; '.join(details)})." if details else f"{why}."
