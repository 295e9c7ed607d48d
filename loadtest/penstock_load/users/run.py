"""A run of locust: its users and load shape from our options, then its verdict and exit code."""

import logging
import math
import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent
from flask import Response, jsonify, request
from locust.runners import STATE_RUNNING, STATE_SPAWNING, LocalRunner, MasterRunner, WorkerRunner
from rich.console import Console

from penstock_load.clients.client import Endpoint
from penstock_load.driver.protocol import DriverError
from penstock_load.hardware import is_local, read_machine
from penstock_load.results import State, Verdict
from penstock_load.scenario import RequestSpec, Scenario, ScenarioError, read_scenario, with_model, with_slo
from penstock_load.targets import UNITS, Comparison, Target, read_targets, scenario_targets, slo_targets
from penstock_load.users.arrival_plan import ArrivalPlan
from penstock_load.users.figures import RunTerms, judged_entries, measurements, shortfall, show
from penstock_load.users.options import DEFAULT_MODEL, Options, read_options
from penstock_load.users.processes import ArrivalShape, Processes
from penstock_load.users.sender import Sender
from penstock_load.users.user_classes import DEFAULT_HOST, ScenarioUser
from penstock_load.verdict import Circumstances, exit_code, judge

TIMEOUT_S = 30.0
NO_ENDPOINT = Endpoint(http_url="", grpc_address="")


@dataclass(slots=True)
class LocustSetup:
    """Of one process of locust. users: the classes that the command line named.

    options, scenario: of the run at hand, whatever is typed into the web page meanwhile.
    """

    environment: Any
    crew: Processes
    users: list[type]
    options: Options = field(default_factory=Options)
    scenario: Scenario | None = None
    _is_prepared: bool = False
    _opening: Any = field(default_factory=lambda: gevent.Greenlet(Sender))

    def begin(self) -> None:
        """Once, with the command line's options. Raises ScenarioError for what cannot be run."""
        self.environment.terms = RunTerms(NO_ENDPOINT, (), TIMEOUT_S)
        self.environment.sender = None
        options = read_options(self.environment.parsed_options)
        if not isinstance(self.environment.runner, WorkerRunner):  # which learns the options from the master
            if options.scenario and self.environment.parsed_options.user_classes:
                raise ScenarioError(f"--scenario {options.scenario} brings its own users: leave out the users' names")
            self.choose(options)

    def open_sender(self) -> None:
        """Returns when this process can send; a run that starts meanwhile waits, too."""
        if not isinstance(self.environment.runner, MasterRunner):
            self._opening.start()
            self._opening.join()
        if isinstance(self.environment.runner, LocalRunner) and self.environment.parsed_options.headless:
            self._prepare()  # now, and not while --run-time runs
            self._is_prepared = True

    def choose(self, options: Options) -> None:
        """Takes users and shape for the next run. Raises ScenarioError where the scenario cannot be run so."""
        environment = self.environment
        scenario = wanted_scenario(options)
        shape = None
        if scenario is not None:
            plan = ArrivalPlan(scenario, capacity_per_s=options.capacity)
            given = environment.parsed_options
            shape = ArrivalShape(plan, self.crew, stop_after=lambda: given.run_time)
            shape.runner = environment.runner
            environment.stop_timeout = environment.stop_timeout or scenario.timeout_s  # what was asked is waited for
        self.scenario = scenario
        environment.shape_class = shape
        self._take_users(options)

    def start(self) -> None:
        """A run begins; where its requests cannot be made, the whole run ends."""
        environment = self.environment
        self.crew.begin()
        if not self._is_prepared:
            self._prepare()
        self._is_prepared = False
        if environment.terms.trouble:
            self.crew.send_error(f"{socket.gethostname()}: {environment.terms.trouble}")
        if environment.shape_class:
            environment.shape_class.reset_time()  # to prepare is no part of the schedule
        self.crew.start_requests()

    def stop(self) -> None:
        """A run stops: no more users are started, and every process reports."""
        if self.environment.shape_class:
            self.environment.shape_class.close()
        self.crew.gather()

    def watch_form(self, web_ui: Any) -> None:
        """Has the web page's start button take our fields, too, and say what is wrong with them."""
        web_ui.app.before_request(self._before_start)

    def _before_start(self) -> Response | None:
        runner, given = self.environment.runner, self.environment.parsed_options
        is_start = request.method == "POST" and request.path.endswith("/swarm")
        if not is_start or runner.state in (STATE_RUNNING, STATE_SPAWNING):  # there, the number of users is edited
            return None
        given.run_time = None  # or that of an earlier start would count where the field is empty now
        try:
            self.choose(read_options(Namespace(**vars(given) | request.form.to_dict())))
        except ScenarioError as error:
            return jsonify({"success": False, "message": str(error), "host": self.environment.host})
        return None

    def _prepare(self) -> None:
        """Makes what this process sends; terms.trouble says why it cannot."""
        environment = self.environment
        try:
            options = self.options = read_options(environment.parsed_options)
            self._take_users(options)
            self.scenario = wanted_scenario(options)
            environment.terms = self._terms(options)
            if not isinstance(environment.runner, MasterRunner):
                self._connect(environment.terms, options.images)
        except (ScenarioError, DriverError) as error:
            environment.terms = RunTerms(NO_ENDPOINT, (), TIMEOUT_S, trouble=str(error))

    def _connect(self, terms: RunTerms, images: str) -> None:
        """Raises DriverError; the next run then gets a new process."""
        self._opening.start()
        sender: Sender = self._opening.get()
        self.environment.sender = None
        try:
            sender.connect(terms.asks, terms.endpoint, images=images, timeout_s=terms.timeout_s)
        except DriverError:
            self._opening = gevent.Greenlet(Sender)
            raise
        self.environment.sender = sender

    def _take_users(self, options: Options) -> None:
        if options.scenario:
            self.environment.user_classes = [ScenarioUser]
        elif ScenarioUser in self.environment.user_classes:
            self.environment.user_classes = list(self.users)

    def _terms(self, options: Options) -> RunTerms:
        endpoint = options.endpoint(self.environment.host or DEFAULT_HOST)
        if self.scenario:
            return RunTerms(endpoint, self.scenario.requests, self.scenario.timeout_s, self.crew.now)
        kinds = [users.kind for users in self.environment.user_classes]
        model = options.model or DEFAULT_MODEL
        return RunTerms(endpoint, tuple(RequestSpec(kind=kind, model=model) for kind in kinds), TIMEOUT_S)


def wanted_scenario(options: Options) -> Scenario | None:
    """The scenario with the changes of the options; None if there are none. Raises ScenarioError."""
    if not options.scenario:
        return None
    scenario = read_scenario(options.scenario)
    if options.model:
        scenario = with_model(scenario, options.model)
    if options.slo_p99_ms is not None:
        scenario = with_slo(scenario, options.slo_p99_ms)
    return scenario


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LocustJudge:
    """Of the master, or of locust where it is one process. rows, complaints: of the last run that stopped."""

    environment: Any
    setup: LocustSetup
    crew: Processes
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
        elif scenario and not self._seconds():
            complaints.append("no judged phase was reached")
        elif scenario:
            intended: Mapping[str, float] = self.environment.shape_class.walk.intended
            complaints += shortfall(scenario, intended, sum(entry.num_requests for entry in entries))
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
            seconds: Mapping[str, float] = self.environment.shape_class.walk.seconds
            return sum(seconds.get(name, 0.0) for name in phases)
        return max((account.seconds for account in self.crew.accounts.values()), default=0.0)


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
