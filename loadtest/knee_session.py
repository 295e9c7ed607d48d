"""Composes a search for the knee: trials of rising rates until the SLO breaks, each an open loop of its own."""

from dataclasses import dataclass

import msgspec

from loadtest.knee import Knee, KneeSearch, trial_verdict
from loadtest.measure.measures import capacity_per_s, knee_measurement
from loadtest.order import Order, Watch
from loadtest.results import Run, Side
from loadtest.rig import Rig, Step
from loadtest.scenario import Arrivals, Phase, Shape
from loadtest.session import Gathered, begun, ending_in_complaints, finished

CONFIRMING_TIMES = 3
START_OF_CAPACITY = 0.5
LEAST_REQUESTS = 10  # of a trial, on average: of so few one in 20,000 trials asks nothing at all


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeOptions:
    """trial_s: how long a rate is tried at least (thrice that to confirm it). start_per_s: 0: half of the capacity."""

    trial_s: float = 5.0
    error_share: float = 0.01
    precision: float = 0.05
    start_per_s: float = 0.0
    highest_per_s: float = 100_000.0


async def run_knee(order: Order, options: KneeOptions, watch: Watch) -> tuple[Run, Knee | None]:
    """The run whose phases are the trials, unjudged, and what the search found; None where it was stopped.

    The scenario gives the requests, the SLO and the phases before its ladder (warm-up, capacity). Raises SessionError.
    """
    gathered, knee = Gathered(), None
    async with begun(order, watch) as (rig, run), ending_in_complaints(gathered):
        start_per_s = await _prepare(order, options, rig, gathered)
        knee = await _search(order, options, rig, gathered, start_per_s=start_per_s)
        if knee.is_generators_limit:
            gathered.complaints.append(f"the search ended at the generator's limit: {knee.why}")
    found = [] if knee is None or knee.kept_per_s is None else [knee_measurement([knee.kept_per_s])]
    return finished(run, gathered, found), knee


def trial_s(options: KneeOptions, rate_per_s: float) -> float:
    """How long the rate is tried: as long as was said, and at a low one until there is something to judge."""
    return max(options.trial_s, LEAST_REQUESTS / rate_per_s)


async def _prepare(order: Order, options: KneeOptions, rig: Rig, gathered: Gathered) -> float:
    """Warm-up and capacity; the rate to begin with."""
    phases = [phase for phase in order.scenario.phases if phase.callers]
    results = [await rig.run(Step(phase, 1, 1, place, len(phases))) for place, phase in enumerate(phases, 1)]
    capacity = capacity_per_s(results, round=1, side=Side.TARGET) or 2.0
    # Only where the search begins depends on it, so a generator that was busy then does no harm.
    gathered.phases += [msgspec.structs.replace(result, is_capacity=False) for result in results]
    return options.start_per_s or max(START_OF_CAPACITY * capacity, 1.0)


async def _search(order: Order, options: KneeOptions, rig: Rig, gathered: Gathered, *, start_per_s: float) -> Knee:
    search = KneeSearch(
        start_per_s,
        max(options.highest_per_s, start_per_s),
        precision=options.precision,
        lowest_per_s=min(1.0, start_per_s),
    )
    number = 0
    while (rate := search.next_rate()) is not None:
        number += 1
        seconds = trial_s(options, rate) * (CONFIRMING_TIMES if search.is_confirming else 1)
        phase = Phase(
            name=f"trial {number}: {rate:.4g}/s",
            seconds=seconds,
            arrivals=Arrivals(shape=Shape.POISSON, rate=rate),
        )
        result = await rig.run(Step(phase, 1, 1, number, number))
        gathered.phases.append(result)
        outcome, reason = trial_verdict(result, slo_p99_ms=order.scenario.slo_p99_ms, error_share=options.error_share)
        search.record(rate, outcome, reason)
    knee = search.result
    assert knee is not None, "the search has ended"
    return knee
