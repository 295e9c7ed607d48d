"""A scenario's arrivals as a number of locust users, each of which asks about once a second.

So many users stand for so many requests a second (the gap between a user's requests makes up for the rounding); number
and gap follow the schedule's rate every second, as it is in the middle of the coming one. It approximates an open loop:
while answers take less than a second no user is delayed, and every request is timed from the moment that it was meant
for. A slower answer holds its user back, so that from then on less is asked than was meant, and the wait of the next
request is in no latency. Rates change once a second, and a replayed recording has no such form. The published numbers
come from the open-loop driver (`penstock load run`).
"""

import math
import random
from dataclasses import dataclass

from penstock_load.pacer import offered_rate
from penstock_load.scenario import Phase, Scenario, ScenarioError, Shape, Unit

TICK_S = 1.0
PACE_S = 1.0
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class PlannedRate:
    """A phase, and the rate that it asks at a moment in requests a second."""

    phase: Phase
    rate: float

    @property
    def users(self) -> int:
        """How many stand for the rate; one at least where there is any."""
        return max(round(self.rate * PACE_S), 1) if self.rate else 0

    @property
    def gap_s(self) -> float:
        """What lies between two requests of a user: near PACE_S."""
        return self.users / self.rate if self.rate else PACE_S

    @property
    def is_poisson(self) -> bool:
        """Gaps are exponential: many such users are together a Poisson process."""
        return self.phase.arrivals is not None and self.phase.arrivals.shape is Shape.POISSON


class ArrivalPlan:
    """The open-loop phases of a scenario one after the other; callers and reloads have no arrivals and are left out."""

    def __init__(self, scenario: Scenario, *, capacity_per_s: float | None) -> None:
        """Raises ScenarioError where nothing is left, for a recording, and for a capacity that is needed and unknown.

        capacity_per_s: what the unit of_capacity means.
        """
        self.phases = tuple(phase for phase in scenario.phases if phase.arrivals is not None)
        self._capacity_per_s = capacity_per_s
        for complaint in _complaints(scenario.name, self.phases, capacity_per_s):
            raise ScenarioError(complaint)

    def at(self, at_s: float) -> PlannedRate | None:
        """What is asked then; None after the last phase."""
        begin_s = 0.0
        for phase in self.phases:
            if at_s < begin_s + phase.seconds and phase.arrivals is not None:
                rate = offered_rate(
                    phase.arrivals, at_s - begin_s, seconds=phase.seconds, capacity_per_s=self._capacity_per_s
                )
                return PlannedRate(phase, rate)
            begin_s += phase.seconds
        return None


def _complaints(name: str, phases: tuple[Phase, ...], capacity_per_s: float | None) -> list[str]:
    if not phases:
        return [f"{name} has no phase with arrivals, which is all that locust can do: penstock load run {name}"]
    complaints = []
    for phase in phases:
        if phase.arrivals and phase.arrivals.shape is Shape.REPLAY:
            complaints.append(f"phase {phase.name} replays a recording, which only penstock load run {name} does")
        elif phase.arrivals and phase.arrivals.unit is Unit.OF_CAPACITY and not capacity_per_s:
            complaints.append(
                f"phase {phase.name} of {name} asks a share of the capacity, which locust does not measure: say "
                "--capacity REQUESTS_PER_S (penstock load run and penstock load knee find it)"
            )
    return complaints


@dataclass(slots=True)
class Spent:
    """How long a phase has lasted, and how many requests were meant to be sent in it."""

    seconds: float = 0.0
    intended: float = 0.0


class PlanCursor:
    """A run through a plan. spent: of each phase so far. Times are seconds since the run began."""

    def __init__(self, plan: ArrivalPlan) -> None:
        self._plan = plan
        self._now: PlannedRate | None = None
        self._since_s = 0.0
        self.spent: dict[str, Spent] = {}

    def restart(self) -> None:
        """The clock begins at 0 again; what is asked stays as it is."""
        self._since_s = 0.0
        self.spent = {}

    def step(self, at_s: float) -> PlannedRate | None:
        """What is asked from now on, by the middle of the coming second; None after the last phase."""
        self.stop(at_s)
        self._now = self._plan.at(at_s + TICK_S / 2)
        return self._now

    def stop(self, at_s: float) -> None:
        """Nothing more is asked."""
        if self._now:
            spent = self.spent.setdefault(self._now.phase.name, Spent())
            spent.seconds += at_s - self._since_s
            spent.intended += self._now.rate * (at_s - self._since_s)
        self._since_s = at_s
        self._now = None


class Pace:
    """When one of many users asks next: not all of them at the same moment."""

    def __init__(self, number: int, began_s: float) -> None:
        """number: the how manieth user this is. began_s: when it was started."""
        self._number = number
        self._due_s = began_s
        self._has_begun = False
        self._random = random.Random(number)

    def wait_s(self, now_s: float, *, gap_s: float, is_poisson: bool) -> float:
        """How long to wait. What a late answer held back is caught up on, a second's worth at most.

        gap_s: between two requests, on average.
        """
        if is_poisson:
            after_s = self._random.expovariate(1 / gap_s)
        elif self._has_begun:
            after_s = gap_s
        else:  # whole steps of the golden ratio spread any number of users evenly over the gap
            after_s = self._number * GOLDEN % 1 * gap_s
        self._has_begun = True
        self._due_s = max(self._due_s + after_s, now_s - PACE_S)
        return max(0.0, self._due_s - now_s)
