"""Two replicas behind a real HAProxy are restarted in turn, in the chart's order, under load: no request fails.

The times are those of deploy/helm/penstock/values.yaml (gateway.drain) and of deploy/haproxy/haproxy.cfg, divided by
SCALE.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.balancer import Balancer, balancer, check_interval_s
from tests.integration.living import gateway_of
from tests.integration.replicas import Replica, SidecarReplica, chart_drain
from tests.integration.steady_load import SteadyLoad
from tests.support.waiting import wait_for

SCALE = 5.0
DRAIN = chart_drain(SCALE)
AGE_S = 2.0
CHECK_INTERVAL_MS = round(check_interval_s()[0] * 1000 / SCALE)
GREYS = (60, 180)  # grey levels of the pictures that clients send


@contextmanager
def serving(folder: Path, replicas: list[Replica]) -> Iterator[Balancer]:
    """The replicas, ready, behind HAProxy."""
    with ExitStack() as stack:
        addresses = [replica.addresses for replica in replicas]
        proxy = stack.enter_context(balancer(folder, addresses, check_interval_ms=CHECK_INTERVAL_MS))
        for replica in replicas:
            stack.callback(replica.clean_up)
        for replica in replicas:
            stack.callback(replica.kill)
            replica.begin()
        for number, replica in enumerate(replicas, start=1):
            replica.await_ready()
            wait_for(lambda number=number: proxy.state(number) == "UP", 10, "HAProxy takes it in")
        yield proxy


def restart(proxy: Balancer, number: int, replica: Replica) -> None:
    """The rollout's part: end it, start it anew, wait until it is ready and balanced to."""
    replica.end(DRAIN)
    assert proxy.state(number).startswith("DOWN")
    replica.begin()
    replica.await_ready()
    wait_for(lambda: proxy.state(number) == "UP", 10, "HAProxy takes it in again")


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> list[SidecarReplica]:
    """Two that end old gRPC connections, not begun yet."""
    folder = tmp_path_factory.mktemp("pods")
    environ = {"PENSTOCK_DECODERS": "1", "TMPDIR": str(folder), "PENSTOCK_GRPC_MAX_CONNECTION_AGE_S": str(AGE_S)}
    return [SidecarReplica(folder / name, DRAIN.flags, environ) for name in ("one", "two")]


def test_rolling_restart_under_load_fails_no_request_and_a_kill_does(
    tmp_path: Path, sidecars: list[SidecarReplica]
) -> None:
    """HTTP tensors, pictures and gRPC through the balancer, gRPC past it: each request is computed and answered once.

    Each replica served until its SIGTERM and again after its restart. Then one gateway is killed, now and
    again: these clients do see that.
    """
    before = [len(replica.computed()) for replica in sidecars]  # of a first try
    with serving(tmp_path, list(sidecars)) as proxy:
        with SteadyLoad() as load:
            load.tensors_over_http(proxy.http_address)
            load.unary_over_grpc(proxy.grpc_address)
            for grey in GREYS:
                load.pictures(proxy.http_address, grey)
            load.unary_to_each([replica.addresses[1] for replica in sidecars])
            for number, replica in enumerate(sidecars, start=1):
                await_calls(replica, 20)
                restart(proxy, number, replica)
                await_calls(replica, 20)
        message = [replica.computed()[count:] for replica, count in zip(sidecars, before, strict=True)]
        computed = Counter(brightness for values in message for brightness in values)
        assert not load.failures, "\n".join(load.failures)
        by_number = {number: 1 for kind in ("tensors", "unary") for number in load.answered(kind)}
        assert {value: count for value, count in computed.items() if value > 1} == by_number
        pictures = sum(computed[round(grey / 255, 2)] for grey in GREYS)  # others are the gateway's own trials
        assert pictures == len(load.answered("pictures")) > 50

        with SteadyLoad() as load:
            for _ in range(6):
                load.tensors_over_http(proxy.http_address)
            for _ in range(5):  # a kill between two requests costs none
                await_calls(sidecars[0], 20)
                gateway_of(sidecars[0].running).kill()
                with suppress(AssertionError):
                    wait_for(lambda: load.failures, 1, "a kill costs requests")
                    break
            assert load.failures


def await_calls(replica: SidecarReplica, count: int) -> None:
    """Returns when it has computed so many more."""
    before = len(replica.computed())
    wait_for(lambda: len(replica.computed()) >= before + count, 20, f"{count} more calls")
