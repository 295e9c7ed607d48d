"""POST /v1/inspect: what is in a model's file, before it is added; and adding it without sending it again."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import model_uploads
from penstock.gateway.model_uploads import MAX_STORED
from penstock.gateway.rest.limits import RestOptions
from tests.rest.harness import Client, Front, request_bytes
from tests.rest.test_add_model import ADD, FILE, adding_front, is_empty, left_in, text_of, until

INSPECT = "/v1/inspect"


async def inspected(front: Front, query: str = "", body: bytes = FILE) -> dict[str, Any]:
    """The answer of an inspection that succeeds."""
    reply = await front.ask("POST", f"{INSPECT}?{query}" if query else INSPECT, body)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = json.loads(reply.body)
    return answer


async def test_file_is_described_and_no_model_is_added(tmp_path: Path) -> None:
    """Layout, size, labels, tensors, what was assumed, and the open questions with their choices."""
    front = adding_front(tmp_path)
    found = await inspected(front)
    token = found.pop("upload")
    assert token.startswith("upload-")
    assert found == {
        "expires_s": 600.0,
        "verdict": "ambiguous",
        "reason": "the order of the colours is not in the file",
        "size_bytes": len(FILE),
        "sha256": "ab",
        "file_format": "onnx",
        "producer": "pytorch",
        "opset": 17,
        "node_count": 3,
        "is_quantised": False,
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, 3, 416, 640]}],
        "outputs": [{"name": "output", "datatype": None, "shape": [-1, 3, 416, 640]}],
        "layout": "yolox",
        "width": 640,
        "height": 416,
        "label_count": 2,
        "labels": ["person", "<b>car</b>"],
        "card": {"network-type": "0"},
        "evidence": ["2 labels, by labels"],
        "assumptions": ["the usual scale"],
        "questions": [
            {
                "parameter": "color",
                "choices": ["rgb", "bgr"],
                "ambiguous": "the order of the colours is not in the file",
                "is_blocking": True,
            }
        ],
        "warnings": ["the file is odd"],
        "trial": ["street.jpg: 1 person"],
        "trial_failure": "",
    }
    assert front.plane.added == []
    assert not (tmp_path / "models").exists()
    assert left_in(tmp_path) == [token]


async def test_answered_question_is_closed_without_sending_the_file_again(tmp_path: Path) -> None:
    """The token and the parameter of the question suffice, and the token stays the same."""
    front = adding_front(tmp_path)
    token = (await inspected(front))["upload"]
    found = await inspected(front, f"upload={token}&color=rgb", b"")
    assert (found["verdict"], found["questions"], found["upload"]) == ("servable", [], token)
    assert left_in(tmp_path) == [token]


async def test_inspected_file_is_added_by_its_token_once(tmp_path: Path) -> None:
    """The model has the file's bytes; then the file is gone, and its token is refused."""
    front = adding_front(tmp_path)
    token = (await inspected(front))["upload"]
    reply = await front.ask("POST", f"{ADD.format('ppe')}?upload={token}&color=rgb", b"")
    assert (reply.status, json.loads(reply.body)["state"]) == (200, "READY")
    folder = tmp_path / "models" / "ppe"
    assert (folder / "model.onnx").read_bytes() == FILE
    assert "--color=rgb" in json.loads((folder / "arguments.json").read_text())
    assert left_in(tmp_path) == []
    reply = await front.ask("POST", f"{ADD.format('other')}?upload={token}", b"")
    assert reply.status == 400
    assert f"no upload '{token}'" in text_of(reply)
    assert "send the file again" in text_of(reply)


async def test_file_whose_addition_failed_can_be_added_again(tmp_path: Path) -> None:
    """After a refusal the token is still good."""
    front = adding_front(tmp_path)
    token = (await inspected(front))["upload"]
    assert (await front.ask("POST", f"{ADD.format('ppe')}?upload={token}&layout=refuse", b"")).status == 400
    assert (await front.ask("POST", f"{ADD.format('ppe')}?upload={token}", b"")).status == 200


async def test_file_that_is_no_model_is_refused_without_the_gateways_paths(tmp_path: Path) -> None:
    """400 with the command's sentence, and nothing is stored."""
    reply = await adding_front(tmp_path).ask("POST", INSPECT, b"no model")
    assert (reply.status, text_of(reply)) == (400, "the file cannot be used: the file is not an ONNX model")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("token", ["upload-unknown", "..", "../../etc/passwd", "%2e%2e%2fmodels", "upload-%0a"])
async def test_token_that_names_no_upload_is_refused(tmp_path: Path, token: str) -> None:
    """A token is never a path."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    front = adding_front(tmp_path)
    for target in (INSPECT, ADD.format("m")):
        assert (await front.ask("POST", f"{target}?upload={token}", b"")).status == 400
    assert left_in(tmp_path) == []


async def test_stored_files_are_few_and_the_oldest_makes_room(tmp_path: Path) -> None:
    """A client cannot fill the disk by inspecting."""
    front = adding_front(tmp_path)
    tokens = [(await inspected(front))["upload"] for _ in range(MAX_STORED + 1)]
    assert left_in(tmp_path) == sorted(tokens[1:])
    assert (await front.ask("POST", f"{INSPECT}?upload={tokens[0]}", b"")).status == 400
    assert (await front.ask("POST", f"{INSPECT}?upload={tokens[-1]}", b"")).status == 200


async def test_stored_file_is_removed_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another request."""
    monkeypatch.setattr(model_uploads, "STORED_S", 0.05)
    front = adding_front(tmp_path)
    await inspected(front)
    await until(lambda: left_in(tmp_path) == [])


async def test_stored_files_are_removed_when_the_gateway_stops(tmp_path: Path) -> None:
    """`close` leaves nothing behind."""
    front = adding_front(tmp_path)
    await inspected(front)
    assert front.uploads is not None
    front.uploads.close()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("replace=1", "unknown query parameter 'replace'"),
        ("layot=yolox", "did you mean 'layout'?"),
        ("upload=", "give it a value"),
        ("upload=a&upload=b", "'upload' is given twice"),
        ("labels=a%00b", "give it a value"),
    ],
)
async def test_query_that_is_wrong_is_refused_before_the_body(tmp_path: Path, query: str, said: str) -> None:
    """400 names the parameter; nothing is written."""
    reply = await adding_front(tmp_path).ask("POST", f"{INSPECT}?{query}", FILE)
    assert reply.status == 400
    assert said in text_of(reply)
    assert is_empty(tmp_path)


@pytest.mark.parametrize(
    ("body", "header", "status", "said"),
    [
        (FILE, (b"content-encoding", b"gzip"), 400, "send the ONNX file uncompressed"),
        (FILE, (b"content-type", b"multipart/form-data; boundary=x"), 415, "send the ONNX file itself as the body"),
        (b"", (b"x-a", b"b"), 400, "the body is empty"),
    ],
)
async def test_body_that_is_no_plain_file_is_refused(
    tmp_path: Path, body: bytes, header: tuple[bytes, bytes], status: int, said: str
) -> None:
    """By the rules of adding a model."""
    reply = await adding_front(tmp_path).ask("POST", INSPECT, body, (header,))
    assert reply.status == status
    assert said in text_of(reply)
    assert left_in(tmp_path) == []


async def test_body_over_the_limit_of_models_is_refused(tmp_path: Path) -> None:
    """413, and nothing is left."""
    front = adding_front(tmp_path, RestOptions(max_model_bytes=1 << 10))
    reply = await front.ask("POST", INSPECT, FILE * 10)
    assert (reply.status, "raise max_model_bytes" in text_of(reply)) == (413, True)
    assert left_in(tmp_path) == []


async def test_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(tmp_path: Path) -> None:
    """What had come is removed."""
    async with adding_front(tmp_path).served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", INSPECT, FILE)[:-10])
            await until(lambda: len(left_in(tmp_path)) == 1)
        await until(lambda: left_in(tmp_path) == [])


async def test_engine_with_a_repository_of_its_own_inspects_no_models(tmp_path: Path) -> None:
    """400 with the reason, before the body."""
    uploads = model_uploads.ModelUploads(tmp_path, (), refusal="the engine has a repository of its own")
    reply = await Front(uploads=uploads).ask("POST", INSPECT, FILE)
    assert (reply.status, text_of(reply)) == (400, "the engine has a repository of its own")
