"""Batch explanations of a real stack: over both protocols and by the command."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from penstock.cli import models as models_command
from tests.integration.ledger import ended, inferences, page_of
from tests.integration.living import COUNTED_WITHIN_S
from tests.integration.pictures import jpeg
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("stack")

MODEL, CROWD, HEADER = "identity_fp32", 24, "x-penstock-explain"
OWNED = {"batch_owner": {"string_value": "gateway"}, "slo_p99_ms": {"string_value": "10000"}}


def load(
    stack: RunningStack, parameters: dict[str, Any] | None = None, *, model: str = MODEL, **members: object
) -> Answer:
    """A shipped model as it is, or with these parameters and members of its config besides."""
    target = f"{stack.http_url}/v2/repository/models/{model}/load"
    if parameters is None:
        return post_json(target, {})
    config = call("GET", f"{stack.http_url}/v2/models/{model}/config").json | members
    config["parameters"] |= parameters
    return post_json(target, {"parameters": {"config": json.dumps(config)}})


@pytest.fixture(scope="module")
def owned(stack: RunningStack) -> Iterator[RunningStack]:
    """The gateway owns the model's batches; in the end the model is as it is shipped."""
    assert load(stack, OWNED).status == 200
    yield stack
    assert load(stack).status == 200


@pytest.fixture
def tritons_street(stack: RunningStack) -> Iterator[RunningStack]:
    """Triton forms the batches of street for once."""
    theirs = {"batch_owner": {"string_value": "triton"}}
    assert load(stack, theirs, model="street", dynamic_batching={}).status == 200
    yield stack
    assert load(stack, model="street").status == 200


def infer(stack: RunningStack, number: float) -> Answer:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [number]}
    return post_json(f"{stack.http_url}/v2/models/{MODEL}/infer", {"inputs": [tensor]}, **{HEADER: "1"})


def explained(stack: RunningStack) -> dict[str, Any]:
    page: dict[str, Any] = call("GET", f"{stack.http_url}/v2/models/{MODEL}/explain").json
    return page


def rows_in(page: dict[str, Any]) -> int:
    """Rows of all batches so far."""
    return sum(row["rows"] * row["batches"] for row in page["batches"])


def test_every_request_of_a_crowd_gets_the_trace_of_its_batch(owned: RunningStack) -> None:
    """Right answers, each with a batch of the gateway's, and the model's page has counted those batches."""
    before = explained(owned)
    with ThreadPoolExecutor(CROWD) as pool:
        answers = list(pool.map(lambda number: infer(owned, number), range(CROWD)))
    assert [answer.json["outputs"][0]["data"] for answer in answers] == [[number] for number in range(CROWD)]
    traces = [json.loads(answer.headers[HEADER]) for answer in answers]
    assert {one["owner"] for one in traces} == {"gateway"}
    rows_of_batch = {one["batch"]: one["batch_rows"] for one in traces}
    assert sum(rows_of_batch.values()) == CROWD
    assert all(one["slots"] == 2 and one["queue_ms"] >= 0 for one in traces)
    assert all(("slack_ms" in one) == ("fit" in one) for one in traces)  # its deadline is the model's SLO
    page = explained(owned)
    assert rows_in(page) - rows_in(before) == CROWD
    assert sum(page["closed_by"].values()) - sum(before["closed_by"].values()) == len(rows_of_batch)
    assert (page["owner"], page["queue"]["depth"], page["options"]["slo_p99_ms"]) == ("gateway", 0, 10_000)


def test_grpc_tells_it_in_the_trailing_metadata(owned: RunningStack) -> None:
    """Only for a call that requests it in its metadata."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))

    async def both() -> list[dict[str, str | bytes]]:
        async with grpc.aio.insecure_channel(owned.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            trailers = []
            for metadata in (((HEADER, "1"),), ()):  # one after the other: two at once may make a full batch
                call = stub.ModelInfer(request, metadata=metadata)
                await call
                trailers.append(dict(await call.trailing_metadata()))
            return trailers

    asked, unasked = asyncio.run(both())
    trace = json.loads(asked[HEADER])
    assert (trace["model"], trace["owner"], trace["closed_by"]) == (MODEL, "gateway", "slot_free")
    assert HEADER not in unasked


def test_command_shows_the_page_of_the_running_gateway(owned: RunningStack) -> None:
    """`penstock models explain`, by a person's eyes."""
    assert infer(owned, 1.0).status == 200
    shown = CliRunner().invoke(models_command.app, ["explain", MODEL, "--url", owned.http_url])
    assert shown.exit_code == 0, shown.stderr
    assert f"{MODEL}: the gateway forms its batches" in shown.stdout
    assert "dynamic_batching {" in shown.stdout


def test_image_of_a_model_that_triton_batches_names_triton_as_owner(tritons_street: RunningStack) -> None:
    """In the answer, and the model's page is made of Triton's own statistics."""
    answer = call(
        "POST",
        f"{tritons_street.http_url}/v2/models/street/image",
        jpeg(np.full((288, 512, 3), 128, np.uint8)),
        {HEADER: "1"},
    )
    (trace,) = answer.json["explain"]
    assert trace["owner"] == "triton"
    assert "Triton forms this model's batches" in trace["text"]
    page = f"{tritons_street.http_url}/v2/models/street/explain"
    assert (call("GET", page).json["owner"], call("GET", page).json["queue"]) == ("triton", None)
    wait_for(
        lambda: sum(row["batches"] for row in call("GET", page).json["batches"]) >= 1,
        COUNTED_WITHIN_S,
        "Triton counted the call",
    )


def test_model_whose_slo_is_no_number_is_refused_everywhere_until_it_is_mended(owned: RunningStack) -> None:
    """Load, index, readiness and inference say the same sentence; the mended model serves without a restart."""
    why = f"model '{MODEL}': slo_p99_ms is 'fast' in config.pbtxt, and must be a number of milliseconds above 0"
    refused = load(owned, {"slo_p99_ms": {"string_value": "fast"}})
    assert (refused.status, refused.json["error"]) == (400, f"the model is loaded but not served: {why}")
    index = post_json(f"{owned.http_url}/v2/repository/index", {}).json
    rows = [(row["state"], row["reason"]) for row in index if row["name"] == MODEL]
    assert rows == [("UNAVAILABLE", why)]
    ready = call("GET", f"{owned.http_url}/v2/models/{MODEL}/ready")
    for answer, status in ((infer(owned, 1.0), 404), (ready, 400)):  # Triton's, of a model that failed to load
        assert (answer.status, answer.json["error"]) == (status, why)
        assert "retry-after" not in answer.headers
    assert load(owned, OWNED).status == 200
    assert infer(owned, 1.0).status == 200


def test_accepted_inferences_are_all_accounted_for(owned: RunningStack) -> None:
    """When nothing is in flight: accepted = answered + failed + cancelled."""
    before = inferences(page_of(owned))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: infer(owned, number), range(40)))
    assert {answer.status for answer in answers} == {200}
    after = inferences(page_of(owned))
    assert after["accepted"] - before["accepted"] == after["answered"] - before["answered"] == 40
    assert after["accepted"] == ended(after)
