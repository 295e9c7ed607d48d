"""What client and server say of the same phase, and where they do not agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock_load.clients.client import Endpoint
from penstock_load.measure.ledger import percentiles_of
from penstock_load.results import RequestSummary
from penstock_load.scenario import Kind, RequestSpec
from penstock_load.witness.counters import Counted, disagreements
from penstock_load.witness.counters import Histogram as Seen
from penstock_load.witness.readers import MAX_PAGE_BYTES, MetricsError
from penstock_load.witness.witness import open_witnesses
from tests.support.web_server import serving

ASKS = (RequestSpec(kind=Kind.IMAGE, model="m"), RequestSpec(kind=Kind.GRPC, model="m"))
BUCKETS = (0.005, 0.010, 0.025, float("inf"))


def client(*service_ms: float, refused: int = 0, timeouts: int = 0, failed: int = 0) -> RequestSummary:
    """A client that got an answer for each of these times."""
    none, service = percentiles_of(np.array([])), percentiles_of(np.array(service_ms))
    count = len(service_ms)
    return RequestSummary("all", count, count, count, refused, failed, timeouts, 0, service, service, none)


def counted(*up_to: int) -> Counted:
    """A server whose buckets hold so many, cumulatively."""
    return Counted(up_to[-1], 1.0, Seen(tuple(zip(BUCKETS, up_to, strict=True)), up_to[-1], 1.0))


def test_client_and_server_who_say_the_same_do_not_disagree() -> None:
    """Every answer counted, both quantiles in their buckets."""
    assert disagreements(client(*[7.0] * 100), counted(0, 100, 100, 100), seconds=1) == ()


def test_network_and_accept_time_up_to_the_tolerance_is_agreement() -> None:
    """20 % and 2 ms above the bucket's upper bound are, 3 ms more are not."""
    server = counted(0, 0, 100, 100)
    assert disagreements(client(*[32.0] * 100), server, seconds=1) == ()
    assert len(disagreements(client(*[35.0] * 100), server, seconds=1)) == 2


def test_time_that_passes_outside_the_server_is_said_with_the_least_it_can_be() -> None:
    """Both figures and the gap."""
    (sentence,) = disagreements(client(*[20.0] * 98, 41.0, 41.0), counted(0, 0, 100, 100), seconds=1)
    assert sentence == (
        "client p99 41 ms, server says 10 to 25 ms: 16 ms or more pass outside the server's measure (network, accept "
        "queue, or a busy generator)"
    )


def test_server_slower_than_its_client_counted_another() -> None:
    """A client cannot have its answer before the server has it."""
    (sentence, _) = disagreements(client(*[5.0] * 100), counted(0, 0, 100, 100), seconds=1)
    assert sentence.endswith("the server counted requests slower than this client's by 5 ms or more")


@pytest.mark.parametrize(
    ("up_to", "complaint"),
    [
        ((0, 99, 99, 99), "client got 100 answers, server counted 99: 1 were answered by another server"),
        ((0, 101, 101, 101), "client got 100 answers, server counted 101: 1 are not this client's"),
    ],
)
def test_count_that_differs_by_one_is_said(up_to: tuple[int, ...], complaint: str) -> None:
    """Counting is exact."""
    (sentence,) = disagreements(client(*[7.0] * 100), counted(*up_to), seconds=1)
    assert sentence.startswith(complaint)


def test_refusals_are_answers_and_unanswered_requests_may_be_counted_or_not() -> None:
    """Ten refusals must be counted, five timeouts and failures may be."""
    summary = client(*[7.0] * 100, refused=10, timeouts=2, failed=3)
    assert disagreements(summary, counted(10, 110, 110, 110), seconds=1) == ()
    assert disagreements(summary, counted(10, 110, 110, 115), seconds=1) == ()
    assert disagreements(summary, counted(0, 109, 109, 109), seconds=1)
    assert disagreements(summary, counted(10, 110, 110, 116), seconds=1)


def test_refusals_among_the_servers_answers_widen_its_intervals() -> None:
    """Half of the server's answers were quick refusals: its median says nothing of the client's."""
    assert disagreements(client(*[20.0] * 50, refused=50), counted(50, 50, 100, 100), seconds=1) == ()


def test_triton_may_have_counted_a_gateways_canaries() -> None:
    """One a second is expected there, not more."""
    triton = Counted(105, 1.0, probes_per_s=1.0)
    assert disagreements(client(*[7.0] * 100), triton, seconds=5) == ()
    assert disagreements(client(*[7.0] * 100), triton, seconds=4)


class Liar:
    """A server with a metrics page of the test's own; `seconds` is what it says of its requests."""

    def __init__(self) -> None:
        self.status = 200
        self.restart()

    def restart(self) -> None:
        self.registry = CollectorRegistry()
        self.seconds = Histogram(
            "penstock_request_seconds", "h", ("model", "protocol"), buckets=BUCKETS, registry=self.registry
        )

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)


@contextmanager
def served(liar: Liar) -> Iterator[str]:
    """Its address: a metrics page, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/metrics"
            body = liar.text if is_page else b""
            self.send_response(liar.status if is_page else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:  # the reader has had enough
                return

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with serving(Handler) as url:
        yield url


async def test_witness_of_a_server_that_lies_disagrees() -> None:
    """It leaves one answer out and says that all were quick; the interval is what it said."""
    liar = Liar()
    liar.seconds.labels("m", "http").observe(0.02)
    with served(liar) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1")
        async with await open_witnesses(endpoint, ["m"], metrics_url=f"{url}/metrics") as witnesses:
            assert witnesses.notes == (f"no statistics of the models: {url}/v2/models/m/stats answers 404, not 200",)
            await witnesses.before()
            for protocol in ["http"] * 150 + ["grpc"] * 49:
                liar.seconds.labels("m", protocol).observe(0.007)
            witness = await witnesses.after(client(*[40.0] * 200), ASKS)
    assert witness is not None
    assert (witness.source, witness.answered, witness.mean_ms) == (f"{url}/metrics", 199, pytest.approx(7))
    assert [(q.quantile, q.low_ms, q.high_ms) for q in witness.quantiles][:1] == [(0.5, 5, 10)]
    on_count, on_median, on_p99 = witness.disagreements
    assert on_count.startswith("client got 200 answers, server counted 199")
    assert on_median.startswith("client p50 40 ms, server says 5 to 10 ms: 30 ms or more pass outside")
    assert on_p99.startswith("client p99 40 ms, server says 5 to 10 ms")


async def test_witness_of_a_server_started_again_in_mid_phase_says_so() -> None:
    """No negative figures, none at all."""
    liar = Liar()
    liar.seconds.labels("m", "http").observe(0.02)
    with served(liar) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1")
        async with await open_witnesses(endpoint, ["m"], metrics_url=f"{url}/metrics") as witnesses:
            await witnesses.before()
            liar.restart()
            witness = await witnesses.after(client(7.0), ASKS)
    assert witness is not None
    assert (witness.answered, witness.quantiles) == (0, ())
    assert "the server was started again meanwhile" in witness.disagreements[0]


async def test_witness_whose_page_fails_in_mid_run_says_so_and_the_next_phase_is_whole() -> None:
    """A page that answers 500 once is a sentence, not the end of the run."""
    liar = Liar()
    with served(liar) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1")
        liar.seconds.labels("m", "http")
        async with await open_witnesses(endpoint, ["m"], metrics_url=f"{url}/metrics") as witnesses:
            liar.status = 500
            await witnesses.before()
            liar.status = 200
            spoilt = await witnesses.after(client(7.0), ASKS)
            await witnesses.before()
            liar.seconds.labels("m", "http").observe(0.007)
            whole = await witnesses.after(client(7.0), ASKS)
    assert spoilt is not None
    assert spoilt.disagreements == (f"the server's own figures are missing: {url}/metrics answers 500, not 200",)
    assert whole is not None
    assert (whole.answered, whole.disagreements) == (1, ())


async def test_witnesses_of_a_server_with_nothing_to_say_have_none() -> None:
    """Notes say who cannot be asked; a run goes on without."""
    with served(Liar()) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1")
        async with await open_witnesses(endpoint, ["m"], timeout_s=1) as witnesses:
            assert [note.split(":")[0] for note in witnesses.notes] == [
                "no metrics of the server",
                "no statistics of the models",
            ]
            await witnesses.before()
            assert await witnesses.after(client(7.0), ASKS) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"other_total 1\n", "has no counters of a gateway or a Triton"),
        (b"penstock_ what", "is no metrics page"),
        (b"#" * (MAX_PAGE_BYTES + 1), "is larger than 8 MiB"),
    ],
)
async def test_metrics_address_that_was_given_and_has_none_is_refused(
    text: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, before a load is run for nothing."""
    monkeypatch.setattr(Liar, "text", text)
    with served(Liar()) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1")
        with pytest.raises(MetricsError, match=complaint):
            await open_witnesses(endpoint, ["m"], metrics_url=f"{url}/metrics")


async def test_statistics_alone_tell_stages_and_batches_and_judge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gateway in front, the engine's requests need not be the client's."""
    asked: list[str] = []

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("x-token", ""))
            count = len(asked) * 10
            spent = {"count": count, "ns": count * 4_000_000}
            stats = {"success": spent, "queue": spent, "compute_infer": spent}
            batches = [{"batch_size": 2, "compute_infer": spent}]
            answer = {"model_stats": [{"name": "m", "inference_stats": stats, "batch_stats": batches}]}
            body = msgspec.json.encode(answer)
            self.send_response(200 if self.path == "/v2/models/m/stats" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with serving(Engine) as url:
        endpoint = Endpoint(http_url=url, grpc_address="127.0.0.1:1", headers=(("x-token", "t"),))
        async with await open_witnesses(endpoint, ["m"], timeout_s=1) as witnesses:
            await witnesses.before()
            witness = await witnesses.after(client(7.0), ASKS)
    assert witness is not None
    assert (witness.answered, witness.mean_ms, witness.disagreements) == (10, 4.0, ())
    assert dict(witness.stages_ms)["engine_queue"] == 4.0
    assert (witness.batch_sizes, set(asked)) == (((2, 10),), {"t"})
