"""How far a figure could be off: the bootstrap over blocks of one second.

Requests that follow each other share a queue, so that they cannot be resampled one by one: that would make intervals
too narrow. Whole seconds are drawn instead, as many as there were, each round's from the same round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_load.measure.ledger import Columns, Floats, Ledger
from penstock_load.results import PhaseResult, Status

RESAMPLES = 1_000
RANK_BINS = 4_096  # up to so many latencies percentiles are exact; above, off by 1 / 4,096 of the ranks at most
MATRIX_CELLS = 20_000_000  # of seconds by bins: beyond 4,882 seconds, bins get wider so that memory does not grow


@dataclass(frozen=True, slots=True)
class Blocks:
    """A run's seconds. All columns have a row a second; stratum: which phase and round it belongs to.

    latency_ms holds every answer's and timeout's latency, and block_of the second of each. cpu_ms is of the server's
    processes; None if it was not read in every phase.
    """

    stratum: NDArray[np.intp]
    seconds: Floats
    intended: Floats
    ok: Floats
    latency_ms: Floats
    block_of: NDArray[np.intp]
    cpu_ms: Floats | None

    @property
    def count(self) -> int:
        """How many seconds there are."""
        return int(self.stratum.size)


def blocks_of(phases: Sequence[tuple[PhaseResult, Ledger]]) -> Blocks:
    """The seconds of phases with their records, by the intended moment."""
    parts = [_one_phase(phase, ledger.columns(), stratum) for stratum, (phase, ledger) in enumerate(phases)]
    if not parts:
        none = np.zeros(0)
        return Blocks(none.astype(np.intp), none, none, none, none, none.astype(np.intp), None)
    offsets = np.cumsum([0, *(part.count for part in parts[:-1])])
    costs = [part.cpu_ms for part in parts if part.cpu_ms is not None]
    return Blocks(
        stratum=np.concatenate([part.stratum for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        intended=np.concatenate([part.intended for part in parts]),
        ok=np.concatenate([part.ok for part in parts]),
        latency_ms=np.concatenate([part.latency_ms for part in parts]),
        block_of=np.concatenate([part.block_of + offset for part, offset in zip(parts, offsets, strict=True)]),
        cpu_ms=np.concatenate(costs) if len(costs) == len(parts) else None,
    )


def draw_weights(blocks: Blocks, seed: int) -> Floats:
    """(resamples, blocks): how often each second was drawn, within its own stratum."""
    random = np.random.default_rng(seed)
    weights = np.zeros((RESAMPLES, blocks.count))
    for stratum in np.unique(blocks.stratum):
        places = np.flatnonzero(blocks.stratum == stratum)
        evenly = np.full(places.size, 1.0 / places.size)
        weights[:, places] = random.multinomial(places.size, evenly, size=RESAMPLES)
    return weights


def resampled_ratio(weights: Floats, over: Floats, under: Floats) -> Floats:
    """In each resample, the sum of the one by the sum of the other; nan where that is 0."""
    sums: Floats = weights @ under
    ratios = np.full(sums.size, np.nan)
    np.divide(weights @ over, sums, out=ratios, where=sums > 0)
    return ratios


def resampled_percentiles(weights: Floats, blocks: Blocks, per_milles: Sequence[int]) -> dict[int, Floats]:
    """The percentiles by nearest rank in each resample; nan where nothing was drawn.

    Latencies are put into bins of equal counts, so that a resample is a row of a matrix product, not a sort.
    """
    order = np.argsort(blocks.latency_ms, kind="stable")
    ascending = blocks.latency_ms[order]
    bins = min(ascending.size, RANK_BINS, max(MATRIX_CELLS // max(blocks.count, 1), 1))
    if not bins:
        return {per_mille: np.full(len(weights), np.nan) for per_mille in per_milles}
    bin_of = np.arange(ascending.size) * bins // ascending.size
    counts = np.zeros((blocks.count, bins))
    np.add.at(counts, (blocks.block_of[order], bin_of), 1.0)
    highest_ms = ascending[np.searchsorted(bin_of, np.arange(bins), side="right") - 1]
    up_to = np.cumsum(weights @ counts, axis=1)
    drawn = up_to[:, -1:]
    found = {}
    for per_mille in per_milles:
        ranks = np.ceil(drawn * per_mille / 1000)
        places = np.minimum((up_to < ranks).sum(axis=1), bins - 1)
        found[per_mille] = np.where(drawn[:, 0] > 0, highest_ms[places], np.nan)
    return found


def _one_phase(phase: PhaseResult, columns: Columns, stratum: int) -> Blocks:
    count = max(len(phase.timeline), 1)
    second_of = np.clip(np.floor(columns.intended_s - phase.began_s), 0, count - 1).astype(np.intp)
    is_ok, waited = columns.has(Status.OK), columns.has(Status.OK, Status.TIMEOUT)
    return Blocks(
        stratum=np.full(count, stratum, dtype=np.intp),
        seconds=np.full(count, phase.seconds / count),
        intended=np.bincount(second_of, minlength=count).astype(np.float64),
        ok=np.bincount(second_of[is_ok], minlength=count).astype(np.float64),
        latency_ms=columns.latency_ms[waited],
        block_of=second_of[waited],
        cpu_ms=_cpu_a_second(phase, count),
    )


def _cpu_a_second(phase: PhaseResult, count: int) -> Floats | None:
    """The phase's CPU, spread over its seconds as the readings of each second say."""
    cores = [second.server_cpu for second in phase.timeline if second.server_cpu is not None]
    if phase.cpu_ms_per_ok is None or not cores or not sum(cores):
        return None
    mean = sum(cores) / len(cores)
    by_second = [mean if second.server_cpu is None else second.server_cpu for second in phase.timeline]
    ms_a_core = phase.cpu_ms_per_ok * phase.all.ok / sum(by_second)
    return np.array(by_second) * ms_a_core
