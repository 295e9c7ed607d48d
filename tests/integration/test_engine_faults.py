"""An engine that is slow, lies or breaks, and a decoder that dies: what a client sees, through the real stack.

One stack for the file: a model whose behaviour a picture's brightness chooses, one that Triton batches, and one that
sleeps.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.engines import onnx_models
from tests.integration.living import COUNTED_WITHIN_S, SLOW_CONFIG, gateway_of, inflight
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import SLOW, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("engine_faults")

GOOD, NAN, SHAPE, DATATYPE, FEW_SCORES, RAISES, LINGERS = range(0, 7 * 30, 30)
ACTOR = '''"""A detector that behaves as the picture's brightness tells it to. LAST: a file, how the last wait ended."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils

LAST = {last!r}


class TritonPythonModel:
    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        role = int(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel()[0])
        boxes, scores = np.array([[1, 2, 5, 6]], np.float32), np.array([0.9], np.float32)
        classes = np.array([0], np.int64)
        if role == {nan}:
            boxes[0, 0] = np.nan
        if role == {shape}:
            boxes = np.zeros((1, 5), np.float32)
        if role == {datatype}:
            classes = np.zeros(1, np.float32)
        if role == {few_scores}:
            scores = np.zeros(0, np.float32)
        if role == {raises}:
            raise RuntimeError("the weights are gone")
        if role == {lingers}:
            self.linger(request)
        named = {{"boxes": boxes, "scores": scores, "class_ids": classes}}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in named.items()])

    def linger(self, request):
        until = time.monotonic() + 10
        while time.monotonic() < until and not request.is_cancelled():
            time.sleep(0.01)
        with open(LAST, "w") as file:
            file.write("cancelled" if request.is_cancelled() else "finished")
'''
ACTOR_CONFIG = """backend: "python"
input [ { name: "image" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] } ]
output [
  { name: "boxes" data_type: TYPE_FP32 dims: [ -1, -1 ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "class_ids" data_type: TYPE_INT64 dims: [ -1 ] }
]
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "network-input-order" value { string_value: "1" } }
parameters { key: "parse-bbox-func-name" value { string_value: "boxes" } }
parameters { key: "labels" value { string_value: "thing" } }
"""
LOOKUP_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 2000000 }
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "canary" value { string_value: "off" } }
"""


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the lingering model says how its request ended."""
    return tmp_path_factory.mktemp("last") / "said"


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory, last: Path, triton_environment: Path) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("faults")
    roles = {"nan": NAN, "shape": SHAPE, "datatype": DATATYPE, "few_scores": FEW_SCORES}
    source = ACTOR.format(last=str(last), raises=RAISES, lingers=LINGERS, **roles)
    write_model(folder / "models", "actor", source, ACTOR_CONFIG)
    write_model(folder / "models", "slow", SLOW, SLOW_CONFIG)
    onnx_models.save(onnx_models.lookup(), folder / "models", "lookup", config=LOOKUP_CONFIG)
    environ = {"PENSTOCK_DECODERS": "2"}
    stack = start_stack(folder / "home", "--model-repository", str(folder / "models"), environ=environ)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def picture(level: int, side: int = 16) -> bytes:
    is_written, encoded = cv2.imencode(".png", np.full((side, side, 3), level, np.uint8))
    assert is_written
    return encoded.tobytes()


def ask_actor(stack: RunningStack, level: int, **headers: str) -> Answer:
    target = f"{stack.http_url}/v2/models/actor/image"
    return call("POST", target, picture(level), {"content-type": "image/png", **headers})


def own_metric(stack: RunningStack, name: str) -> float:
    """The sum over all labels."""
    lines = call("GET", f"{stack.metrics_url}/penstock").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextmanager
def unharmed(stack: RunningStack) -> Iterator[None]:
    """Whatever happened: the stack lives, is ready, has nothing in flight, and serves the next picture."""
    yield
    for page in ("live", "ready"):
        assert call("GET", f"{stack.http_url}/v2/health/{page}").status == 200
    assert ask_actor(stack, GOOD).status == 200
    assert inflight(stack) == 0
    assert own_metric(stack, "penstock_engine_restarts_total") == 0


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (NAN, "'boxes' has 1 values that are NaN"),
        (SHAPE, "'boxes' has shape [1, 5] for one image; [n, 4] was expected"),
        (DATATYPE, "class_ids"),
        (FEW_SCORES, "'scores' has shape [0] for one image"),
        (RAISES, "the weights are gone"),
    ],
    ids=["nan", "shape", "datatype", "few scores", "raises"],
)
def test_image_of_a_model_that_breaks_its_promise_is_500_with_its_name(
    acting: RunningStack, level: int, words: str
) -> None:
    """Model, version and output are named; no line of anybody's Python reaches the client."""
    counted = own_metric(acting, "penstock_rejected_total")
    with unharmed(acting):
        answer = ask_actor(acting, level)
        assert answer.status == 500, answer.body
        assert "model 'actor'" in answer.json["error"]
        assert words in answer.json["error"]
        assert not any(mark in answer.body for mark in (b"Traceback", b".py", b"\\n", b"\n"))
    assert own_metric(acting, "penstock_rejected_total") == counted + 1


def test_image_past_its_deadline_in_the_engine_is_504_and_cancelled_there(acting: RunningStack, last: Path) -> None:
    """504 at the deadline, not at the engine's leisure; the model hears of it, and its instance is free."""
    last.unlink(missing_ok=True)
    with unharmed(acting):
        started = time.monotonic()
        answer = ask_actor(acting, LINGERS, **{"x-request-timeout-ms": "400"})
        took_s = time.monotonic() - started
        assert answer.status == 504, answer.body
        assert 0.39 <= took_s < 0.4 + 1.0, took_s
        wait_for(last.exists, 2, "the model ended")
        wait_for(lambda: last.read_text() == "cancelled", 1, "the model was cancelled")


def test_image_of_a_client_that_leaves_is_cancelled_in_the_engine(acting: RunningStack, last: Path) -> None:
    """No client waits: the engine's request is cancelled, and nothing is in flight."""
    last.unlink(missing_ok=True)
    with unharmed(acting):
        with pytest.raises(TimeoutError):
            call("POST", f"{acting.http_url}/v2/models/actor/image", picture(LINGERS), timeout_s=0.4)
        wait_for(last.exists, 2, "the model ended")
        wait_for(lambda: last.read_text() == "cancelled", 1, "the model was cancelled")
        wait_for(lambda: inflight(acting) == 0, 1, "nothing in flight")


def sleeping_tensor(ms: float) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.array([ms], np.float32))
    return tensor


@pytest.mark.parametrize("transport", ["http header", "http parameter", "grpc parameter"])
def test_tensors_past_their_deadline_in_the_engine_are_504_in_time(acting: RunningStack, transport: str) -> None:
    """The deadline is set by header or by parameter, over either protocol."""
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1500]}]}
    target = f"{acting.http_url}/v2/models/slow/infer"
    started = time.monotonic()
    if transport == "http header":
        assert post_json(target, body, **{"x-request-timeout-ms": "300"}).status == 504
    elif transport == "http parameter":
        assert post_json(target, {**body, "parameters": {"timeout": 300_000}}).status == 504
    else:
        with tritonclient.grpc.InferenceServerClient(acting.grpc_address) as client:
            with pytest.raises(InferenceServerException) as refused:
                client.infer("slow", [sleeping_tensor(1500)], timeout=300_000)
            assert refused.value.status() == str(grpc.StatusCode.DEADLINE_EXCEEDED)
    took_s = time.monotonic() - started
    assert 0.29 <= took_s < 1.2, took_s
    wait_for(lambda: inflight(acting) == 0, 2, "nothing in flight")


def runs_by_size(stack: RunningStack) -> dict[int, int]:
    """How often Triton ran how many rows of the model together."""
    stats = call("GET", f"{stack.http_url}/v2/models/lookup/stats").json["model_stats"][0]
    return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats.get("batch_stats", ())}


def explained(stack: RunningStack, model: str) -> dict[str, Any]:
    page: dict[str, Any] = call("GET", f"{stack.http_url}/v2/models/{model}/explain").json
    return page


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_one_bad_request_of_a_batch_fails_alone(acting: RunningStack, transport: str) -> None:
    """Of four requests in one batch, three succeed and one fails with the reason."""

    def over_http(index: int) -> tuple[bool, str]:
        body = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [index]}]}
        answer = post_json(f"{acting.http_url}/v2/models/lookup/infer", body)
        return answer.status == 200, answer.body.decode()

    def over_grpc(index: int) -> tuple[bool, str]:
        tensor = tritonclient.grpc.InferInput("index", [1, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[index]], np.int64))
        try:
            with tritonclient.grpc.InferenceServerClient(acting.grpc_address) as client:
                return True, str(client.infer("lookup", [tensor]).as_numpy("value").item())
        except InferenceServerException as error:
            return False, error.message()

    ask: Callable[[int], tuple[bool, str]] = over_http if transport == "http" else over_grpc
    wait_for(
        lambda: not explained(acting, "lookup").get("unmerged"), 60, "its rows are tried, each for the queue's 2 s"
    )
    before = runs_by_size(acting)
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(ask, (0, 9, -1, 3)))
    assert [is_good for is_good, _ in outcomes] == [True, False, True, True], outcomes
    assert "idx=9" in outcomes[1][1]
    assert "Traceback" not in outcomes[1][1]
    wait_for(lambda: runs_by_size(acting) != before, COUNTED_WITHIN_S, "Triton counts what it ran")
    assert runs_by_size(acting) == before | {4: before.get(4, 0) + 1}, "Triton did not run the four as one batch"


def noisy_jpeg(seed: int) -> bytes:
    """36 megapixels that take a decoder a while."""
    noise = np.random.default_rng(seed).integers(0, 256, (750, 750, 3), np.uint8)
    is_written, encoded = cv2.imencode(".jpg", np.tile(noise, (8, 8, 1)))
    assert is_written
    return encoded.tobytes()


def decoders_of(stack: RunningStack) -> list[psutil.Process]:
    return [child for child in gateway_of(stack).children() if "penstock.vision.decoder_worker" in child.cmdline()]


def test_decoder_that_crashes_costs_its_one_image(acting: RunningStack) -> None:
    """SIGSEGV at work: 400 for that image, now and at once when it comes again; all others are served meanwhile."""
    poison = noisy_jpeg(1)
    target = f"{acting.http_url}/v2/models/actor/image"
    answers: list[Answer] = []
    before = own_metric(acting, "penstock_decoder_restarts_total")
    with unharmed(acting):
        idle_cpu_s = {child: sum(child.cpu_times()[:2]) for child in decoders_of(acting)}
        assert len(idle_cpu_s) == 2
        thread = threading.Thread(target=lambda: answers.append(call("POST", target, poison)))
        thread.start()

        def at_work() -> list[psutil.Process]:
            return [child for child, cpu_s in idle_cpu_s.items() if sum(child.cpu_times()[:2]) > cpu_s + 0.03]

        wait_for(at_work, 10, "a decoder works on the image")
        (victim,) = at_work()
        victim.send_signal(signal.SIGSEGV)
        assert ask_actor(acting, GOOD).status == 200
        thread.join(5)
        assert [answer.status for answer in answers] == [400], answers
        assert "SIGSEGV" in answers[0].json["error"]
        wait_for(lambda: len(decoders_of(acting)) == 2, 5, "another decoder")
        wait_for(lambda: own_metric(acting, "penstock_decoder_restarts_total") == before + 1, 5, "it is counted")
        again = call("POST", target, poison)
        assert (again.status, "refused for ten minutes" in again.json["error"]) == (400, True), again.body
        assert own_metric(acting, "penstock_decoder_restarts_total") == before + 1
