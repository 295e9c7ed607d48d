"""What a run of locust comes to: judged when it stops, shown and made the exit code when locust ends."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from loadtest.arrival_plan import Spent
from loadtest.hardware import is_local, read_machine
from loadtest.results import State, Verdict
from loadtest.swarm.setup import Setup
from loadtest.swarm.verdict import judged_entries, measurements, shortfall, show
from loadtest.swarm.workers import Crew
from loadtest.targets import UNITS, Comparison, Target, read_targets, scenario_targets, slo_targets
from loadtest.verdict import Circumstances, exit_code, judge

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Judge:
    """Of the master, or of locust where it is one process. rows, complaints: of the last run that stopped."""

    environment: Any
    setup: Setup
    crew: Crew
    rows: tuple[Verdict, ...] = ()
    complaints: tuple[str, ...] = ()
    has_run: bool = False

    def judge(self) -> None:
        """Judges the run that has just stopped, and says the outcome in the log, which the web page shows, too."""
        stats, scenario = self.environment.stats, self.setup.scenario
        entries = judged_entries(stats.entries.values(), scenario)
        complaints = self.crew.complaints(stats.total.num_requests)
        self.has_run = stats.total.num_requests > 0
        if not self.has_run:
            logger.error("no request was made")
        elif scenario and (short := shortfall(scenario, self._spent(), sum(entry.num_requests for entry in entries))):
            complaints.append(short)
        self.complaints = tuple(complaints)
        self.rows = self._judged(entries)
        for row in (row for row in self.rows if row.state is not State.NOT_COMPARABLE):
            logger.info("%s: %s (%s)", row.target_id, row.state, row.why)
        for complaint in self.complaints:
            logger.error(complaint)

    def decide(self) -> None:
        """Sets locust's exit code by the last run. Without any target locust's own rule counts: no failed request."""
        environment = self.environment
        if self.crew.trouble or not self.has_run or environment.runner.exceptions:
            environment.process_exit_code = 1
        elif self.rows or self.complaints:
            environment.process_exit_code = exit_code(self.rows, self.complaints)

    def show(self) -> None:
        """Prints rows and complaints on standard error: standard output may be locust's --json."""
        show(self.rows, self.complaints, Console(stderr=True))

    def _judged(self, entries: Sequence[Any]) -> tuple[Verdict, ...]:
        scenario, options, terms = self.setup.scenario, self.setup.options, self.environment.terms
        targets = self._targets()
        if not targets:
            return ()
        slo_p99_ms = scenario.slo_p99_ms if scenario else options.slo_p99_ms or math.inf
        circumstances = Circumstances(
            machine=read_machine(),
            models=tuple(sorted({ask.model for ask in terms.asks})),
            slo_p99_ms=slo_p99_ms,
            is_local=is_local(terms.endpoint.http_url),
            complaints=self.complaints,
        )
        return judge(targets, measurements(entries, self._seconds(), slo_p99_ms=slo_p99_ms), circumstances)

    def _targets(self) -> tuple[Target, ...]:
        """Of a scenario: what targets.toml has of it, its SLO, and --max-error-share; else what the options say."""
        scenario, options = self.setup.scenario, self.setup.options
        slo_p99_ms, share = options.slo_p99_ms, options.max_error_share
        if scenario:
            rows = scenario_targets(read_targets(), scenario.name)
            if share is not None:
                rows = (*rows, _limit("max-error-share", "error_share", share))
            return (*rows, *slo_targets(scenario, documented=rows))
        if slo_p99_ms is None and share is None:
            return ()
        row = _limit("max-error-share", "error_share", share or 0.0)
        return (row,) if slo_p99_ms is None else (_limit("slo-p99-ms", "p99_ms", slo_p99_ms), row)

    def _seconds(self) -> float:
        """How long was asked what is judged."""
        if self.setup.scenario:
            phases = [phase.name for phase in self.setup.scenario.phases if phase.is_judged]
            return sum(spent.seconds for name, spent in self._spent().items() if name in phases)
        return max((account.seconds for account in self.crew.accounts.values()), default=0.0)

    def _spent(self) -> Mapping[str, Spent]:
        spent: Mapping[str, Spent] = self.environment.shape_class.walk.spent
        return spent


def _limit(flag: str, measure: str, figure: float) -> Target:
    return Target(
        id=flag,
        title=f"--{flag}",
        scenarios=(),
        measure=measure,
        unit=UNITS[measure],
        comparison=Comparison.AT_MOST,
        figure=figure,
        source=f"--{flag}",
    )
