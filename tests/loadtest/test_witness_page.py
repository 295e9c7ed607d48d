"""What is read off a metrics page, and what happened between two readings."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock_load.scenario import Kind, RequestSpec
from penstock_load.witness.counters import (
    CounterReset,
    Page,
    add_histograms,
    count_requests,
    counter_delta,
    histogram_delta,
    quantile_bounds,
)
from penstock_load.witness.readers import (
    BatchStats,
    Duration,
    InferStats,
    MetricsError,
    Statistics,
    default_metrics_url,
    parse_page,
    seconds_of,
    statistics_delta,
)

HTTP = {"model": "m", "protocol": "http"}


class Server:
    """The gateway's histogram of requests, as its own library writes it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        bounds = (0.01, 0.1, 1.0)
        labels = ("model", "protocol")
        self.seconds = Histogram("penstock_request_seconds", "h", labels, buckets=bounds, registry=self.registry)
        self.cpu = Counter("process_cpu_seconds_total", "h", registry=self.registry)

    def observe(self, *seconds: float, model: str = "m", protocol: str = "http") -> None:
        for each in seconds:
            self.seconds.labels(model, protocol).observe(each)

    @property
    def page(self) -> Page:
        return parse_page(generate_latest(self.registry).decode(), "http://x/metrics")


def test_histogram_delta_is_what_was_observed_between_two_readings() -> None:
    """Earlier observations and other models' are left out; a series that began meanwhile began at 0."""
    server = Server()
    server.observe(0.05, 5.0)
    before = server.page
    server.observe(0.005, 0.02, 2.0)
    server.observe(0.5, model="other")
    server.observe(0.5, protocol="grpc")
    found = histogram_delta(before, server.page, "penstock_request_seconds", HTTP)
    assert found is not None
    assert found.buckets == ((0.01, 1), (0.1, 2), (1.0, 2), (math.inf, 3))
    assert (found.count, found.mean) == (3, pytest.approx(2.025 / 3))
    both = histogram_delta(before, server.page, "penstock_request_seconds", {"model": "m"})
    assert both is not None
    assert both.count == 4


def test_histogram_that_the_server_does_not_keep_is_none() -> None:
    """Nothing is made up for a model without requests."""
    assert histogram_delta(Page(), Server().page, "penstock_request_seconds", HTTP) is None


def test_counter_that_fell_or_vanished_is_a_restart_and_no_negative_figure() -> None:
    """The sentence names the series."""
    old, new = Server(), Server()
    old.observe(0.05, 0.05)
    new.observe(0.05)
    for later in (new.page, Server().page):
        with pytest.raises(CounterReset, match=r'penstock_request_seconds_\w+\{.*model="m".*\} fell .*started again'):
            histogram_delta(old.page, later, "penstock_request_seconds", HTTP)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("penstock_gateway_restarts_total", "the gateway was started again"),
        ("process_start_time_seconds", "the server was started again"),
    ],
)
def test_restart_that_no_counter_shows_is_seen_by_what_counts_restarts(name: str, complaint: str) -> None:
    """A new process may have overtaken the old one's figures by the time it is read."""
    old, new = Server(), Server()
    old.observe(0.05)
    new.observe(0.05, 0.05, 0.05)
    before, after = (parse_page(f"{name} {value}\n", "x").samples for value in (7, 8))
    with pytest.raises(CounterReset, match=complaint):
        count_requests(
            Page({**old.page.samples, **before}),
            Page({**new.page.samples, **after}),
            [RequestSpec(kind=Kind.REST, model="m")],
        )


@pytest.mark.parametrize(
    ("q", "bounds"),
    [(0.01, (0.0, 0.01)), (0.1, (0.0, 0.01)), (0.11, (0.01, 0.1)), (0.9, (0.01, 0.1)), (0.99, (1.0, math.inf))],
)
def test_quantile_lies_in_the_bucket_that_holds_its_rank(q: float, bounds: tuple[float, float]) -> None:
    """Of ten: the first in the lowest bucket, the second to ninth in the next, the tenth above the last bound."""
    assert quantile_bounds(((0.01, 1), (0.1, 9), (1.0, 9), (math.inf, 10)), q) == bounds


def test_quantile_of_nothing_may_be_anything() -> None:
    """An empty histogram says nothing."""
    assert quantile_bounds((), 0.5) == (0.0, math.inf)
    assert quantile_bounds(((0.01, 0), (math.inf, 0)), 0.5) == (0.0, math.inf)


def test_histograms_of_two_protocols_add_up() -> None:
    """Bucket by bucket."""
    server = Server()
    server.observe(0.05, 2.0)
    server.observe(0.05, protocol="grpc")
    found = [
        histogram_delta(Page(), server.page, "penstock_request_seconds", {"model": "m", "protocol": protocol})
        for protocol in ("http", "grpc")
    ]
    total = add_histograms(each for each in found if each)
    assert total.buckets == ((0.01, 0), (0.1, 2), (1.0, 2), (math.inf, 3))
    assert total.count == 3


def test_page_keeps_tritons_counters_under_their_own_names() -> None:
    """They do not end in _total, and must not be read as if they did."""
    text = '# TYPE nv_inference_count counter\nnv_inference_count{model="m",version="1"} 4\nnv_gpu_power 3\n'
    assert counter_delta(Page(), parse_page(text, "x"), "nv_inference_count", {"model": "m"}) == 4
    assert not parse_page(text, "x").has("nv_gpu")


def test_page_that_is_none_says_where_it_was_read() -> None:
    """One sentence with the address."""
    with pytest.raises(MetricsError, match="http://x/metrics is no metrics page"):
        parse_page("penstock_requests_total{model=} what", "http://x/metrics")


@pytest.mark.parametrize(
    ("url", "metrics"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8002/metrics"),
        ("https://host/prefix", "https://host:445/metrics"),
        ("http://[::1]:8000", "http://[::1]:8002/metrics"),
        ("http://host:65535", ""),
    ],
)
def test_metrics_are_looked_for_two_ports_above(url: str, metrics: str) -> None:
    """As Triton's ports lie, and the gateway's."""
    assert default_metrics_url(url) == metrics


def test_statistics_delta_holds_means_and_batches_of_what_happened_between() -> None:
    """Two requests in one execution of two rows, 3 ms each in the queue."""
    ms = 1_000_000
    before = Statistics(InferStats(Duration(5, 50 * ms)), (BatchStats(1, Duration(5, 50 * ms)),))
    after = Statistics(
        InferStats(Duration(7, 70 * ms), queue=Duration(2, 6 * ms)),
        (BatchStats(1, Duration(5, 50 * ms)), BatchStats(2, Duration(1, 20 * ms))),
    )
    found = statistics_delta(before, after)
    assert (found.inference_stats.success.count, found.inference_stats.success.mean_ms) == (2, 10.0)
    assert (found.batch_sizes, found.stages_ms[0]) == (((2, 1),), ("engine_queue", 3.0))
    with pytest.raises(CounterReset, match="began anew"):
        statistics_delta(after, before)


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15), ("1m30s", 90), ("500ms", 0.5), ("", 15), ("soon", 15)])
def test_durations_are_read_as_prometheus_writes_them(text: str, seconds: float) -> None:
    """Its default where it does not say."""
    assert seconds_of(text) == seconds
