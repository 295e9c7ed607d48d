"""Figures of the GPU bench, point by point, and the ratios that targets use."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.report import BenchSpread, ratio_row, spread
from loadtest.bench.wire import BadAnswer

Key = Mapping[str, str | int]
RAW_AND_SERVED = "raw and served"
CHART_ENDINGS = {"chart": "", "plain-chart": "_plain"}  # by part
_BATCHING = (  # mode of the chart, measure, text
    ("mps+batching", "batching_over_mps", "batching with MPS"),
    ("mps+shared", "shared_over_mps", "batching with MPS and one process that runs the program"),
)
_GROUPS = {"raw": RAW_AND_SERVED, "served": RAW_AND_SERVED, "jpeg rate": "jpeg"}
_AGREEMENTS = {
    "top1": "same top class",
    "iou_p01": "1st percentile of the boxes' IoU",
    "box_share": "share of boxes with an IoU of 0.98",
    "likeness_min": "least cosine of vectors",
}
SAME = ("machine", "gpu versions", "slo_p99_ms")  # conditions that two runs in one file must share


@dataclass(frozen=True, slots=True)
class PointRun:
    """One run. part: of the bench. key: what was measured (mode, clients). figures: by name, the unit in it."""

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


@dataclass
class PointLedger:
    """Everything of one run; written after each round, so that a run that is cut leaves its results.

    model: of the runs that are added. facts: what is not a figure. failures: "PART: why".
    """

    path: Path
    conditions: dict[str, str]
    model: str
    runs: list[PointRun] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _earlier: Mapping[str, Any] | None = None

    def take_over(self) -> None:
        """Keeps the file's parts that are not measured now. Raises BadAnswer for another file or other conditions."""
        try:
            content = json.loads(self.path.read_text())
            before, _ = content["conditions"], (content["facts"], runs_of(content))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadAnswer(f"{self.path} cannot be added to, it is no file of this bench: {error!r}") from error
        for name in SAME:
            if before.get(name) != self.conditions.get(name):
                was, now = before.get(name), self.conditions.get(name)
                raise BadAnswer(f"{self.path} is of {name} {was!r} and this run of {now!r}; write another file")
        self._earlier = content

    def add(self, part: str, number: int, key: Key, figures: Mapping[str, float], model: str = "") -> None:
        """Adds a run; figures that are not finite are left out. model: the ledger's own by default."""
        finite = {name: round(value, 6) for name, value in figures.items() if math.isfinite(value)}
        self.runs.append(PointRun(part, number, dict(key), finite, model or self.model))

    def save(self) -> None:
        """The file, whole or as it was."""
        conditions, facts, runs, new = dict(self.conditions), dict(self.facts), self.runs, set(map(group_of, self.runs))
        failures = list(self.failures)
        if earlier := self._earlier:
            kept = [run for run in runs_of(earlier) if group_of(run) not in new]
            facts = _facts_of(earlier["facts"], facts, set(map(group_of, kept)), new)
            runs = kept + runs
            tried = new | {part_of(why) for why in failures}
            failures = [why for why in earlier["facts"].get("failures", []) if part_of(why) not in tried] + failures
            if kept:
                was = earlier["conditions"]
                conditions |= {name: f"{was[name]}; {conditions[name]}" for name in ("command", "at")}
        content = {
            "conditions": conditions,
            "model": self.model,
            "results": results_of(runs),
            "facts": facts | {"failures": failures},
            "laps": [asdict(run) for run in runs],  # plain-english: ok
        }
        staged = self.path.with_suffix(".part")
        staged.write_text(json.dumps(content, indent=1) + "\n")
        staged.replace(self.path)


def group_of(run: PointRun) -> str:
    """The part of the bench that a run belongs to: raw and served are compared with each other."""
    return _GROUPS.get(run.part, run.part)


def _facts_of(
    earlier: Mapping[str, Any], facts: Mapping[str, Any], kept: Collection[str], new: Collection[str]
) -> dict[str, Any]:
    """Facts of both runs: of each part those of the run whose figures are kept. A fact's name begins with its part."""
    of_others = {name: value for name, value in earlier.items() if not name.startswith(tuple(new))}
    return of_others | {name: value for name, value in facts.items() if not name.startswith(tuple(kept))}


def part_of(failure: str) -> str:
    """The part of the bench that a failure names."""
    return failure.partition(":")[0]


def runs_of(content: Mapping[str, Any]) -> list[PointRun]:
    """Of a ledger's file. Raises KeyError."""
    rows: list[dict[str, Any]] = content["laps"]  # plain-english: ok
    return [
        PointRun(row["part"], row["round"], row["key"], row["figures"], row.get("model") or content["model"])
        for row in rows
    ]


def rows_of(runs: Iterable[PointRun]) -> list[PointRow]:
    """A row for each key, in the order of their first runs, with the figures that all its runs have."""
    grouped: dict[tuple[str, tuple[tuple[str, str | int], ...]], list[PointRun]] = {}
    for run in runs:
        grouped.setdefault((run.part, tuple(sorted(run.key.items()))), []).append(run)
    rows = []
    for same in grouped.values():
        first = same[0]
        names = [name for name in first.figures if all(name in run.figures for run in same)]
        figures = {name: spread([run.figures[name] for run in same]) for name in names}
        rows.append(PointRow(first.part, first.key, len(same), figures, first.model))
    return rows


def results_of(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """What stands under "results": a row a point, then the ratios that targets use."""
    points = [
        {"kind": row.part, "model": row.model, **row.key, "rounds": row.rounds}
        | {name: asdict(figure) for name, figure in row.figures.items()}
        for row in rows_of(runs)
    ]
    return points + ratios_of(runs)


def ratios_of(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """Rows of the ratios that the runs allow; a ratio is of two runs of the same round."""
    charts = [row for part, ending in CHART_ENDINGS.items() for row in _chart_ratios(runs, part, ending)]
    return [*charts, *_raw_share(runs), *_form_ratios(runs), *_jpeg_rate(runs), *_agreements(runs), *_card_by_cpu(runs)]


def _card_by_cpu(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """For each model the rate of /image on the card by that on the CPU."""
    found: list[dict[str, Any]] = []
    images = [run for run in runs if run.part == "image"]
    for model in dict.fromkeys(run.model for run in images):
        rates = {(run.round, run.key["on"]): run.figures["rate"] for run in images if run.model == model}
        pairs = [(rate, rates.get((number, "cpu"))) for (number, on), rate in sorted(rates.items()) if on == "gpu"]
        values = [one / other for one, other in pairs if other]
        found += ratio_row(model, "image_gpu_by_cpu", values, "/image with the model on the GPU by on the CPU")
    return found


def _agreements(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """For each engine and precision the lowest share of its models.

    A precision below FP32 counts for models that the product serves in it: it keeps FP32 for the others, which the
    sentence names.
    """
    found: list[dict[str, Any]] = []
    of_agreement = [run for run in runs if run.part == "agreement"]
    for by in dict.fromkeys(str(run.key["by"]) for run in of_agreement):
        every = [run for run in of_agreement if run.key["by"] == by]
        same = every if by.endswith("FP32") else [run for run in every if run.figures.get("served", 1.0)]
        refused = ", ".join(run.model for run in every if run not in same)
        word = by.lower().replace(" ", "_")
        for figure, what in _AGREEMENTS.items():
            values = sorted((run.figures[figure], run.model) for run in same if figure in run.figures)
            of = f"{what}, {by} by the CPU in FP32, lowest of {len(values)} models"
            of += f"; not served in it: {refused}" if refused else ""
            found += [row for value, model in values[:1] for row in ratio_row(model, f"{figure}_{word}", [value], of)]
    return found


def _chart_ratios(runs: Sequence[PointRun], part: str, ending: str) -> list[dict[str, Any]]:
    """ending: of the measures' names."""
    chart = [run for run in runs if run.part == part]
    clients = sorted({int(run.key["clients"]) for run in chart})
    if not clients:
        return []
    model, most = chart[0].model, clients[-1]
    by_count = {count: _by_round(chart, ("mps", count), ("none", count)) for count in clients}
    found: list[dict[str, Any]] = []
    for count, values in by_count.items():
        found += ratio_row(model, f"mps_ratio_{count}{ending}", values, f"MPS by no MPS at {count} clients")
        for mode, measure, what in _BATCHING:
            over = _by_round(chart, (mode, count), ("mps-unlimited", count))
            of = f"{what} by MPS alone without a thread limit, {count} clients"
            found += ratio_row(model, f"{measure}_{count}{ending}", over, of)
    best = max(clients, key=lambda count: _median(by_count[count]))
    found += ratio_row(model, f"mps_ratio{ending}", by_count[best], f"MPS by no MPS at its best, {best} clients")
    values = _by_round(chart, ("mps+batching", most), ("mps", most))
    of = f"batching with MPS by MPS alone with a thread limit, {most} clients"
    return found + ratio_row(model, f"batching_over_mps{ending}", values, of)


def _form_ratios(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """The fused program by the plain one in the same round, for each batch; of the fewest processes.

    Each is taken at its best number of callers and from the memory that is faster for it.
    """
    of_forms = [run for run in runs if run.part in ("raw", "served") and "memory" in run.key]
    fewest = min((int(run.key["processes"]) for run in of_forms if "form" in run.key), default=0)
    found: list[dict[str, Any]] = []
    for part, batch in dict.fromkeys((run.part, run.key["batch"]) for run in of_forms):
        key = {"processes": fewest, "batch": batch}
        same = [run for run in of_forms if run.part == part and key.items() <= run.key.items()]
        fused = _best([run for run in same if "form" not in run.key])
        plain = _best([run for run in same if run.key.get("form") == "plain"])
        if not fused or not plain:
            continue
        rates = {run.round: run.figures["rate"] for run in plain}
        values = [run.figures["rate"] / rates[run.round] for run in fused if run.round in rates]
        of = f"fused by plain, {part} ({key_text(fused[0].key)}; {key_text(plain[0].key)})"
        found += ratio_row(fused[0].model, f"fused_by_plain_{part}_{batch}", values, of)
    return found


def _best(runs: Sequence[PointRun]) -> list[PointRun]:
    """The runs of the key with the highest median rate; none without rates."""
    rows = [row for row in rows_of(runs) if "rate" in row.figures]
    if not rows:
        return []
    best = max(rows, key=lambda row: row.figures["rate"].median).key
    return [run for run in runs if run.key == best]


def _raw_share(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """Each side of the fused program at its best over the rounds, whatever its batch, processes, memory and callers."""
    fused = [run for run in runs if "form" not in run.key]
    raw, served = (_best([run for run in fused if run.part == part]) for part in ("raw", "served"))
    if not raw or not served:
        return []
    rates = {run.round: run.figures["rate"] for run in raw}
    values = [run.figures["rate"] / rates[run.round] for run in served if run.round in rates]
    of = f"served ({key_text(served[0].key)}) by raw ({key_text(raw[0].key)})"
    return ratio_row(raw[0].model, "raw_share", values, of)


def _jpeg_rate(runs: Sequence[PointRun]) -> list[dict[str, Any]]:
    """Of the decoder that sustains more."""
    by_way: dict[str, list[PointRun]] = {}
    for run in runs:
        if run.part == "jpeg" and "held_per_s" in run.figures:
            by_way.setdefault(str(run.key["decoded_by"]), []).append(run)
    if not by_way:
        return []
    rates = {way: [run.figures["held_per_s"] for run in found] for way, found in by_way.items()}
    best = max(rates, key=lambda way: _median(rates[way]))
    of = f"pictures/s over HTTP within the SLO, decoded by the {best}"
    return ratio_row(by_way[best][0].model, "knee_per_s", rates[best], of)


def key_text(key: Key) -> str:
    """ "processes 8, batch 64, memory cuda"."""
    return ", ".join(f"{name} {value}" for name, value in key.items())


def _by_round(chart: Sequence[PointRun], over: tuple[str, int], under: tuple[str, int]) -> list[float]:
    rates = {(run.round, run.key["mode"], run.key["clients"]): run.figures["rate"] for run in chart}
    rounds = sorted({run.round for run in chart})
    pairs = [(rates.get((number, *over)), rates.get((number, *under))) for number in rounds]
    return [one / other for one, other in pairs if one and other]


def _median(figures: Sequence[float]) -> float:
    return spread(figures).median if figures else 0.0
