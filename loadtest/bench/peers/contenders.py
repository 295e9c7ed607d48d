"""Who is measured: how each is started, asked and understood."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.peers.answers import Found
from loadtest.bench.peers.environments import python_of
from loadtest.bench.peers.model import ServedModel
from loadtest.bench.wire import HttpRequest

SERVERS = Path(__file__).resolve().parent / "servers"
_BOUNDARY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contender runs. folder: its own, empty, removed afterwards."""

    port: int
    folder: Path
    model: ServedModel


@dataclass(frozen=True, slots=True)
class Contender:
    """One server. package: whose version is told. environment: of .venv-peers, or empty for our own.

    write: a picture as a request; read: the body of a 200 as boxes.
    """

    name: str
    command: Callable[[Place], list[str]]
    write: Callable[[bytes, ServedModel], HttpRequest]
    read: Callable[[bytes], list[Found]]
    environment: str = ""
    package: str = ""
    is_ours: bool = False
    variables: Callable[[Place], Mapping[str, str]] = field(default=lambda place: {})


def _penstock(engine: str, place: Place) -> list[str]:
    ports = ["grpc", "metrics", "engine-http", "engine-grpc", "engine-metrics"]
    free = [argument for port in ports for argument in (f"--{port}-port", "0")]
    models = ["--model-repository", str(place.model.folder.parent), "--models", place.model.name]
    command = [sys.executable, "-m", "server.cli", "up", "--engine", engine, "--http-port", str(place.port)]
    return [*command, *free, *models, "--home", str(place.folder / "home")]


def _script(file: str, place: Place, *, environment: str = "") -> list[str]:
    python = str(python_of(environment)) if environment else sys.executable
    return [python, str(SERVERS / file), str(place.port), str(place.model.instances)]


def _ray(place: Place) -> list[str]:
    return [*_script("ray_server.py", place, environment="ray"), str(place.folder / "ray")]


def _ray_variables(place: Place) -> Mapping[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place.folder / "haproxy" / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place.folder / "haproxy" / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(place.folder / "haproxy" / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place.folder / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place.folder / "haproxy" / "server-state"),
    }


def _bentoml(place: Place) -> list[str]:
    serve = ["-m", "bentoml", "serve", "bentoml_server:DetectorService", "--host", "127.0.0.1"]
    return [str(python_of("bentoml")), *serve, "--port", str(place.port), "--working-dir", str(SERVERS)]


def _bentoml_variables(place: Place) -> Mapping[str, str]:
    return {"BENTOML_DO_NOT_TRACK": "true", "BENTOML_HOME": str(place.folder / "bentoml")}


def _mlserver(place: Place) -> list[str]:
    program = python_of("mlserver").with_name("mlserver")
    return [str(program), "start", str(SERVERS / "mlserver_settings")]


def _mlserver_variables(place: Place) -> Mapping[str, str]:
    return {
        "MLSERVER_HTTP_PORT": str(place.port),
        "MLSERVER_GRPC_PORT": "0",
        "MLSERVER_PARALLEL_WORKERS": str(place.model.instances),
    }


def _as_body(path: str, jpeg: bytes, model: ServedModel) -> HttpRequest:
    return HttpRequest(path.format(model=model.name), {"content-type": "image/jpeg"}, jpeg)


def _as_form(jpeg: bytes, model: ServedModel) -> HttpRequest:
    head = 'Content-Disposition: form-data; name="pictures"; filename="picture.jpg"\r\nContent-Type: image/jpeg'
    body = f"--{_BOUNDARY}\r\n{head}\r\n\r\n".encode() + jpeg + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return HttpRequest("/detect", {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}, body)


def _found(detections: list[dict[str, Any]]) -> list[Found]:
    return [Found(tuple(one["xyxy"]), one["class_id"], one["score"]) for one in detections]


def _read_ours(body: bytes) -> list[Found]:
    return _found(json.loads(body)["results"][0]["detections"])


def _read_one(body: bytes) -> list[Found]:
    return _found(json.loads(body)["detections"])


def _read_list(body: bytes) -> list[Found]:
    return _found(json.loads(body)[0]["detections"])


_body_to_ours = functools.partial(_as_body, "/v2/models/{model}/image")
_body = functools.partial(_as_body, "/detect")

CONTENDERS = (
    Contender("penstock-triton", functools.partial(_penstock, "triton"), _body_to_ours, _read_ours, is_ours=True),
    Contender("penstock-embedded", functools.partial(_penstock, "embedded"), _body_to_ours, _read_ours, is_ours=True),
    Contender("fastapi", functools.partial(_script, "fastapi_server.py"), _body, _read_one, package="fastapi"),
    Contender(
        "litserve",
        functools.partial(_script, "litserve_server.py", environment="litserve"),
        _body,
        _read_one,
        environment="litserve",
        package="litserve",
    ),
    Contender("ray", _ray, _body, _read_one, environment="ray", package="ray", variables=_ray_variables),
    Contender(
        "bentoml",
        _bentoml,
        _as_form,
        _read_list,
        environment="bentoml",
        package="bentoml",
        variables=_bentoml_variables,
    ),
    Contender(
        "mlserver",
        _mlserver,
        _body,
        _read_one,
        environment="mlserver",
        package="mlserver",
        variables=_mlserver_variables,
    ),
)
