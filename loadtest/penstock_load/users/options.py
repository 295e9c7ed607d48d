"""The command line of locust for a scenario, and the options that our locustfile adds."""

import math
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock_load.clients.client import Endpoint
from penstock_load.scenario import ScenarioError, scenario_names

LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"
LOOPBACK = "127.0.0.1"
WEB_PORT = 8089


def locust_arguments(
    scenario: str,
    *,
    target: str = "http://127.0.0.1:8000",
    capacity_per_s: float | None = None,
    headless: bool = False,
    workers: int = 0,
    web_port: int = WEB_PORT,
) -> list[str]:
    """What follows `python -m locust`. workers: processes that ask, on this machine; 0: locust itself asks.

    Without headless the web page waits on the loopback for a person to start the scenario. Raises ValueError for a
    number that cannot be.
    """
    if workers < 0 or not 0 < web_port < 65536:
        raise ValueError(f"--workers {workers} --web-port {web_port}: 0 or more workers, a port from 1 to 65535")
    if capacity_per_s is not None and not 0 < capacity_per_s < math.inf:
        raise ValueError(f"--capacity {capacity_per_s:g}: requests a second, above 0")
    arguments = ["-f", str(LOCUSTFILE), "--host", target, "--scenario", scenario]
    if capacity_per_s is not None:
        arguments += ["--capacity", f"{capacity_per_s:g}"]
    if workers:
        arguments += ["--processes", str(workers), "--master-bind-host", LOOPBACK]
    if headless:
        return [*arguments, "--headless", "--only-summary"]
    return [*arguments, "--web-host", LOOPBACK, "--web-port", str(web_port)]


DEFAULT_MODEL = "street"
KEY_VARIABLE = "PENSTOCK_API_KEY"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Our options as they were given. An empty scenario: the users themselves, as many as --users says."""

    model: str = ""
    images: str = ""
    grpc: str = ""
    api_key: str = ""
    scenario: str = ""
    capacity: float | None = None
    slo_p99_ms: float | None = None
    max_error_share: float | None = None

    def endpoint(self, host: str) -> Endpoint:
        """Whom to ask; gRPC is one port above HTTP unless it was said."""
        url = urlsplit(host)
        default_port = 443 if url.scheme == "https" else 80
        grpc_address = self.grpc or f"{url.hostname}:{(url.port or default_port) + 1}"
        headers = (("x-api-key", self.api_key),) if self.api_key else ()
        return Endpoint(http_url=host.rstrip("/"), grpc_address=grpc_address, headers=headers)


class Suggestions(list[str]):
    """Suggestions of the web page: a path outside the list is accepted and becomes one of them."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and not super().__contains__(name):
            self.append(name)
        return True


def add_arguments(parser: ArgumentParser) -> None:
    """Adds them to locust's, and not in a group, which its page would leave out. There, a line has 90 characters."""
    parser.add_argument(
        "--scenario",
        default="",
        metavar="NAME",
        choices=Suggestions(["", *scenario_names()]),
        help="asks its requests at its rates, then judges; empty: so many users, each asks again at once",
    )
    parser.add_argument(
        "--capacity",
        default="",
        metavar="REQUESTS_PER_S",
        help="what the server carries, in requests a second: scenarios that ask shares of it need it",
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help=f"empty: {DEFAULT_MODEL}, or what the scenario asks"
    )
    parser.add_argument(
        "--images",
        default="",
        metavar="DIR",
        help="a folder of pictures to post, there on every worker; empty: made ones",
    )
    parser.add_argument(
        "--grpc", default="", metavar="HOST:PORT", help="host:port of gRPC; empty: the host, one port above HTTP"
    )
    api_key = parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"of a server that asks for one, as the header x-api-key [{KEY_VARIABLE}]",
    )
    api_key.include_in_web_ui = False  # type: ignore[attr-defined]  # locust's: its page would hold the key
    parser.add_argument(
        "--slo-p99-ms",
        dest="slo",
        default="",
        metavar="MS",
        help="milliseconds within which 99 of 100 answers are to come; empty: the scenario's",
    )
    parser.add_argument(
        "--max-error-share",
        default="",
        metavar="SHARE",
        help="of requests that may fail, 0.01 is 1 in 100; empty: 0, or the scenario's targets",
    )


def read_options(given: Namespace) -> Options:
    """Ours among all. Raises ScenarioError for a number that is none."""
    values = vars(given)
    texts = {name: str(values.get(name) or "") for name in ("model", "images", "grpc", "scenario", "api_key")}
    return Options(
        **texts,
        capacity=_number("--capacity", values["capacity"]),
        slo_p99_ms=_number("--slo-p99-ms", values["slo"]),
        max_error_share=_number("--max-error-share", values["max_error_share"], can_be_zero=True),
    )


def _number(flag: str, text: str, *, can_be_zero: bool = False) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 < value < float("inf") or (can_be_zero and value == 0):
        return value
    raise ScenarioError(f"{flag} {text}: a number {'from' if can_be_zero else 'above'} 0 is needed")
