"""The load shape that locust follows in a scenario: so many users at a time, by `loadtest.arrival_plan`."""

import math
from collections.abc import Callable

from locust import LoadTestShape

from loadtest.arrival_plan import ArrivalPlan, Moment, Walk


class ArrivalShape(LoadTestShape):  # type: ignore[misc]  # locust is not type-checked here
    """Tells locust how many users there are to be. walk: what has been asked so far."""

    use_common_options = True  # or the web page could not go back from a scenario to so many users

    def __init__(
        self, plan: ArrivalPlan, *, tell: Callable[[Moment], None], stop_after: Callable[[], float | None]
    ) -> None:
        """tell: called every second with what is asked now. stop_after: seconds, where the plan is to be cut short."""
        super().__init__()
        self.walk = Walk(plan)
        self._tell = tell
        self._stop_after = stop_after
        self._order: tuple[int, float] = (0, 1.0)
        self._is_ended = self._is_closed = False

    def reset_time(self) -> None:
        """The clock starts: locust calls it, as a master a second time after the first tick."""
        super().reset_time()
        self.walk.restart()

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many of them may be started or stopped a second; None ends the run."""
        if self._is_closed:
            return self._order  # while locust stops, nothing changes
        at_s = self.get_run_time()
        is_over = self._is_ended or at_s >= (self._stop_after() or math.inf)
        moment = None if is_over else self.walk.step(at_s)
        if moment is None:
            return None
        self._tell(moment)
        if change := abs(moment.users - self._order[0]):  # while the users stay, so does the order: a new one is logged
            self._order = (moment.users, float(change))
        return self._order

    def end(self) -> None:
        """The run is to stop within a second."""
        self._is_ended = True

    def close(self) -> None:
        """The run stops: the last second is accounted for, and nobody is started any more."""
        if not self._is_closed:
            self.walk.stop(self.get_run_time())
            self._is_closed = True
