"""Triton's model class of the backend `torch`, its GPU and Triton's Python API played: responses and faults."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.instance import Pipeline
from tests.support.stack import CHECKOUT

MODEL = CHECKOUT / "server/penstock/engines/triton_backends/torch/model.py"
OURS = ("config", "instance", "parameters", "slab_pictures")
TIMEOUT_S = 20.0


class Response:
    """rows: of its only tensor; error: instead."""

    def __init__(self, tensors: Sequence[Any] = (), error: Exception | None = None) -> None:
        self.rows = [rows for _, rows in tensors]
        self.error = error


class Failure(Exception):
    """Triton's error, with its code."""

    INVALID_ARG, INTERNAL, CANCELLED = range(3)


class Sender:
    """The response that was sent, when it was."""

    def __init__(self) -> None:
        self.sent = threading.Event()
        self.response = Response()

    def send(self, response: Response, flags: int) -> None:
        assert flags == 1
        self.response = response
        self.sent.set()


class Request:
    """A request of one row, which contains its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sender = Sender()

    def name(self) -> str:
        return "x"

    def inputs(self) -> list["Request"]:
        return [self]

    def to_dlpack(self) -> int:
        return self.number

    def get_response_sender(self) -> Sender:
        return self.sender


class PlayedInstance:
    """Doubles numbers; a negative one fails when the run ends. log: what was called."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, requests: Sequence[Any], _: object) -> list[int]:
        return [request.tensors[0] for request in requests]

    def expected(self, started: list[int]) -> list[Any]:
        self.log.append("expected")
        return [(number * 2,) for number in started]

    def finish(self, started: list[int]) -> list[Any]:
        self.log.append("finish")
        if min(started) < 0:
            raise RuntimeError("an illegal memory access")
        return [(number * 2,) for number in started]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instance as `initialize` leaves it, without a pipeline."""
    triton = ModuleType("triton_python_backend_utils")
    log = SimpleNamespace(log_error=lambda _: None, log_warn=lambda _: None, log_info=lambda _: None)
    tensor = SimpleNamespace(from_dlpack=lambda name, rows: (name, rows))
    names = {"InferenceResponse": Response, "TritonError": lambda text, _: Failure(text), "Logger": log}
    triton.__dict__.update(names, Tensor=tensor, TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
    triton.TritonError.__dict__.update(INVALID_ARG=0, INTERNAL=1)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.setitem(sys.modules, "row_trial", importlib.import_module("penstock.engines.row_trial"))
    monkeypatch.setitem(sys.modules, "torch_serving", importlib.import_module("penstock.engines.torch_serving"))
    for name in OURS:
        module = importlib.import_module(f"penstock.engines.torch_serving.{name}")
        monkeypatch.setitem(sys.modules, f"torch_serving.{name}", module)
    found = importlib.util.spec_from_file_location("torch_backend_model", MODEL)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made = module.TritonPythonModel()
    tensors = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {"name": "m", "max_batch_size": 8, "input": [tensors | {"name": "x"}], "output": [tensors | {"name": "y"}]}
    made._name, made._spec, made._instance = "m", engine_spec(config, is_gpu=True), PlayedInstance()
    made._from_dlpack = made._to_dlpack = lambda one: one
    made._pipeline, made._reads_at_end, made.ended = None, True, []
    made._is_broken, made._end_after = lambda error: "illegal" in str(error), lambda: made.ended.append(True)
    return made


def test_responses_are_made_before_the_wait_if_triton_reads_them_later(model: Any) -> None:
    """Python works while the GPU computes; a Triton that copies at once gets finished rows."""
    assert [one.rows for one in model.execute([Request(1), Request(2)])] == [[2], [4]]
    assert model._instance.log == ["expected", "finish"]
    model._reads_at_end = False
    assert [one.rows for one in model.execute([Request(3)])] == [[6]]
    assert model._instance.log[2:] == ["finish"]


def test_batch_that_fails_in_flight_is_answered_by_errors_and_ends_a_lost_process(model: Any) -> None:
    """Each client of the batch gets an error at once, those of other batches their rows, and the process ends."""
    model._pipeline = Pipeline(model._instance, model._answered, model._deliver, report=model._log, in_flight=3)
    batches = [[Request(1)], [Request(-1), Request(5)], [Request(2)]]
    for batch in batches:
        assert model.execute(batch) is None
    model.finalize()
    answers = [request.sender for batch in batches for request in batch]
    assert all(sender.sent.wait(TIMEOUT_S) for sender in answers)
    assert [sender.response.rows for sender in answers] == [[2], [], [], [4]]
    wanted = "model 'm': RuntimeError in the torch backend, see the server's log"
    assert [str(sender.response.error) for sender in answers[1:3]] == [wanted] * 2
    assert model.ended == [True]
