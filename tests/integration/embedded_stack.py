"""A stack with the embedded engine where no Triton can be found, and what the tests ask of it."""

import threading
from pathlib import Path

from tests.engines import onnx_models
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack

NO_TRITON = {"PATH": "/nonexistent", "PENSTOCK_ENGINE_ENVIRONMENT": "/nonexistent"}
LOOKUP_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SLOW_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "trips" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "done" data_type: TYPE_INT64 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 4 } ]
parameters { key: "canary" value { string_value: "off" } }
"""


def start_embedded(
    folder: Path, *arguments: str, engine: str = "embedded", wait: bool = True, **environ: str
) -> RunningStack:
    """A stack where no Triton can be found, with the models of `folder`/models."""
    words = ("--engine", engine, "--model-repository", str(folder / "models"), *arguments)
    return start_stack(folder / "home", *words, environ=NO_TRITON | environ, wait=wait)


def write_models(repository: Path) -> None:
    """lookup: a table's row; slow: as many products of matrices as it is asked for, four at once."""
    onnx_models.save(onnx_models.lookup(), repository, "lookup", config=LOOKUP_CONFIG)
    onnx_models.save(onnx_models.slow(), repository, "slow", config=SLOW_CONFIG)


def look_up(stack: RunningStack, index: int = 3) -> Answer:
    body = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [index]}]}
    return post_json(f"{stack.http_url}/v2/models/lookup/infer", body)


def is_serving(stack: RunningStack) -> bool:
    try:
        return look_up(stack).status == 200
    except OSError:
        return False


def own_metrics(stack: RunningStack) -> str:
    return call("GET", f"{stack.metrics_url}/penstock").body.decode()


def infer_slow(stack: RunningStack, trips: int, outcomes: list[int | str]) -> threading.Thread:
    """One REST request that takes about a millisecond a trip, in a thread."""

    def work() -> None:
        body = {"inputs": [{"name": "trips", "shape": [1, 1], "datatype": "INT64", "data": [trips]}]}
        try:
            outcomes.append(post_json(f"{stack.http_url}/v2/models/slow/infer", body).status)
        except OSError as error:
            outcomes.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread
