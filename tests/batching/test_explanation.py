"""Explanations of the batches of a request, and of a model."""

import json
from dataclasses import replace

import msgspec
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.gateway.batching.batch_report import (
    EngineBatches,
    explain_engine,
    explain_queue,
    propose_config,
    read_engine_batches,
)
from penstock.gateway.batching.explanation import (
    explain_batched,
    explain_unbatched,
    explanation_header,
    wants_explanation,
)
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.protocol.batch_reports import EXPLAIN_HEADER, ModelBatchReport, RequestExplanation
from penstock.protocol.call import GrpcCall, HttpCall
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import BatchOwner, BatchTrace, CloseReason, EngineTimeFit

V100 = EngineTimeFit(1.98e-3, 0.1475e-3, 0.0, 1000)
ONE = BatchTrace(
    model_name="street",
    arrived_unix_s=1_700_000_000.5,
    queued_s=0.0004,
    engine_s=0.0051,
    batch_number=7,
    requests=3,
    rows=4,
    close_reason=CloseReason.SLOT_FREE,
    ahead=2,
    slots=3,
    busy=1,
    fit=V100,
    expected_s=0.0049,
    slack_s=0.02,
)
OPTIONS = BatchOptions(BatchOwner.GATEWAY, max_batch_size=64, instances=1, slo_s=0.05)


def test_explanation_says_why_the_request_waited_and_why_its_batch_closed() -> None:
    """The sentence names the wait, who was ahead, the batch, why it closed, and what the engine took."""
    found = explain_batched(ONE)
    assert found.text == (
        "waited 0.4 ms behind 2 for its batch of 3 requests and 4 rows, closed because the engine was free and nothing "
        "more waited; the engine took 5.1 ms, 4.9 ms were expected"
    )
    assert (found.queue_ms, found.engine_ms, found.closed_by, found.busy, found.slots) == (0.4, 5.1, "slot_free", 1, 3)
    assert found.fit is not None
    assert (found.fit.alpha_ms, found.fit.beta_ms_per_row) == (1.98, 0.1475)


def test_header_is_printable_ascii_whatever_the_model_is_called() -> None:
    """Headers and gRPC metadata carry no other signs; the JSON gives the name back."""
    explanation = explain_batched(replace(ONE, model_name="straße\n\N{SNOWMAN}"))
    header = explanation_header(explanation)
    assert header.isascii()
    assert header.isprintable()
    assert msgspec.json.decode(header, type=RequestExplanation) == explanation
    assert "expected_ms" not in json.loads(explanation_header(explain_batched(replace(ONE, expected_s=None))))


@pytest.mark.parametrize(
    ("owner", "words"),
    [(BatchOwner.TRITON, "Triton forms"), (BatchOwner.OFF, "batching is off"), (BatchOwner.GATEWAY, "alone")],
)
def test_explanation_of_an_unbatched_request_names_the_owner_of_its_batches(owner: BatchOwner, words: str) -> None:
    """The gateway claims no batch that it did not form."""
    explanation = explain_unbatched("street", owner)
    assert (explanation.owner, explanation.batch, explanation.queue_ms) == (owner, None, None)
    assert words in explanation.text
    assert ("penstock models explain street" in explanation.text) is (owner is BatchOwner.TRITON)


@pytest.mark.parametrize(
    ("value", "is_asked"), [("1", True), ("true", True), (" ON ", True), ("0", False), ("", False)]
)
def test_explanation_is_given_to_who_asks_only(value: str, is_asked: bool) -> None:
    """The header and the metadata are read alike; others are not looked at."""
    headers = ((b"x-other", b"1"), (EXPLAIN_HEADER.encode(), value.encode()))
    assert wants_explanation(HttpCall("POST", b"/", headers, b"")) is is_asked
    assert wants_explanation(GrpcCall("m", b"", (("x-other", "1"), (EXPLAIN_HEADER, value)))) is is_asked
    assert wants_explanation(GrpcCall("m", b"", ((EXPLAIN_HEADER, value.encode()),))) is is_asked
    assert not wants_explanation(HttpCall("POST", b"/", headers[:1], b""))
    assert not wants_explanation(GrpcCall("m", b""))


def dynamic_batching(text: str) -> model_config_pb2.ModelDynamicBatching:
    """What protobuf reads out of a proposal."""
    return text_format.Parse(text, model_config_pb2.ModelConfig()).dynamic_batching


def sentences(text: str) -> str:
    """A proposal's comments, each in one line again."""
    return text.replace("\n# ", " ")


@pytest.mark.parametrize(("slo_s", "rows"), [(0.007, 10), (0.015, 37), (0.050, 64)])
def test_proposal_prefers_the_largest_batch_that_keeps_the_slo_twice(slo_s: float, rows: int) -> None:
    """2 t(b) within the SLO: what a request meets that comes when a batch has just begun."""
    proposal = propose_config(V100, replace(OPTIONS, slo_s=slo_s, max_queue_size=99))
    batching = dynamic_batching(proposal)
    assert list(batching.preferred_batch_size) == [rows]
    delay_s = batching.max_queue_delay_microseconds / 1e6
    assert 2 * V100.seconds(rows) + delay_s <= slo_s + 1e-6
    assert delay_s <= V100.alpha_s
    policy = batching.default_queue_policy
    assert policy.max_queue_size == 99
    assert policy.default_timeout_microseconds == pytest.approx((slo_s - V100.seconds(rows)) * 1e6, abs=1)


@pytest.mark.parametrize(
    ("fit", "slo_s", "said"),
    [
        (None, 0.05, "No fit yet"),
        (V100, None, "no slo_p99_ms is declared"),
        (V100, 0.003, "not even one row keeps 2 t(b) + guard (4.3 ms) within the SLO of 3 ms"),
    ],
)
def test_proposal_that_rests_on_less_says_so_and_still_parses(
    fit: EngineTimeFit | None, slo_s: float | None, said: str
) -> None:
    """No number is invented where the fit, or the SLO, does not give it."""
    proposal = propose_config(fit, replace(OPTIONS, slo_s=slo_s))
    assert said in sentences(proposal)
    assert dynamic_batching(proposal).max_queue_delay_microseconds <= V100.alpha_s * 1e6


def test_proposal_speaks_of_batch_owner_only_where_one_stands() -> None:
    """Who has Triton form the batches already has none to take out; a model of single rows is proposed nothing."""
    assert "take batch_owner out" in propose_config(V100, OPTIONS)
    assert "batch_owner" not in propose_config(V100, replace(OPTIONS, owner=BatchOwner.TRITON))
    single = propose_config(V100, replace(OPTIONS, owner=BatchOwner.OFF, max_batch_size=1))
    assert "takes one row a call" in single
    assert text_format.Parse(single, model_config_pb2.ModelConfig()) == model_config_pb2.ModelConfig()


def test_page_of_a_queue_shows_fit_histogram_reasons_and_drops() -> None:
    """Everything that the queue counts is in the report, sorted, and survives JSON."""
    statistics = QueueStatistics(
        depth=3,
        rows=4,
        size_bytes=100,
        in_flight=1,
        max_rows=32,
        fit=V100,
        wait_s=0.0123,
        batches_by_rows={4: 2, 1: 9},
        closed_by={CloseReason.FULL: 2, CloseReason.SLOT_FREE: 9},
        dropped={"queue_full": 1},
    )
    page = msgspec.json.decode(msgspec.json.encode(explain_queue("street", OPTIONS, statistics)), type=ModelBatchReport)
    assert [(row.rows, row.batches) for row in page.batches] == [(1, 9), (4, 2)]
    assert page.queue is not None
    assert (page.queue.wait_ms, page.queue.slots, page.queue.max_rows) == (12.3, 2, 32)
    assert page.closed_by == {CloseReason.FULL: 2, CloseReason.SLOT_FREE: 9}
    assert page.dropped == {"queue_full": 1}
    assert page.options.slo_p99_ms == 50
    assert "preferred_batch_size: [ 64 ]" in page.proposed_config


def test_page_before_the_first_request_tells_what_is_declared() -> None:
    """A model without a request so far has options, and no queue."""
    page = explain_queue("street", OPTIONS, None)
    assert (page.owner, page.queue, page.fit, page.batches) == (BatchOwner.GATEWAY, None, None, [])


def triton_statistics(*sizes: tuple[int, int]) -> bytes:
    """As Triton's statistics have it: batch sizes and calls, each call of the V100's time in its three parts."""
    rows = [
        {
            "batch_size": rows,
            "compute_input": {"count": calls, "ns": calls * 80_000},
            "compute_infer": {"count": calls, "ns": round(calls * (V100.seconds(rows) - 1e-4) * 1e9)},
            "compute_output": {"count": calls, "ns": calls * 20_000},
        }
        for rows, calls in sizes
    ]
    return json.dumps({"model_stats": [{"name": "street", "version": "1", "batch_stats": rows}]}).encode()


def test_fit_of_a_triton_is_the_line_through_its_statistics() -> None:
    """A model whose batches Triton forms is explained by Triton's own counts."""
    batches = read_engine_batches(triton_statistics((1, 50), (8, 20), (32, 3)))
    assert batches.calls_by_rows == {1: 50, 8: 20, 32: 3}
    assert batches.fit is not None
    assert (batches.fit.alpha_s, batches.fit.beta_s) == pytest.approx((V100.alpha_s, V100.beta_s))
    page = explain_engine("street", replace(OPTIONS, owner=BatchOwner.TRITON, slo_s=0.015), batches)
    assert page.queue is None
    assert "preferred_batch_size: [ 37 ]" in page.proposed_config


@pytest.mark.parametrize("sizes", [(), ((4, 100),), ((4, 0), (8, 0))])
def test_statistics_of_fewer_than_two_sizes_give_no_fit(sizes: tuple[tuple[int, int], ...]) -> None:
    """A line needs two points; a size without a call is none."""
    assert read_engine_batches(triton_statistics(*sizes)).fit is None


def test_statistics_that_are_none_are_the_engines_fault() -> None:
    """An engine that answers something else is named, not guessed at."""
    with pytest.raises(EngineFailed, match="the engine's statistics cannot be read"):
        read_engine_batches(b"<html>")
    assert EngineBatches().fit is None
