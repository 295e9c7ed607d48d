"""A model whose batches the gateway forms, over real sockets and in the real Triton: what its clients see.

Who leaves, and what was counted then: `test_batching_faults`.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.ledger import RAISES, UNTIL_RELEASED, Ledgers, inferences, page_of
from tests.integration.living import triton_of
from tests.integration.test_batching_faults import MODEL, accounted, busy, in_queue
from tests.support.http import call, post_json
from tests.support.waiting import until, wait_for

__all__ = ["accounted"]  # after each test, what was accepted has its end
pytestmark = pytest.mark.xdist_group("ledgers")


@pytest.fixture(autouse=True)
def warm(ledgers: Ledgers) -> Iterator[None]:
    """Full batches went well before the test and after it, so that the next may be full."""
    rows = [[1000.0 + number, 0] for number in range(8)]
    assert ledgers.post(MODEL, rows).status == 200
    yield
    assert ledgers.post(MODEL, rows).status == 200


async def test_requests_of_both_protocols_share_a_call_and_get_their_own_rows(ledgers: Ledgers) -> None:
    """REST's and gRPC's, each answered in its own form."""
    async with busy(ledgers) as caller:
        over_grpc = [caller.ask(MODEL, [value, 0]) for value in (1021, 1022, 1023)]
        over_rest = [
            asyncio.create_task(asyncio.to_thread(ledgers.post, MODEL, [[value, 0]])) for value in (1024, 1025)
        ]
        await in_queue(ledgers, 5)
        assert await asyncio.gather(*over_grpc) == [[1021], [1022], [1023]]
        answers = await asyncio.gather(*over_rest)
    assert [answer.json["outputs"][0]["data"] for answer in answers] == [[1024.0], [1025.0]]
    assert {1021, 1022, 1023, 1024, 1025} in [set(line["values"]) for line in ledgers.calls(MODEL)]


async def test_row_that_breaks_the_model_fails_alone(ledgers: Ledgers) -> None:
    """Its batch-mates are asked again without it, and answered."""
    async with busy(ledgers) as caller:
        asked = [caller.ask(MODEL, [value, 0]) for value in (1061, RAISES, 1062, 1063)]
        await in_queue(ledgers, 4)
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [end for end in ends if isinstance(end, list)] == [[1061], [1062], [1063]]
    assert isinstance(ends[1], InferenceServerException)
    assert "a row of -1.0" in str(ends[1])
    assert any(RAISES in line["values"] and len(line["values"]) > 1 for line in ledgers.calls(MODEL))


def test_request_of_a_wrong_shape_is_refused_in_tritons_words(ledgers: Ledgers) -> None:
    """400 with the expected and the given shape."""
    target = f"{ledgers.stack.http_url}/v2/models/shades/infer"
    tensor = {"name": "image", "shape": [1, 3], "datatype": "FP32", "data": [71, 0, 0]}
    answer = post_json(target, {"inputs": [tensor]})
    assert answer.status == 400
    assert (
        "unexpected shape for input 'image' for model 'shades'. Expected [-1,3,8,8], got [1,3]" in answer.json["error"]
    )


async def test_deadline_that_passes_in_a_batch_ends_that_request_only(ledgers: Ledgers) -> None:
    """504 at its deadline, while the batch runs on; the mate gets its row later."""

    def accepted() -> int:
        return inferences(page_of(ledgers.stack))["accepted"]

    async with busy(ledgers) as caller:
        before = accepted()
        patient = caller.ask(MODEL, [1081, UNTIL_RELEASED])
        started = time.monotonic()
        timeout = {"x-request-timeout-ms": "1000"}
        answer = asyncio.create_task(asyncio.to_thread(ledgers.post, MODEL, [[1082, UNTIL_RELEASED]], **timeout))
        await until(lambda: answer.done() or accepted() == before + 2)  # it may be refused: it could not be met
        ledgers.release(MODEL)
        hurried = await answer
        took_s = time.monotonic() - started
        assert not patient.done()
        ledgers.release(MODEL)
        assert await patient == [1081]
    assert hurried.status in (503, 504)
    if hurried.status == 504:
        assert took_s > 0.95
    else:
        assert "retry-after" in hurried.headers


def test_pictures_of_a_request_are_rows_of_a_batch(ledgers: Ledgers) -> None:
    """Each picture gets its own result, in the order sent, and the answer says of how many rows the batch was."""
    levels = (0, 255, 10, 250, 20, 240)
    body, media_type = multipart(*[png(level) for level in levels])
    target = f"{ledgers.stack.http_url}/v2/models/shades/image"

    def batch_size() -> int:
        answer = call("POST", target, body, {"content-type": media_type})
        assert answer.status == 200, answer.body
        found = [result["classes"][0]["label"] for result in answer.json["results"]]
        assert found == ["dark", "bright"] * 3
        return int(answer.json["batch_size"])

    wait_for(lambda: batch_size() > 1, 20, "its rows were tried together")


def test_engine_that_dies_ends_what_runs_and_what_waits_at_once(ledgers: Ledgers) -> None:
    """503 for the running call and for the queue, within a second; then the model is served again."""
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ledgers.post, MODEL, [[1091.0 + number, 20_000]]) for number in range(6)]
        wait_for(lambda: {1091, 1092, 1093, 1094, 1095, 1096} & set(ledgers.values(MODEL)), 10, "the model works")
        time.sleep(0.2)
        triton_of(ledgers.stack).send_signal(signal.SIGKILL)
        started = time.monotonic()
        answers = [future.result() for future in asked]
        took_s = time.monotonic() - started
    assert {answer.status for answer in answers} == {503}
    assert all("retry-after" in answer.headers for answer in answers)
    assert took_s < 10, took_s
    wait_for(lambda: ledgers.post(MODEL, [[1099, 0]]).status == 200, 60, "the model is served again")
    for model in ("short", "replayed"):
        url = f"{ledgers.stack.http_url}/v2/models/{model}/ready"
        wait_for(lambda url=url: call("GET", url).status == 200, 60, f"so is {model}")


def png(level: int) -> bytes:
    is_written, encoded = cv2.imencode(".png", np.full((8, 8, 3), level, np.uint8))
    assert is_written
    return encoded.tobytes()


def multipart(*pictures: bytes) -> tuple[bytes, str]:
    """The body, and its media type."""
    parts = [
        b"--here\r\ncontent-disposition: form-data; name=image; filename=a.png\r\ncontent-type: image/png\r\n\r\n"
        + picture
        + b"\r\n"
        for picture in pictures
    ]
    return b"".join(parts) + b"--here--\r\n", "multipart/form-data; boundary=here"
