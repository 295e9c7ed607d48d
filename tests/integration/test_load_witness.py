"""The load test's witnesses against the real stack: its metrics, its statistics, a real Prometheus, its processes."""

import asyncio
import os
import time
from collections.abc import Iterator

import aiohttp
import numpy as np
import psutil
import pytest

from penstock_load.clients.client import Client, Endpoint, TargetError
from penstock_load.clients.connect import connect
from penstock_load.clients.control import ReloadPlan, reload_cycles
from penstock_load.measure.ledger import percentiles_of
from penstock_load.results import RequestSummary, Side, Status, Witness
from penstock_load.scenario import Kind, RequestSpec
from penstock_load.witness.loads import open_loads
from penstock_load.witness.process_cpu import meter_of_server
from penstock_load.witness.readers import MetricsError, fetch_statistics
from penstock_load.witness.witness import Witnesses, open_witnesses
from tests.integration import prometheus_server
from tests.integration.prometheus_server import scrape
from tests.support.http import call, post_json
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")

REST = RequestSpec(kind=Kind.REST, model="identity_fp32", sizes=(4,))
GRPC = RequestSpec(kind=Kind.GRPC, model="identity_fp32", sizes=(4,))
IMAGE = RequestSpec(kind=Kind.IMAGE, model="street")
STAGES = {"decode", "preprocess", "queue", "infer", "postprocess"}


def gateway_of(stack: RunningStack) -> Endpoint:
    return Endpoint(http_url=stack.http_url, grpc_address=stack.grpc_address)


def engine_of(stack: RunningStack) -> Endpoint:
    return Endpoint(http_url=stack.engine_http_url, grpc_address=stack.engine_grpc_address)


async def ask(endpoint: Endpoint, asks: dict[RequestSpec, int]) -> RequestSummary:
    """So many answers of each, one after the other, and how long each took."""
    service_ms = []
    for one, count in asks.items():
        client = await connect(one, endpoint, seed=1, images="", timeout_s=30)
        for number in range(count):
            began = time.monotonic()
            answer = await client.send(number)
            service_ms.append((time.monotonic() - began) * 1e3)
            assert answer.status is Status.OK, answer
        await client.aclose()
    return summary(service_ms)


async def ask_slow(stack: RunningStack, *, sleep_ms: float, count: int) -> RequestSummary:
    """A model that sleeps as long as requested."""
    request = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [sleep_ms]}]}
    service_ms = []
    for _ in range(count):
        began = time.monotonic()
        answer = await asyncio.to_thread(post_json, f"{stack.http_url}/v2/models/slow/infer", request)
        service_ms.append((time.monotonic() - began) * 1e3)
        assert answer.status == 200, answer
    return summary(service_ms)


def summary(service_ms: list[float]) -> RequestSummary:
    """Of good answers alone."""
    count, none, service = len(service_ms), percentiles_of(np.array([])), percentiles_of(np.array(service_ms))
    return RequestSummary("all", count, count, count, 0, 0, 0, 0, service, service, none)


async def witnessed(
    witnesses: Witnesses, endpoint: Endpoint, asks: dict[RequestSpec, int]
) -> tuple[RequestSummary, Witness]:
    """A phase and what the server says of it."""
    await witnesses.before()
    client = await ask(endpoint, asks)
    witness = await witnesses.after(client, tuple(asks))
    assert witness is not None
    return client, witness


def assert_agree(client: RequestSummary, witness: Witness) -> None:
    """The counts exactly; the server's median is no longer than the client's, which holds it."""
    assert witness.answered == client.ok
    assert not [sentence for sentence in witness.disagreements if "server counted" in sentence]
    (median,) = [quantile for quantile in witness.quantiles if quantile.quantile == 0.5]
    assert median.low_ms <= client.service.p50
    assert witness.mean_ms <= client.service.mean


@pytest.fixture(scope="module")
def prometheus(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server that scrapes the stack once a second, and has: its address."""
    target = stack.metrics_url.removeprefix("http://").removesuffix("/metrics")
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus_server.prometheus(folder, scrape("penstock", target), rules=None) as server:
        server.wait_for("penstock_ready", 60)
        yield server.url


async def test_prometheus_and_client_count_the_same_answers(stack: RunningStack, prometheus: str) -> None:
    """REST, gRPC and pictures made meanwhile; two phases, each counted by itself, though it scrapes once a second."""
    endpoint = gateway_of(stack)
    async with await open_witnesses(endpoint, ["identity_fp32", "street"], prometheus_url=prometheus) as witnesses:
        assert witnesses.notes == ()
        await ask(endpoint, {REST: 3})  # belongs to no phase
        for asks in ({REST: 40, GRPC: 17, IMAGE: 5}, {GRPC: 11}):
            client, witness = await witnessed(witnesses, endpoint, asks)
            assert_agree(client, witness)
            assert witness.source == f"Prometheus at {prometheus} and statistics of {stack.http_url}"


async def test_prometheus_and_the_metrics_page_say_the_same_of_one_phase(stack: RunningStack, prometheus: str) -> None:
    """Count, mean and quantiles to the last figure; and the bucket of the median holds the client's."""
    endpoint, models = gateway_of(stack), ["slow"]
    async with (
        await open_witnesses(endpoint, models, prometheus_url=prometheus) as remote,
        await open_witnesses(endpoint, models, metrics_url=stack.metrics_url) as own,
    ):
        await remote.before()
        await own.before()
        client = await ask_slow(stack, sleep_ms=60, count=15)
        witnesses = [await each.after(client, [RequestSpec(kind=Kind.REST, model="slow")]) for each in (own, remote)]
    by_page, by_prometheus = (witness for witness in witnesses if witness)
    assert by_prometheus.answered == by_page.answered == 15
    assert by_prometheus.mean_ms == pytest.approx(by_page.mean_ms)
    assert by_prometheus.quantiles == by_page.quantiles
    median = by_page.quantiles[0]
    assert (median.low_ms, median.high_ms) == (50, 100)
    assert median.low_ms < client.service.p50 < median.high_ms


async def test_prometheus_that_knows_no_gateway_is_refused_before_the_run(stack: RunningStack, prometheus: str) -> None:
    """And so is an address where no Prometheus answers."""
    endpoint = gateway_of(stack)
    for url in (stack.http_url, stack.metrics_url, "http://127.0.0.1:9"):
        with pytest.raises(MetricsError, match=url):
            await open_witnesses(endpoint, ["street"], prometheus_url=url)


async def test_metrics_page_tells_the_stages_of_pictures_and_the_engines_batches(stack: RunningStack) -> None:
    """The gateway's five stages, the engine's four, every execution by its rows."""
    endpoint = gateway_of(stack)
    async with await open_witnesses(endpoint, ["street"], metrics_url=stack.metrics_url) as witnesses:
        client, witness = await witnessed(witnesses, endpoint, {IMAGE: 12})
    assert_agree(client, witness)
    stages = dict(witness.stages_ms)
    engine = {"engine_queue", "engine_compute_input", "engine_compute_infer", "engine_compute_output"}
    assert set(stages) == STAGES | engine
    assert 0 < stages["engine_compute_infer"] < stages["infer"] < witness.mean_ms
    assert sum(rows * count for rows, count in witness.batch_sizes) in range(12, 16)  # and a canary or two


async def test_triton_asked_by_its_own_port_is_witnessed_by_its_counters_and_statistics(stack: RunningStack) -> None:
    """Counts to within the gateway's canaries; no quantiles, for it keeps none."""
    (line,) = stack.logged(": engine process ")
    endpoint = engine_of(stack)
    url = f"{line.partition(' metrics=')[2].split()[0]}/metrics"
    async with await open_witnesses(endpoint, ["identity_fp32"], metrics_url=url) as witnesses:
        client, witness = await witnessed(witnesses, endpoint, {REST: 20, GRPC: 20})
    assert client.ok <= witness.answered <= client.ok + 3
    mismatches = ("counted 3", "another server")
    assert not [one for one in witness.disagreements if any(text in one for text in mismatches)]
    assert witness.quantiles == ()
    assert dict(witness.batch_sizes).get(1, 0) >= 40
    assert 0 < dict(witness.stages_ms)["engine_compute_infer"] < witness.mean_ms


def test_family_of_the_gateways_port_is_gateway_and_triton_and_not_this_test(stack: RunningStack) -> None:
    """The whole of `penstock up` by its HTTP port, Triton and its stubs alone by the engine's."""
    front, engine = (int(url.rpartition(":")[2]) for url in (stack.http_url, stack.engine_http_url))
    family = meter_of_server("127.0.0.1", front)
    pids = {process.pid for process in family.processes()}
    assert family.root.pid == stack.process.pid
    assert os.getpid() not in pids
    triton = meter_of_server("127.0.0.1", engine)
    assert "tritonserver" in triton.root.name()
    assert {process.pid for process in triton.processes()} < pids
    assert meter_of_server("localhost", front).root == family.root


async def test_cpu_of_the_stack_grows_with_the_answers_it_gives(stack: RunningStack) -> None:
    """By no less than what the answers needed in the engine's own CPU time, and no more than the machine has."""
    endpoint = gateway_of(stack)
    async with await open_loads(endpoint, began_s=time.monotonic(), interval_s=0.2) as loads:
        began, before_s = time.monotonic(), await loads.server_cpu_s()
        await ask(endpoint, {REST: 200})
        after_s, elapsed_s = await loads.server_cpu_s(), time.monotonic() - began
    assert before_s is not None
    assert after_s is not None
    assert 0.02 < after_s - before_s < (elapsed_s + 0.5) * psutil.cpu_count()


async def test_reloads_take_a_model_away_bring_it_back_and_time_its_first_answers(stack: RunningStack) -> None:
    """Through the gateway; the model answers afterwards, and one that is not served is left alone."""
    endpoint = gateway_of(stack)

    async def client() -> Client:
        return await connect(
            RequestSpec(kind=Kind.REST, model="identity_bytes"), endpoint, seed=1, images="", timeout_s=30
        )

    plan = ReloadPlan(cycles=2, round=3, side=Side.BESIDE)
    reloads = await reload_cycles(endpoint, "identity_bytes", connect=client, plan=plan)
    assert [(reload.round, reload.side, reload.model) for reload in reloads] == [(3, Side.BESIDE, "identity_bytes")] * 2
    for reload in reloads:
        assert reload.load_ms > 10  # a process of python starts
        assert reload.first_answer_ms > 0
        assert reload.second_answer_ms > 0
    assert call("GET", f"{stack.http_url}/v2/models/identity_bytes/ready").status == 200
    with pytest.raises(TargetError, match=f"missing is not ready at {stack.http_url}"):
        await reload_cycles(endpoint, "missing", connect=client, plan=plan)


async def test_statistics_are_the_same_by_gateway_and_by_engine(stack: RunningStack) -> None:
    """The gateway relays the extension."""
    async with aiohttp.ClientSession() as session:
        found = [
            await fetch_statistics(session, endpoint, ["identity_bytes"], timeout_s=10)
            for endpoint in (gateway_of(stack), engine_of(stack))
        ]
    assert abs(found[0].inference_stats.success.count - found[1].inference_stats.success.count) <= 1  # a canary
