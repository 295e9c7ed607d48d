"""What the processes of a run tell each other, so that the master's figures are complete when it judges.

locust's master waits half a second for the last statistics of its workers, and takes what has come. Here it asks them
to stop first, and waits for each one's account of what it sent: if that does not add up, the run says so. Where one
process does everything, the same account comes from itself.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import gevent
import msgspec
from locust.runners import MasterRunner, WorkerRunner

from loadtest.arrival_plan import Moment
from loadtest.swarm.account import BUSY_SHARE, Account, Tally
from loadtest.users.terms import Now

FINISH, FINISHED, TROUBLE, NOW = "penstock-finish", "penstock-finished", "penstock-trouble", "penstock-now"
ANSWER_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Crew:
    """The processes of a run as one of them sees them.

    now: what a scenario asks at the moment. accounts: of the run's end, by worker. trouble: why the run was ended,
    else empty.
    """

    environment: Any
    tally: Tally = field(default_factory=Tally)
    now: Now = field(default_factory=Now)
    accounts: dict[str, Account] = field(default_factory=dict)
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

    def begin_to_ask(self) -> None:
        """All is prepared: the account starts."""
        self.tally.begin()

    def tell_moment(self, moment: Moment) -> None:
        """Has every worker know what is asked now; one that comes late knows within a second, too."""
        data = {"phase": moment.phase.name, "gap_s": moment.gap_s, "is_poisson": moment.is_poisson}
        self.environment.runner.send_message(NOW, data)

    def tell_trouble(self, why: str) -> None:
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
            self.accounts["locust"] = self.tally.account("locust")
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

    def _set_moment(self, msg: Any, **_: Any) -> None:
        self.now.phase, self.now.gap_s, self.now.is_poisson = (
            msg.data["phase"],
            msg.data["gap_s"],
            msg.data["is_poisson"],
        )

    def _give_up(self, msg: Any, **_: Any) -> None:
        if self.trouble:
            return  # another worker said it already
        self.trouble = msg.data["why"]
        logger.error(self.trouble)
        is_headless = self.environment.parsed_options.headless
        runner = self.environment.runner
        gevent.spawn(runner.quit if is_headless else runner.stop)

    def _forget(self, **_: Any) -> None:
        self._is_whole = False  # somebody reset the statistics: they hold less than was sent

    def _finish(self, **_: Any) -> None:
        if self._has_finished:
            return
        self._has_finished = True
        runner = self.environment.runner
        runner.stop()
        runner._send_stats()  # messages keep their order: the account comes after the figures
        account = self.tally.account(runner.client_id)
        logger.info("this worker sent %d requests, %d failed", account.requests, account.failures)
        runner.send_message(FINISHED, msgspec.to_builtins(account))

    def _take_account(self, msg: Any, **_: Any) -> None:
        account = msgspec.convert(msg.data, Account)
        self.accounts[account.worker] = account
