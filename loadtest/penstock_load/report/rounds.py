"""A run's phases with their rounds merged, and its seconds as series for plots."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock_load.results import PhaseResult, RequestSummary, Run, Second, Side, Spread, Stages

MOST_DRAWN, MOST_SPLIT = 4, 12
KNEE = "knee_per_s"
GOOD_SHARE = 0.99
STAGE_NAMES = ("decode", "preprocess", "queue", "infer", "postprocess")
_TRIAL = re.compile(r"trial \d+")
K = TypeVar("K", int, float)


@dataclass(frozen=True, slots=True)
class PhaseRounds:
    """One phase against one side; its rounds in order, at least one."""

    phase: str
    side: Side
    rounds: tuple[PhaseResult, ...]

    @property
    def first(self) -> PhaseResult:
        """The first round: what is the same in all (is_judged, is_open_loop) is read here."""
        return self.rounds[0]

    def spread(self, figure: Callable[[PhaseResult], float]) -> Spread:
        """The figure's median, lowest and highest over the rounds."""
        return spread_of([figure(result) for result in self.rounds])

    def waited_spread(self, figure: Callable[[PhaseResult], float]) -> Spread | None:
        """The same of a latency, over the rounds in which anything was waited for; None: in none."""
        values = [figure(result) for result in self.rounds if result.all.latency.count]
        return spread_of(values) if values else None

    def total(self, figure: Callable[[RequestSummary], int]) -> int:
        """The sum over the rounds."""
        return sum(figure(result.all) for result in self.rounds)

    def histogram(self) -> tuple[tuple[float, int], ...]:
        """(upper bound in ms, count), all rounds together, ascending."""
        return add_counts(result.all.histogram for result in self.rounds)

    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """(rows, answers) as the answers say, else (rows, batches) as the server's statistics say."""
        counts = add_counts(result.all.batch_sizes for result in self.rounds)
        return counts or add_counts(result.witness.batch_sizes for result in self.rounds if result.witness)

    def says_batch_sizes(self) -> bool:
        """Whether the answers themselves say in which batch they were."""
        return any(result.all.batch_sizes for result in self.rounds)

    def errors(self) -> tuple[tuple[str, int], ...]:
        """(text, count), all rounds together, the most frequent first."""
        counts: Counter[str] = Counter()
        for result in self.rounds:
            counts.update(dict(result.all.errors))
        return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def rows_a_batch(self) -> float:
        """Rows / batches; an answer from a batch of n counts as 1/n of a batch."""
        sizes = self.batch_sizes()
        if self.says_batch_sizes():
            return sum(amount for _, amount in sizes) / sum(amount / size for size, amount in sizes)
        return weighted_mean(sizes)

    def stages(self) -> tuple[tuple[str, float], ...]:
        """(stage, mean ms) in the order of a request's way, the rest of the service time last; empty if unknown."""
        known = [(result.all.stages, result.all.ok) for result in self.rounds if result.all.stages and result.all.ok]
        if known:
            return _split(known, self._mean_service_ms())
        return self._witnessed_stages()

    def _mean_service_ms(self) -> float:
        counted = [(result.all.service.mean, result.all.service.count) for result in self.rounds]
        return weighted_mean(counted)

    def _witnessed_stages(self) -> tuple[tuple[str, float], ...]:
        known = [(dict(result.witness.stages_ms), result.all.ok) for result in self.rounds if result.witness]
        names = dict.fromkeys(name for stages, _ in known for name in stages)
        means = [(name, weighted_mean([(stages.get(name, 0.0), ok) for stages, ok in known])) for name in names]
        if not any(mean for _, mean in means):
            return ()
        return (*means, ("other", max(0.0, self._mean_service_ms() - sum(mean for _, mean in means))))


def _split(known: Sequence[tuple[Stages, int]], service_ms: float) -> tuple[tuple[str, float], ...]:
    """The named stages; "server" is what the server spent in none of them, "other" what was spent outside of it."""
    means = [weighted_mean([(getattr(stages, f"{name}_ms"), ok) for stages, ok in known]) for name in STAGE_NAMES]
    total_ms = weighted_mean([(stages.total_ms, ok) for stages, ok in known])
    inside_ms = max(0.0, total_ms - sum(means))
    other_ms = max(0.0, service_ms - max(total_ms, sum(means)))
    return (*zip(STAGE_NAMES, means, strict=True), ("server", inside_ms), ("other", other_ms))


def split_phases(run: Run) -> tuple[tuple[PhaseRounds, dict[str, float]], ...]:
    """The phases whose time can be split, with their stages (mean ms), without stages that never take any.

    Of a search for the knee: some of the trials, by rate.
    """
    phases = trials_by_rate(run) if is_knee_search(run) else phase_rounds(run)
    split = [(phase, dict(stages)) for phase in phases if (stages := phase.stages())]
    split = split[:: -(-len(split) // MOST_SPLIT) or 1]
    longest = max((sum(stages.values()) for _, stages in split), default=0.0)
    names = dict.fromkeys(name for _, stages in split for name in stages)
    kept = [name for name in names if any(stages.get(name, 0.0) > 0.001 * longest for _, stages in split)]
    return tuple((phase, {name: stages.get(name, 0.0) for name in kept}) for phase, stages in split)


def weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    """The mean of (value, weight); 0 where nothing weighs."""
    weight = sum(count for _, count in values)
    return sum(value * count for value, count in values) / weight if weight else 0.0


def spread_of(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def add_counts(parts: Iterable[Sequence[tuple[K, int]]]) -> tuple[tuple[K, int], ...]:
    """Counts of the same key added up, by key."""
    counts: Counter[K] = Counter()
    for part in parts:
        for key, count in part:
            counts[key] += count
    return tuple(sorted(counts.items()))


def phase_rounds(run: Run) -> tuple[PhaseRounds, ...]:
    """The run's phases in the order in which they were first run, the target's before what is beside it."""
    order = {phase: place for place, phase in enumerate(dict.fromkeys(result.phase for result in run.phases))}
    groups: dict[tuple[int, bool], list[PhaseResult]] = {}
    for result in run.phases:
        groups.setdefault((order[result.phase], result.side is Side.BESIDE), []).append(result)
    return tuple(
        PhaseRounds(results[0].phase, results[0].side, tuple(results)) for _, results in sorted(groups.items())
    )


def is_knee_search(run: Run) -> bool:
    """Whether the phases are trials of a search for the knee ("trial 1: 40/s")."""
    open_loop = [result.phase for result in run.phases if result.is_open_loop]
    return bool(open_loop) and all(_TRIAL.match(phase) for phase in open_loop)


def key_phase(run: Run) -> PhaseRounds | None:
    """The phase that the run is about: judged, else the last; of a search for the knee its best trial. None: none."""
    target = [phase for phase in phase_rounds(run) if phase.side is Side.TARGET]
    if is_knee_search(run):
        return best_trial(run) or (target[0] if target else None)
    judged = [phase for phase in target if phase.first.is_judged]
    return judged[0] if judged else (target[-1] if target else None)


def searched_knee(run: Run) -> float | None:
    """The rate that a search for the knee confirmed; None: it confirmed none, or there was no search."""
    return next((it.spread.median for it in run.measurements if it.measure == KNEE), None)


def best_trial(run: Run) -> PhaseRounds | None:
    """The kept trial nearest to the searched knee, else the last below the lowest that broke; None: none was kept."""
    knee = searched_knee(run)
    if knee is not None:
        good_trials = [trial for trial in trials_by_rate(run) if keeps_slo(trial, run.slo_p99_ms)]
        return min(good_trials, key=lambda trial: abs(_offered(trial) - knee), default=None)
    kept = None
    for trial in filter(is_usable, trials_by_rate(run)):
        if not keeps_slo(trial, run.slo_p99_ms):
            break
        kept = trial
    return kept


def trials_by_rate(run: Run) -> list[PhaseRounds]:
    """The target's open-loop phases, the lowest offered rate first."""
    trials = [phase for phase in phase_rounds(run) if phase.side is Side.TARGET and phase.first.is_open_loop]
    return sorted(trials, key=_offered)


def _offered(trial: PhaseRounds) -> float:
    return trial.spread(lambda result: result.offered_per_s).median


def keeps_slo(phase: PhaseRounds, slo_p99_ms: float) -> bool:
    """Whether 99 of 100 requests were answered well within the SLO, by the median of the rounds, and that is true."""
    if not is_usable(phase):
        return False
    shares = [result.all.good / result.all.intended if result.all.intended else 0.0 for result in phase.rounds]
    p99 = phase.waited_spread(lambda result: result.all.latency.p99)
    return p99 is not None and p99.median <= slo_p99_ms and statistics.median(shares) >= GOOD_SHARE


def is_usable(phase: PhaseRounds) -> bool:
    """Whether the generator kept up, so that the phase says something of the server."""
    return not any(result.health.complaint for result in phase.rounds)


def drawn_phases(run: Run) -> tuple[PhaseRounds, ...]:
    """The phases worth a picture of their own, at most four names of them: judged ones, else the key phase.

    Of a search for the knee: the best trial and the one that broke above it. A phase's two sides stand together.
    """
    names = _drawn_names(run)
    drawn = [phase for phase in phase_rounds(run) if phase.phase in names]
    return tuple(sorted(drawn, key=lambda phase: names.index(phase.phase)))


def _drawn_names(run: Run) -> list[str]:
    if is_knee_search(run):
        best = best_trial(run)
        above = [trial for trial in trials_by_rate(run) if best is None or _offered(trial) > _offered(best)]
        broken = [trial for trial in above if is_usable(trial) and not keeps_slo(trial, run.slo_p99_ms)]
        return [trial.phase for trial in ([best] if best else []) + broken[:1]]
    names = list(dict.fromkeys(result.phase for result in run.phases if result.is_judged))[:MOST_DRAWN]
    key = key_phase(run)
    return names or ([key.phase] if key else [])


MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class TimelinePart:
    """A phase's place on the time axis, in seconds since the run's start; both sides of a phase are one stretch."""

    phase: str
    round: int
    began_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one side over time. Every list is as long as at_s; NaN is a gap.

    p50_ms is the mean of a point's seconds, p99_ms the highest; rates and loads are means.
    """

    at_s: list[float]
    offered: list[float]
    ok: list[float]
    bad: list[float]
    p50_ms: list[float]
    p99_ms: list[float]
    server_cpu: list[float]
    machine_cpu: list[float]
    gpu: list[float]
    gpu_sm: list[float]
    rss_mib: list[float]


def seconds_a_point(run: Run) -> int:
    """How many seconds a point of the plots stands for, so that a side has about MOST_POINTS."""
    longest = max((sum(len(result.timeline) for result in _of(run, side)) for side in Side), default=0)
    return max(1, math.ceil(longest / MOST_POINTS))


def stretches(run: Run) -> tuple[TimelinePart, ...]:
    """Where each phase lies, in the order of time."""
    found: list[TimelinePart] = []
    for result in sorted(run.phases, key=lambda result: result.began_s):
        if not result.timeline:
            continue
        ends_s = result.began_s + max(result.seconds, len(result.timeline))
        stretch = TimelinePart(result.phase, result.round, result.began_s, ends_s)
        if found and (found[-1].phase, found[-1].round) == (stretch.phase, stretch.round):
            stretch = replace(found.pop(), ends_s=ends_s)
        found.append(stretch)
    return tuple(found)


def series_of(run: Run, side: Side) -> Series:
    """The side's seconds of every phase, thinned out for a plot."""
    width = seconds_a_point(run)
    points: list[tuple[float, Sequence[Second]]] = []
    for result in sorted(_of(run, side), key=lambda result: result.began_s):
        seconds = result.timeline
        points += [(chunk[0].at_s + len(chunk) / 2, chunk) for chunk in _chunks(seconds, width)]
        points.append((result.began_s + result.seconds, ()))
    return _series(points)


def _of(run: Run, side: Side) -> list[PhaseResult]:
    return [result for result in run.phases if result.side is side and result.timeline]


def _chunks(seconds: Sequence[Second], width: int) -> list[Sequence[Second]]:
    return [seconds[at : at + width] for at in range(0, len(seconds), width)]


def _series(points: Sequence[tuple[float, Sequence[Second]]]) -> Series:
    chunks = [chunk for _, chunk in points]
    return Series(
        at_s=[at_s for at_s, _ in points],
        offered=[_mean(chunk, lambda second: second.offered) for chunk in chunks],
        ok=[_mean(chunk, lambda second: second.ok) for chunk in chunks],
        bad=[_mean(chunk, lambda second: second.bad) for chunk in chunks],
        p50_ms=[_mean(chunk, lambda second: second.p50_ms or None) for chunk in chunks],
        p99_ms=[max((second.p99_ms for second in chunk if second.p99_ms), default=math.nan) for chunk in chunks],
        server_cpu=[_mean(chunk, lambda second: second.server_cpu) for chunk in chunks],
        machine_cpu=[_mean(chunk, lambda second: second.machine_cpu) for chunk in chunks],
        gpu=[_mean(chunk, lambda second: second.gpu) for chunk in chunks],
        gpu_sm=[_mean(chunk, lambda second: second.gpu_sm) for chunk in chunks],
        rss_mib=[_mean(chunk, lambda second: second.rss_mib) for chunk in chunks],
    )


def _mean(chunk: Sequence[Second], figure: Callable[[Second], float | None]) -> float:
    values = [value for second in chunk if (value := figure(second)) is not None]
    return sum(values) / len(values) if values else math.nan
