"""The real gateway before external Tritons that stop, fail, or have too little memory.

The engines are fakes: three in a thread of this process as replicas, one in a process of its own to be stopped.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.engines.fake_triton import FakeTriton, Mode
from tests.integration.living import inflight
from tests.support.http import Answer, call, post_json
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("external_engines")

BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3.0]}]}


class Fakes:
    """Fake Tritons in a thread with a loop of its own."""

    def __init__(self, count: int) -> None:
        self.all = [FakeTriton() for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    def __enter__(self) -> "Fakes":
        self._thread.start()
        assert self._begun.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            for fake in self.all:
                await stack.enter_async_context(fake.running())
            self._begun.set()
            await self._end.wait()

    def release(self) -> None:
        """Those that were slow answer, and are normal."""
        for fake in self.all:
            fake.mode = Mode.NORMAL
            self._loop.call_soon_threadsafe(fake.release.set)

    def become(self, mode: Mode) -> None:
        """All of them."""
        for fake in self.all:
            fake.mode = mode
            self._loop.call_soon_threadsafe(fake.release.clear)
            self._loop.call_soon_threadsafe(fake.grpc_cancelled.clear)


@contextmanager
def gateway(home: Path, urls: list[str], grpc_addresses: list[str], *arguments: str) -> Iterator[RunningStack]:
    stack = start_stack(
        home,
        *("--engine", ",".join(urls), "--engine-grpc", ",".join(grpc_addresses), *arguments),
        environ={"PENSTOCK_CANARY_INTERVAL_S": "3600"},  # the fakes count rows
    )
    try:
        yield stack
    finally:
        code = stop_stack(stack)
    assert code == 0, "".join(stack.log[-30:])


@pytest.fixture(scope="module")
def fakes() -> Iterator[Fakes]:
    with Fakes(3) as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, fakes: Fakes) -> Iterator[RunningStack]:
    """Three replicas; the gateway owns the batches of their model."""
    urls, addresses = [fake.http_url for fake in fakes.all], [fake.grpc_address for fake in fakes.all]
    home = tmp_path_factory.mktemp("replicas")
    with gateway(home, urls, addresses, "--batching", "double=gateway") as running:
        yield running


@pytest.fixture(autouse=True)
def well(fakes: Fakes) -> Iterator[None]:
    """Whatever a test made of the fakes ends with it."""
    yield
    for fake in fakes.all:
        fake.max_rows = None
    fakes.release()


def ask(stack: RunningStack, **headers: str) -> Answer:
    return post_json(f"{stack.http_url}/v2/models/double/infer", BODY, **headers)


def ask_over_grpc(stack: RunningStack, timeout_us: int | None = None) -> str:
    """The status code's name, OK where it is answered."""
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[3.0]], np.float32))
    with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
        try:
            answer = client.infer("double", [tensor], timeout=timeout_us)
        except InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode.")
        assert answer.as_numpy("y").tolist() == [[6.0]]
        return "OK"


def own_metrics(stack: RunningStack, name: str) -> list[float]:
    lines = call("GET", f"{stack.metrics_url}/penstock").body.decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]


def test_requests_past_their_deadline_are_504_in_time_and_given_up_in_the_engine(
    stack: RunningStack, fakes: Fakes
) -> None:
    """The client gets 504 at the deadline; the engine's request is cancelled a moment later."""
    fakes.become(Mode.SLOW)
    started = time.monotonic()
    answer = ask(stack, **{"x-request-timeout-ms": "400"})
    took_s = time.monotonic() - started
    assert answer.status == 504, answer.body
    assert 0.39 <= took_s < 0.4 + 1.0, took_s
    started = time.monotonic()
    assert ask_over_grpc(stack, 400_000) == "DEADLINE_EXCEEDED"
    assert 0.39 <= time.monotonic() - started < 0.4 + 1.0
    wait_for(lambda: any(fake.grpc_cancelled.is_set() for fake in fakes.all), 3, "the engine's call is cancelled")
    fakes.release()
    wait_for(lambda: inflight(stack) == 0, 3, "nothing in flight")
    assert ask(stack).status == 200


def test_engine_out_of_memory_halves_the_batches_and_costs_no_request_that_fits(
    stack: RunningStack, fakes: Fakes
) -> None:
    """Rows that are too many together are asked again by halves; what does not fit alone is 503, with Retry-After."""
    fakes.become(Mode.SLOW)
    for fake in fakes.all:
        fake.max_rows = 2
        fake.rows.clear()
    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(ask, stack) for _ in range(24)]
        wait_for(lambda: inflight(stack) == 24, 10, "all of them wait")
        fakes.release()
        assert Counter(answer.result().status for answer in answers) == {200: 24}
    assert max(rows for fake in fakes.all for rows in fake.rows) > 2, "no batch was too large: nothing was tried"
    for fake in fakes.all:
        fake.max_rows = 0
    answer = ask(stack)
    assert (answer.status, answer.headers["retry-after"] in ("1", "2")) == (503, True), answer.body
    assert "Failed to allocate memory" in answer.json["error"]
    assert ask_over_grpc(stack) == "RESOURCE_EXHAUSTED"
    for fake in fakes.all:
        fake.max_rows = None
    wait_for(lambda: ask(stack).status == 200, 5, "what fits is answered again")
    assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200


def test_same_request_twice_is_computed_twice(stack: RunningStack, fakes: Fakes) -> None:
    """At least once: nothing is remembered by a request's id, and both are answered alike."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [7.25]}  # a number that no other request has
    body = {"inputs": [tensor], "id": "order-7"}
    answers = [post_json(f"{stack.http_url}/v2/models/double/infer", body) for _ in range(2)]
    assert answers[0].json == answers[1].json
    assert answers[0].json["id"] == "order-7"
    computed = [content for fake in fakes.all for content in fake.contents]
    assert computed.count(np.float32(7.25).tobytes()) == 2


def test_bad_replica_is_left_out_and_its_callers_see_few_failures(stack: RunningStack, fakes: Fakes) -> None:
    """Five in a row and it is out, the two others serve all; in the metrics it is seen."""
    wait_for(lambda: own_metrics(stack, "penstock_replica_up") == [1.0] * 3, 20, "all replicas are up")
    ejections = sum(own_metrics(stack, "penstock_replica_ejections_total"))
    fakes.all[1].mode = Mode.ERROR
    statuses: list[int] = []
    until = time.monotonic() + 30
    while sum(own_metrics(stack, "penstock_replica_ejections_total")) == ejections and time.monotonic() < until:
        statuses += [ask(stack).status for _ in range(10)]
    assert Counter(statuses)[500] <= 6, Counter(statuses)
    assert own_metrics(stack, "penstock_replica_up") == [1.0, 0.0, 1.0]
    assert [ask(stack).status for _ in range(30)] == [200] * 30
    assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    fakes.all[1].mode = Mode.NORMAL


@contextmanager
def child_triton() -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    argv = [sys.executable, "-m", "tests.engines.fake_triton", "normal"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)
        process.stdout.close()


def test_stopped_engine_is_503_at_once_until_it_goes_on(tmp_path: Path) -> None:
    """SIGSTOP: a few callers wait for their deadline, then the circuit is open; SIGCONT: it closes by itself."""
    with (
        child_triton() as (engine, ports),
        gateway(tmp_path, [f"http://127.0.0.1:{ports['http']}"], [f"127.0.0.1:{ports['grpc']}"]) as stack,
    ):
        assert ask(stack).status == 200
        engine.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        statuses: Counter[int] = Counter()
        with ThreadPoolExecutor(5) as threads:
            while not statuses[503] and time.monotonic() < stopped + 10:
                answers = list(threads.map(lambda _: ask(stack, **{"x-request-timeout-ms": "300"}), range(5)))
                statuses.update(answer.status for answer in answers)
        assert set(statuses) == {503, 504}, statuses
        assert time.monotonic() - stopped < 5

        took_s: list[float] = []
        for _ in range(5):
            began = time.monotonic()
            answer = ask(stack)
            took_s.append(time.monotonic() - began)
        assert min(took_s) < 0.1, took_s
        assert (answer.status, answer.headers["retry-after"] in ("1", "2")) == (503, True)
        assert "5 calls in a row were not answered in time, nor was a probe" in answer.json["error"]
        assert ask_over_grpc(stack) == grpc.StatusCode.UNAVAILABLE.name
        assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 503
        assert inflight(stack) <= 10  # a call counts until the engine answers it

        engine.send_signal(signal.SIGCONT)
        wait_for(lambda: ask(stack).status == 200, 10, "the circuit closes")
        wait_for(lambda: inflight(stack) == 0, 10, "it has answered what it had taken")
        assert own_metrics(stack, "penstock_engine_stalls_total") == [1.0]
        assert len(stack.logged("engine is down")) == 1
