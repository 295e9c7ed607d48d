"""Requests of the client, and the results and errors that it makes from responses of a fake gateway."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from penstock import Client
from penstock.client import ClassificationResult, DetectionResult
from penstock.protocol.errors import (
    EngineFailed,
    EngineUnavailable,
    GatewayUnreachable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
)
from tests.cli.conftest import StandIn
from tests.client.conftest import PICTURE


def test_results_are_iterated_as_objects_and_read_as_arrays(client: Client, stand_in: StandIn) -> None:
    """Objects have label and score; the corners are an array (n, 4) float32."""
    result = client.infer("ppe", PICTURE)
    assert isinstance(result, DetectionResult)
    assert [(one.label, one.score) for one in result] == [("person", 0.912345), ("dog", 0.41)]
    assert result.xyxy.tolist() == [[10.25, 20.5, 40.0, 90.0], [50.0, 60.0, 80.0, 95.0]]
    assert (result.xyxy.dtype, result.score.dtype, result.class_id.dtype) == (np.float32, np.float32, np.int64)
    assert (result.model_name, result.batch_size, result.timings_ms["infer"]) == ("ppe", 1, 12.0)
    assert stand_in.asked[0].body == PICTURE


def test_options_become_query_parameters_and_an_unknown_one_is_a_type_error(client: Client, stand_in: StandIn) -> None:
    """`classes` is sent as a comma-separated list; a misspelt option raises TypeError."""
    client.infer("a b", PICTURE, conf=0.5, iou=0.4, classes=["person", 2], max_detections=3, masks="none", version="2")
    (asked,) = stand_in.asked
    assert asked.path == "/v2/models/a%20b/versions/2/image"
    assert asked.query == "conf=0.5&iou=0.4&classes=person%2C2&max_detections=3&masks=none"
    with pytest.raises(TypeError, match="cnof"):
        client.infer("ppe", PICTURE, cnof=0.5)  # type: ignore[call-overload]


def test_every_kind_of_image_is_sent_encoded(client: Client, stand_in: StandIn, tmp_path: Path) -> None:
    """Paths, bytes, BGR, RGB and grayscale arrays, PIL images and URLs are accepted."""
    path = tmp_path / "a.jpg"
    path.write_bytes(PICTURE)
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 2] = 255
    pil = PIL.Image.fromarray(red[..., ::-1])
    for source in (path, str(path), PICTURE, bytearray(PICTURE), memoryview(PICTURE)):
        client.infer("ppe", source)
    assert {asked.body for asked in stand_in.asked} == {PICTURE}
    stand_in.asked.clear()
    client.infer("ppe", red)
    client.infer("ppe", red[..., ::-1], color="rgb")
    client.infer("ppe", pil)
    assert len({asked.body for asked in stand_in.asked}) == 1
    client.infer("ppe", red[..., 0])
    client.infer("ppe", f"{stand_in.url}/v2")  # an address: what is there is sent on
    assert json.loads(stand_in.asked[-1].body)["name"] == "triton"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (np.zeros((4, 4), np.float32), r"shape \(4, 4\) and dtype float32 is not an image: give \(height, width, 3\)"),
        (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels is empty or too large"),
        (Path("gone.jpg"), "gone.jpg cannot be read"),
        (3.5, "a float is not an image"),
    ],
)
def test_invalid_image_is_rejected_before_it_is_sent(
    client: Client, stand_in: StandIn, source: object, sentence: str
) -> None:
    """The error names the value and what to pass instead."""
    with pytest.raises(InvalidRequest, match=sentence):
        client.infer("ppe", source)  # type: ignore[call-overload]
    assert stand_in.asked == []


def test_list_returns_a_list_and_infer_batch_keeps_the_order(client: Client, stand_in: StandIn) -> None:
    """infer_batch reads the iterable only as fast as results are consumed."""
    assert [len(one) for one in client.infer("ppe", [PICTURE, PICTURE])] == [2, 2]
    taken: list[int] = []

    def pictures() -> Iterator[bytes]:
        for number in range(9):
            taken.append(number)
            yield PICTURE + bytes([number])

    results = client.infer_batch("ppe", pictures(), concurrency=2)
    first = next(results)
    assert (first.picture[-1], len(taken)) == (0, 2)
    assert [one.picture[-1] for one in results] == list(range(1, 9))


def test_batch_that_is_not_read_to_its_end_leaves_no_thread(client: Client) -> None:
    """Closing the iterator of infer_batch ends its threads."""
    results = client.infer_batch("ppe", [PICTURE] * 20, concurrency=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("penstock-client")]


def test_models_are_listed_loaded_and_described(client: Client, stand_in: StandIn) -> None:
    """Models have states with reasons, inputs with shapes, and parameters."""
    stand_in.index = [{"name": "ppe", "version": "1", "state": "UNAVAILABLE", "reason": "out of memory"}]
    stand_in.parameters = {"labels": "a;b"}
    (row,) = client.models.list()
    assert (row.name, row.state, row.reason) == ("ppe", "UNAVAILABLE", "out of memory")
    client.models.load("ppe")
    client.models.unload("ppe")
    assert [asked.path.rpartition("/")[2] for asked in stand_in.asked[1:]] == ["load", "unload"]
    assert client.models.get("ppe").inputs[0].shape == (-1, 3)
    assert client.models.parameters("ppe") == {"labels": "a;b"}
    assert client.engine().name == "triton"


def test_model_file_is_sent_with_its_settings(client: Client, stand_in: StandIn, tmp_path: Path) -> None:
    """The body is the file, the default name is the file's name, and settings are query parameters."""
    (tmp_path / "best (1).onnx").write_bytes(b"onnx" * 1000)
    added = {"name": "n", "layout": "yolov8", "max_batch_size": 8, "batches": "", "evidence": [], "warnings": []}
    stand_in.refusals["/add"] = (200, json.dumps(added | {"state": "READY"}), {})
    assert client.models.add(tmp_path / "best (1).onnx", settings={"layout": "yolov8"}, replace=True).state == "READY"
    (asked,) = stand_in.asked
    assert (asked.path, asked.query) == ("/v2/repository/models/best-1/add", "layout=yolov8&replace=1")
    assert asked.body == b"onnx" * 1000
    with pytest.raises(InvalidRequest, match="there is no file"):
        client.models.add(tmp_path / "gone.onnx")


def test_tensors_go_and_come_as_binary(client: Client) -> None:
    """Tensors arrive with their values; the fake model adds one."""
    answer = client.infer_tensors("m", {"x": np.ones((2, 3), np.float32)})
    assert answer["y"].tolist() == [[2.0] * 3] * 2
    with pytest.raises(InvalidRequest, match="complex64"):
        client.infer_tensors("m", {"x": np.ones(3, np.complex64)})


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (400, {}, InvalidRequest),
        (403, {}, PermissionDenied),
        (404, {}, ModelNotFound),
        (413, {}, TooLarge),
        (429, {"Retry-After": "7"}, QuotaExceeded),
        (500, {}, EngineFailed),
        (500, {"x-penstock-reason": "internal"}, InferenceError),
        (503, {}, Overloaded),
        (503, {"Retry-After": "7"}, Overloaded),
        (503, {"x-penstock-reason": "engine_down", "Retry-After": "7"}, EngineUnavailable),
        (503, {"x-penstock-reason": "model_not_ready"}, ModelNotReady),
        (503, {"x-penstock-reason": "hopeless"}, Overloaded),
        (400, {"x-penstock-reason": "engine_down"}, InvalidRequest),  # the status wins
        (599, {}, InferenceError),
    ],
)
def test_error_response_raises_the_matching_error_class(
    client: Client, stand_in: StandIn, status: int, headers: dict[str, str], kind: type[InferenceError]
) -> None:
    """The error has the gateway's message and its Retry-After in seconds."""
    stand_in.refusals["/image"] = (status, '{"error": "the sentence"}', headers)
    with pytest.raises(InferenceError) as caught:
        client.infer("ppe", PICTURE)
    assert (type(caught.value), str(caught.value)) == (kind, "the sentence")
    assert caught.value.retry_after_s == (7.0 if "Retry-After" in headers else None)


def test_key_is_sent_and_never_printed(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key can come from the environment; repr and errors do not contain it."""
    stand_in.key = "secret-1"
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", stand_in.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret-1")
    with Client() as right:
        assert len(right.infer("ppe", PICTURE)) == 2
        assert "secret" not in repr(right) + repr(vars(right))
    with Client(api_key="secret-2") as wrong, pytest.raises(Unauthenticated) as caught:
        wrong.infer("ppe", PICTURE)
    assert str(caught.value) == (
        f"{stand_in.url} refused the API key (the API key is unknown): "
        "give a valid key as `api_key` or PENSTOCK_API_KEY"
    )
    with Client(api_key="") as anonymous, pytest.raises(Unauthenticated, match="requires an API key"):
        anonymous.infer("ppe", PICTURE)
    with pytest.raises(InvalidRequest, match="characters that HTTP headers do not allow"):
        Client(api_key="a\nb")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://u:p@a", "http://a?b=c", "http://a:b"]
)
def test_invalid_url_is_rejected_by_the_constructor(url: str) -> None:
    """The error comes before any connection is opened."""
    with pytest.raises(InvalidRequest, match="gateway URL"):
        Client(url)


def test_refused_connection_names_the_url_and_what_to_do() -> None:
    """The error names the URL, the command that starts the gateway, and the variable."""
    with Client("http://127.0.0.1:9", retries=0) as alone, pytest.raises(GatewayUnreachable) as caught:
        alone.health()
    assert str(caught.value) == (
        "nothing answers at http://127.0.0.1:9: start it with `penstock up`, or give its URL as `url` or "
        "PENSTOCK_GATEWAY_URL"
    )


def test_classification_has_a_top_class(client: Client, stand_in: StandIn) -> None:
    """`top` is the class with the highest score, or None."""
    stand_in.result = {"classes": [{"class_id": 3, "label": "cat", "score": 0.75}]}
    result = client.infer("cls", PICTURE)
    assert isinstance(result, ClassificationResult)
    assert result.top is not None
    assert (result.top.label, result.score.tolist(), repr(result)) == (
        "cat", [0.75], "<ClassificationResult of cls: cat 0.75>",
    )  # fmt: skip
    stand_in.result = {"classes": []}
    nothing = client.infer("cls", PICTURE)
    assert (bool(nothing), len(nothing), repr(nothing)) == (False, 0, "<ClassificationResult of cls: nothing found>")
