"""The load test's entry for locust: users by name, or a scenario with its verdict.

locust -f loadtest/penstock_load/locustfile.py --host http://127.0.0.1:8000 --web-host 127.0.0.1
locust -f loadtest/penstock_load/locustfile.py --headless -u 4 -t 10s --host http://127.0.0.1:8000 ImageUser
locust -f loadtest/penstock_load/locustfile.py --headless --host http://127.0.0.1:8000 --scenario image-steady
--capacity 140

Users: ImageUser, RestUser, GrpcUser and StreamUser, without names all of them; each sends its next request when the
last is answered. A scenario has one user in each process, which sends on schedule (penstock_load.users.arrival_plan).

Exit code 1: a target was missed, no request was made, the generator was the bottleneck, or it does not add up; without
any target (--scenario, --slo-p99-ms, --max-error-share) also where a request failed.

On several processes: --processes N. On several machines, one with --master, --expect-workers N and all of the options,
each other with --worker --master-host HOST and nothing else of ours: locust hands our options from the master to its
workers. What they name must be there, too: the checkout, the folder of --images, a scenario's file, and the host of
--host and --grpc as seen from there. Users are named on every one of them.
"""

import logging
import signal
import sys
from typing import Any

import gevent
import locust.stats
from locust import events
from locust.runners import WorkerRunner

from penstock_load.scenario import ScenarioError
from penstock_load.users import figures as verdict
from penstock_load.users import options
from penstock_load.users.processes import Processes
from penstock_load.users.run import LocustJudge, LocustSetup
from penstock_load.users.user_classes import GrpcUser, ImageUser, RestUser, StreamUser

__all__ = ["GrpcUser", "ImageUser", "RestUser", "StreamUser"]

logger = logging.getLogger(__name__)

events.init_command_line_parser.add_listener(options.add_arguments)
locust.stats.bucket_response_time = verdict.bucket  # locust's own way to keep more than two digits


@events.init.add_listener  # type: ignore[untyped-decorator]
def set_up(environment: Any, web_ui: Any, **_: Any) -> None:
    """Once, when locust has its runner; whatever the options get wrong ends it here."""
    crew = Processes(environment)
    crew.listen()
    setup = LocustSetup(environment, crew, list(environment.user_classes))
    judge = LocustJudge(environment, setup, crew)
    try:
        setup.begin()
    except ScenarioError as error:
        logger.error(error)
        sys.exit(1)
    if web_ui:
        setup.watch_form(web_ui)
    elif environment.shape_class:  # until it has ended, locust by itself would die of SIGTERM and leave its workers
        gevent.signal_handler(signal.SIGTERM, environment.shape_class.end)
    listen(environment, setup, judge)
    setup.open_sender()
    gevent.get_hub().loop.update_now()  # its clock stood still while modules were imported: --run-time counts from here


def listen(environment: Any, setup: LocustSetup, judge: LocustJudge) -> None:
    """From here on locust's events drive everything."""
    runs = environment.events
    runs.test_start.add_listener(lambda **_: setup.start())
    if isinstance(environment.runner, WorkerRunner):
        return
    runs.test_stopping.add_listener(lambda **_: setup.stop())
    runs.test_stop.add_listener(lambda **_: judge.judge())
    events.quitting.add_listener(lambda **_: judge.decide())
    runs.quit.add_listener(lambda **_: judge.show())
