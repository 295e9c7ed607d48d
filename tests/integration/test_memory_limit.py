"""A model that needs more memory than there is, for some requests only: it fails those, and nothing else."""

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines import onnx_models
from tests.integration.embedded_stack import LOOKUP_CONFIG, NO_TRITON, look_up
from tests.integration.living import family, gateway_of
from tests.support.http import Answer, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack

pytestmark = pytest.mark.xdist_group("embedded")
LIMIT_BYTES = 3 << 30  # of every process, instead of a machine with little memory
NORMAL_BYTES = 1 << 30
GREEDY_CONFIG = """backend: "onnxruntime"
input [ { name: "count" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "mean" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "canary" value { string_value: "off" } }
"""
AT_ONCE = 1 << 40  # numbers: 4 TB
IN_STEPS, IN_SMALL_STEPS = 40_000_000, 14_000_000  # 160 and 56 MB for each of 64 tensors


@pytest.fixture(params=["embedded", "triton"])
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningStack]:
    """The models `lookup` and `greedy`, in processes with little memory."""
    environ = NO_TRITON
    if request.param == "triton":
        request.getfixturevalue("triton_environment")
        environ = {}
    onnx_models.save(onnx_models.lookup(), tmp_path / "models", "lookup", config=LOOKUP_CONFIG)
    onnx_models.save(onnx_models.greedy(64), tmp_path / "models", "greedy", config=GREEDY_CONFIG)
    words = ("--engine", request.param, "--model-repository", str(tmp_path / "models"))
    limit = (shutil.which("prlimit") or "prlimit", f"--data={LIMIT_BYTES}")
    stack = start_stack(tmp_path / "home", *words, environ=environ, wrapper=limit)
    yield stack
    if stack.process.poll() is None:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def be_greedy(stack: RunningStack, count: int) -> Answer:
    """A request to `greedy` for tensors of so many numbers."""
    body = {"inputs": [{"name": "count", "shape": [1], "datatype": "INT64", "data": [count]}]}
    return post_json(f"{stack.http_url}/v2/models/greedy/infer", body)


def largest_private_bytes(stack: RunningStack) -> int:
    """Private memory of the stack's largest process."""
    return max(info.rss - info.shared for info in (process.memory_info() for process in family(stack)))


def test_calls_that_need_too_much_memory_get_503_and_other_models_answer(stack: RunningStack) -> None:
    """Each of them gets a sentence, no process ends, and the memory is free again.

    The other model's answers stay right; only in moments when the memory is full, a call is 503.
    """
    gateway, processes = gateway_of(stack).pid, {process.pid for process in family(stack)}
    is_over = threading.Event()
    right, refused, wrong = list[Answer](), list[Answer](), list[Answer]()

    def look_up_until_over() -> None:
        while not is_over.wait(0.005):
            answer = look_up(stack, 3)
            if answer.status == 200 and answer.json["outputs"][0]["data"] == [30.0]:
                right.append(answer)
            elif answer.status == 503 and "retry-after" in answer.headers:
                refused.append(answer)
            else:
                wrong.append(answer)

    neighbours = [threading.Thread(target=look_up_until_over) for _ in range(2)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        answers = [
            be_greedy(stack, count) for count in (10, AT_ONCE, IN_STEPS, 10, IN_SMALL_STEPS, AT_ONCE, IN_STEPS, 10)
        ]
    finally:
        is_over.set()
        for neighbour in neighbours:
            neighbour.join()
    assert [answer.status for answer in answers] == [200, 503, 503, 200, 503, 503, 503, 200], answers
    for answer in answers:
        if answer.status == 503:
            assert re.search("greedy.*(Failed to allocate|Available memory|bad_alloc)", answer.json["error"]), answer
            assert "onnxruntime::" not in answer.json["error"], answer
            assert "retry-after" in answer.headers, answer
    assert not wrong, wrong[:3]
    assert len(refused) <= len(right) // 20, (len(refused), len(right), refused[:3])
    assert gateway_of(stack).pid == gateway
    assert {process.pid for process in family(stack)} == processes
    assert largest_private_bytes(stack) < NORMAL_BYTES
    assert all(psutil.pid_exists(pid) for pid in processes)
