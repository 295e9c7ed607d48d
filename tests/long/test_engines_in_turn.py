"""Two Tritons behind one gateway are restarted in turn under load, as the chart's topology `separate` does it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.replicas import BareTriton
from tests.integration.steady_load import SteadyLoad
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.long

UP = 'penstock_replica_up{{replica="{}"}} {}'


@pytest.fixture
def tritons(tmp_path: Path, triton_environment: Path) -> Iterator[list[BareTriton]]:
    """Two that serve the same model, each on ports of its own."""
    both = [BareTriton(tmp_path / name) for name in ("one", "two")]
    with ExitStack() as stack:
        for triton in both:
            stack.callback(triton.clean_up)
            triton.begin()
        yield both


@pytest.fixture
def gateway(tmp_path: Path, tritons: list[BareTriton]) -> Iterator[RunningStack]:
    """One that knows both by name."""
    urls, addresses = zip(*(triton.addresses for triton in tritons), strict=True)
    flags = ("--engine", ",".join(urls), "--engine-grpc", ",".join(addresses), "--models", "brightness")
    stack = start_stack(tmp_path / "home", *flags, environ={"PENSTOCK_DECODERS": "1"})
    try:
        yield stack
    finally:
        stop_stack(stack)


def knows(gateway: RunningStack, triton: BareTriton, value: float) -> bool:
    """Whether the gateway says so of it."""
    return UP.format(triton.addresses[0], value) in call("GET", f"{gateway.metrics_url}/penstock").body.decode()


def test_engines_restarted_in_turn_under_load_cost_no_request(gateway: RunningStack, tritons: list[BareTriton]) -> None:
    """SIGTERM to one at a time: what it has is answered, what it unloads the other one serves, and it is taken back."""
    with SteadyLoad() as load:
        http, grpc = (gateway.http_url.removeprefix("http://"), gateway.grpc_address)
        for grey in (40, 90, 140, 190):
            load.pictures(http, grey)
            load.tensors_over_http(http)
            load.unary_over_grpc(grpc)
        for triton in tritons:
            before = len(triton.computed())
            wait_for(lambda triton=triton, before=before: len(triton.computed()) > before + 20, 20, "it serves")
            triton.end()
            wait_for(lambda triton=triton: knows(gateway, triton, 0.0), 10, "it is left out")
            triton.begin()
            wait_for(lambda triton=triton: knows(gateway, triton, 1.0), 20, "it is taken back")
    assert not load.failures, "\n".join(load.failures)
    assert len(load.answered("pictures")) > 50
