"""Two runs side by side: what differs, by how much, and whether that could be chance.

Rates, shares and percentiles are of all judged phases of the target together; an interval covers what chance leaves
open 95 times in 100, by the bootstrap over seconds. It knows only what these runs saw: what differs from one start of a
server to the next, or from hour to hour, is in it only as far as the rounds were apart. And each row errs once in 20:
of six rows on two runs of the same server, some row seems to differ about every fourth time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from loadtest.measure.bootstrap import Blocks, blocks_of, draw_weights, resampled_percentiles, resampled_ratio
from loadtest.measure.ledger import Ledger
from loadtest.measure.measures import UNITS
from loadtest.measure.percentiles import Floats, at_rank
from loadtest.measure.run_folder import RunFolder
from loadtest.measure.same_terms import differences
from loadtest.results import Measurement, PhaseResult, Side

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


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of both runs. ratio: B's figure / A's; None where A's is 0.

    low, high: the 95 % confidence interval of the ratio; None where there are no records to draw it from.
    is_trusted: False where fewer than 10 seconds are behind it. sentence: all of it for a person.
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


class Comparison(msgspec.Struct, frozen=True):
    """Run A, run B, a row a measure that both have, and sentences on what makes the comparison unfair."""

    a: str
    b: str
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Figure:
    value: float
    resampled: Floats
    blocks: int


def compare(a: RunFolder, b: RunFolder) -> Comparison:
    """Run B against run A. Where either has no records, medians and spreads of the rounds are compared instead.

    RunFolderError where records cannot be read.
    """
    warnings = differences(a.run, b.run)
    if a.records_path is None or b.records_path is None:
        without = " and ".join(run.name for run in (a, b) if run.records_path is None)
        note = f"no confidence intervals: {without} has no records.jsonl, so medians of the rounds are compared"
        return Comparison(a.name, b.name, _rows_of_rounds(a, b), (*warnings, note))
    of_a, of_b = _figures(a, seed=SEEDS[0]), _figures(b, seed=SEEDS[1])
    rows = tuple(_row(name, of_a[name], of_b[name]) for name in TITLES if name in of_a and name in of_b)
    fewest = min((min(of_a[row.measure].blocks, of_b[row.measure].blocks) for row in rows), default=0)
    if fewest < FEWEST_BLOCKS:
        note = f"intervals come from as few as {fewest} seconds and are not to be trusted; run for longer"
        warnings = (*warnings, note)
    return Comparison(a.name, b.name, rows, warnings)


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


def _row(name: str, a: _Figure, b: _Figure) -> Row:
    is_trusted = min(a.blocks, b.blocks) >= FEWEST_BLOCKS
    low, high = _interval(a.resampled, b.resampled) if a.value else (None, None)
    ratio = b.value / a.value if a.value else None
    return Row(
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
        return f"B's {title} is {b:.3g}, A's {a:.3g}; the interval cannot be told"
    if low <= 1 <= high:
        return f"{title}: no difference can be told: {_signed(low)} to {_signed(high)}"
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


def _rows_of_rounds(a: RunFolder, b: RunFolder) -> tuple[Row, ...]:
    of_a = {it.measure: it for it in a.run.measurements}
    of_b = {it.measure: it for it in b.run.measurements}
    return tuple(_row_of_rounds(of_a[name], of_b[name]) for name in TITLES if name in of_a and name in of_b)


def _row_of_rounds(a: Measurement, b: Measurement) -> Row:
    title, ratio = TITLES[a.measure], b.spread.median / a.spread.median if a.spread.median else None
    return Row(
        measure=a.measure,
        unit=a.unit,
        a=a.spread.median,
        b=b.spread.median,
        ratio=ratio,
        low=None,
        high=None,
        is_trusted=False,
        sentence=_sentence_of_rounds(title, a, b, ratio),
    )


def _sentence_of_rounds(title: str, a: Measurement, b: Measurement, ratio: float | None) -> str:
    spreads = (
        f"A {a.spread.low:.4g} to {a.spread.high:.4g} in {_rounds(a)}, "
        f"B {b.spread.low:.4g} to {b.spread.high:.4g} in {_rounds(b)}"
    )
    if ratio is None or ratio == 1:
        return f"{title}: {spreads}"
    overlap = a.spread.low <= b.spread.high and b.spread.low <= a.spread.high
    fate = "the rounds overlap" if overlap else "the rounds do not overlap"
    return f"B's median {title} is {_size(ratio)} {_direction(ratio)}; {fate}: {spreads}"


def _rounds(measurement: Measurement) -> str:
    return "1 round" if measurement.rounds == 1 else f"{measurement.rounds} rounds"
