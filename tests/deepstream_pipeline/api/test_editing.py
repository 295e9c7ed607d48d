"""Trying an address, and changing a source that runs."""

import base64
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.errors import DecodeError, SourceRefused
from penstock_video.interfaces import Change, RulesChanged, Saved, SourceAdded, SourceChanged, SourceRemoved
from penstock_video.types import SourceConfig
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import JPEG, FakePipeline, one_key, serving

SECRET = "rtsp://viewer:s3cret@camera.example/1"
SHOWN = "rtsp://***@camera.example/1"
DOOR = SourceConfig(SECRET, "door", "Door", reconnect_interval_s=4.0)


def test_probe_answers_facts_and_a_picture(api: ApiServer, pipeline: FakePipeline) -> None:
    """The address is tried as that of a client."""
    answer = ask(api.url, "POST", "/v1/streams/probe", {"uri": "rtsp://camera.example/2", "is_udp": True})
    assert answer.status == 200
    jpeg = answer.json.pop("jpeg")
    assert base64.b64decode(str(jpeg)) == JPEG
    assert {**answer.json, "jpeg": ""} == {
        **{"width": 1280, "height": 720, "fps": 25.0, "codec": "h264", "is_live": True, "duration_s": None},
        **{"jpeg": "", "is_recordable": True},
    }
    (tried,) = pipeline.probed
    assert (tried.uri, tried.is_udp, tried.is_from_api) == ("rtsp://camera.example/2", True, True)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"uri": "rtsp://127.0.0.1/1"}, 403, "--allow-outbound"),
        ({"uri": "rtsp://169.254.169.254/1"}, 403, "--allow-outbound"),
        ({"uri": "gopher://camera/1"}, 400, "no protocol that is read"),
        ({"uri": SHOWN}, 400, "enter them"),
        ({"uri": SHOWN, "source_id": "gone"}, 404, "gone"),
        ({"uri": "rtsp://c.example/1", "open_timeout_s": 60}, 400, "open_timeout_s"),
        ({}, 400, "uri is missing"),
    ],
)
def test_address_that_could_not_be_added_is_not_tried(
    api: ApiServer, pipeline: FakePipeline, body: dict[str, object], status: int, text: str
) -> None:
    """FAULTS 95: the rules for addresses are those of adding; nothing is opened."""
    answer = ask(api.url, "POST", "/v1/streams/probe", body)
    assert (answer.status, text in answer.error) == (status, True)
    assert pipeline.probed == []


def test_file_is_tried_only_where_no_other_machine_asks() -> None:
    """A client elsewhere does not see this machine's files."""
    with serving(FakePipeline(), ApiOptions("0.0.0.0", 0, one_key("a-key-that-is-long"))) as api:
        headers = {"x-api-key": "a-key-that-is-long", "content-type": "application/json"}
        url = api.url.replace("0.0.0.0", "127.0.0.1")
        assert ask(url, "POST", "/v1/streams/probe", {"uri": "/etc/passwd"}, headers).status == 403


@pytest.mark.parametrize(("error", "status"), [(SourceRefused("no"), 502), (DecodeError("no"), 415)])
def test_fault_of_the_camera_is_no_fault_of_the_api(
    api: ApiServer, pipeline: FakePipeline, error: Exception, status: int
) -> None:
    """A camera that refuses is 502, one without video 415; the text is the source's."""

    def fail(call: str) -> None:
        if call == "probe":
            raise error

    pipeline.before = fail
    answer = ask(api.url, "POST", "/v1/streams/probe", {"uri": "rtsp://camera.example/2"})
    assert (answer.status, answer.error) == (status, "no")


def test_options_are_read_and_written_back_without_the_password(api: ApiServer, pipeline: FakePipeline) -> None:
    """PUT of what GET answered changes nothing: the address that is shown stands for the one that is known."""
    pipeline.add(DOOR)
    options = ask(api.url, "GET", "/v1/streams/door/options").json
    assert (options["uri"], options["reconnect_interval_s"]) == (SHOWN, 4.0)
    answer = ask(api.url, "PUT", "/v1/streams/door", options)
    assert (answer.status, answer.json["source_id"]) == (200, "door")
    assert pipeline.configs["door"] == DOOR


class KeptChanges:
    """A saver that remembers the changes and says that they were saved."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def apply(self, change: Change, run: Callable[[], None]) -> Saved:
        run()
        self.changes.append(change)
        return Saved.YES


def test_each_change_goes_to_the_saver_and_its_answer_says_so(pipeline: FakePipeline) -> None:
    """Ours and DeepStream's; without --save-changes the answer says `off`."""
    saver, new = KeptChanges(), {"uri": "rtsp://camera.example/1", "source_id": "door"}
    changed = {"camera_id": "gate", "camera_url": "rtsp://camera.example/2", "change": "camera_add"}
    config = SourceConfig("rtsp://camera.example/1", "door", is_from_api=True)
    gate = SourceConfig("rtsp://camera.example/2", "gate", is_from_api=True)
    udp = SourceChanged(replace(config, is_udp=True), is_new_address=False)
    requests: list[tuple[str, str, object, Change]] = [
        ("POST", "/v1/streams", new, SourceAdded(config)),
        ("PUT", "/v1/streams/door", {"uri": new["uri"], "is_udp": True}, udp),
        ("PUT", "/v1/streams/door/rules", {}, RulesChanged("door", {})),
        ("POST", "/api/v1/stream/add", {"value": changed}, SourceAdded(gate)),
        ("POST", "/api/v1/stream/remove", {"value": {**changed, "change": "camera_remove"}}, SourceRemoved("gate")),
        ("DELETE", "/v1/streams/door", None, SourceRemoved("door")),
    ]
    with serving(pipeline, ApiOptions(port=0, saver=saver)) as api:
        for method, path, body, _ in requests:
            assert ask(api.url, method, path, body).headers["x-penstock-saved"] == "yes", path
    assert saver.changes == [change for *_, change in requests]
    with serving(pipeline) as api:
        answer = ask(api.url, "POST", "/v1/streams", new)
        assert (answer.json["saved"], answer.headers["x-penstock-saved"]) == ("off", "off")


def test_name_and_options_change_under_the_same_address(api: ApiServer, pipeline: FakePipeline) -> None:
    """What is left out gets its default, as when a source is added."""
    pipeline.add(DOOR)
    assert ask(api.url, "PUT", "/v1/streams/door", {"uri": SHOWN, "camera_name": "Back door"}).status == 200
    assert pipeline.configs["door"] == SourceConfig(SECRET, "door", "Back door")


def test_other_address_is_checked_as_a_new_one(api: ApiServer, pipeline: FakePipeline) -> None:
    """FAULTS 95: an edit opens no address that could not be added, and is marked as a client's."""
    pipeline.add(DOOR)
    assert ask(api.url, "PUT", "/v1/streams/door", {"uri": "rtsp://10.0.0.7/1"}).status == 403
    assert ask(api.url, "PUT", "/v1/streams/door", {"uri": "rtsp://***@other.example/1"}).status == 400
    assert ask(api.url, "PUT", "/v1/streams/gone", {"uri": "rtsp://other.example/1"}).status == 404
    assert pipeline.configs["door"] == DOOR
    assert ask(api.url, "PUT", "/v1/streams/door", {"uri": "rtsp://other.example/1"}).status == 200
    assert pipeline.configs["door"] == SourceConfig("rtsp://other.example/1", "door", is_from_api=True)
