"""What is asked in a run of locust: from our options to users, shape and terms, checked before anything is sent."""

import socket
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from flask import Response, jsonify, request
from locust.contrib.fasthttp import FastHttpSession
from locust.event import EventHook
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner, WorkerRunner

from loadtest.arrival_plan import ArrivalPlan
from loadtest.clients.client import Endpoint
from loadtest.overrides import with_model, with_slo
from loadtest.scenario import Ask, Scenario
from loadtest.scenario_files import ScenarioError, read_scenario
from loadtest.swarm.options import DEFAULT_MODEL, Options, read_options
from loadtest.swarm.shapes import ArrivalShape
from loadtest.swarm.workers import Crew
from loadtest.users.asking import DEFAULT_HOST, ScenarioUser, prepare
from loadtest.users.terms import CannotAsk, HttpSession, Terms

TIMEOUT_S = 30.0
NOBODY = Endpoint(http_url="", grpc_address="")


@dataclass(slots=True)
class Setup:
    """Of one process of locust. users: the classes that the command line named.

    options, scenario: of the run at hand, whatever is typed into the web page meanwhile.
    """

    environment: Any
    crew: Crew
    users: list[type]
    options: Options = field(default_factory=Options)
    scenario: Scenario | None = None

    def begin(self) -> None:
        """Once, with the command line's options. Raises ScenarioError for what cannot be run."""
        self.environment.terms = Terms(NOBODY, (), TIMEOUT_S)
        options = read_options(self.environment.parsed_options)
        if not isinstance(self.environment.runner, WorkerRunner):  # which learns the options from the master
            if options.scenario and self.environment.parsed_options.user_classes:
                raise ScenarioError(f"--scenario {options.scenario} brings its own users: leave out the users' names")
            self.choose(options)

    def choose(self, options: Options) -> None:
        """Takes users and shape for the next run. Raises ScenarioError where the scenario cannot be run so."""
        environment = self.environment
        scenario = wanted_scenario(options)
        shape = None
        if scenario is not None:
            plan = ArrivalPlan(scenario, capacity_per_s=options.capacity)
            given = environment.parsed_options
            shape = ArrivalShape(plan, tell=self.crew.tell_moment, stop_after=lambda: given.run_time)
            shape.runner = environment.runner
            environment.stop_timeout = environment.stop_timeout or scenario.timeout_s  # what was asked is waited for
        self.scenario = scenario
        environment.shape_class = shape
        self._take_users(options)

    def start(self) -> None:
        """A run begins: makes what this process sends; where that cannot be, the whole run ends."""
        environment = self.environment
        self.crew.begin()
        try:
            options = self.options = read_options(environment.parsed_options)
            self._take_users(options)
            self.scenario = wanted_scenario(options)
            environment.terms = self._terms(options)
            if not isinstance(environment.runner, MasterRunner):
                prepare(environment.terms, options.images, _session(environment.terms))
        except (ScenarioError, CannotAsk) as error:
            environment.terms = Terms(NOBODY, (), TIMEOUT_S, trouble=str(error))
            self.crew.tell_trouble(f"{socket.gethostname()}: {error}")
        self.crew.begin_to_ask()

    def stop(self) -> None:
        """A run stops: nobody is started any more, and every process gives its account."""
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

    def _take_users(self, options: Options) -> None:
        if options.scenario:
            self.environment.user_classes = [ScenarioUser]
        elif ScenarioUser in self.environment.user_classes:
            self.environment.user_classes = list(self.users)

    def _terms(self, options: Options) -> Terms:
        endpoint = options.endpoint(self.environment.host or DEFAULT_HOST)
        if self.scenario:
            return Terms(endpoint, self.scenario.requests, self.scenario.timeout_s, self.crew.now)
        kinds = [users.kind for users in self.environment.user_classes]
        model = options.model or DEFAULT_MODEL
        return Terms(endpoint, tuple(Ask(kind=kind, model=model) for kind in kinds), TIMEOUT_S)


def wanted_scenario(options: Options) -> Scenario | None:
    """The scenario with what the options change in it; None where none is asked. Raises ScenarioError."""
    if not options.scenario:
        return None
    scenario = read_scenario(options.scenario)
    if options.model:
        scenario = with_model(scenario, options.model)
    if options.slo_p99_ms is not None:
        scenario = with_slo(scenario, options.slo_p99_ms)
    return scenario


def _session(terms: Terms) -> HttpSession:
    """For what is asked beside the load: nobody counts it."""
    session: HttpSession = FastHttpSession(
        terms.endpoint.http_url, EventHook(), None, network_timeout=terms.timeout_s, connection_timeout=terms.timeout_s
    )
    return session
