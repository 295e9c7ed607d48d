"""Which hosts an API client may name: public ones, and those that the operator allows."""

from typing import Any

import pytest

from penstock.protocol.identity import Role
from penstock_video.api.options import ApiOptions, ApiRefused
from penstock_video.types import SourceConfig
from tests.deepstream_pipeline.api.asking import JSON, ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, one_key, serving

HIDDEN = (
    *("127.0.0.1", "localhost", "10.1.2.3", "192.168.0.9", "169.254.1.1", "0.0.0.0", "[::1]", "[fe80::1]"),
    *("[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]", "169.254.169.254", "[fd00:ec2::254]", "100.100.100.200"),
)


def calls(host: str) -> list[tuple[str, dict[str, Any]]]:
    """Our request to add a source on that host, and DeepStream's."""
    uri = f"rtsp://anna:hunter2@{host}/1"
    value = {"camera_id": "theirs", "camera_url": uri, "change": "camera_add"}
    return [
        ("/v1/streams", {"uri": uri, "source_id": "ours"}),
        ("/api/v1/stream/add", {"key": "sensor", "value": value}),
    ]


@pytest.mark.parametrize("host", HIDDEN)
def test_source_on_a_host_that_is_not_public_is_refused(host: str) -> None:
    """Both requests get 403 with the flag that allows it and without the password; nothing is added."""
    pipeline = FakePipeline()
    with serving(pipeline) as api:
        for path, body in calls(host):
            answer = ask(api.url, "POST", path, body)
            assert answer.status == 403
            assert "--allow-outbound" in answer.json["error"]
            assert "hunter2" not in answer.json["error"]
    assert pipeline.configs == {}


@pytest.mark.parametrize("host", ["camera.example", "93.184.216.34", "10.1.2.3", "cam.local"])
def test_source_that_is_taken_is_marked_as_a_callers(host: str) -> None:
    """Therefore its DNS answers and redirects are checked, also if its host is allowed."""
    pipeline = FakePipeline()
    with serving(pipeline, ApiOptions(port=0, allowed_outbound=("10.0.0.0/8", "cam.local"))) as api:
        for path, body in calls(host):
            assert ask(api.url, "POST", path, body).status in (200, 201)
    assert [source.is_from_api for source in pipeline.configs.values()] == [True, True]


def test_allowed_value_that_is_none_stops_the_start() -> None:
    """The message has the flag and the value."""
    with pytest.raises(ApiRefused, match=r"--allow-outbound '10.0.0.0/99'"):
        ApiOptions(allowed_outbound=("10.0.0.0/99",))


FOREIGN = {**JSON, "x-penstock-client-address": "203.0.113.9"}  # as a console sends it


def test_console_does_not_open_a_program_without_keys_to_other_machines() -> None:
    """It listens on 127.0.0.1, so everybody on this machine may call it, and no other machine's browser."""
    pipeline = FakePipeline()
    with serving(pipeline) as api:
        for method, path, body in (("GET", "/v1/streams", None), ("POST", "/v1/streams", {"uri": "/dev/video0"})):
            answer = ask(api.url, method, path, body, FOREIGN)
            assert (answer.status, "203.0.113.9" in answer.error) == (403, True)
        assert ask(api.url, "GET", "/v1/streams", headers={**FOREIGN, "x-penstock-client-address": "::1"}).status == 200
        assert ask(api.url, "GET", "/health/live", headers=FOREIGN).status == 200


def test_browser_of_another_machine_cannot_add_files_of_this_one() -> None:
    """Not with a key for changes either: for that the API and the console must listen on 127.0.0.1."""
    pipeline = FakePipeline()
    pipeline.add(SourceConfig("rtsp://93.184.216.34/1", "gate"))
    key = {**FOREIGN, "x-api-key": "secret"}
    with serving(pipeline, ApiOptions(port=0, access=one_key("secret", Role.ADMIN))) as api:
        for uri in ("/etc/hostname", "file:///etc/hostname", "/dev/video0"):
            for method, path, body in (
                ("POST", "/v1/streams", {"uri": uri, "source_id": "theirs"}),
                ("POST", "/v1/streams/probe", {"uri": uri}),
                ("POST", "/v1/streams/probe", {"uri": uri, "source_id": "gate"}),
                ("PUT", "/v1/streams/gate", {"uri": uri}),
            ):
                answer = ask(api.url, method, path, body, key)
                assert (answer.status, "files and devices" in answer.error) == (403, True), (method, path, answer.body)
    assert list(pipeline.configs) == ["gate"]


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2Jcleared", "\u202egnp.exe", "\x00"])
def test_name_of_a_camera_is_one_printable_line(name: str) -> None:
    """As in a settings file: a terminal and a log show it as it is."""
    pipeline = FakePipeline()
    with serving(pipeline) as api:
        body = {"uri": "rtsp://93.184.216.34/1", "camera_name": name}
        answer = ask(api.url, "POST", "/v1/streams", {**body, "source_id": "gate"})
        assert (answer.status, "printable" in answer.error) == (400, True)
        pipeline.add(SourceConfig("rtsp://93.184.216.34/1", "gate"))
        assert ask(api.url, "PUT", "/v1/streams/gate", body).status == 400
