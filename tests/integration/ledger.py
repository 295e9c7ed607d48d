"""Models whose batches the gateway forms, which write down every call, and what a gateway counted of its inferences.

A row is (value, milliseconds, ...): a call sleeps for the longest of its rows and a bit for each, unless it is
cancelled, and answers every row's value. A call with a row of UNTIL_RELEASED milliseconds ends with `Ledgers.release`.
"""

import asyncio
import json
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack
from tests.support.tiny_models import write_model

FEWER = -2.0  # a value that costs its call a row of the answer
RAISES = -1.0  # a value that the model fails at
UNTIL_RELEASED = -1.0  # milliseconds
LEDGER = '''"""Sleeps for its rows, writes each call down, and answers the rows' values."""
import json
import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def write(self, line):
        with open({file!r}, "a") as file:
            file.write(json.dumps(line) + "\\n")

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        values = rows[:, 0].tolist()
        parameters = json.loads(request.parameters() or "{{}}")
        outputs = sorted(request.requested_output_names())
        began = time.monotonic()
        is_held = bool((rows[:, 1] < 0).any())
        longest_s = 60.0 if is_held else float(rows[:, 1].max()) / 1000
        until = began + longest_s + {beta_ms} / 1000 * len(rows)
        about = {{"columns": rows.shape[1], "outputs": outputs, "parameters": parameters}}
        self.write({{"values": values, "at_s": began, "until_s": until, **about}})
        if {raises} in values:
            raise RuntimeError("a row of {raises}")
        while (left_s := until - time.monotonic()) > 0:
            if request.is_cancelled():
                self.write({{"cancelled": values}})
                break
            if is_held and self.is_released():
                break
            time.sleep(min(left_s, 0.01))
        answer = rows[:, :1][len([value for value in values if value == {fewer}]):]
        tensors = [pb_utils.Tensor(name, answer) for name in outputs]
        return pb_utils.InferenceResponse(tensors)

    def is_released(self):
        try:
            os.unlink({release!r})
        except FileNotFoundError:
            return False
        return True
'''
CONFIG = """backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }}, {{ name: "z" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "batch_owner" value {{ string_value: "gateway" }} }}
parameters {{ key: "canary" value {{ string_value: "off" }} }}
{more}"""

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


def parameter(name: str, value: float) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value:g}" }} }}\n'


def write_ledger(folder: Path, name: str, *, beta_ms: float = 0.0, more: str = "") -> None:
    """The model in the repository `folder`/models; its ledger is `folder`/NAME.calls. more: lines of its config."""
    file = folder / f"{name}.calls"
    file.touch()
    release = str(_release_file(folder, name))
    source = LEDGER.format(file=str(file), release=release, fewer=FEWER, raises=RAISES, beta_ms=beta_ms)
    write_model(folder / "models", name, source, CONFIG.format(more=more))


def _release_file(folder: Path, model: str) -> Path:
    return folder / f"{model}.release"


def write_shades(folder: Path) -> None:
    """The model of pictures in the repository `folder`/models; it has no ledger."""
    write_model(folder / "models", "shades", SHADES, SHADES_CONFIG)


@dataclass(frozen=True)
class Ledgers:
    """A stack over such models, and what they wrote down."""

    stack: RunningStack
    folder: Path

    def lines(self, model: str) -> list[dict[str, Any]]:
        """All that the model wrote: its calls, and those that were cancelled."""
        return [json.loads(line) for line in (self.folder / f"{model}.calls").read_text().splitlines()]

    def calls(self, model: str) -> list[dict[str, Any]]:
        """The calls that the model got: values, columns, outputs, parameters; at_s, until_s: monotonic seconds."""
        return [line for line in self.lines(model) if "values" in line]

    def values(self, model: str) -> list[float]:
        """The values of all rows that the model got, in order."""
        return [value for line in self.calls(model) for value in line["values"]]

    def post(self, model: str, rows: list[list[float]], **headers: str) -> Answer:
        """The rows in one request over REST."""
        return post_json(f"{self.stack.http_url}/v2/models/{model}/infer", body_of(rows), **headers)

    def release(self, model: str) -> None:
        """Ends the model's running call that waits for it, or else the next one."""
        _release_file(self.folder, model).touch()

    def unrelease(self, model: str) -> None:
        """No call has been released."""
        _release_file(self.folder, model).unlink(missing_ok=True)

    def waiting(self, model: str) -> float:
        """Requests in the model's queue now."""
        return page_of(self.stack)[f"penstock_batch_queue_requests/{model}"]


def page_of(stack: RunningStack) -> Counter[str]:
    """Every sample of the gateway's metrics, by name and the values of its labels: NAME/VALUE/VALUE."""
    page: Counter[str] = Counter()
    for family in text_string_to_metric_families(call("GET", f"{stack.metrics_url}/penstock").body.decode()):
        for sample in family.samples:
            page["/".join((sample.name, *sample.labels.values()))] += sample.value  # type: ignore[assignment]
    return page


def inferences(page: Counter[str]) -> Counter[str]:
    """What became of them: accepted, answered, failed/REASON, cancelled/STAGE."""
    found: Counter[str] = Counter()
    for name, value in page.items():
        if name.startswith("penstock_inferences_"):
            found[name.removeprefix("penstock_inferences_").replace("_total", "", 1)] = int(value)
    return found


def ended(found: Counter[str]) -> int:
    """How many of them have an end."""
    return sum(count for name, count in found.items() if name != "accepted")


def is_settled(found: Counter[str]) -> bool:
    """Whether all that was accepted has an end; a front writes its counts down each quarter of a second."""
    return found["accepted"] == ended(found)


def body_of(rows: list[list[float]]) -> dict[str, Any]:
    """The request in REST's form; it may share a batch with one that `Caller` sends."""
    data = [number for row in rows for number in row]
    tensor = {"name": "x", "shape": [len(rows), len(rows[0])], "datatype": "FP32", "data": data}
    return {"inputs": [tensor], "outputs": [{"name": "y"}]}


def rows_tensor(*rows: list[float]) -> tritonclient.grpc.InferInput:
    """The request's input."""
    array = np.array(rows, np.float32)
    tensor = tritonclient.grpc.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


class Caller:
    """One caller over gRPC: a connection of its own."""

    def __init__(self, client: tritonclient.grpc.aio.InferenceServerClient) -> None:
        self._client = client

    def ask(self, model: str, *rows: list[float], output: str = "y", **how: Any) -> "asyncio.Task[list[float]]":
        """A request; its answer is the rows of that output. how: as tritonclient's infer has it."""
        return asyncio.create_task(self._answer(model, rows, output, how))

    async def _answer(self, model: str, rows: tuple[list[float], ...], output: str, how: dict[str, Any]) -> list[float]:
        outputs = [tritonclient.grpc.InferRequestedOutput(output)]
        result = await self._client.infer(model, [rows_tensor(*rows)], outputs=outputs, **how)
        answer: list[float] = result.as_numpy(output)[:, 0].tolist()
        return answer


def open_request(stack: RunningStack, model: str, row: list[float]) -> socket.socket:
    """A connection over REST with one request on it, unanswered."""
    body = json.dumps(body_of([row])).encode()
    address = urlsplit(stack.http_url)
    connection = socket.create_connection((address.hostname or "", address.port or 0))
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection
