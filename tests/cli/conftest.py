"""A stand-in for the gateway's REST port, and the commands as a person calls them."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import cv2
import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli import infer, models
from penstock.gateway.workers import running_stacks
from penstock_load.cli import commands as load
from tests.support.web_server import serving

Head = dict[str, Any]
LENGTH = "inference-header-content-length"
PERSON = {"xyxy": [10.25, 20.5, 40.0, 90.0], "class_id": 0, "label": "person", "score": 0.912345}
DOG = {"xyxy": [50.0, 60.0, 80.0, 95.0], "class_id": 16, "label": "dog", "score": 0.41}
TIMINGS = {"decode": 1.5, "preprocess": 0.25, "queue": 0.0, "infer": 12.0, "postprocess": 0.125, "total": 14.0}


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: bytes
    query: str = ""


@dataclass
class StandIn:
    """What the gateway answers, and what it was asked. answer: status and JSON (or text) by path; None: 404."""

    url: str = ""
    result: dict[str, Any] = field(default_factory=lambda: {"detections": [PERSON, DOG]})
    index: list[dict[str, str]] = field(default_factory=list)
    engine: str = "triton"
    explain: list[dict[str, Any]] = field(default_factory=list)  # of the answers to pictures
    page: dict[str, Any] = field(default_factory=dict)  # of every model
    refusals: dict[str, tuple[int, str, dict[str, str]]] = field(default_factory=dict)  # by the path's end
    parameters: dict[str, str] = field(default_factory=dict)  # of every model's config.pbtxt
    key: str = ""  # that callers have to show
    refuses_body: Callable[[bytes], bool] = lambda body: False
    specs: tuple[str, list[int]] = ("FP32", [-1, 3])  # of the input x and the output y of every model: x + 1
    spoil: Callable[[Head, bytes], tuple[Head, bytes]] = lambda head, data: (head, data)  # of the answer's two parts
    asked: list[Asked] = field(default_factory=list)

    def infer(self, body: bytes, length: int) -> tuple[int, bytes, dict[str, str]]:
        """x + 1, as binary tensors."""
        (x,) = json.loads(body[:length])["inputs"]
        data = (np.frombuffer(body[length:], np.float32) + np.float32(1)).tobytes()
        y = {"name": "y", "datatype": "FP32", "shape": x["shape"], "parameters": {"binary_data_size": len(data)}}
        head, data = self.spoil({"model_name": "m", "model_version": "1", "outputs": [y]}, data)
        text = json.dumps(head).encode()
        return 200, text + data, {LENGTH: str(len(text))}

    def answer(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str | bytes, dict[str, str]]:
        """Status, body and extra headers."""
        if self.key and headers.get("x-api-key") != self.key:
            return 401, json.dumps({"error": "the API key is unknown"}), {}
        for end, refusal in self.refusals.items():
            if path.endswith(end):
                return refusal
        if path.endswith("/image"):
            if self.refuses_body(body):
                return 400, json.dumps({"error": "the JPEG is truncated"}), {}
            name = path.split("/")[3]
            answer = {"model_name": name, "model_version": "1", "results": [self.result]}
            explanation = {"explain": self.explain} if self.explain else {}
            return 200, json.dumps(answer | {"timings_ms": TIMINGS, "batch_size": 1} | explanation), {}
        if path.endswith("/explain"):
            return 200, json.dumps(self.page), {}
        if path == "/v2":
            return 200, json.dumps({"name": self.engine, "version": "1", "extensions": []}), {}
        if path.endswith("/infer"):
            return self.infer(body, int(headers[LENGTH]))
        if path.startswith("/v2/models/"):
            datatype, shape = self.specs
            (x, y) = ({"name": name, "datatype": datatype, "shape": shape} for name in "xy")
            metadata = {"name": path, "versions": ["1"], "platform": "", "inputs": [x], "outputs": [y]}
            parameters = {key: {"string_value": value} for key, value in self.parameters.items()}
            return 200, json.dumps({"parameters": parameters} if path.endswith("/config") else metadata), {}
        return 200, json.dumps(self.index) if path.endswith("/index") else "{}", {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        path, _, query = self.path.partition("?")
        self.stand_in.asked.append(Asked(path, headers, body, query))
        status, answer, extra = self.stand_in.answer(path, body, headers)
        text = answer.encode() if isinstance(answer, str) else answer
        self.send_response(status)
        for name, value in (extra | {"Content-Length": str(len(text))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A running stand-in."""
    state = StandIn()
    with serving(type("Handler", (_Handler,), {"stand_in": state})) as state.url:
        yield state


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No settings and no stacks of the machine, a home of its own, a wide terminal."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("penstock-home")))
    run_folders = tmp_path_factory.mktemp("penstock-runs")
    monkeypatch.setattr(running_stacks, "run_folders", lambda: run_folders)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


Call = Callable[..., Result]


@pytest.fixture
def penstock() -> Call:
    """Runs `penstock WORDS…` in this process."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("infer")(infer.infer)
    app.add_typer(models.app, name="models")
    app.add_typer(load.app, name="load")

    def call(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return call


@pytest.fixture
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "dumb")  # no colours between the cells


def jpeg(width: int = 100, height: int = 100, suffix: str = ".jpg") -> bytes:
    """A grey picture, encoded."""
    return bytes(cv2.imencode(suffix, np.full((height, width, 3), 128, np.uint8))[1])
