"""Messages between the processes of a locust run, and the load shape that its master follows."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
import msgspec
from locust import LoadTestShape
from locust.runners import MasterRunner, WorkerRunner

from penstock_load.users.arrival_plan import ArrivalPlan, PlanCursor, PlannedRate
from penstock_load.users.figures import BUSY_SHARE, CurrentRate, ProcessReport, RequestCounter

FINISH, FINISHED, TROUBLE, NOW = "penstock-finish", "penstock-finished", "penstock-trouble", "penstock-now"
ANSWER_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Processes:
    """The processes of a run as one of them sees them.

    now: what a scenario asks at the moment. accounts: of the run's end, by worker. trouble: why the run was ended,
    else empty.
    """

    environment: Any
    tally: RequestCounter = field(default_factory=RequestCounter)
    now: CurrentRate = field(default_factory=CurrentRate)
    accounts: dict[str, ProcessReport] = field(default_factory=dict)
    trouble: str = ""
    _is_whole: bool = True
    _has_finished: bool = True

    def listen(self) -> None:
        """Takes part: called once, when locust has its runner."""
        runner = self.environment.runner
        self.environment.events.request.add_listener(self.tally.count)
        self.environment.events.reset_stats.add_listener(self._forget)
        runner.register_message(NOW, self._set_moment)
        runner.register_message(TROUBLE, self._give_up)
        if isinstance(runner, WorkerRunner):
            runner.register_message(FINISH, self._finish)
            self.environment.events.quitting.add_listener(self._finish)  # before locust's own, which says goodbye
        if isinstance(runner, MasterRunner):
            runner.register_message(FINISHED, self._take_account)

    def begin(self) -> None:
        """A run begins."""
        self.accounts.clear()
        self.trouble = ""
        self._has_finished = False
        self._is_whole = not self.environment.reset_stats

    def start_requests(self) -> None:
        """All is prepared: the account starts."""
        self.tally.begin(self._sender_cpu_s())

    def send_rate(self, moment: PlannedRate) -> None:
        """Tells every process its share of the rate; a late process gets it within a second, too."""
        rate = moment.rate / max(self.count, 1)
        data = {"phase": moment.phase.name, "rate": rate, "is_poisson": moment.is_poisson}
        self.environment.runner.send_message(NOW, data)

    @property
    def count(self) -> int:
        """Processes that send."""
        runner = self.environment.runner
        return int(runner.worker_count) if isinstance(runner, MasterRunner) else 1

    def send_error(self, why: str) -> None:
        """Has the run end: this process cannot ask what it should."""
        self.environment.runner.send_message(TROUBLE, {"why": why})

    def gather(self) -> None:
        """As a master, has every worker stop asking, and waits for their accounts."""
        runner = self.environment.runner
        if not isinstance(runner, MasterRunner):
            return
        runner.send_message(FINISH)
        with gevent.Timeout(ANSWER_TIMEOUT_S + self.environment.stop_timeout, False):
            while set(runner.clients) - set(self.accounts):
                gevent.sleep(0.02)

    def complaints(self, counted: int) -> list[str]:
        """Why the figures cannot be trusted, once all users have stopped. counted: requests by locust's statistics."""
        runner = self.environment.runner
        if not isinstance(runner, MasterRunner):
            self.accounts["locust"] = self.tally.account("locust", self._sender_cpu_s())
        found = [account.complaint for account in self.accounts.values() if account.complaint]
        if not found and (runner.cpu_warning_emitted or runner.worker_cpu_warning_emitted):
            found.append(
                f"the load generator was the bottleneck: a process of locust used more than {BUSY_SHARE:.0%} of its "
                "core for 10 s; give it more processes (--processes) or machines (--worker)"
            )
        sent = sum(account.requests for account in self.accounts.values())
        if sent != counted and self._is_whole:
            found.append(f"it does not add up: the workers sent {sent} requests, the statistics hold {counted}")
        return found

    def _sender_cpu_s(self) -> float:
        return self.environment.sender.cpu_s if self.environment.sender else 0.0

    def _set_moment(self, msg: Any, **_: Any) -> None:
        self.now.phase, self.now.rate = msg.data["phase"], msg.data["rate"]
        self.now.is_poisson = msg.data["is_poisson"]

    def _give_up(self, msg: Any, **_: Any) -> None:
        if self.trouble:
            return  # another worker said it already
        self.trouble = msg.data["why"]
        logger.error(self.trouble)
        is_headless = self.environment.parsed_options.headless
        runner = self.environment.runner
        gevent.spawn(runner.quit if is_headless else runner.stop)

    def _forget(self, **_: Any) -> None:
        self._is_whole = False  # the statistics were reset: they hold less than was sent

    def _finish(self, **_: Any) -> None:
        if self._has_finished:
            return
        self._has_finished = True
        runner = self.environment.runner
        runner.stop()
        runner._send_stats()  # messages keep their order: the account comes after the figures
        account = self.tally.account(runner.client_id, self._sender_cpu_s())
        logger.info("this worker sent %d requests, %d failed", account.requests, account.failures)
        runner.send_message(FINISHED, msgspec.to_builtins(account))

    def _take_account(self, msg: Any, **_: Any) -> None:
        account = msgspec.convert(msg.data, ProcessReport)
        self.accounts[account.worker] = account


class ArrivalShape(LoadTestShape):  # type: ignore[misc]  # locust is not type-checked here
    """Gives each process that sends one user, for as long as the plan lasts. walk: the phases so far."""

    use_common_options = True  # or the web page could not go back from a scenario to so many users

    def __init__(self, plan: ArrivalPlan, crew: Processes, stop_after: Callable[[], float | None]) -> None:
        """stop_after: seconds after which the plan is cut short, or None."""
        super().__init__()
        self.walk = PlanCursor(plan)
        self._crew, self._stop_after = crew, stop_after
        self._order: tuple[int, float] = (1, 1.0)
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
        self._crew.send_rate(moment)
        users = max(self._crew.count, 1)
        self._order = (users, float(users))
        return self._order

    def end(self) -> None:
        """The run is to stop within a second."""
        self._is_ended = True

    def close(self) -> None:
        """The run stops: the last second is accounted for, and no more users are started."""
        if not self._is_closed:
            self.walk.stop(self.get_run_time())
            self._is_closed = True
