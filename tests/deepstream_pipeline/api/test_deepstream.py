"""DeepStream's own REST bodies, as its documentation sends them, and its answers."""

from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from penstock_video.api.deepstream import SourceNumbers
from penstock_video.api.server import ApiServer
from penstock_video.source_ids import ID_FORM
from penstock_video.types import SourceConfig
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline

ADD = b"""{
    "key": "sensor",
    "value": {
        "camera_id": "uniqueSensorID1",
        "camera_name": "front_door",
        "camera_url": "file:///opt/nvidia/deepstream/deepstream/samples/streams/sample_1080p_h264.mp4",
        "change": "camera_add",
        "metadata": {"resolution": "1920 x1080", "codec": "h264", "framerate": 30}
    },
    "headers": {"source": "vst", "created_at": "2021-06-01T14:34:13.417Z"}
}"""
REMOVE = ADD.replace(b"camera_add", b"camera_remove")
FORM = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` says


def test_documented_calls_add_list_and_remove_a_source(api: ApiServer, pipeline: FakePipeline) -> None:
    """The bodies of DeepStream's documentation, sent as its curl lines send them, do what they do there."""
    added = ask(api.url, "POST", "/api/v1/stream/add", ADD, FORM)
    assert (added.status, added.json) == (200, {"status": "HTTP/1.1 200 OK", "reason": "STREAM_ADD_SUCCESS"})
    assert pipeline.configs["uniqueSensorID1"] == SourceConfig(
        "file:///opt/nvidia/deepstream/deepstream/samples/streams/sample_1080p_h264.mp4",
        "uniqueSensorID1",
        "front_door",
        is_from_api=True,
    )
    assert ask(api.url, "GET", "/api/v1/stream/get-stream-info").json == {
        "reason": "GET_LIVE_STREAM_INFO_SUCCESS",
        "status": "HTTP/1.1 200 OK",
        "stream-info": {
            "stream-count": 1,
            "stream-info": [{"camera_id": "uniqueSensorID1", "camera_name": "front_door", "source_id": 0}],
        },
    }
    removed = ask(api.url, "POST", "/api/v1/stream/remove", REMOVE, FORM)
    assert (removed.status, removed.json) == (200, {"status": "HTTP/1.1 200 OK", "reason": "STREAM_REMOVE_SUCCESS"})
    assert pipeline.sources == {}


def test_event_form_of_the_body_adds_a_source(api: ApiServer, pipeline: FakePipeline) -> None:
    """`event` with camera_streaming stands for `value` with camera_add; a number for an id is its digits."""
    body = {"event": {"camera_id": 7, "camera_url": "rtsp://camera/1", "change": "camera_streaming"}}
    assert ask(api.url, "POST", "/api/v1/stream/add", body).status == 200
    assert list(pipeline.sources) == ["7"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("add", {}, 400, "STREAM_ADD_FAIL, value is missing; a JSON object is needed"),
        ("add", {"value": {"camera_url": "rtsp://c/1"}}, 400, f"ADD_FAIL, value.camera_id is missing; {ID_FORM}"),
        ("add", {"value": 7}, 400, "STREAM_ADD_FAIL, value: 7 is not taken; a JSON object is needed"),
        (
            "add",
            {"value": {"camera_id": "a", "change": []}},
            400,
            "value.change: a list is not taken; a text is needed",
        ),
        (
            "add",
            {"value": {"camera_id": "hls", "camera_url": "rtsp://c/1", "change": "camera_add"}},
            400,
            "'hls' cannot",
        ),
        ("add", {"value": {"camera_id": "a", "change": "camera_add"}}, 400, "value.camera_url is missing; a source's"),
        (
            "add",
            {"value": {"camera_id": "a", "camera_url": "rtsp://c/1"}},
            400,
            "value.change: it is missing; it has to hold 'add'",
        ),
        (
            "add",
            {"value": {"camera_id": "a/b", "camera_url": "rtsp://c/1"}},
            400,
            f"value.camera_id: 'a/b' is not taken; {ID_FORM}",
        ),
        ("add", {"value": {"camera_id": "a", "camera_url": "x://c", "change": "camera_add"}}, 400, "'x'"),
        ("remove", {"value": {"camera_id": "a", "change": "camera_add"}}, 400, "STREAM_REMOVE_FAIL, value.change"),
        (
            "remove",
            {"value": {"camera_id": "a", "change": "camera_remove"}},
            404,
            "STREAM_REMOVE_FAIL, there is no source 'a'",
        ),
    ],
)
def test_refusal_has_deepstreams_form_and_ours(
    api: ApiServer, path: str, body: dict[str, object], status: int, text: str
) -> None:
    """status and reason for its clients, error for ours, and the HTTP status says the same."""
    answer = ask(api.url, "POST", f"/api/v1/stream/{path}", body)
    assert answer.status == status
    assert text in str(answer.json["reason"])
    assert str(answer.json["status"]).startswith(f"HTTP/1.1 {status} ")
    assert answer.error in str(answer.json["reason"])


def test_source_that_is_there_already_is_a_conflict(api: ApiServer) -> None:
    """409, in DeepStream's form."""
    ask(api.url, "POST", "/api/v1/stream/add", ADD)
    answer = ask(api.url, "POST", "/api/v1/stream/add", ADD)
    assert (answer.status, answer.json["status"]) == (409, "HTTP/1.1 409 Conflict")
    assert str(answer.json["reason"]).startswith("STREAM_ADD_FAIL, there is a source")


def test_body_of_a_get_is_not_looked_at(api: ApiServer) -> None:
    """DeepStream's documentation sends {} with its GET."""
    parts = urlsplit(api.url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    for _ in range(2):
        connection.request("GET", "/api/v1/stream/get-stream-info", body=b"{}", headers=FORM)
        answer = connection.getresponse()
        assert (answer.status, b"GET_LIVE_STREAM_INFO_SUCCESS" in answer.read()) == (200, True)
    connection.close()


@pytest.mark.parametrize(("is_healthy", "word"), [(True, "YES"), (False, "NO")])
def test_ready_state_has_deepstreams_form(api: ApiServer, pipeline: FakePipeline, is_healthy: bool, word: str) -> None:
    """YES or NO."""
    pipeline.healthy = is_healthy
    answer = ask(api.url, "GET", "/api/v1/health/get-dsready-state")
    assert (answer.status, answer.json["health-info"]) == (200, {"ds-ready": word})


def test_source_numbers_stay_while_their_source_is_there() -> None:
    """A number does not move when another source goes, and a new source takes the least free one."""
    numbers = SourceNumbers()
    assert numbers.of(["a", "b", "c"]) == [0, 1, 2]
    assert numbers.of(["a", "c"]) == [0, 2]
    assert numbers.of(["a", "c", "d", "e"]) == [0, 2, 1, 3]
    assert numbers.of([]) == []
    assert numbers.of(["z"]) == [0]
