"""Which hosts an API client may name: public ones, and those that the operator allows."""

from typing import Any

import pytest

from penstock_video.api.options import ApiOptions, ApiRefused
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving

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
