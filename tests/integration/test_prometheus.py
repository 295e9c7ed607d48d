"""A real Prometheus scrapes a running stack: what the rules record, what autoscalers ask, and which alerts fire.

Rules are those of deploy/monitoring/rules, each `for` divided by HURRY; their windows are as they are.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from penstock.engines.triton.endpoints import pick_free_ports
from tests.deploy.chart.rendering import NAMESPACE, render
from tests.integration.ledger import page_of
from tests.integration.live_prometheus import LivePrometheus, live_prometheus, rule_groups
from tests.integration.living import SLOW_CONFIG, infer_slow, inflight, running, triton_of
from tests.integration.prometheus_server import RULES, scrape
from tests.integration.replicas import BRIGHTNESS, BRIGHTNESS_CONFIG
from tests.support.http import call, post_json
from tests.support.stack import CHECKOUT, ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, SLOW, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("prometheus")

HURRY = 300.0  # ten minutes are two seconds
JOB, GONE = "penstock", "penstock-gone"
POD, GONE_POD = "penstock-gateway-7c9d8f6b5-x2x4z", "penstock-gateway-7c9d8f6b5-g0n3e"
OWNED = 'parameters { key: "batch_owner" value { string_value: "gateway" } }\n'
SHORT = OWNED + 'parameters { key: "max_queue_size" value { string_value: "1" } }\n'
HPA_RULES = CHECKOUT / "deploy" / "monitoring" / "prometheus-adapter.yaml"
# What needs metrics of others (cAdvisor's) or of the video program.
NOT_OF_A_GATEWAY = {"penstock:container_memory:ratio"}
QUERIED_WITHIN_S = 20.0


def write_models(folder: Path) -> None:
    """brightness takes pictures, batched by the gateway; short is asked for more than its queue takes; slow sleeps."""
    write_model(folder, "brightness", BRIGHTNESS.format(ledger="/dev/null"), BRIGHTNESS_CONFIG + OWNED)
    write_model(folder, "short", SLOW, CONFIG.format(max_batch_size=1, data_type="TYPE_FP32", count=1) + SHORT)
    write_model(folder, "slow", SLOW, SLOW_CONFIG)


@pytest.fixture(scope="module")
def metrics_ports() -> tuple[int, ...]:
    """Of the stack, and of a gateway that comes and goes."""
    return pick_free_ports("127.0.0.1", 2)


@pytest.fixture(scope="module")
def prom(tmp_path_factory: pytest.TempPathFactory, metrics_ports: tuple[int, ...]) -> Iterator[LivePrometheus]:
    """It scrapes gateways as the chart's ServiceMonitor would have it: with a namespace and a pod."""
    own, gone = (f"127.0.0.1:{port}" for port in metrics_ports)
    scrapes = scrape(JOB, own, namespace=NAMESPACE, pod=POD), scrape(GONE, gone, namespace=NAMESPACE, pod=GONE_POD)
    with live_prometheus(tmp_path_factory.mktemp("prometheus"), *scrapes, hurry=HURRY) as server:
        yield server


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory,
    triton_environment: Path,
    prom: LivePrometheus,
    metrics_ports: tuple[int, ...],
) -> Iterator[RunningStack]:
    """A stack of this file's own, scraped: its engine is stopped now and then."""
    folder = tmp_path_factory.mktemp("scraped")
    write_models(folder / "models")
    with running(folder, folder / "models", "--metrics-port", str(metrics_ports[0]), *ENGINE_PORTS) as stack:
        wait_for(lambda: prom.number(f'up{{job="{JOB}"}}') == 1, QUERIED_WITHIN_S, "it is scraped")
        yield stack


def post_picture(stack: RunningStack) -> int:
    is_written, encoded = cv2.imencode(".png", np.full((8, 8, 3), 100, np.uint8))
    assert is_written
    url = f"{stack.http_url}/v2/models/brightness/image"
    return call("POST", url, encoded.tobytes(), {"content-type": "image/png"}).status


def ask(stack: RunningStack, model: str, milliseconds: float, **headers: str) -> int:
    shape = [1] if model == "slow" else [1, 1]
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": [milliseconds]}
    return post_json(f"{stack.http_url}/v2/models/{model}/infer", {"inputs": [tensor]}, **headers).status


@contextmanager
def traffic(stack: RunningStack) -> Iterator[None]:
    """Pictures, and more for a short queue than it takes, until the end of the with."""
    is_over = threading.Event()

    def work(number: int) -> None:
        while not is_over.wait(0.05):
            if number % 2:
                post_picture(stack)
            else:
                ask(stack, "short", 50)

    with ThreadPoolExecutor(12) as threads:
        for number in range(12):
            threads.submit(work, number)
        try:
            yield
        finally:
            is_over.set()


def test_prometheus_scrapes_the_stack_and_takes_every_rule(stack: RunningStack, prom: LivePrometheus) -> None:
    """The target is up, and no rule fails when it is evaluated."""
    (target,) = [one for one in prom.ask("targets")["activeTargets"] if one["labels"]["job"] == JOB]
    assert (target["health"], target["lastError"]) == ("up", "")
    groups = prom.ask("rules")["groups"]
    expected = {group["name"] for file in RULES.glob("*.yaml") for group in rule_groups(file)}
    assert {group["name"] for group in groups} == expected
    wait_for(lambda: evaluated(prom) == {"ok"}, QUERIED_WITHIN_S, "every rule was evaluated")


def evaluated(prom: LivePrometheus) -> set[str]:
    return {rule["health"] for group in prom.ask("rules")["groups"] for rule in group["rules"]}


def recorded_names() -> list[str]:
    """Of all that is recorded of gateways."""
    files = [file for file in RULES.glob("*.yaml") if file.stem not in ("video", "gpu")]
    rules = [rule for file in files for group in rule_groups(file) for rule in group["rules"]]
    return [rule["record"] for rule in rules if "record" in rule and rule["record"] not in NOT_OF_A_GATEWAY]


def test_every_recording_rule_returns_a_number_while_there_is_traffic(
    stack: RunningStack, prom: LivePrometheus
) -> None:
    """Each of a gateway's has a finite value for this job."""
    names = recorded_names()
    assert len(names) > 20
    with traffic(stack):
        for name in names:
            wait_for(lambda name=name: prom.finite(f'{name}{{job="{JOB}"}}'), QUERIED_WITHIN_S, name)
    assert sum(prom.finite(f'penstock:requests:rate5m{{job="{JOB}"}}')) > 0


def hpa_queries() -> dict[str, str]:
    """By metric, what prometheus-adapter would ask for this pod: its file with its three words filled in."""
    said = yaml.safe_load(HPA_RULES.read_text())["rules"]["custom"]
    words = {"<<.LabelMatchers>>": f'namespace="{NAMESPACE}",pod=~"{POD}"', "<<.GroupBy>>": "pod"}
    found = {}
    for rule in said:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        for word, meaning in words.items():
            query = query.replace(word, meaning)
        assert "<<" not in query
        found[rule["name"]["as"]] = query
    return found


def keda_queries() -> dict[str, str]:
    """By trigger, as the chart renders them."""
    values = {"autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://prometheus:9090"}}}
    (scaled,) = render(values).of_kind("ScaledObject")
    return {trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}


def test_autoscalers_see_the_requests_in_flight_that_the_gateway_counts(
    stack: RunningStack, prom: LivePrometheus
) -> None:
    """The HPA's metric, KEDA's question and the recorded sum are two while two requests run, and nought after them."""
    queries = [
        hpa_queries()["penstock_inflight_requests"],
        keda_queries()["inflight-requests"],
        f'penstock:inflight_requests:sum{{job="{JOB}"}}',
    ]
    results: list[int | str] = []
    threads = [infer_slow(stack, 4000, results) for _ in range(2)]
    wait_for(lambda: inflight(stack) == 2, 5, "two in flight")
    wait_for(lambda: [prom.number(query) for query in queries] == [2.0] * 3, 4, "seen by all")
    assert inflight(stack) == 2, "seen while they ran"
    for thread in threads:
        thread.join()
    assert results == [200, 200]
    wait_for(lambda: [prom.number(query) for query in queries] == [0.0] * 3, QUERIED_WITHIN_S, "gone for all")


def test_autoscalers_see_the_time_in_the_queue_that_the_gateway_measured(
    stack: RunningStack, prom: LivePrometheus
) -> None:
    """The HPA's metric and KEDA's question are the queue's seconds by its requests, over the samples of two minutes."""
    selector = f'{{job="{JOB}",model="brightness"}}'
    for pictures in (1, 40):  # a rate needs something before
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(lambda _: post_picture(stack), range(pictures))) == {200}
        page = page_of(stack)
        count, seconds = (page[f"penstock_queue_seconds_{what}/brightness"] for what in ("count", "sum"))
        wait_for(lambda: prom.number(f"penstock_queue_seconds_count{selector}") == count, QUERIED_WITHIN_S, "scraped")  # noqa: B023
    now = time.time()
    counts = prom.window(f"penstock_queue_seconds_count{selector}", 120, now)
    sums = prom.window(f"penstock_queue_seconds_sum{selector}", 120, now)
    assert (counts[-1], sums[-1]) == (count, pytest.approx(seconds))
    mean_s = (sums[-1] - sums[0]) / (counts[-1] - counts[0])
    assert mean_s > 0
    for query in (hpa_queries()["penstock_queue_seconds"], keda_queries()["queue-seconds"]):
        # A rate reckons on to the window's start, or to where its counter was nought: not the same for the two of them.
        assert prom.number(query, time=str(now)) == pytest.approx(mean_s, rel=0.2)


def test_alert_of_the_engine_fires_while_it_is_stopped_and_resolves(stack: RunningStack, prom: LivePrometheus) -> None:
    """SIGSTOP of Triton under traffic: PenstockEngineDown fires; SIGCONT: nothing fires."""
    wait_for(lambda: prom.number(f'penstock_engine_up{{job="{JOB}"}}') == 1, QUERIED_WITHIN_S, "it was up before")
    triton = triton_of(stack)
    triton.suspend()
    try:
        with ThreadPoolExecutor(8) as threads:
            until = time.monotonic() + 20
            while not prom.firing("PenstockEngineDown", JOB) and time.monotonic() < until:
                list(threads.map(lambda _: ask(stack, "slow", 1, **{"x-request-timeout-ms": "300"}), range(8)))
        (fired,) = prom.firing("PenstockEngineDown", JOB)
        assert fired["labels"]["severity"] == "page"
        assert POD in fired["annotations"]["summary"]
    finally:
        triton.resume()
    wait_for(lambda: not prom.firing("PenstockEngineDown", JOB), QUERIED_WITHIN_S, "resolved")
    assert ask(stack, "slow", 1) == 200


def test_alert_of_refusals_fires_under_more_than_the_queue_takes(stack: RunningStack, prom: LivePrometheus) -> None:
    """A full queue refuses most of what comes: PenstockRequestsRefused says which reason."""
    with traffic(stack):
        wait_for(lambda: prom.firing("PenstockRequestsRefused", JOB), 30, "it fires")
    reasons = {fired["labels"]["reason"] for fired in prom.firing("PenstockRequestsRefused", JOB)}
    assert reasons <= {"queue_full", "cannot_meet"}
    refused = page_of(stack)
    assert sum(refused[f"penstock_rejected_total/{reason}"] for reason in reasons) > 30


def test_alerts_of_a_gateway_that_is_gone_fire(
    tmp_path: Path, stack: RunningStack, prom: LivePrometheus, metrics_ports: tuple[int, ...]
) -> None:
    """A second gateway is scraped and ends: its target is down, and of its job none is left."""
    engine = ("--engine", stack.engine_http_url, "--engine-grpc", stack.engine_grpc_address)
    port = ("--metrics-port", str(metrics_ports[1]))
    second = start_stack(tmp_path / "home", *engine, *port, environ={"PENSTOCK_DECODERS": "1"})
    alerts = ("PenstockTargetDown", "PenstockGatewayAbsent")
    try:
        wait_for(lambda: prom.number(f'penstock_ready{{job="{GONE}"}}') == 1, QUERIED_WITHIN_S, "it is there")
        wait_for(lambda: not any(prom.firing(alert, GONE) for alert in alerts), QUERIED_WITHIN_S, "all is well")
    finally:
        assert stop_stack(second) == 0
    for alert in alerts:
        wait_for(lambda alert=alert: prom.firing(alert, GONE), QUERIED_WITHIN_S, f"{alert} fires")
        assert not prom.firing(alert, JOB)
