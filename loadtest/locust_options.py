"""What locust is told beside its own options, on the command line and in the form of its web page."""

from argparse import ArgumentParser, Namespace
from urllib.parse import urlsplit

import msgspec

from loadtest.clients.client import Endpoint
from loadtest.scenario_files import ScenarioError, scenario_names

DEFAULT_MODEL = "street"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Our options as they were given. An empty scenario: the users themselves, as many as --users says."""

    model: str = ""
    images: str = ""
    grpc: str = ""
    scenario: str = ""
    capacity: float | None = None
    slo_p99_ms: float | None = None
    max_error_share: float | None = None

    def endpoint(self, host: str) -> Endpoint:
        """Whom to ask; gRPC is one port above HTTP unless it was said."""
        url = urlsplit(host)
        default_port = 443 if url.scheme == "https" else 80
        grpc_address = self.grpc or f"{url.hostname}:{(url.port or default_port) + 1}"
        return Endpoint(http_url=host.rstrip("/"), grpc_address=grpc_address)


class Suggestions(list[str]):
    """Choices that the web page offers and that bind nobody: a scenario may be a file of one's own, too."""

    def __contains__(self, name: object) -> bool:
        return True


def add_arguments(parser: ArgumentParser) -> None:
    """Adds them to locust's; the page shows every one with its help."""
    ours = parser.add_argument_group("Penstock")
    ours.add_argument(
        "--scenario",
        default="",
        metavar="NAME",
        choices=Suggestions(["", *scenario_names()]),
        help="a scenario, by name or .toml file: its requests at its rates, phase after phase, then its verdict. It "
        "decides about users, ramp up and run time (which can only cut it short). Empty: the users as chosen, each "
        "asking again as soon as it is answered",
    )
    ours.add_argument(
        "--capacity",
        default="",
        metavar="REQUESTS_PER_S",
        help="what the server carries, in requests a second; scenarios that ask shares of the capacity need it",
    )
    ours.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help=f"the model that is asked (empty: {DEFAULT_MODEL}; in a scenario, the model of each request)",
    )
    ours.add_argument(
        "--images", default="", metavar="DIR", help="a folder of pictures to post, on every worker (empty: made ones)"
    )
    ours.add_argument(
        "--grpc", default="", metavar="HOST:PORT", help="where gRPC is (empty: the host, one port above HTTP)"
    )
    ours.add_argument(
        "--slo-p99-ms", default="", metavar="MS", help="99 %% of the answers are to come within so many milliseconds"
    )
    ours.add_argument(
        "--max-error-share",
        default="",
        metavar="SHARE",
        help="the share of requests that may fail: 0.01 is 1 %% (empty: none, or what the scenario's targets say)",
    )


def read_options(given: Namespace) -> Options:
    """Ours among all. Raises ScenarioError for a number that is none."""
    values = vars(given)
    texts = {name: str(values[name] or "") for name in ("model", "images", "grpc", "scenario")}
    return Options(
        **texts,
        capacity=_number("--capacity", values["capacity"]),
        slo_p99_ms=_number("--slo-p99-ms", values["slo_p99_ms"]),
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
