"""Health and metrics answer, whatever hangs behind the API."""

import threading
import time
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving
from tests.support.waiting import wait_for

DOOR = {"uri": "rtsp://camera/1", "source_id": "door"}


class Hanging:
    """Holds the named calls of a pipeline until it is let go."""

    def __init__(self, pipeline: FakePipeline, *names: str) -> None:
        self._names = names
        self.free = threading.Event()
        self.held = threading.Semaphore(0)
        pipeline.before = self._wait

    def _wait(self, name: str) -> None:
        if name in self._names:
            self.held.release()
            assert self.free.wait(60.0)


@pytest.fixture
def hurried(pipeline: FakePipeline) -> Iterator[ApiServer]:
    """An API that waits half a second for the pipeline."""
    with serving(pipeline, ApiOptions(port=0, call_timeout_s=0.5)) as server:
        yield server


def test_live_is_answered(api: ApiServer) -> None:
    """200, and nothing else is said."""
    answer = ask(api.url, "GET", "/health/live")
    assert (answer.status, answer.json) == (200, {"live": True})


@pytest.mark.parametrize(("is_healthy", "status"), [(True, 200), (False, 503)])
def test_ready_is_what_the_pipeline_says(api: ApiServer, pipeline: FakePipeline, is_healthy: bool, status: int) -> None:
    """200 while it is healthy, else 503."""
    pipeline.healthy = is_healthy
    answer = ask(api.url, "GET", "/health/ready")
    assert (answer.status, answer.json) == (status, {"live": True, "ready": is_healthy})


def test_metrics_are_served_as_prometheus_reads_them(api: ApiServer) -> None:
    """Its content type, and our names."""
    answer = ask(api.url, "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE penstock_video_frames_total counter" in answer.body


def test_call_that_hangs_is_given_up_and_delays_no_other(hurried: ApiServer, pipeline: FakePipeline) -> None:
    """Its asker gets 503 after the deadline; health, metrics and the list are answered meanwhile and after."""
    hanging = Hanging(pipeline, "add")
    answer = ask(hurried.url, "POST", "/v1/streams", DOOR)
    assert (answer.status, "did not answer within 0.5 s" in answer.error) == (503, True)
    for path in ("/health/live", "/health/ready", "/metrics", "/v1/streams"):
        assert ask(hurried.url, "GET", path).status == 200
    hanging.free.set()


def test_crowd_of_calls_that_hang_is_bounded(hurried: ApiServer, pipeline: FakePipeline) -> None:
    """Once 32 hang the next is refused at once, health answers, and when they are let go all is as before."""
    hanging = Hanging(pipeline, "add", "statistics")
    before = threading.active_count()
    askers = [
        threading.Thread(target=ask, args=(hurried.url, "POST", "/v1/streams", DOOR | {"source_id": f"c{n}"}))
        for n in range(40)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert threading.active_count() <= before + 32
    refused = ask(hurried.url, "GET", "/v1/streams")
    assert (refused.status, "limit 32" in refused.error) == (503, True)
    assert [ask(hurried.url, "GET", f"/health/{which}").status for which in ("live", "ready")] == [200, 200]
    hanging.free.set()
    until = time.monotonic() + 20.0
    while ask(hurried.url, "GET", "/v1/streams").status != 200:
        assert time.monotonic() < until


def test_ready_of_a_pipeline_that_hangs_is_no(api: ApiServer, pipeline: FakePipeline) -> None:
    """503 within its own deadline, and live stays 200."""
    hanging = Hanging(pipeline, "is_healthy")
    answer = ask(api.url, "GET", "/health/ready")
    assert (answer.status, answer.json["ready"]) == (503, False)
    assert ask(api.url, "GET", "/health/live").status == 200
    hanging.free.set()


def test_unexpected_fault_is_answered_without_its_text(api: ApiServer, pipeline: FakePipeline) -> None:
    """500, and the next request is served."""

    def fail(name: str) -> None:
        raise ZeroDivisionError("secret")

    pipeline.before = fail
    with capture_logs() as logs:
        answer = ask(api.url, "GET", "/v1/streams")
        wait_for(lambda: logs, 5, "the fault is logged, which may be after the answer")
    assert [line["event"] for line in logs] == ["api_request_failed"]
    assert (answer.status, answer.error) == (500, "the API failed; its log says why")
    pipeline.before = lambda _: None
    assert ask(api.url, "GET", "/v1/streams").status == 200
