"""`penstock infer`: what is asked of the gateway, what is printed, and how failures end."""

import base64
import json
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from penstock.protocol.vision_results import DepthMap, Mask
from penstock.vision.masks import png16_of, rle_of
from tests.cli.conftest import DOG, PERSON, TIMINGS, Call, StandIn, jpeg


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A picture file."""
    file = tmp_path / "photo.jpg"
    file.write_bytes(jpeg())
    return file


def cells(line: str) -> list[str]:
    """The cells of a table's line."""
    return [cell.strip() for cell in line.strip("│┃ \n").replace("┃", "│").split("│")]


def row_of(line: str) -> list[str]:
    """The cells of a table's line, empty ones too; a line of no table is one cell."""
    parts = line.replace("┃", "│").split("│")
    return [part.strip() for part in parts[1:-1] or parts]


def test_infer_detector_prints_a_table_of_boxes_and_the_timings(penstock: Call, stand_in: StandIn, photo: Path) -> None:
    """Label, score and corners a box, then where the time went."""
    answer = penstock("infer", "people", photo, "--url", stand_in.url)
    assert (answer.exit_code, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert f"{photo} · people 1" in lines[0]
    assert cells(lines[2]) == ["label", "score", "x1", "y1", "x2", "y2"]
    assert cells(lines[4]) == ["person", "0.912", "10.2", "20.5", "40.0", "90.0"]
    assert cells(lines[5]) == ["dog", "0.410", "50.0", "60.0", "80.0", "95.0"]
    assert lines[-1] == "decode 1.5 + preprocess 0.2 + queue 0.0 + infer 12.0 + postprocess 0.1 = 14.0 ms"


def test_infer_classifier_prints_labels_and_scores(penstock: Call, stand_in: StandIn, photo: Path) -> None:
    """One row per class; square brackets of a label are printed."""
    cat, other = {"class_id": 3, "label": "[cat]", "score": 0.75}, {"class_id": 9, "label": "9", "score": 0.2}
    stand_in.result = {"classes": [cat, other]}
    lines = penstock("infer", "pets", photo, "--url", stand_in.url).stdout.splitlines()
    assert cells(lines[2]) == ["label", "score"]
    assert [cells(line) for line in lines[4:6]] == [["[cat]", "0.750"], ["9", "0.200"]]


def test_infer_nothing_found_says_so(penstock: Call, stand_in: StandIn, photo: Path) -> None:
    """An empty result is no failure."""
    stand_in.result = {"detections": []}
    answer = penstock("infer", "people", photo, "--url", stand_in.url)
    assert answer.exit_code == 0
    assert answer.stdout.splitlines()[1] == "nothing found"


def test_infer_sends_the_bytes_with_their_type_and_deadline(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """The file is sent unchanged, with its type from its first bytes and the deadline in a header."""
    for name, suffix in (("a.png", ".jpg"), ("b.jpg", ".png"), ("c", ".webp")):
        (tmp_path / name).write_bytes(jpeg(suffix=suffix))
    (tmp_path / "d.jpg").write_bytes(b"GIF89a")
    files = [tmp_path / name for name in ("a.png", "b.jpg", "c", "d.jpg")]
    answer = penstock("infer", "a b/c", *files, "--url", f"{stand_in.url}/behind/", "--timeout-ms", "250")
    assert answer.exit_code == 0, answer.stderr
    assert {asked.path for asked in stand_in.asked} == {"/behind/v2/models/a%20b%2Fc/image"}
    types = [asked.headers["content-type"] for asked in stand_in.asked]
    assert types == ["image/jpeg", "image/png", "image/webp", "application/octet-stream"]
    assert [asked.body for asked in stand_in.asked] == [file.read_bytes() for file in files]
    assert {asked.headers["x-request-timeout-ms"] for asked in stand_in.asked} == {"250"}


def test_infer_json_prints_one_line_a_picture_and_nothing_else(
    penstock: Call, stand_in: StandIn, photo: Path, tmp_path: Path
) -> None:
    """Standard output is JSON lines only: answers with the gateway's members, failures with `error`."""
    absent = tmp_path / "absent.jpg"
    answer = penstock("infer", "people", absent, photo, photo, "--json", "--url", stand_in.url)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert answer.exit_code == 1
    assert lines[0] == {"file": str(absent), "error": f"there is no file or folder {absent}: check the name"}
    expected = {"results": [{"detections": [PERSON, DOG]}], "timings_ms": TIMINGS, "batch_size": 1}
    assert lines[1] == lines[2] == {"file": str(photo), "model_name": "people", "model_version": "1", **expected}


@pytest.mark.parametrize(
    ("options", "query"),
    [
        ((), ""),
        (("--threshold", "0.5"), "conf=0.5"),
        (("--conf", "0.01", "--iou", "0.6"), "conf=0.01&iou=0.6"),
        (("--classes", "0,2", "--max-detections", "3"), "classes=0%2C2&max_detections=3"),
        (("--masks", "polygon"), "masks=polygon"),
    ],
)
def test_infer_options_are_the_endpoints_parameters(
    penstock: Call, stand_in: StandIn, photo: Path, options: tuple[str, ...], query: str
) -> None:
    """Each option is sent under the endpoint's name; options that are not given are not sent."""
    answer = penstock("infer", "people", photo, "--url", stand_in.url, *options)
    assert (answer.exit_code, stand_in.asked[0].query) == (0, query)


# 1,800 and 3 pixels of pictures of 100 x 100, in COCO's encoding
MASKED = {"size": [100, 100], "counts": rle_of(Mask(100, 100, 10, 20, np.ones((60, 30), np.bool_)))}
SMALL = rle_of(Mask(100, 100, 0, 0, np.ones((1, 3), np.bool_)))
DEPTH_PNG, DEPTH_SCALE, DEPTH_OFFSET = png16_of(
    DepthMap(np.linspace(0.5, 4.5, 10000, dtype=np.float32).reshape(100, 100))
)
RESULTS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "instances": (
        {"detections": [PERSON | {"mask": MASKED, "keypoints": [[20, 30, 0.9], [0, 0, 0.1]]}]},
        [
            ["label", "score", "x1", "y1", "x2", "y2", "mask", "keypoints"],
            ["person", "0.912", "10.2", "20.5", "40.0", "90.0", "1800", "1 of 2"],
        ],
    ),
    "outlines": (
        {"detections": [PERSON | {"polygons": [[[10, 20], [20, 20], [20, 30]]]}, DOG]},
        [
            ["label", "score", "x1", "y1", "x2", "y2", "mask"],
            ["person", "0.912", "10.2", "20.5", "40.0", "90.0", "50"],
            ["dog", "0.410", "50.0", "60.0", "80.0", "95.0", ""],
        ],
    ),
    "oriented boxes": (
        {"detections": [DOG | {"xywhr": [65, 77.5, 20, 30, 0.5236]}]},
        [
            ["label", "score", "x1", "y1", "x2", "y2", "angle"],
            ["dog", "0.410", "50.0", "60.0", "80.0", "95.0", "30.0°"],
        ],
    ),
    "text": (
        {
            "text": [
                {"text": "[EXIT]", "score": 0.97, "polygon": [[10, 20], [60, 22], [60, 40], [9, 38]]},
                {"text": "", "score": 0.5},
            ]
        },
        [
            ["text", "score", "x1", "y1", "x2", "y2"],
            ["[EXIT]", "0.970", "9.0", "20.0", "60.0", "40.0"],
            ["", "0.500", "", "", "", ""],
        ],
    ),
    "segmentation": (
        {
            "segmentation": {
                "size": [100, 100],
                "classes": [
                    {"class_id": 1, "label": "road", "area": 3, "counts": SMALL},
                    {"class_id": 4, "label": "sky", "area": 1800, "counts": MASKED["counts"]},
                ],
            }
        },
        [["label", "pixels", "share"], ["sky", "1800", "18.0%"], ["road", "3", "0.0%"]],
    ),
    "outlines of areas": (
        {
            "segmentation": {
                "size": [100, 100],
                "classes": [{"class_id": 4, "label": "sky", "area": 66, "polygons": [[[10, 20], [20, 20], [20, 30]]]}],
            }
        },
        [["label", "pixels", "share"], ["sky", "66", "0.7%"]],
    ),
    "embedding": (
        {"embedding": [0.5, -0.25] + [0.0] * 510},
        [["embedding of 512 values: 0.5000 -0.2500 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 …"]],
    ),
    "depth": (
        {
            "depth": {
                "size": [100, 100],
                "png16": base64.b64encode(DEPTH_PNG).decode(),
                "scale": DEPTH_SCALE,
                "offset": DEPTH_OFFSET,
            }
        },
        [["depth of 100x100 pixels, from 0.5 to 4.5"]],
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_infer_result_of_every_kind_is_printed(penstock: Call, stand_in: StandIn, photo: Path, kind: str) -> None:
    """A table has the columns that the kind needs; JSON has every member as the gateway sent it."""
    result, rows = RESULTS[kind]
    stand_in.result = result
    lines = penstock("infer", "seer", photo, "--url", stand_in.url).stdout.splitlines()
    printed = [row_of(line) for line in lines[1:-1] if not set(line) & set("━─")]
    assert printed == rows
    answer = penstock("infer", "seer", photo, "--url", stand_in.url, "--json")
    assert json.loads(answer.stdout)["results"] == [result]


@pytest.mark.parametrize("kind", RESULTS)
def test_infer_draws_a_result_of_every_kind(
    penstock: Call, stand_in: StandIn, photo: Path, tmp_path: Path, kind: str
) -> None:
    """The picture that is written is as large as the one that was sent, and another one."""
    stand_in.result, out = RESULTS[kind][0], tmp_path / "out.png"
    answer = penstock("infer", "seer", photo, "--url", stand_in.url, "--draw", out)
    assert (answer.exit_code, answer.stderr) == (0, "")
    drawn, before = cv2.imread(str(out)), cv2.imread(str(photo))
    assert drawn is not None
    assert before is not None
    assert drawn.shape == before.shape == (100, 100, 3)
    assert (drawn != before).any()


def test_infer_draws_the_skeleton_of_the_models_card(
    penstock: Call, stand_in: StandIn, photo: Path, tmp_path: Path
) -> None:
    """Keypoints are joined as the model's parameters say; without the parameter they are dots."""
    stand_in.result = {"detections": [PERSON | {"keypoints": [[20, 30, 1], [30, 80, 1]]}]}
    pictures = []
    for parameters in ({}, {"skeleton": "0-1"}):
        stand_in.parameters = parameters
        assert penstock("infer", "pose", photo, "--url", stand_in.url, "--draw", tmp_path / "out.png").exit_code == 0
        pictures.append(cv2.imread(str(tmp_path / "out.png")))
    rows, columns = np.nonzero((pictures[0] != pictures[1]).any(axis=2))
    assert 30 <= rows.min() < 45 < 65 < rows.max() <= 80
    assert 18 <= columns.min() < columns.max() <= 32


def test_infer_mask_of_another_size_is_one_sentence(
    penstock: Call, stand_in: StandIn, photo: Path, tmp_path: Path
) -> None:
    """A gateway's mistake ends in no traceback, and no picture is written."""
    stand_in.result = {"detections": [PERSON | {"mask": MASKED | {"size": [10, 12]}}]}
    answer = penstock("infer", "seer", photo, "--json", "--url", stand_in.url, "--draw", tmp_path / "out.png")
    assert answer.exit_code == 1
    assert "a mask has 12x10 pixels, but the image has 100x100" in answer.stdout
    assert not (tmp_path / "out.png").exists()


def test_infer_folder_means_its_pictures(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """The pictures of a folder by name, other files and sub-folders left alone."""
    folder = tmp_path / "pictures"
    (folder / "below.jpg").mkdir(parents=True)
    for name in ("b.JPG", "a.png", "c.webp", "notes.txt"):
        (folder / name).write_bytes(jpeg())
    answer = penstock("infer", "people", folder, "--json", "--url", stand_in.url)
    names = [Path(json.loads(line)["file"]).name for line in answer.stdout.splitlines()]
    assert names == ["a.png", "b.JPG", "c.webp"]


def test_infer_goes_on_after_a_failure_and_ends_with_one(
    penstock: Call, stand_in: StandIn, photo: Path, tmp_path: Path
) -> None:
    """The gateway's own words are passed on with the file's name; the other pictures are answered."""
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"\xff\xd8\xff broken")
    stand_in.refuses_body = lambda body: b"broken" in body
    answer = penstock("infer", "people", bad, photo, "--url", stand_in.url)
    assert answer.exit_code == 1
    assert answer.stderr == f"penstock: {bad}: the JPEG is truncated\n"
    assert "person" in answer.stdout


def test_infer_without_url_asks_the_port_of_the_settings(
    penstock: Call, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable that moves the gateway's port moves the commands with it."""
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "9")
    assert "nothing answers at http://127.0.0.1:9:" in penstock("infer", "people", photo).stderr


def test_infer_no_gateway_says_how_to_start_it(penstock: Call, photo: Path) -> None:
    """Where nothing listens the command ends at once, with the way out."""
    answer = penstock("infer", "people", photo, photo, "--url", "http://127.0.0.1:9")
    assert answer.exit_code == 1
    assert answer.stderr == (
        "penstock: nothing answers at http://127.0.0.1:9: start it with `penstock up`, or give its address with --url\n"
    )


@pytest.mark.parametrize(
    ("status", "text", "why"),
    [
        (200, "<html>", "is not a gateway"),
        (404, "<html>", "is not a gateway (HTTP 404 Not Found)"),
        (200, json.dumps({"results": "?"}), "is not a gateway"),
        (
            200,
            json.dumps({"model_name": "a", "model_version": "1", "results": [], "timings_ms": {}, "batch_size": 1}),
            "the response has no result",
        ),
    ],
)
def test_infer_something_else_answers_is_one_sentence(
    penstock: Call, stand_in: StandIn, photo: Path, status: int, text: str, why: str
) -> None:
    """Another program on that port is not taken for a gateway."""
    stand_in.refusals["/image"] = (status, text, {})
    answer = penstock("infer", "people", photo, "--url", stand_in.url)
    assert answer.exit_code == 1
    assert why in answer.stderr
    assert answer.stderr.count("\n") == 1


NOT_SERVED = "Request for unknown model: 'people' has no available versions"
INVALID = "model 'people': slo_p99_ms is 'fast' in config.pbtxt, and must be a number"


@pytest.mark.parametrize(
    ("status", "refusal", "reason", "said"),
    [
        (503, "512 requests in flight (limit 512)", "", "512 requests in flight (limit 512) (retry after 2 s)"),
        (404, "'people' is not found", "", "'people' is not found; `penstock models list` shows what there is"),
        (404, NOT_SERVED, "this engine runs ONNX models only", f"{NOT_SERVED}: this engine runs ONNX models only"),
        (404, INVALID, INVALID, INVALID),
        (400, "\x1b[2Jgone\x00\nand more", "", "\\x1b[2Jgone\\x00 and more"),
    ],
    ids=["full", "unknown", "not served", "the reason once", "control characters"],
)
def test_infer_refusal_is_one_sentence_with_the_reason(
    penstock: Call, stand_in: StandIn, photo: Path, status: int, refusal: str, reason: str, said: str
) -> None:
    """The gateway's words with Retry-After, or the index's reason; no byte of it is obeyed by a terminal."""
    stand_in.refusals["/image"] = (
        status,
        json.dumps({"error": refusal}),
        {"Retry-After": "2"} if status == 503 else {},
    )
    stand_in.index = [{"name": "people", "state": "UNAVAILABLE", "reason": reason}]
    answer = penstock("infer", "people", photo, "--url", stand_in.url)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr == f"penstock: {photo}: {said}\n"


def test_unknown_model_is_refused_with_the_name_that_is_close(penstock: Call, stand_in: StandIn, photo: Path) -> None:
    """As by `penstock video run`; also if the word is only the beginning of the model's name."""
    stand_in.refusals["/image"] = (404, json.dumps({"error": "Request for unknown model: 'yolo' is not found"}), {})
    stand_in.index = [{"name": "yolox-nano", "version": "1", "state": "READY", "reason": ""}]
    answer = penstock("infer", "yolo", photo, "--url", stand_in.url)
    assert answer.stderr == f"penstock: {photo}: there is no model 'yolo' at {stand_in.url}: did you mean yolox-nano?\n"


def test_infer_at_a_port_that_speaks_no_http_says_so(penstock: Call, photo: Path) -> None:
    """The gRPC port, mistaken for the REST port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_speak_http2, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answer = penstock("infer", "people", photo, "--url", url)
        thread.join()
    assert answer.exit_code == 1
    assert answer.stderr == (
        f"penstock: {photo}: the server at {url} does not speak HTTP: check the address: does it take https?\n"
    )


def test_infer_at_a_port_that_resets_asks_for_https(penstock: Call, photo: Path) -> None:
    """A server with TLS does so to a plain connection: to try again is not enough."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_reset, args=(listener, photo.read_bytes()))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answer = penstock("infer", "people", photo, "--url", url)
        thread.join()
    assert answer.exit_code == 1
    assert f"the connection to {url} broke ([Errno 104] Connection reset by peer): try again; " in answer.stderr
    assert answer.stderr.endswith("check the address: does it take https?\n")


def _reset(listener: socket.socket, body: bytes) -> None:
    caller, _ = listener.accept()
    received = b""
    while not received.endswith(body):  # a reset before the end would be that of the client's send
        received += caller.recv(1 << 16)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
    caller.close()


def _speak_http2(listener: socket.socket) -> None:
    caller, _ = listener.accept()
    with caller:
        caller.recv(1 << 16)
        caller.sendall(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\r\n")
        while caller.recv(1 << 16):  # reads on to the end: a reset would come before the answer is read
            pass


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://a:b"])
def test_infer_malformed_url_is_refused(penstock: Call, photo: Path, url: str) -> None:
    """The message for an invalid address has an example."""
    answer = penstock("infer", "people", photo, "--url", url)
    assert answer.exit_code == 1
    assert "is not a gateway URL: give one such as http://127.0.0.1:8000" in answer.stderr


def test_infer_unreadable_file_is_one_sentence(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """The message for a file without read permission says so."""
    photo = tmp_path / "photo.jpg"
    photo.symlink_to("/proc/self/mem")
    answer = penstock("infer", "people", photo, "--url", stand_in.url)
    assert answer.exit_code == 1
    assert answer.stderr == f"penstock: {photo} cannot be read (Input/output error): check its permissions\n"
