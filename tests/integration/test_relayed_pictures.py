"""Encoded pictures, relayed to models that decode them, through two fronts, their core and the real Triton."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.integration.living import inflight, triton_of
from tests.integration.two_workers import metric, part_of
from tests.support.http import Answer, call
from tests.support.relayed_models import write_finder, write_joined_finder
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for
from tests.vision.images import Image, jpeg, png, png_header, webp

pytestmark = pytest.mark.xdist_group("relayed-pictures")

SHARED = pytest.mark.parametrize("model", ["batched", "joined"])
BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
OWNERS = pytest.mark.parametrize("model", ["batched", "alone", "joined"])
WIDTH, HEIGHT = 640, 400


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """Two workers and their core. pixels: the gateway decodes for it. The others decode pictures themselves.

    batched: the core forms its batches; joined: the workers call Triton, which does.
    """
    folder = tmp_path_factory.mktemp("relayed")
    write_finder(folder / "models", "batched", decodes=True, owner="gateway")
    write_finder(folder / "models", "alone", decodes=True, owner="off")
    write_finder(folder / "models", "pixels", decodes=False, owner="gateway")
    environ = write_joined_finder(folder / "models", "joined", folder / "package")
    running = start_stack(
        folder / "home", "--model-repository", str(folder / "models"), "--workers", "2", environ=environ
    )
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def drawn(x: int, y: int, width: int = WIDTH, height: int = HEIGHT) -> Image:
    """Black, with a white rectangle of 160 x 80 at (x, y), and noise that makes a JPEG of a usual size."""
    noise = np.random.default_rng(x).integers(0, 60, (height, width, 3), np.uint8)
    noise[y : y + 80, x : x + 160] = 255
    return noise


def turned(encoded: bytes, orientation: int) -> bytes:
    """The JPEG with that EXIF orientation."""
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + b"\0\0\0\0\0\0"
    payload = b"Exif\0\0" + tiff
    return encoded[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + encoded[2:]


def see(stack: RunningStack, model: str, body: bytes, **headers: str) -> Answer:
    return call("POST", f"{stack.http_url}/v2/models/{model}/image", body, {"content-type": "image/jpeg", **headers})


def box_of(answer: Answer) -> list[float]:
    assert answer.status == 200, answer.body
    (found,) = answer.json["results"][0]["detections"]
    assert found["label"] == "bright"
    box: list[float] = found["xyxy"]
    return box


@OWNERS
@pytest.mark.parametrize("encode", [jpeg, lambda rgb: png(rgb, color_type=2), webp], ids=["jpeg", "png", "webp"])
def test_picture_that_the_engine_decodes_is_answered_as_one_that_the_gateway_decodes(
    stack: RunningStack, model: str, encode: object
) -> None:
    """The same box in pixels of the picture, which is ten times the network's size."""
    encoded = encode(drawn(200, 120))  # type: ignore[operator]
    wanted = box_of(see(stack, "pixels", encoded))
    assert wanted == pytest.approx([200, 120, 360, 200], abs=10)
    assert box_of(see(stack, model, encoded)) == wanted


def test_boxes_of_a_picture_that_lies_on_its_side_are_in_pixels_of_how_it_stands(stack: RunningStack) -> None:
    """EXIF 6: stored 640 x 400, seen 400 x 640; engine and gateway agree on that."""
    encoded = turned(jpeg(drawn(200, 120)), 6)
    wanted = box_of(see(stack, "pixels", encoded))
    assert wanted == pytest.approx([200, 200, 280, 360], abs=10)
    assert box_of(see(stack, "batched", encoded)) == wanted


@SHARED
def test_pictures_of_a_crowd_are_batched_and_each_gets_its_own_answer(stack: RunningStack, model: str) -> None:
    """48 pictures of 12 clients: the engine saw fewer calls, and no box is another's."""
    places = [(number * 10, number * 6) for number in range(48)]
    pictures = [jpeg(drawn(x, y)) for x, y in places]
    with ThreadPoolExecutor(12) as crowd:
        answers = list(crowd.map(lambda picture: see(stack, model, picture), pictures))
    for (x, y), answer in zip(places, answers, strict=True):
        assert box_of(answer) == pytest.approx([x, y, x + 160, y + 80], abs=10)
    assert max(answer.json["batch_size"] for answer in answers) > 1
    wait_for(lambda: _leased_bytes(stack) == 0, 5, "no lease is left")


@OWNERS
def test_several_pictures_of_one_request_are_answered_in_their_order(stack: RunningStack, model: str) -> None:
    """As multipart, of unlike formats and sizes."""
    parts = [jpeg(drawn(10, 10)), png(drawn(400, 300, 700, 500), color_type=2), jpeg(drawn(300, 50))]
    body = b"".join(
        b'--x\r\ncontent-disposition: form-data; name="f"; filename="p"\r\n\r\n' + part + b"\r\n" for part in parts
    )
    answer = see(stack, model, body + b"--x--\r\n", **{"content-type": "multipart/form-data; boundary=x"})
    assert answer.status == 200, answer.body
    left = [result["detections"][0]["xyxy"][0] for result in answer.json["results"]]
    assert left == pytest.approx([10, 400, 300], abs=11)


CLAIMS = png(np.zeros((1, 1, 3), np.uint8), color_type=2).replace(
    png_header(1, 1, depth=8, color_type=2), png_header(30_000, 30_000, depth=8, color_type=2)
)


@OWNERS
@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"GIF89a" + bytes(100), 415, b"this is a GIF"),
        (jpeg(drawn(0, 0))[:100], 400, b"the JPEG image cannot be decoded"),
        (CLAIMS, 413, b"30000 x 30000 = 900000000 pixels (limit 40000000)"),
    ],
    ids=["gif", "torn", "huge"],
)
def test_picture_with_a_bad_header_never_reaches_the_engine(
    stack: RunningStack, model: str, body: bytes, status: int, text: bytes
) -> None:
    """Refused in the words in which a picture is refused that the gateway would decode."""
    answer, twin = see(stack, model, body), see(stack, "pixels", body)
    assert (answer.status, answer.body) == (twin.status, twin.body)
    assert answer.status == status
    assert text in answer.body


@BOTH
@OWNERS
def test_pictures_as_tensors_reach_the_engine_as_they_are(stack: RunningStack, module: ModuleType, model: str) -> None:
    """BYTES [N] and [N, 1], by the unmodified clients; a broken one is named by its number."""
    pictures = [jpeg(drawn(10, 10)), jpeg(drawn(300, 200))]
    for shape in ([2], [2, 1]):
        boxes = _infer(stack, module, model, pictures, shape)
        assert boxes[:, 0, 0].tolist() == [1, 30]
    with pytest.raises(InferenceServerException, match="image 2 of 2: the JPEG image cannot be decoded"):
        _infer(stack, module, model, [pictures[0], pictures[1][:100]], [2])
    with pytest.raises(InferenceServerException, match="image 1 of 2: not an image format that we take"):
        _infer(stack, module, model, [b"GIF89a" + bytes(100), pictures[1]], [2])


@SHARED
def test_picture_that_cannot_be_answered_in_time_is_refused(stack: RunningStack, model: str) -> None:
    """A tenth of a millisecond: 503 or 504, and nothing stays in the slab."""
    answer = see(stack, model, jpeg(drawn(10, 10)), **{"x-request-timeout-ms": "0.1"})
    assert answer.status in (503, 504), answer.body
    wait_for(lambda: _leased_bytes(stack) == 0, 5, "no lease is left")


def test_check_of_a_model_that_decodes_is_by_a_picture(stack: RunningStack) -> None:
    """What it sees in its golden.jpg is recorded; no made tensors are sent to it."""
    models = stack.home.parent / "models"
    (models / "alone" / "golden.jpg").write_bytes(jpeg(drawn(200, 120)))
    environ = os.environ | {"PENSTOCK_HOME": str(stack.home), "PENSTOCK_MODEL_REPOSITORY": str(models)}
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "models",
        "check",
        "alone",
        "--record",
        "--url",
        stack.http_url,
    ]
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (seen,) = json.loads((models / "alone" / "golden.json").read_text())["picture"]["seen"]
    assert seen["xyxy"] == pytest.approx([200, 120, 360, 200], abs=10)


def test_raw_binary_request_is_a_picture(stack: RunningStack) -> None:
    """And what is none is refused by the gateway, not handed to the engine."""
    url = f"{stack.http_url}/v2/models/batched/infer"
    raw = {"inference-header-content-length": "0"}
    assert call("POST", url, jpeg(drawn(10, 10)), raw).status == 200
    answer = call("POST", url, b"no picture at all", raw)
    assert (answer.status, b"not an image format that we take" in answer.body) == (400, True)


@SHARED
def test_picture_that_the_engine_cannot_decode_fails_alone(stack: RunningStack, model: str) -> None:
    """With a valid header and a broken Huffman table, it gets 400 with the engine's message; others are answered."""
    good, bad = jpeg(drawn(10, 10)), jpeg(drawn(10, 10))
    table = bad.index(b"\xff\xc4")
    bad = bad[: table + 5] + b"\xff" * 16 + bad[table + 21 :]
    with ThreadPoolExecutor(16) as crowd:
        answers = list(crowd.map(lambda number: see(stack, model, bad if number % 16 == 5 else good), range(64)))
    for number, answer in enumerate(answers):
        assert answer.status == (400 if number % 16 == 5 else 200), answer.body
    assert answers[5].json == {"error": "the picture cannot be decoded"}


def test_metrics_have_the_queues_of_the_workers(stack: RunningStack) -> None:
    """Their calls are counted, by why they were sent, and none is running in the end."""
    with ThreadPoolExecutor(8) as crowd:
        answers = list(crowd.map(lambda _: see(stack, "joined", jpeg(drawn(10, 10))), range(32)))
    assert {answer.status for answer in answers} == {200}
    wait_for(lambda: metric(stack, 'penstock_batches_total{model="joined"') > 0, 5, "calls are counted")
    wait_for(lambda: metric(stack, 'penstock_batch_calls{model="joined"') == 0, 5, "none is running")


@pytest.mark.parametrize("victim", ["client", "front-1", "core", "tritonserver"])
def test_process_that_is_killed_costs_pictures_in_flight_only(stack: RunningStack, victim: str) -> None:
    """FAULTS 1, 14, 24, 65. Others get 200 or 503 in seconds, service returns, and nothing stays in use."""
    picture, answered = jpeg(drawn(200, 120)), list[int]()
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            with suppress(http.client.HTTPException, OSError):  # a killed worker's connections break
                answered.append(see(stack, "joined", picture).status)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: answered.count(200) > 20, 10, "pictures are answered")
    if victim == "client":
        address = urlsplit(stack.http_url)
        with socket.create_connection((address.hostname, address.port)) as leaving:
            head = f"POST /v2/models/joined/image HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(picture)}"
            leaving.sendall(f"{head}\r\n\r\n".encode() + picture)
    else:
        (triton_of(stack) if victim == "tritonserver" else part_of(stack, victim)).kill()
    before = answered.count(200)
    wait_for(lambda: answered.count(200) > before + 20, 40, "service is back")
    is_over.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert set(answered) <= {200, 503}
    assert box_of(see(stack, "joined", picture)) == pytest.approx([200, 120, 360, 200], abs=10)
    wait_for(lambda: _leased_bytes(stack) == 0 and inflight(stack) == 0, 20, "nothing is in use")


def _infer(stack: RunningStack, module: ModuleType, model: str, pictures: list[bytes], shape: list[int]) -> np.ndarray:
    address = stack.grpc_address if module is tritonclient.grpc else stack.http_url.removeprefix("http://")
    array = np.empty(len(pictures), np.object_)
    array[:] = pictures
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput("picture", shape, "BYTES")
        tensor.set_data_from_numpy(array.reshape(shape))
        boxes: np.ndarray = client.infer(model, [tensor]).as_numpy("boxes")
    return boxes


def _leased_bytes(stack: RunningStack) -> float:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return float(text.split("\npenstock_slab_leased_bytes ")[1].split("\n")[0])
