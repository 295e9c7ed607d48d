"""/v1/streams: sources are listed, added, taken out, paused and recorded, and given rules."""

import re
import threading
from dataclasses import replace

import pytest

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.errors import PipelineError, SourceNotOpen, SourceNotRecordable
from penstock_video.source_ids import ID_FORM
from penstock_video.types import DecoderKind, DropPolicy, SourceConfig, SourceState
from tests.deepstream_pipeline.api.asking import Client, ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, one_key, serving

DOOR = {"uri": "rtsp://camera/1", "source_id": "door"}


def test_stream_that_is_added_is_listed_and_read(api: ApiServer, pipeline: FakePipeline) -> None:
    """What was added is there, under its own address, with the configuration that was given."""
    added = ask(api.url, "POST", "/v1/streams", {**DOOR, "camera_name": "Front", "policy": "drop-oldest"})
    assert (added.status, added.json, added.headers["location"]) == (
        201,
        {"source_id": "door", "saved": "off"},
        "/v1/streams/door",
    )
    assert pipeline.configs["door"] == SourceConfig(
        "rtsp://camera/1", "door", "Front", policy=DropPolicy.DROP_OLDEST, is_from_api=True
    )
    listed = ask(api.url, "GET", "/v1/streams")
    read = ask(api.url, "GET", "/v1/streams/door")
    assert listed.json == {"streams": [read.json]}
    assert (read.json["source_id"], read.json["state"], read.json["drops"]) == ("door", "connecting", {})


def test_stream_has_the_decoder_that_was_asked_for(api: ApiServer, pipeline: FakePipeline) -> None:
    """nvdec where it is asked for, else what fits; DeepStream's own body has no word for it. Which it is is shown."""
    assert ask(api.url, "POST", "/v1/streams", {**DOOR, "decoder": "nvdec"}).status == 201
    assert ask(api.url, "POST", "/v1/streams", {**DOOR, "source_id": "yard"}).status == 201
    found = [pipeline.configs[name].decoder for name in ("door", "yard")]
    assert found == [DecoderKind.NVDEC, DecoderKind.AUTO]
    assert ask(api.url, "GET", "/v1/streams/door").json["decoder"] == ""
    pipeline.sources["door"] = replace(pipeline.sources["door"], decoder="nvdec")
    assert ask(api.url, "GET", "/v1/streams/door").json["decoder"] == "nvdec"


def test_stream_that_is_deleted_is_gone(api: ApiServer, pipeline: FakePipeline) -> None:
    """Taking out answers 204 once, and 404 after that."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    assert ask(api.url, "DELETE", "/v1/streams/door").status == 204
    assert pipeline.sources == {}
    assert ask(api.url, "DELETE", "/v1/streams/door").status == 404


def test_stream_is_paused_and_resumed(api: ApiServer, pipeline: FakePipeline) -> None:
    """Both verbs reach the pipeline."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    assert ask(api.url, "POST", "/v1/streams/door/pause").status == 204
    assert pipeline.sources["door"].state is SourceState.PAUSED
    assert ask(api.url, "POST", "/v1/streams/door/resume").status == 204
    assert pipeline.sources["door"].state is SourceState.RUNNING


@pytest.mark.parametrize("state", [SourceState.RUNNING, SourceState.ENDED])
def test_stream_is_started_over(api: ApiServer, pipeline: FakePipeline, state: SourceState) -> None:
    """Also one that has ended; an unknown one is 404."""
    pipeline.add(SourceConfig("clip.mp4", "clip"))
    pipeline.sources["clip"] = replace(pipeline.sources["clip"], state=state)
    assert ask(api.url, "POST", "/v1/streams/clip/restart").status == 204
    assert pipeline.sources["clip"].state is SourceState.CONNECTING
    assert ask(api.url, "POST", "/v1/streams/door/restart").status == 404


@pytest.mark.parametrize("state", [SourceState.ENDED, SourceState.FAILED])
@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_stream_that_is_over_is_neither_paused_nor_resumed(
    api: ApiServer, pipeline: FakePipeline, state: SourceState, verb: str
) -> None:
    """It would stay as it is: 409 with its state and what to do, and the pipeline is not asked."""
    pipeline.add(SourceConfig("clip.mp4", "clip"))
    pipeline.sources["clip"] = replace(pipeline.sources["clip"], state=state)
    answer = ask(api.url, "POST", f"/v1/streams/clip/{verb}")
    assert answer.status == 409
    assert answer.error == f"'clip' has {state.value}; start it over first"
    assert pipeline.sources["clip"].state is state


def test_recording_and_path_that_are_wrong_are_refused_in_our_words(api: ApiServer, pipeline: FakePipeline) -> None:
    """The seconds of a recording, the rules' body and an id in the path, as a stream's fields."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    asked = {
        ("POST", "door/record", b'{"before_s": -1}'): "before_s: -1 is not taken; a number from 0 to 300 is needed",
        ("POST", "door/record", b'{"befor_s": 1}'): "befor_s: there is no such field; did you mean before_s?",
        ("PUT", "door/rules", b"[]"): "the body: a list is not taken; a JSON object is needed",
        ("POST", ".door/pause", b""): f"source_id: '.door' is not taken; {ID_FORM}",
    }
    for (method, path, body), text in asked.items():
        answer = ask(api.url, method, f"/v1/streams/{path}", body or None)
        assert (answer.status, answer.error) == (400, text)


def test_recording_is_begun_with_its_seconds(api: ApiServer, pipeline: FakePipeline) -> None:
    """The answer says where the file will be."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    answer = ask(api.url, "POST", "/v1/streams/door/record", {"before_s": 2, "after_s": 3.5})
    assert (answer.status, answer.json) == (202, {"path": "/recordings/door.mp4"})
    assert pipeline.recordings == [("door", 2.0, 3.5)]
    pipeline.has_recorder = False
    answer = ask(api.url, "POST", "/v1/streams/door/record", {})
    assert (answer.status, answer.json) == (409, {"error": "no folder for recordings was given"})


@pytest.mark.parametrize(("refusal", "status"), [(SourceNotOpen, 409), (SourceNotRecordable, 415)])
def test_recording_that_nothing_would_come_of_is_no_promise(
    api: ApiServer, pipeline: FakePipeline, refusal: type[PipelineError], status: int
) -> None:
    """Of a source that is still connecting, or whose codec fits no MP4: the pipeline's own sentence."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))

    def refused(call: str) -> None:
        raise refusal(f"'door' is not so: no {call}")

    pipeline.before = refused
    answer = ask(api.url, "POST", "/v1/streams/door/record", {})
    assert (answer.status, answer.json) == (status, {"error": "'door' is not so: no record"})


def test_rules_that_are_put_are_read_back(api: ApiServer, pipeline: FakePipeline) -> None:
    """The section goes to the pipeline as it is, and the answer is what holds now."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    section = {"line-crossing": [{"name": "Entry", "line": [[0, 1], [2, 3]]}]}
    put = ask(api.url, "PUT", "/v1/streams/door/rules", section)
    assert (put.status, put.json) == (200, section)
    assert ask(api.url, "GET", "/v1/streams/door/rules").json == section


def test_rules_that_cannot_be_meant_are_refused_with_the_fix(api: ApiServer, pipeline: FakePipeline) -> None:
    """The text of the analytics comes to the caller, and what held before holds on."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    answer = ask(api.url, "PUT", "/v1/streams/door/rules", {"line-crosing": []})
    assert answer.status == 400
    assert answer.error == "analytics.line-crosing: there is no such rule; did you mean line-crossing?"


PYDANTIC = re.compile(r"Field required|should|\^|\[A-Z")  # words of the library, or an expression
BAD_BODIES = [
    (b"{", "the body is not JSON"),
    (b"", "the body is missing; send a JSON object"),
    (b"[1]", "the body: a list is not taken; a JSON object is needed"),
    (b"7", "the body: 7 is not taken; a JSON object is needed"),
    (b"null", "the body: null is not taken; a JSON object is needed"),
    (b"\xff\xfe", "the body"),
    (b'{"uri": "rtsp://camera/1"}', f"source_id is missing; {ID_FORM}"),
    (b'{"source_id": "a"}', "uri is missing; a text of 1 to 2048 characters is needed"),
    (b'{"uri": 7, "source_id": "door"}', "uri: 7 is not taken; a text of 1 to 2048 characters is needed"),
    (b'{"uri": "", "source_id": "door"}', "uri: a text of 0 characters is not taken; a text of 1 to 2048 "),
    (b'{"uri": "rtsp://c/1", "source_id": "../x"}', f"source_id: '../x' is not taken; {ID_FORM}"),
    (b'{"uri": "rtsp://c/1", "source_id": ".."}', f"source_id: '..' is not taken; {ID_FORM}"),
    (b'{"uri": "rtsp://c/1", "source_id": null}', f"source_id: null is not taken; {ID_FORM}"),
    (b'{"uri": "rtsp://c/1", "source_id": "hls"}', f"'hls' cannot be a source's id: {ID_FORM}, and no file's name"),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "polcy": "block"}',
        "polcy: there is no such field; did you mean policy",
    ),
    (b'{"uri": "rtsp://c/1", "source_id": "a", "zzz": 1}', "zzz: there is no such field; leave it out; /openapi.json"),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "policy": "none"}',
        "policy: 'none' is not taken; one of block, drop-old",
    ),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "decoder": "cuda"}',
        "decoder: 'cuda' is not taken; one of auto, cpu, nvdec",
    ),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "is_loop": "oft"}',
        "is_loop: a text of 3 characters is not taken; true",
    ),
    (b'{"uri": "rtsp://c/1", "source_id": "a", "is_loop": {}}', "is_loop: an object is not taken; true or false is n"),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "expected_fps": -1}',
        "-1 is not taken; a number above 0 and at most 1000",
    ),
    (b'{"uri": "rtsp://c/1", "source_id": "a", "record_cache_s": 601}', "601 is not taken; a number from 0 to 600 is"),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "reconnect_attempts": 1.5}',
        "1.5 is not taken; a whole number from -1 to",
    ),
    (
        b'{"uri": "rtsp://c/1", "source_id": "a", "open_timeout_s": 1e999}',
        "open_timeout_s: Infinity is not taken; a num",
    ),
    (b'{"uri": "gopher://c/1", "source_id": "a"}', "'gopher'"),
    (b"[" * 100_000, "the body"),
]


@pytest.mark.parametrize(("body", "text"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_body_that_is_wrong_is_refused_by_its_field(
    api: ApiServer, pipeline: FakePipeline, body: bytes, text: str
) -> None:
    """400, the field and what is wrong with it, and nothing is added."""
    answer = ask(api.url, "POST", "/v1/streams", body)
    assert answer.status == 400
    assert text in answer.error
    assert not PYDANTIC.search(answer.error)
    assert pipeline.sources == {}


def test_refusal_of_an_address_does_not_tell_its_password(api: ApiServer) -> None:
    """Neither a field's fault nor the pipeline's shows what was sent."""
    for uri in ("rtsp://ann:hunter2@camera:x/1", "gopher://ann:hunter2@camera/1", "rtsp://ann:hunter2@\x01/1"):
        answer = ask(api.url, "POST", "/v1/streams", {"uri": uri, "source_id": "a", "is_loop": "hunter2"})
        assert answer.status == 400
        assert b"hunter2" not in answer.body
        answer = ask(api.url, "POST", "/v1/streams", {"uri": uri, "source_id": "a"})
        assert answer.status == 400
        assert b"hunter2" not in answer.body


def test_user_and_password_of_a_stream_are_shown_nowhere(api: ApiServer, pipeline: FakePipeline) -> None:
    """They reach the pipeline, and no answer, not even of a pipeline that forgets to hide them."""
    ask(api.url, "POST", "/v1/streams", {"uri": "rtsp://ann:hunter2@camera/1", "source_id": "door"})
    assert pipeline.configs["door"].uri == "rtsp://ann:hunter2@camera/1"
    for path in ("/v1/streams", "/v1/streams/door", "/", "/api/v1/stream/get-stream-info", "/metrics"):
        answer = ask(api.url, "GET", path)
        assert answer.status == 200
        assert b"hunter2" not in answer.body
        assert b"ann:" not in answer.body


def test_stream_that_is_there_already_is_a_conflict(api: ApiServer) -> None:
    """409, with its id."""
    assert ask(api.url, "POST", "/v1/streams", DOOR).status == 201
    answer = ask(api.url, "POST", "/v1/streams", DOOR)
    assert (answer.status, answer.error) == (409, "there is a source 'door' already")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/streams/missing"),
        ("DELETE", "/v1/streams/missing"),
        ("POST", "/v1/streams/missing/pause"),
        ("POST", "/v1/streams/missing/resume"),
        ("GET", "/v1/streams/missing/rules"),
        ("GET", "/v1/streams/missing/preview.jpg"),
        ("GET", "/v1/streams/missing/preview.mjpeg"),
        ("GET", "/nothing"),
    ],
)
def test_what_is_not_there_is_not_found(api: ApiServer, method: str, path: str) -> None:
    """404, and the text names it."""
    answer = ask(api.url, method, path)
    assert answer.status == 404
    assert "missing" in answer.error or "/nothing" in answer.error


def test_method_that_is_not_served_is_refused(api: ApiServer) -> None:
    """405."""
    answer = ask(api.url, "DELETE", "/v1/streams", headers={})
    assert (answer.status, "DELETE" in answer.error) == (405, True)


def test_one_source_too_many_is_refused() -> None:
    """429, with the limit."""
    with serving(FakePipeline(limit=1)) as api:
        ask(api.url, "POST", "/v1/streams", DOOR)
        answer = ask(api.url, "POST", "/v1/streams", {**DOOR, "source_id": "yard"})
        assert (answer.status, answer.error) == (429, "1 sources are there, the limit")
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("uri", ["/etc/passwd", "file:///etc/passwd", "clip.mp4", "/dev/video0"])
def test_file_of_this_machine_is_added_only_where_that_is_allowed(uri: str) -> None:
    """A remote client cannot make the API read files."""
    pipeline = FakePipeline()
    headers = {"x-api-key": "a-key-that-is-long", "content-type": "application/json"}
    with serving(pipeline, ApiOptions("0.0.0.0", 0, one_key(headers["x-api-key"]))) as api:
        for path, body in (
            ("/v1/streams", {"uri": uri, "source_id": "a"}),
            ("/api/v1/stream/add", {"value": {"camera_id": "a", "camera_url": uri, "change": "camera_add"}}),
        ):
            answer = ask(api.url, "POST", path, body, headers)
            assert answer.status == 403
            assert "files and devices" in answer.error
    assert pipeline.sources == {}
    with serving(pipeline) as api:
        assert ask(api.url, "POST", "/v1/streams", {"uri": uri, "source_id": "a"}).status == 201


def test_many_streams_come_and_go(api: ApiServer, pipeline: FakePipeline) -> None:
    """One connection, 100 adds and removes, and no thread is left."""
    before = threading.active_count()
    client = Client(api.url)
    for number in range(100):
        assert client.ask("POST", "/v1/streams", {**DOOR, "source_id": f"c{number}"}).status == 201
        assert client.ask("DELETE", f"/v1/streams/c{number}").status == 204
    client.close()
    assert pipeline.sources == {}
    assert threading.active_count() <= before + 1  # the last call's thread may still be ending
