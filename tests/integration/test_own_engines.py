"""A model that hung gets an engine process of its own: when it hangs again, other models are not affected."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc

from penstock.engines.dedicated_engines import RECORD
from tests.engines import onnx_models
from tests.integration.embedded_stack import LOOKUP_CONFIG, NO_TRITON
from tests.integration.living import family, gateway_of, triton_of
from tests.integration.test_models import penstock
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("own_engines")

SLEEPER = '''"""Answers its input; -1 waits."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.act(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def act(self, x):
        if x.ravel()[0] == -1:
            time.sleep(100000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
'''
LONG_CONFIG = 'backend: "onnxruntime"\ninstance_group [ { kind: KIND_CPU count: 1 } ]\n'
ENVIRON = {"PENSTOCK_CANARY_INTERVAL_S": "0.5", "PENSTOCK_EXECUTION_TIMEOUT_S": "2"}
PAUSE_S = 0.02
LONGEST_GAP_S = 1.0  # on a machine that is busy with other tests; a restart of the engine takes several seconds


@dataclass(frozen=True)
class Hanging:
    """A stack, a model that hangs on demand, and a neighbour model. engine: the process of all other models.

    gateway: the process that knows of the record.
    """

    stack: RunningStack
    model: str
    ask: Callable[[bool], Answer]
    ask_neighbour: Callable[[], Answer]
    engine: psutil.Process
    gateway: psutil.Process

    def hang(self) -> None:
        """Makes the model hang, and waits until it serves again."""
        assert self.ask(True).status == 504
        wait_for(lambda: self.ask(False).status == 503, 20, "the hang is noticed")
        wait_for(lambda: self.ask(False).status == 200, 40, "the model serves again")

    def row(self) -> dict[str, str]:
        rows: list[dict[str, str]] = post_json(f"{self.stack.http_url}/v2/repository/index", {}).json
        return next(row for row in rows if row["name"] == self.model)

    def own_process(self) -> psutil.Process:
        """The youngest child of the parent process: the model's own engine."""
        return max(psutil.Process(self.stack.process.pid).children(), key=lambda child: child.create_time())


@dataclass
class Neighbour:
    """Sends requests all the time. gaps_s: times between two answers. failed: answers other than 200."""

    ask: Callable[[], Answer]
    gaps_s: list[float] = field(default_factory=list)
    failed: list[Answer] = field(default_factory=list)

    @contextmanager
    def asking(self) -> Iterator[None]:
        end = threading.Event()
        thread = threading.Thread(target=self._run, args=(end,))
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _run(self, end: threading.Event) -> None:
        last = time.monotonic()
        while not end.wait(PAUSE_S):
            answer = self.ask()
            now = time.monotonic()
            self.gaps_s.append(now - last)
            last = now
            if answer.status != 200:
                self.failed.append(answer)


def infer(stack: RunningStack, model: str, name: str, datatype: str, value: float) -> Answer:
    body = {"inputs": [{"name": name, "shape": [1], "datatype": datatype, "data": [value]}]}
    return post_json(f"{stack.http_url}/v2/models/{model}/infer", body, **{"x-request-timeout-ms": "1000"})


@contextmanager
def stack_over(engine: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    """triton: a Python model that sleeps, behind two fronts. embedded: a node that takes minutes."""
    models = folder / "models"
    if engine == "embedded":
        onnx_models.save(onnx_models.one_long_node(), models, "bad", config=LONG_CONFIG)
        onnx_models.save(onnx_models.lookup(), models, "fine", config=LOOKUP_CONFIG)
        words = ("--engine", "embedded", "--model-repository", str(models))
        stack = start_stack(folder / "home", *words, environ=NO_TRITON | ENVIRON)
    else:
        request.getfixturevalue("triton_environment")
        config = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=1)
        write_model(models, "bad", SLEEPER, config)
        write_model(models, "fine", IDENTITY, config)
        stack = start_stack(folder / "home", "--model-repository", str(models), "--workers", "2", environ=ENVIRON)
    everyone = family(stack)
    try:
        if engine == "embedded":
            yield Hanging(
                stack,
                "bad",
                lambda hangs: infer(stack, "bad", "n", "INT64", 1_000_000 if hangs else 1),
                lambda: post_json(
                    f"{stack.http_url}/v2/models/fine/infer",
                    {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [3]}]},
                ),
                gateway_of(stack),
                gateway_of(stack),
            )
        else:
            yield Hanging(
                stack,
                "bad",
                lambda hangs: infer(stack, "bad", "x", "FP32", -1.0 if hangs else 1.0),
                lambda: infer(stack, "fine", "x", "FP32", 1.0),
                triton_of(stack),
                gateway_of(stack),
            )
        everyone = family(stack)
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])
    finally:
        stack.process.kill()
    wait_for(lambda: not any(child.is_running() for child in everyone), 10, "every process is gone")


@pytest.mark.parametrize("engine", ["embedded", pytest.param("triton", marks=pytest.mark.long)])
def test_model_that_hangs_again_is_ended_with_its_own_process_and_its_neighbour_notices_nothing(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """There is no error and no gap, the main engine continues, and the index has the record over both protocols.

    The next gateway uses the running engine process of the model, and does not load it elsewhere.
    """
    with stack_over(engine, tmp_path, request) as hanging:
        stack = hanging.stack
        wait_for(lambda: hanging.ask(False).status == 200, 60, "the model serves")
        hanging.hang()
        assert (hanging.row()["state"], hanging.row()["reason"]) == ("READY", RECORD)
        first = hanging.own_process()
        neighbour = Neighbour(hanging.ask_neighbour)
        with neighbour.asking():
            hanging.hang()
        assert not first.is_running()
        assert hanging.own_process().is_running()
        assert hanging.engine.is_running()
        assert neighbour.failed == []
        assert max(neighbour.gaps_s) < LONGEST_GAP_S
        page = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert "penstock_engine_restarts_total 0.0" in page
        assert "penstock_gateway_restarts_total 0.0" in page
        client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
        rows = {row.name: row for row in client.get_model_repository_index().models}
        assert (rows["bad"].state, rows["bad"].reason, rows["fine"].reason) == ("READY", RECORD, "")
        assert client.is_model_ready("bad")
        client.close()
        assert f"bad: {RECORD}" in penstock(stack, "list")
        own = hanging.own_process()
        hanging.gateway.kill()
        hanging.gateway.wait(10)
        wait_for(lambda: serves(hanging), 60, "the next gateway serves the model")
        assert own.is_running()
        assert hanging.row()["reason"] == RECORD


def serves(hanging: Hanging) -> bool:
    try:
        return hanging.ask(False).status == 200
    except OSError:
        return False
