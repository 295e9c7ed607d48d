"""Compares two runs: ratios with 95 % confidence intervals, and whether the conditions are the same."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock_load.measure.bootstrap import Blocks, blocks_of, draw_weights, resampled_percentiles, resampled_ratio
from penstock_load.measure.ledger import Floats, Ledger, at_rank
from penstock_load.measure.measures import UNITS
from penstock_load.measure.run_folder import RunFolder
from penstock_load.results import Measurement, PhaseResult, Run, Side

OFFERED_TOLERANCE = 0.02
SECONDS_TOLERANCE = 0.05
TERMS: tuple[tuple[str, Callable[[Run], object]], ...] = (
    ("scenario", lambda run: run.scenario),
    ("models", lambda run: ", ".join(sorted(run.models)) or "none"),
    ("SLO", lambda run: f"{run.slo_p99_ms:g} ms"),
    ("payloads' seed", lambda run: run.seed),
    ("server's hardware", lambda run: run.server_hardware),
    ("generator's processor", lambda run: f"{run.machine.cpu}, {run.machine.cores} cores"),
    ("generator's GPUs", lambda run: ", ".join(run.machine.gpus) or "none"),
    ("generator's place", lambda run: "the server's machine" if run.is_local else "another machine"),
    ("judged phases", lambda run: ", ".join(sorted({phase.phase for phase in _judged(run)})) or "none"),
)


_FACTS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("commit", lambda run: run.commit),
    ("server", lambda run: run.server),
    ("target", lambda run: run.target_url),
    ("system", lambda run: run.machine.system),
)


def changes(a: Run, b: Run) -> tuple[str, ...]:
    """A sentence for each version, commit or address that differs; such a difference may be what is compared."""
    facts = [(name, of(a), of(b)) for name, of in _FACTS]
    versions_a, versions_b = dict(a.machine.versions), dict(b.machine.versions)
    facts += [(name, versions_a.get(name, ""), versions_b.get(name, "")) for name in {**versions_a, **versions_b}]
    return tuple(f"{name}: {old or 'unknown'} in A, {new or 'unknown'} in B" for name, old, new in facts if old != new)


def differences(a: Run, b: Run) -> tuple[str, ...]:
    """A sentence for each thing that makes the comparison unfair."""
    terms = [
        f"the {what} differs: {of(a)} in A, {of(b)} in B"
        if what not in ("models", "judged phases", "generator's GPUs")
        else f"the {what} differ: {of(a)} in A, {of(b)} in B"
        for what, of in TERMS
        if of(a) != of(b)
    ]
    complaints = [
        f"{name} cannot be relied on: {complaint}" for name, run in (("A", a), ("B", b)) for complaint in run.complaints
    ]
    return (*terms, *_phase_differences(a, b), *complaints)


def _phase_differences(a: Run, b: Run) -> list[str]:
    warnings = []
    for phase in sorted({it.phase for it in _judged(a)} & {it.phase for it in _judged(b)}):
        offered = [_median(run, phase, lambda it: it.offered_per_s) for run in (a, b)]
        seconds = [_median(run, phase, lambda it: it.seconds) for run in (a, b)]
        if _is_open_loop(a, phase) != _is_open_loop(b, phase):
            warnings.append(f"the phase {phase} was an open loop in one run and a closed one in the other")
        elif _is_open_loop(a, phase) and _differ(offered, OFFERED_TOLERANCE):
            rates = f"{offered[0]:.4g}/s in A and {offered[1]:.4g}/s in B"
            warnings.append(f"the phase {phase} was offered {rates}; --rate gives both the same")
        if _differ(seconds, SECONDS_TOLERANCE):
            warnings.append(f"the phase {phase} lasted {seconds[0]:.4g} s in A and {seconds[1]:.4g} s in B")
    return warnings


def _judged(run: Run) -> list[PhaseResult]:
    return [phase for phase in run.phases if phase.is_judged and phase.side is Side.TARGET]


def _is_open_loop(run: Run, name: str) -> bool:
    return any(phase.is_open_loop for phase in _judged(run) if phase.phase == name)


def _median(run: Run, name: str, of: Callable[[PhaseResult], float]) -> float:
    return statistics.median(of(phase) for phase in _judged(run) if phase.phase == name)


def _differ(pair: list[float], tolerance: float) -> bool:
    return abs(pair[0] - pair[1]) > tolerance * max(pair)


FEWEST_BLOCKS = 10
SEEDS = (1, 2)  # one for each run: the same runs give the same intervals
PER_MILLES = {"p50_ms": 500, "p95_ms": 950, "p99_ms": 990}
TITLES = {
    "ok_per_s": "rate",
    "capacity_per_s": "capacity",
    "p50_ms": "p50",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "error_share": "error share",
    "cpu_ms_per_ok": "CPU a right answer",
}


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of both runs. ratio: B's figure / A's; None if A's is 0.

    low, high: the 95 % confidence interval of the ratio; None if there are no records to draw it from.
    is_trusted: False where fewer than 10 seconds are behind it. sentence: all of it for a person.
    is_larger_than_spread: None if unknown: one round without records, or too few seconds.
    """

    measure: str
    unit: str
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None
    is_trusted: bool
    sentence: str
    is_larger_than_spread: bool | None = None


class RunComparison(msgspec.Struct, frozen=True):
    """Run A, run B, a row a measure that both have.

    warnings: what makes the comparison unfair. changes: versions, commit and addresses that differ.
    """

    a: str
    b: str
    rows: tuple[ComparedFigure, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Figure:
    value: float
    resampled: Floats
    blocks: int


def compare(a: RunFolder, b: RunFolder) -> RunComparison:
    """Run B against run A. Where either has no records, medians and spreads of the rounds are compared instead.

    RunFolderError where records cannot be read.
    """
    warnings = differences(a.run, b.run)
    if a.records_path is None or b.records_path is None:
        without = " and ".join(run.name for run in (a, b) if run.records_path is None)
        note = f"no confidence intervals: {without} has no records.jsonl, so medians of the rounds are compared"
        return RunComparison(a.name, b.name, _rows_of_rounds(a, b), (*warnings, note), changes(a.run, b.run))
    of_a, of_b = _figures(a, seed=SEEDS[0]), _figures(b, seed=SEEDS[1])
    rows = tuple(_row(name, of_a[name], of_b[name]) for name in TITLES if name in of_a and name in of_b)
    fewest = min((min(of_a[row.measure].blocks, of_b[row.measure].blocks) for row in rows), default=0)
    if fewest < FEWEST_BLOCKS:
        note = f"intervals come from as few as {fewest} seconds and are not to be trusted; run for longer"
        warnings = (*warnings, note)
    return RunComparison(a.name, b.name, rows, warnings, changes(a.run, b.run))


def _figures(folder: RunFolder, *, seed: int) -> dict[str, _Figure]:
    ledgers: dict[tuple[int, str], Ledger] = {}
    for record in folder.records():
        if record.side is Side.TARGET:
            ledgers.setdefault((record.round, record.phase), Ledger()).add((record,))

    def blocks(is_wanted: Callable[[PhaseResult], bool]) -> Blocks:
        phases = [phase for phase in folder.run.phases if phase.side is Side.TARGET and is_wanted(phase)]
        return blocks_of([(phase, ledgers.get((phase.round, phase.phase), Ledger())) for phase in phases])

    return {
        **_capacity_figure(blocks(lambda phase: phase.is_capacity), seed),
        **_judged_figures(blocks(lambda phase: phase.is_judged), seed),
    }


def _capacity_figure(blocks: Blocks, seed: int) -> dict[str, _Figure]:
    if not blocks.seconds.sum():
        return {}
    return {"capacity_per_s": _ratio_figure(blocks, draw_weights(blocks, seed), blocks.ok, blocks.seconds)}


def _judged_figures(blocks: Blocks, seed: int) -> dict[str, _Figure]:
    if not blocks.intended.sum():
        return {}
    weights = draw_weights(blocks, seed)
    found = {
        "ok_per_s": _ratio_figure(blocks, weights, blocks.ok, blocks.seconds),
        "error_share": _ratio_figure(blocks, weights, blocks.intended - blocks.ok, blocks.intended),
    }
    if blocks.latency_ms.size:
        ascending = np.sort(blocks.latency_ms)
        resampled = resampled_percentiles(weights, blocks, list(PER_MILLES.values()))
        for name, per_mille in PER_MILLES.items():
            found[name] = _Figure(at_rank(ascending, per_mille), resampled[per_mille], blocks.count)
    if blocks.cpu_ms is not None and blocks.ok.sum():
        found["cpu_ms_per_ok"] = _ratio_figure(blocks, weights, blocks.cpu_ms, blocks.ok)
    return found


def _ratio_figure(blocks: Blocks, weights: Floats, over: Floats, under: Floats) -> _Figure:
    return _Figure(float(over.sum() / under.sum()), resampled_ratio(weights, over, under), blocks.count)


def _row(name: str, a: _Figure, b: _Figure) -> ComparedFigure:
    is_trusted = min(a.blocks, b.blocks) >= FEWEST_BLOCKS
    low, high = _interval(a.resampled, b.resampled) if a.value else (None, None)
    ratio = b.value / a.value if a.value else None
    return ComparedFigure(
        measure=name,
        unit=UNITS[name],
        a=a.value,
        b=b.value,
        ratio=ratio,
        low=low,
        high=high,
        is_trusted=is_trusted,
        sentence=_sentence(TITLES[name], (a.value, b.value), ratio, low=low, high=high)
        + ("" if is_trusted else f" (of {min(a.blocks, b.blocks)} seconds only: not to be trusted)"),
        is_larger_than_spread=None if low is None or high is None or not is_trusted else not low <= 1 <= high,
    )


def _interval(a: Floats, b: Floats) -> tuple[float | None, float | None]:
    is_known = (a > 0) & np.isfinite(a) & np.isfinite(b)
    if is_known.sum() < a.size / 2:
        return None, None
    low, high = np.quantile(b[is_known] / a[is_known], [0.025, 0.975])
    return float(low), float(high)


def _sentence(
    title: str, values: tuple[float, float], ratio: float | None, *, low: float | None, high: float | None
) -> str:
    a, b = values
    if ratio is None:
        return f"{title}: 0 in both" if b == 0 else f"B's {title} is {b:.3g} where A's is 0"
    if low is None or high is None:
        return f"B's {title} is {b:.3g}, A's {a:.3g}; the interval is unknown"
    if low <= 1 <= high:
        return f"{title}: no significant difference: {_signed(low)} to {_signed(high)}"
    nearest, furthest = sorted((abs(low - 1), abs(high - 1)))
    return f"B's {title} is {_size(ratio)} ({_percent(nearest)} to {_percent(furthest)} %) {_direction(ratio)}"


def _size(ratio: float) -> str:
    return f"{_percent(abs(ratio - 1))} %"


def _direction(ratio: float) -> str:
    return "higher" if ratio > 1 else "lower"


def _signed(ratio: float) -> str:
    return f"{'-' if ratio < 1 else '+'}{_percent(abs(ratio - 1))} %"


def _percent(share: float) -> str:
    return f"{share * 100:.2g}" if share < 0.1 else f"{share * 100:.0f}"


def _rows_of_rounds(a: RunFolder, b: RunFolder) -> tuple[ComparedFigure, ...]:
    of_a = {it.measure: it for it in a.run.measurements}
    of_b = {it.measure: it for it in b.run.measurements}
    return tuple(_row_of_rounds(of_a[name], of_b[name]) for name in TITLES if name in of_a and name in of_b)


def _row_of_rounds(a: Measurement, b: Measurement) -> ComparedFigure:
    title, ratio = TITLES[a.measure], b.spread.median / a.spread.median if a.spread.median else None
    return ComparedFigure(
        measure=a.measure,
        unit=a.unit,
        a=a.spread.median,
        b=b.spread.median,
        ratio=ratio,
        low=None,
        high=None,
        is_trusted=False,
        sentence=_sentence_of_rounds(title, a, b, ratio),
        is_larger_than_spread=None if min(a.rounds, b.rounds) < 2 else not _overlap(a, b),
    )


def _overlap(a: Measurement, b: Measurement) -> bool:
    return a.spread.low <= b.spread.high and b.spread.low <= a.spread.high


def _sentence_of_rounds(title: str, a: Measurement, b: Measurement, ratio: float | None) -> str:
    spreads = (
        f"A {a.spread.low:.4g} to {a.spread.high:.4g} in {_rounds(a)}, "
        f"B {b.spread.low:.4g} to {b.spread.high:.4g} in {_rounds(b)}"
    )
    if ratio is None or ratio == 1:
        return f"{title}: {spreads}"
    fate = "the rounds overlap" if _overlap(a, b) else "the rounds do not overlap"
    return f"B's median {title} is {_size(ratio)} {_direction(ratio)}; {fate}: {spreads}"


def _rounds(measurement: Measurement) -> str:
    return "1 round" if measurement.rounds == 1 else f"{measurement.rounds} rounds"
