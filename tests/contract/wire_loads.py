"""Loads and unloads: steps that change what the engines serve, in their order."""

import json
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcCall
from tests.contract.wire_case import Difference, GrpcCase, HttpCase, get, grpc_call, infer_x, post, set_parameter
from tests.contract.wire_http_cases import REASONS, RUNTIME, TIMES, UNREADABLE

LOAD, UNLOAD = "/v2/repository/models/spare/load", "/v2/repository/models/spare/unload"
UNKNOWN = Difference("not in the repository: the client's mistake, not ours", code=400)
NO_FILES = Difference("the embedded engine loads from its repository only", code=501)
ENGINES_WORDS = Difference("each has its own words for why", is_text=True)
CONFIG = {
    "backend": "onnxruntime",
    "max_batch_size": 2,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
}
WRONG_TYPE = CONFIG | {"input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [3]}]}


@dataclass(frozen=True)
class Unloaded:
    """A step that waits until Triton, which unloads in its own time, says that the model is gone."""


def _load(config: Any = None, **parameters: Any) -> Any:
    given = {} if config is None else {"config": config if isinstance(config, str) else json.dumps(config)}
    return post(LOAD, {"parameters": given | parameters})


HTTP_STEPS: list[HttpCase | Unloaded] = [
    HttpCase("unload", post(UNLOAD)),
    Unloaded(),
    HttpCase("infer, unloaded", infer_x("spare")),
    HttpCase("metadata, unloaded", get("/v2/models/spare")),
    HttpCase("config, unloaded", get("/v2/models/spare/config")),
    HttpCase("statistics, unloaded", get("/v2/models/spare/stats")),
    HttpCase("index, unloaded", post("/v2/repository/index"), REASONS),
    HttpCase("unload again", post(UNLOAD)),
    HttpCase("load", post(LOAD, {})),
    HttpCase("infer, loaded", infer_x("spare")),
    HttpCase("load again", post(LOAD)),
    HttpCase("load with a config", _load(CONFIG)),
    HttpCase("its config", get("/v2/models/spare/config"), RUNTIME),
    HttpCase("its largest batch", infer_x("spare", shape=[3, 3], data=[1] * 9)),
    HttpCase("load with a config of the wrong type", _load(WRONG_TYPE), ENGINES_WORDS),
    HttpCase("load with a config of another name", _load(CONFIG | {"name": "other"}), UNKNOWN),
    HttpCase("load with a config that is none", _load("{"), UNKNOWN),
    HttpCase("what served goes on", infer_x("spare")),
    HttpCase("load with a file", _load(CONFIG, **{"file:1/model.onnx": "aGVsbG8="}), NO_FILES),
    HttpCase("load, config is a number", post(LOAD, {"parameters": {"config": 5}}), UNREADABLE),
    HttpCase("load, malformed", post(LOAD, b"{"), UNREADABLE),
    HttpCase("load of an unknown model", post("/v2/repository/models/missing/load"), UNKNOWN),
    HttpCase("load of broken", post("/v2/repository/models/broken/load"), ENGINES_WORDS),
    HttpCase("unload of an unknown model", post("/v2/repository/models/missing/unload")),
    HttpCase("load in a repository", post("/v2/repository/here/models/spare/load")),
    HttpCase("load by GET", get(LOAD)),
    HttpCase("load as at first", post(LOAD)),
    HttpCase("config as at first", get("/v2/models/spare/config"), RUNTIME),
    HttpCase("statistics begin anew", get("/v2/models/spare/stats"), TIMES),
]  # fmt: skip


def _grpc_load(model: str = "spare", repository: str = "", **parameters: Any) -> GrpcCall:
    request = service_pb2.RepositoryModelLoadRequest(model_name=model, repository_name=repository)
    for name, value in parameters.items():
        set_parameter(request.parameters[name.replace("__", ":")], value)
    return grpc_call("RepositoryModelLoad", request)


def _grpc_unload(model: str = "spare", repository: str = "", **parameters: Any) -> GrpcCall:
    request = service_pb2.RepositoryModelUnloadRequest(model_name=model, repository_name=repository)
    for name, value in parameters.items():
        set_parameter(request.parameters[name], value)
    return grpc_call("RepositoryModelUnload", request)


def _step(name: str, call: GrpcCall, but: Difference | None = None) -> GrpcCase:
    return GrpcCase(name, call.method.rpartition("/")[2], call, but)


NOT_FROM_US = Difference("not in the repository: the client's mistake, not ours", code=3)
GRPC_STEPS: list[GrpcCase | Unloaded] = [
    _step("unload", _grpc_unload()),
    Unloaded(),
    _step("load", _grpc_load()),
    _step("load with a config", _grpc_load(config=json.dumps(CONFIG))),
    _step("its config", grpc_call("ModelConfig", service_pb2.ModelConfigRequest(name="spare")), RUNTIME),
    _step("load, config is a number", _grpc_load(config=5)),
    _step("load with a config that is none", _grpc_load(config="{"), NOT_FROM_US),
    _step("load with a config of the wrong type", _grpc_load(config=json.dumps(WRONG_TYPE)), ENGINES_WORDS),
    _step("load with a file", _grpc_load(config=json.dumps(CONFIG), file__1=b"x"), Difference(NO_FILES.why, code=12)),
    _step("load with an unknown parameter", _grpc_load(a=1)),
    _step("load of an unknown model", _grpc_load("missing"), NOT_FROM_US),
    _step("load in a repository", _grpc_load(repository="here")),
    _step("unload of an unknown model", _grpc_unload("missing")),
    _step("unload in a repository", _grpc_unload(repository="here")),
    _step("unload, dependents is a number", _grpc_unload(unload_dependents=1)),
    _step("load as at first", _grpc_load()),
]
