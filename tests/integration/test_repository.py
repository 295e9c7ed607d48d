"""Loads and unloads through the gateway: what they change, and that the bare Triton answers the same."""

import base64
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.protocol.call import HttpCall
from tests.contract.raw_http import RawAnswer, ask
from tests.contract.wire_case import get, infer_x, post
from tests.contract.wire_loads import CONFIG
from tests.contract.wire_models import write_models
from tests.engines import onnx_models
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import IDENTITY

pytestmark = pytest.mark.xdist_group("repository")

INDEX, SPARE = "/v2/repository/index", "/v2/repository/models/spare"
BRAND_NEW = "/v2/repository/models/brand_new"
SLOW_S = 3.0  # that the model `slow` takes to load
SLOW = IDENTITY.replace(
    "    def execute", f"    def initialize(self, args):\n        __import__('time').sleep({SLOW_S})\n\n    def execute"
)
SLOW_CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
# Triton calls these its own failure (500).
UNREADABLE = (b"failed to load", b"attempt to access", b"unexpected error on creating", b"attempt to get members")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack of its own, since its models come and go."""
    home = tmp_path_factory.mktemp("home")
    write_models(home / "models")
    (home / "models" / "slow" / "1").mkdir(parents=True)
    (home / "models" / "slow" / "1" / "model.py").write_text(SLOW)
    (home / "models" / "slow" / "config.pbtxt").write_text(SLOW_CONFIG)
    stack = start_stack(home, "--models", "spare,plain", *ENGINE_PORTS)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.fixture(scope="module")
def plus_one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model file that answers x + 1, in base64."""
    folder = tmp_path_factory.mktemp("files")
    onnx_models.save(onnx_models.plus(1), folder, "plus", config="")
    return base64.b64encode((folder / "plus" / "1" / "model.onnx").read_bytes()).decode()


def load(target: str, config: Any = None, **files: object) -> HttpCall:
    """A load with overrides. files: name → base64, __ for what a keyword cannot hold."""
    given = {} if config is None else {"config": config if isinstance(config, str) else json.dumps(config)}
    named = {f"file:{name.replace('__', '/')}.onnx": text for name, text in files.items()}
    return post(f"{target}/load", {"parameters": given | named})


def answers_to(url: str, calls: list[HttpCall]) -> list[RawAnswer]:
    """The answers, one after the other."""
    return [ask(url, call) for call in calls]


def until_gone(url: str, model: str) -> None:
    """Triton unloads in its own time."""
    until = time.monotonic() + 20
    while ask(url, get(f"/v2/models/{model}/ready")).status == 200 or b"UNLOADING" in ask(url, post(INDEX)).body:
        assert time.monotonic() < until
        time.sleep(0.05)


def same(ours: list[RawAnswer], theirs: list[RawAnswer]) -> None:
    """Equal, but that what Triton calls its own failure is the client's here, and that errors are JSON by type."""
    for mine, other in zip(ours, theirs, strict=True):
        is_clients = other.status == 500 and any(text in other.body for text in UNREADABLE)
        assert mine.status == (400 if is_clients else other.status)
        assert mine.body == other.body


def test_unload_and_load_change_what_is_served(running: RunningStack) -> None:
    """Both answer as the bare Triton does, the model is 404 in between, and is ready for the gateway again at once."""
    steps: dict[str, list[RawAnswer]] = {}
    for url in (running.http_url, running.engine_http_url):
        steps[url] = answers_to(url, [post(f"{SPARE}/unload")])
        until_gone(url, "spare")
        gone = [infer_x("spare"), get("/v2/models/spare"), get("/v2/models/spare/ready"), post(f"{SPARE}/unload")]
        steps[url] += answers_to(url, [*gone, post(f"{SPARE}/load"), infer_x("spare"), post(INDEX, {"ready": True})])
    same(*steps.values())
    assert [answer.status for answer in steps[running.http_url]] == [200, 404, 404, 400, 200, 200, 200, 200]


def test_load_with_a_config_and_a_file_serves_them(running: RunningStack, plus_one: str) -> None:
    """A model that is in no repository is made of what comes with its load, and is gone with its unload."""
    shown = [get("/v2/models/brand_new"), get("/v2/models/brand_new/config"), infer_x("brand_new")]
    calls = [load(BRAND_NEW, CONFIG, **{"2__model": plus_one}), *shown, post(f"{BRAND_NEW}/unload")]
    steps = {}
    for url in (running.http_url, running.engine_http_url):
        steps[url] = answers_to(url, calls)
        until_gone(url, "brand_new")
        steps[url] += answers_to(url, [post(f"{BRAND_NEW}/load"), infer_x("brand_new")])
    same(*steps.values())
    ours = steps[running.http_url]
    assert [answer.status for answer in ours] == [200, 200, 200, 200, 200, 400, 404]
    assert json.loads(ours[1].body)["versions"] == ["2"]
    assert json.loads(ours[3].body)["outputs"][0]["data"] == [2.0, 3.0, 4.0]


def test_load_that_cannot_be_leaves_what_serves(running: RunningStack, plus_one: str) -> None:
    """Each refusal is Triton's, in its words, or comes before Triton; the model answers on."""
    refused = [
        load(SPARE, CONFIG | {"name": "other"}),
        load(SPARE, **{"1__model": plus_one}),
        load(SPARE, CONFIG, **{"model": plus_one}),
        load(SPARE, CONFIG, **{"1__model": 5}),
        post(f"{SPARE}/load", {"parameters": {"nonsense": "x"}}),
        post(f"{SPARE}/load", {"parameters": {"config": 5}}),
        post("/v2/repository/models/missing/load"),
        post("/v2/repository/here/models/spare/load"),
    ]
    ours, theirs = answers_to(running.http_url, refused), answers_to(running.engine_http_url, refused)
    same(ours, theirs)
    assert {answer.status for answer in ours} <= {400, 501}
    assert ask(running.http_url, infer_x("spare")).status == 200


CODE = """open({marker!r}, "w").close()
class TritonPythonModel:
    def execute(self, requests): return []
"""


def code_loads(marker: Path) -> list[tuple[str, dict[str, Any], dict[str, bytes]]]:
    """Loads that would write the marker or open another file: the refusal's text, config, files."""
    python = {"1/model.py": CODE.format(marker=str(marker)).encode()}
    return [
        ("backend 'python'", CONFIG | {"backend": "python"}, python),
        ("backend 'Python '", CONFIG | {"backend": "Python "}, python),
        ("'1/model.py'", {**CONFIG, "backend": ""}, python),
        ("runtime '../model.py'", CONFIG | {"runtime": "../model.py"}, {}),
        ("default_model_filename", CONFIG | {"default_model_filename": "../../plain/1/model.onnx"}, {}),
        ("'../x.onnx'", CONFIG, {"../x.onnx": b""}),
        ("255 bytes", CONFIG, {"1/" + "x" * 256: b""}),
    ]


def test_load_with_code_or_a_file_elsewhere_is_refused_over_both_protocols(
    running: RunningStack, tmp_path: Path
) -> None:
    """It gets 400 that names the field, before Triton gets it; no code runs, and the model still serves."""
    before = len(running.logged("loading: spare"))
    with grpc.insecure_channel(running.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for words, config, files in code_loads(tmp_path / "ran"):
            encoded = {f"file:{name}": base64.b64encode(content).decode() for name, content in files.items()}
            answer = ask(
                running.http_url, post(f"{SPARE}/load", {"parameters": {"config": json.dumps(config), **encoded}})
            )
            assert (answer.status, words in answer.body.decode()) == (400, True), answer.body
            request = service_pb2.RepositoryModelLoadRequest(model_name="spare")
            request.parameters["config"].string_param = json.dumps(config)
            for name, content in files.items():
                request.parameters[f"file:{name}"].bytes_param = content
            with pytest.raises(grpc.RpcError, match=re.escape(words)) as refusal:
                stub.RepositoryModelLoad(request, timeout=10)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not (tmp_path / "ran").exists()
    assert len(running.logged("loading: spare")) == before
    assert ask(running.http_url, infer_x("spare")).status == 200


def longest_silence_s(url: str, until: threading.Event) -> float:
    """Of a caller of `plain` on a connection of its own that asks again at once."""
    call, address = infer_x("plain"), urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    longest, before = 0.0, time.monotonic()
    while not until.is_set():
        connection.request("POST", call.target.decode(), call.body, {"Content-Type": "application/json"})
        assert connection.getresponse().read()
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    connection.close()
    return longest


def test_load_of_a_model_keeps_no_request_waiting(running: RunningStack) -> None:
    """Eight callers by REST while a model takes its time: on Triton's own HTTP port most must wait so long."""
    is_loaded = threading.Event()
    with ThreadPoolExecutor(8) as callers:
        silences = [callers.submit(longest_silence_s, running.http_url, is_loaded) for _ in range(8)]
        try:
            time.sleep(0.2)
            assert ask(running.http_url, post("/v2/repository/models/slow/load")).status == 200
        finally:
            is_loaded.set()
        assert max(silence.result() for silence in silences) < SLOW_S / 2
