"""A scenario's arrivals in locust: which rate is asked at which moment, and when a process sends its share of it.

The rate follows the schedule once a second, as it is in the middle of the coming second; each process sends its share
on time, independent of the answers. A replayed recording has no such form, and locust measures no capacity: the
published figures come from `penstock load run`.
"""

import random
from dataclasses import dataclass

from penstock_load.pacer import offered_rate
from penstock_load.scenario import Phase, Scenario, ScenarioError, Shape, Unit

TICK_S = 1.0
STEP_S = 0.1  # within which a process notices another rate


@dataclass(frozen=True, slots=True)
class PlannedRate:
    """A phase, and its rate at a moment in requests a second."""

    phase: Phase
    rate: float

    @property
    def is_poisson(self) -> bool:
        """Whether gaps between requests are exponential."""
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


class PlanCursor:
    """A run through a plan. seconds: how long each phase lasted so far. intended: its requests by
    the plan. Times are seconds since the run began."""

    def __init__(self, plan: ArrivalPlan) -> None:
        self._plan = plan
        self._now: PlannedRate | None = None
        self._since_s = 0.0
        self.seconds: dict[str, float] = {}
        self.intended: dict[str, float] = {}

    def restart(self) -> None:
        """The clock begins at 0 again; what is asked stays as it is."""
        self._since_s = 0.0
        self.seconds, self.intended = {}, {}

    def step(self, at_s: float) -> PlannedRate | None:
        """What is asked from now on, by the middle of the coming second; None after the last phase."""
        self.stop(at_s)
        self._now = self._plan.at(at_s + TICK_S / 2)
        return self._now

    def stop(self, at_s: float) -> None:
        """Nothing more is asked."""
        if self._now:
            name = self._now.phase.name
            lasted_s = at_s - self._since_s
            self.seconds[name] = self.seconds.get(name, 0.0) + lasted_s
            self.intended[name] = self.intended.get(name, 0.0) + lasted_s * self._now.rate
        self._since_s = at_s
        self._now = None


class SendClock:
    """When a process sends, at a rate that may change at any time: a request is due when the rate, summed over time,
    has reached the next whole number (constant), or has grown by an exponential draw (Poisson)."""

    def __init__(self, began_s: float, seed: int) -> None:
        self._at_s, self._left = began_s, 0.0
        self._random = random.Random(seed)

    def step(self, rate: float, *, is_poisson: bool) -> tuple[float, bool]:
        """(the next moment, whether a request is due then); the moments are at most STEP_S apart."""
        if self._left <= 0:
            self._left = self._random.expovariate(1.0) if is_poisson else 1.0
        step_s = min(self._left / rate, STEP_S) if rate else STEP_S
        self._at_s += step_s
        self._left -= rate * step_s
        is_due = self._left <= 1e-9
        if is_due:
            self._left = 0.0
        return self._at_s, is_due
