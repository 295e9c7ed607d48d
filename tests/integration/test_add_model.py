"""Models that are added over HTTP to real stacks: Triton, the embedded engine, and worker processes."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx.parser
import psutil
import pytest
from onnx import TensorProto, helper

from tests.integration.embedded_stack import NO_TRITON
from tests.integration.pictures import jpeg
from tests.models.inspect.made_models import constant_model
from tests.support.http import Answer, call
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack

pytestmark = pytest.mark.xdist_group("add-model")

SHARED = CHECKOUT.parent / "shared"
ADD_TIMEOUT_S = 120.0
UNSERVABLE = "unservable"  # the settings want the gateway to form batches of it, and it takes one picture a call
ONE_MODEL = ("--models", "identity_fp32", "--batching", f"{UNSERVABLE}=gateway")
EMBEDDED = ("--engine", "embedded")


PICTURE = jpeg(np.full((320, 320, 3), 127, np.uint8))
ENDLESS = """
<ir_version: 8, opset_import: ["" : 17]>
endless (float[1, 3, 32, 32] images) => (float[1, 1000] scores)
<int64 count = {1125899906842624}, bool more = {1}, int64[2] square = {64, 64}, int64[2] shape = {1, 1000}>
{
    start = ConstantOfShape <value = float[1] {1}> (square)
    matrix = Loop <body = trip (int64 i, bool go, float[64, 64] kept) => (bool go_on, float[64, 64] next) {
        next = MatMul (kept, kept)
        go_on = Identity (go)
    }> (count, more, start)
    one = ReduceMax <keepdims = 0> (matrix)
    scores = Expand (one, shape)
}
"""


@pytest.fixture(scope="module", params=["embedded", "triton-workers"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, triton_environment: Path
) -> Iterator[RunningStack]:
    """A stack with one model, and room for more."""
    engine, _, has_workers = request.param.partition("-")
    home = tmp_path_factory.mktemp("home")
    audit = ("--audit-log", str(home / "audit.jsonl"))
    stack = start_stack(home, *ONE_MODEL, *audit, "--engine", engine, *(("--workers", "2") if has_workers else ()))
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A YOLOv8 of two classes that finds a vest of 60 x 40 pixels at the centre of every picture of 320 x 320."""
    outputs = np.zeros((1, 6, 2100), np.float32)
    outputs[0, :, 7] = (160, 160, 60, 40, 0.1, 0.9)
    names = {"task": "detect", "names": "{0: 'helmet', 1: 'vest'}", "imgsz": "[320, 320]", "stride": "32"}
    path = tmp_path_factory.mktemp("made") / "made.onnx"
    constant_model(path, {"output0": outputs}, image=(1, 3, 320, 320), metadata=names)
    return path.read_bytes()


def add(stack: RunningStack, name: str, content: bytes, query: str = "", **headers: str) -> Answer:
    url = f"{stack.http_url}/v2/repository/models/{name}/add{query}"
    return call("POST", url, content, {"content-type": "application/octet-stream", **headers}, ADD_TIMEOUT_S)


def infer(stack: RunningStack, name: str, picture: bytes) -> Answer:
    return call("POST", f"{stack.http_url}/v2/models/{name}/image", picture, {"content-type": "image/jpeg"})


def states(stack: RunningStack) -> dict[str, str]:
    rows = call("POST", f"{stack.http_url}/v2/repository/index", b"").json
    return {row["name"]: row.get("state", "") for row in rows}


def left_in(home: Path) -> list[str]:
    """What lies in the staging folder."""
    return sorted(path.name for path in (home / "staging").iterdir()) if (home / "staging").exists() else []


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_made_detector_is_added_and_finds_its_box(running: RunningStack, detector: bytes) -> None:
    """The answer says what it is, both workers serve it at once, and it is in the repository for the next start."""
    answer = add(running, "ppe", detector)
    assert answer.status == 200, answer.body
    assert {key: answer.json[key] for key in ("name", "layout", "max_batch_size", "state")} == {
        "name": "ppe",
        "layout": "yolov8",
        "max_batch_size": 0,
        "state": "READY",
    }
    for _ in range(8):  # of either worker
        (found,) = infer(running, "ppe", PICTURE).json["results"][0]["detections"]
        assert found == {"xyxy": [130.0, 140.0, 190.0, 180.0], "class_id": 1, "label": "vest", "score": 0.9}
    assert states(running)["ppe"] == "READY"
    page = (running.home / "models" / "ppe" / "MODEL.md").read_text()
    assert "sent to the gateway by a client without a key" in page
    assert left_in(running.home) == []
    lines = [json.loads(line) for line in (running.home / "audit.jsonl").read_text().splitlines()]
    assert [(line["action"], line["outcome"]) for line in lines if line["target"] == "ppe"] == [("add", "ok")]


def test_taken_name_is_replaced_on_request_only(running: RunningStack, detector: bytes) -> None:
    """With the labels and the threshold of the query; the replaced model served until then."""
    assert add(running, "swap", detector).status == 200
    refused = add(running, "swap", detector)
    assert (refused.status, "replace=1" in refused.json["error"]) == (400, True)
    assert add(running, "swap", detector, "?replace=1&labels=hat;coat&conf=0.05").status == 200
    found = infer(running, "swap", PICTURE).json["results"][0]["detections"]
    assert [(each["label"], each["score"]) for each in found] == [("coat", 0.9)]
    assert add(running, "identity_fp32", detector, "?replace=1").status == 400


def test_model_that_the_gateway_cannot_serve_is_taken_back(running: RunningStack, detector: bytes) -> None:
    """400 with the gateway's reason; folder, engine and index are as before, and the name is free."""
    answer = add(running, UNSERVABLE, detector)
    assert (answer.status, "it has no batch dimension" in answer.json["error"]) == (400, True)
    assert not (running.home / "models" / UNSERVABLE).exists()
    assert UNSERVABLE not in states(running)
    assert left_in(running.home) == []


def custom_operator() -> bytes:
    """A model that needs an operator of its maker."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph([helper.make_node("Own", ["x"], ["y"], domain="maker")], "own", [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("maker", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def test_hostile_files_get_a_sentence(running: RunningStack, detector: bytes) -> None:
    """Noise, a cut file, a custom operator, a compressed one: 400, nothing left, and the stack serves on."""
    noise = np.random.default_rng(1).bytes(5000)
    for content, said in (
        (noise, "the file is not an ONNX model"),
        (detector[: len(detector) // 2], "the file is not an ONNX model, or truncated"),
        (custom_operator(), "custom operator"),
        (b"", "the body is empty"),
    ):
        answer = add(running, "odd", content)
        assert (answer.status, said in answer.json["error"]) == (400, True), answer.body
        assert str(running.home) not in answer.json["error"]
    assert add(running, "odd", detector, **{"content-encoding": "gzip"}).status == 400
    assert "odd" not in states(running)
    assert left_in(running.home) == []
    assert call("GET", f"{running.http_url}/v2/health/ready").status == 200


@pytest.mark.parametrize("mark", [{"origin": "https://page.example"}, {"sec-fetch-site": "cross-site"}])
def test_page_of_another_site_adds_nothing(running: RunningStack, detector: bytes, mark: dict[str, str]) -> None:
    """403 with the flag that would allow it, before the body is read."""
    answer = add(running, "page", detector, **mark)
    assert (answer.status, "--cors-origin" in answer.json["error"]) == (403, True)
    assert "page" not in states(running)


def test_body_of_10_gb_is_refused_before_it_is_sent(running: RunningStack) -> None:
    """413 by its declared length."""
    parts = urlsplit(running.http_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.putrequest("POST", "/v2/repository/models/big/add")
    connection.putheader("Content-Length", "10000000000")
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_two_uploads_of_one_name_make_one_model(running: RunningStack, detector: bytes) -> None:
    """The later one is refused, as the name is taken."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: add(running, "twin", detector), range(2)))
    assert sorted(answer.status for answer in answers) == [200, 400]
    assert infer(running, "twin", PICTURE).status == 200
    assert left_in(running.home) == []


@pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="shared/models is not here")
def test_real_detector_finds_the_person_of_a_photo(running: RunningStack) -> None:
    """YOLOX-Nano without a flag; its batch, fixed to 1 in the file, is free."""
    answer = add(running, "yolox", (SHARED / "models" / "yolox_nano.onnx").read_bytes())
    assert (answer.status, answer.json["layout"], answer.json["max_batch_size"]) == (200, "yolox", 8)
    found = infer(running, "yolox", (SHARED / "media" / "astronaut.jpg").read_bytes()).json["results"][0]["detections"]
    assert found[0]["label"] == "person"
    assert found[0]["score"] > 0.9


def open_upload(stack: RunningStack, name: str, sent: bytes, declared_bytes: int) -> socket.socket:
    """A connection on which only the first bytes of a body were sent."""
    parts = urlsplit(stack.http_url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    head = (
        f"POST /v2/repository/models/{name}/add HTTP/1.1\r\nHost: localhost\r\nContent-Length: {declared_bytes}\r\n\r\n"
    )
    connection.sendall(head.encode() + sent)
    return connection


def test_client_that_leaves_in_the_middle_leaves_nothing(running: RunningStack, detector: bytes) -> None:
    """What it had sent is removed."""
    with open_upload(running, "half", detector[:1000], len(detector)):
        until(lambda: len(left_in(running.home)) == 1)
    until(lambda: left_in(running.home) == [])
    assert "half" not in states(running)


def test_killed_gateway_leaves_nothing_behind_the_next_upload(tmp_path: Path, detector: bytes) -> None:
    """SIGKILL while a model is inspected: its processes die, too, and the next upload sweeps what they left."""
    stack = start_stack(tmp_path, *ONE_MODEL, *EMBEDDED, environ=NO_TRITON)
    endless = onnx.parser.parse_model(ENDLESS).SerializeToString()
    try:
        with open_upload(stack, "endless", endless, len(endless)):
            until(lambda: any("penstock.models.inspect.child" in each for each in commands_of(stack)))
            (gateway,) = gateways_of(stack)
            children = gateway.children(recursive=True)
            gateway.kill()
            psutil.wait_procs(children, timeout=20)
        assert not [each for each in children if each.is_running()]
        assert len(left_in(tmp_path)) == 2
        until(lambda: is_ready(stack))
        assert add(stack, "ppe", detector).status == 200
        assert left_in(tmp_path) == []
    finally:
        stop_stack(stack)


def gateways_of(stack: RunningStack) -> list[psutil.Process]:
    """The gateway's process; its decoders and the processes that add models are its children."""
    return [
        each for each in psutil.Process(stack.process.pid).children() if "penstock.gateway" in " ".join(each.cmdline())
    ]


def is_ready(stack: RunningStack) -> bool:
    try:
        return call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    except OSError:
        return False


def test_stack_that_stops_ends_the_process_that_adds_a_model(tmp_path: Path) -> None:
    """After the grace, with all that it had begun; the client gets 503."""
    endless = onnx.parser.parse_model(ENDLESS).SerializeToString()
    stack = start_stack(tmp_path, *ONE_MODEL, *EMBEDDED, environ=NO_TRITON | {"PENSTOCK_GRACE_S": "0.5"})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(add, stack, "slow", endless)
        until(lambda: any("penstock.models.inspect.child" in each for each in commands_of(stack)))
        children = psutil.Process(stack.process.pid).children(recursive=True)
        stop_stack(stack)
        assert running.result().status == 503
    psutil.wait_procs(children, timeout=20)
    assert not [each for each in children if each.is_running()]
    assert left_in(tmp_path) == []
    assert not list((tmp_path / "models").glob("*"))


def commands_of(stack: RunningStack) -> list[list[str]]:
    found = []
    for each in psutil.Process(stack.process.pid).children(recursive=True):
        try:
            found.append(each.cmdline())
        except psutil.Error:
            continue
    return found


def test_real_detector_is_inspected_then_added_by_its_token(running: RunningStack) -> None:
    """YOLOX-Nano is sent once: what is found is what `penstock models inspect` finds, and the added model serves.

    With workers, requests of one token reach different processes.
    """
    path = SHARED / "models" / "yolox_nano.onnx"
    if not path.is_file():
        pytest.skip(f"no real inputs: {path} is absent")
    url, headers = f"{running.http_url}/v1/inspect", {"content-type": "application/octet-stream"}
    found = call("POST", url, path.read_bytes(), headers, ADD_TIMEOUT_S)
    assert found.status == 200, found.body
    assert {key: found.json[key] for key in ("layout", "verdict", "width", "height", "size_bytes", "file_format")} == {
        "layout": "yolox",
        "verdict": "servable",
        "width": 416,
        "height": 416,
        "size_bytes": path.stat().st_size,
        "file_format": "onnx",
    }
    assert found.json["questions"] == []
    assert len(found.json["trial"]) == 2, "two packaged pictures"
    assert "nano" not in states(running)
    token = found.json["upload"]
    for _ in range(3):  # connections go to both workers
        again = call("POST", f"{url}?upload={token}&conf=0.4", b"", headers, ADD_TIMEOUT_S)
        assert (again.status, again.json["upload"]) == (200, token), again.body
    answer = add(running, "nano", b"", f"?upload={token}")
    assert (answer.status, answer.json["state"]) == (200, "READY"), answer.body
    photo = (SHARED / "media" / "coffee.jpg").read_bytes()
    labels = {each["label"] for each in infer(running, "nano", photo).json["results"][0]["detections"]}
    assert "cup" in labels
    assert call("POST", f"{url}?upload={token}", b"", headers, ADD_TIMEOUT_S).status == 400
    assert left_in(running.home) == []
