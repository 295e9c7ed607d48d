"""The load test's entry for locust; its users are chosen by name.

locust -f loadtest/locustfile.py --headless -u 4 -t 10s --host http://127.0.0.1:8000 --model people ImageUser
"""

import logging
from argparse import ArgumentParser
from typing import Any

import gevent
import grpc.experimental.gevent  # type: ignore[import-not-found]  # the stubs leave it out
from locust import events

from loadtest.users.grpc import GrpcUser
from loadtest.users.image import ImageUser

__all__ = ["GrpcUser", "ImageUser"]

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: ArgumentParser) -> None:
    """Our own options, shown in locust's --help and in its web page."""
    ours = parser.add_argument_group("Penstock")
    ours.add_argument("--model", default="people", help="name of the model (default: people)")
    ours.add_argument("--images", default="", metavar="DIR", help="pictures to post; without it, generated ones")
    ours.add_argument("--grpc", default="", metavar="HOST:PORT", help="gRPC address (default: --host, the next port)")


@events.init.add_listener  # type: ignore[untyped-decorator]
def let_grpc_wait_in_greenlets(**_: Any) -> None:
    """Makes a waiting gRPC call give way to the other users."""
    grpc.experimental.gevent.init_gevent()
    gevent.get_hub().loop.update_now()  # its clock stood still while modules were imported: --run-time counts from here


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def fail_without_requests(environment: Any, **_: Any) -> None:
    """A run that measured nothing is not a success."""
    if environment.stats.total.num_requests == 0:
        logger.error("no request was made")
        environment.process_exit_code = 1
