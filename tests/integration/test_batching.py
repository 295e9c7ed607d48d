"""A model whose batches the gateway forms, over real sockets and in the real Triton: what its clients see.

Each row is (value, milliseconds): the model sleeps for the longest of its batch, answers value + 1, and writes down the
values of every call that it got. Who leaves, and what was counted then: `test_batching_faults`.
"""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.integration.ledger import rows_tensor
from tests.integration.living import inflight, triton_of
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import until, wait_for

pytestmark = pytest.mark.xdist_group("batching")

RAISES = -1.0
NAPS = '''"""Answers each row's value plus one after the longest sleep among the rows; writes down what it was asked."""
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        with open({said!r}, "a") as file:
            file.write(json.dumps(rows[:, 0].tolist()) + "\\n")
        if {raises} in rows[:, 0]:
            raise RuntimeError("a row of {raises}")
        until = time.monotonic() + float(rows[:, 1].max()) / 1000
        while time.monotonic() < until and not request.is_cancelled():
            time.sleep(0.005)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", rows[:, :1] + 1)])
'''
NAPS_CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "batch_owner" value { string_value: "gateway" } }
parameters { key: "canary" value { string_value: "off" } }
"""
SHADES = '''"""How dark and how bright each picture is."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            means = pb_utils.get_input_tensor_by_name(request, "image").as_numpy().reshape(-1, 192).mean(axis=1)
            shades = np.stack([1 - means, means], axis=1).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("p", shades)]))
        return answers
'''
SHADES_CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
output [ { name: "p" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "network-type" value { string_value: "1" } }
parameters { key: "labels" value { string_value: "dark;bright" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "batch_owner" value { string_value: "gateway" } }
"""


@dataclass(frozen=True)
class Batching:
    """A stack with the models. said: what `naps` wrote down."""

    stack: RunningStack
    said: Path

    def calls(self) -> list[list[float]]:
        """The values of every call that the model got."""
        return [json.loads(line) for line in self.said.read_text().splitlines()]

    def saw(self, value: float) -> bool:
        """Whether a call had such a row."""
        return any(value in rows for rows in self.calls())

    def post(self, value: float, sleep_ms: float = 0, **headers: str) -> Answer:
        """One row over REST."""
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, sleep_ms]}
        return post_json(f"{self.stack.http_url}/v2/models/naps/infer", {"inputs": [tensor]}, **headers)


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Batching]:
    folder = tmp_path_factory.mktemp("batching")
    said = folder / "said"
    said.touch()
    write_model(folder / "models", "naps", NAPS.format(said=str(said), raises=RAISES), NAPS_CONFIG)
    write_model(folder / "models", "shades", SHADES, SHADES_CONFIG)
    stack = start_stack(folder / "home", "--model-repository", str(folder / "models"))
    yield Batching(stack, said)
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.fixture(autouse=True)
def warm(batching: Batching) -> Iterator[None]:
    """Full batches went well, so that the next may be full; after the test nothing is in flight."""
    rows = [[float(value), 0.0] for value in range(8)]
    tensor = {"name": "x", "shape": [8, 2], "datatype": "FP32", "data": rows}
    assert post_json(f"{batching.stack.http_url}/v2/models/naps/infer", {"inputs": [tensor]}).status == 200
    yield
    wait_for(lambda: inflight(batching.stack) == 0, 5, "nothing in flight")


class Client:
    """gRPC requests of one row."""

    def __init__(self, client: tritonclient.grpc.aio.InferenceServerClient) -> None:
        self._client = client

    def ask(self, value: float, sleep_ms: float = 0) -> "asyncio.Task[float]":
        return asyncio.create_task(self._answer(value, sleep_ms))

    async def _answer(self, value: float, sleep_ms: float) -> float:
        result = await self._client.infer("naps", [rows_tensor([value, sleep_ms])])
        return float(result.as_numpy("y")[0, 0])


@asynccontextmanager
async def busy(batching: Batching) -> AsyncIterator[Client]:
    """The instance works for a while, and one more call waits at its door: what comes now is in the queue."""
    async with tritonclient.grpc.aio.InferenceServerClient(batching.stack.grpc_address) as client:
        asks = Client(client)
        before = len(batching.calls())
        first = asks.ask(1001, 400)
        await until(lambda: len(batching.calls()) > before)
        second = asks.ask(1002, 400)
        await asyncio.sleep(0.1)
        yield asks
        await asyncio.gather(first, second)


async def test_requests_of_both_protocols_share_a_call_and_get_their_own_rows(batching: Batching) -> None:
    """REST's and gRPC's, each answered in its own form."""
    async with busy(batching) as client:
        over_grpc = [client.ask(float(value)) for value in (21, 22, 23)]
        over_rest = [asyncio.create_task(asyncio.to_thread(batching.post, float(value))) for value in (24, 25)]
        assert await asyncio.gather(*over_grpc) == [22, 23, 24]
        answers = await asyncio.gather(*over_rest)
    assert [answer.json["outputs"][0]["data"] for answer in answers] == [[25.0], [26.0]]
    assert any(len(rows) > 1 and {21, 22, 23} & set(rows) and {24, 25} & set(rows) for rows in batching.calls())


async def test_row_that_breaks_the_model_fails_alone(batching: Batching) -> None:
    """Its batch-mates are asked again without it, and answered."""
    async with busy(batching) as client:
        asked = [client.ask(value) for value in (61, RAISES, 62, 63)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [end for end in ends if isinstance(end, float)] == [62, 63, 64]
    assert isinstance(ends[1], InferenceServerException)
    assert "a row of -1.0" in str(ends[1])
    assert any(RAISES in rows and len(rows) > 1 for rows in batching.calls())


async def test_request_of_a_wrong_shape_is_refused_before_it_meets_others(batching: Batching) -> None:
    """400 in Triton's words; no batch had it."""
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [71, 0, 0]}
    async with busy(batching) as client:
        good = client.ask(72)
        target = f"{batching.stack.http_url}/v2/models/naps/infer"
        answer = await asyncio.to_thread(post_json, target, {"inputs": [tensor]})
        assert await good == 73
    assert answer.status == 400
    assert "unexpected shape for input 'x' for model 'naps'. Expected [-1,2], got [1,3]" in answer.json["error"]
    assert not batching.saw(71)


async def test_deadline_that_passes_in_a_batch_ends_that_request_only(batching: Batching) -> None:
    """504 within 50 ms of its deadline, give or take this machine's; the mate gets its row later."""
    async with busy(batching) as client:
        patient = client.ask(81, 1500)
        started = time.monotonic()
        hurried = await asyncio.to_thread(batching.post, 82.0, 1500.0, **{"x-request-timeout-ms": "1000"})
        took_s = time.monotonic() - started
        assert await patient == 82
    assert hurried.status in (503, 504)
    if hurried.status == 504:
        assert 0.95 < took_s < 1.45, took_s
    else:  # it could not be met, and was refused at once
        assert took_s < 1.0
        assert "retry-after" in hurried.headers


def test_pictures_of_a_request_are_rows_of_a_batch(batching: Batching) -> None:
    """Each picture gets its own result, in the order sent, and the answer says of how many rows the batch was."""
    levels = (0, 255, 10, 250, 20, 240)
    body, media_type = multipart(*[png(level) for level in levels])
    target = f"{batching.stack.http_url}/v2/models/shades/image"
    answers = [call("POST", target, body, {"content-type": media_type}) for _ in range(4)]
    for answer in answers:
        assert answer.status == 200, answer.body
        found = [result["classes"][0]["label"] for result in answer.json["results"]]
        assert found == ["dark", "bright"] * 3
    assert max(answer.json["batch_size"] for answer in answers) > 1


def test_engine_that_dies_ends_what_runs_and_what_waits_at_once(batching: Batching) -> None:
    """503 for the running call and for the queue, within a second; then the model is served again."""
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(batching.post, 91.0 + number, 20_000) for number in range(6)]
        wait_for(lambda: batching.saw(91) or batching.saw(92) or batching.saw(93), 10, "the model works")
        time.sleep(0.2)
        triton_of(batching.stack).send_signal(signal.SIGKILL)
        started = time.monotonic()
        answers = [future.result() for future in asked]
        took_s = time.monotonic() - started
    assert {answer.status for answer in answers} == {503}
    assert all("retry-after" in answer.headers for answer in answers)
    assert took_s < 10, took_s
    wait_for(lambda: batching.post(99).status == 200, 60, "the model is served again")


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
