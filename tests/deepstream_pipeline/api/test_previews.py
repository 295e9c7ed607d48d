"""Previews: a viewer sees pictures; one that is slow or leaves costs the others nothing."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.request import urlopen

import pytest

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.types import SourceConfig, SourceState
from tests.deepstream_pipeline.api.asking import ask, connect
from tests.deepstream_pipeline.api.pipeline import JPEG, FakePipeline, serving


@pytest.fixture
def watched(pipeline: FakePipeline) -> Iterator[ApiServer]:
    """An API of a source, with room for three viewers and a timeout of one second for each."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    with serving(pipeline, ApiOptions(port=0, max_viewers=3, client_timeout_s=1.0)) as server:
        yield server


def watch(url: str, receive_bytes: int = 0) -> socket.socket:
    """A viewer that asked."""
    connection = connect(url)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.sendall(b"GET /v1/streams/door/preview.mjpeg HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return connection


def read_until(connection: socket.socket, enough: int, what: bytes) -> bytes:
    """What comes, until it holds so many of that."""
    seen = b""
    while seen.count(what) < enough:
        part = connection.recv(65536)
        assert part, seen[-200:]
        seen += part
    return seen


def wait_until_served(url: str) -> None:
    """Until there is room for one more viewer."""
    until = time.monotonic() + 20.0
    while True:
        with watch(url) as viewer:
            if viewer.recv(4096).startswith(b"HTTP/1.1 200"):
                return
        assert time.monotonic() < until
        time.sleep(0.05)


def test_still_is_the_newest_picture(watched: ApiServer) -> None:
    """A JPEG, whole."""
    answer = ask(watched.url, "GET", "/v1/streams/door/preview.jpg")
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, "image/jpeg", JPEG)


def test_moving_preview_is_picture_after_picture(watched: ApiServer) -> None:
    """Each with its type and length, and the boundary behind it that makes a browser show it."""
    part = b"content-type: image/jpeg\r\ncontent-length: %d\r\n\r\n" % len(JPEG) + JPEG + b"\r\n--frame\r\n"
    expected = b"--frame\r\n" + part * 4
    with urlopen(f"{watched.url}/v1/streams/door/preview.mjpeg", timeout=20) as answer:
        assert answer.headers["content-type"] == "multipart/x-mixed-replace; boundary=frame"
        assert answer.read(len(expected)) == expected


def test_viewers_are_bounded_and_the_place_of_one_that_left_is_free(watched: ApiServer) -> None:
    """The fourth is refused with the limit; when one vanishes the next is let in."""
    viewers = [watch(watched.url) for _ in range(3)]
    for viewer in viewers:
        read_until(viewer, 1, JPEG)
    refused = ask(watched.url, "GET", "/v1/streams/door/preview.mjpeg")
    assert (refused.status, "limit 3" in refused.error, "retry-after" in refused.headers) == (503, True, True)
    viewers[0].close()
    wait_until_served(watched.url)
    for viewer in viewers[1:]:
        viewer.close()


def test_viewer_that_does_not_read_is_cut_and_the_others_see_on(watched: ApiServer, pipeline: FakePipeline) -> None:
    """It loses its slot within the timeout; another viewer and a still are not affected."""
    pipeline.picture_bytes = JPEG + bytes(200_000)
    slow = [watch(watched.url, receive_bytes=4096) for _ in range(2)]
    with watch(watched.url) as viewer:
        until = time.monotonic() + 30.0
        while ask(watched.url, "GET", "/v1/streams/door/preview.jpg").status == 200:
            viewer.recv(1_000_000)
            with watch(watched.url) as another:
                if another.recv(4096).startswith(b"HTTP/1.1 200"):
                    break
            assert time.monotonic() < until, "a slow viewer kept its place"
        read_until(viewer, 3, JPEG)
    for each in slow:
        each.close()


def test_source_that_is_taken_out_ends_its_viewers(watched: ApiServer, pipeline: FakePipeline) -> None:
    """The answer ends in order."""
    with watch(watched.url) as viewer:
        read_until(viewer, 1, JPEG)
        pipeline.remove("door")
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            part = viewer.recv(65536)
            assert part
            seen += part


def test_source_without_pictures_keeps_its_viewers_waiting(watched: ApiServer, pipeline: FakePipeline) -> None:
    """A camera that reconnects has none for a while; when they come they are shown."""
    pipeline.pictures = False
    with watch(watched.url) as viewer:
        head = viewer.recv(65536)
        assert head.startswith(b"HTTP/1.1 200")
        pipeline.pictures = True
        read_until(viewer, 1, JPEG)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (SourceState.PAUSED, "'door' is paused and has no picture; resume it"),
        (SourceState.ENDED, "'door' has ended; start it over first"),
        (SourceState.FAILED, "'door' has failed; start it over first"),
    ],
)
@pytest.mark.parametrize("kind", ["jpg", "mjpeg"])
def test_source_that_sends_no_picture_is_said_to(
    watched: ApiServer, pipeline: FakePipeline, kind: str, state: SourceState, text: str
) -> None:
    """409 at once, with its state and what to do: no client waits for a picture that does not come."""
    pipeline.sources["door"] = replace(pipeline.sources["door"], state=state)
    answer = ask(watched.url, "GET", f"/v1/streams/door/preview.{kind}")
    assert (answer.status, answer.error, pipeline.waits) == (409, text, 0)


def test_source_that_is_over_is_not_asked_without_a_pause(watched: ApiServer, pipeline: FakePipeline) -> None:
    """It answers at once that there is no picture; its viewer costs a question a second."""
    pipeline.pictures, pipeline.max_wait_s = False, 0.0
    with watch(watched.url) as viewer:
        assert viewer.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.7)
        assert pipeline.waits <= 2


def test_viewers_that_come_and_vanish_leave_no_thread(watched: ApiServer, pipeline: FakePipeline) -> None:
    """Six, one after the other, each gone without a word."""
    before = threading.active_count()
    for _ in range(6):
        wait_until_served(watched.url)
    until = time.monotonic() + 20.0
    while threading.active_count() > before:
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.05)
    waits = pipeline.waits
    time.sleep(0.3)
    assert pipeline.waits == waits  # without viewers no picture is requested


def test_stop_ends_viewers_at_once(pipeline: FakePipeline) -> None:
    """A program that ends does not wait for who watches."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    with serving(pipeline) as api:
        viewer = watch(api.url)
        read_until(viewer, 1, JPEG)
        began = time.monotonic()
        api.stop(10.0)
        assert time.monotonic() - began < 6.0
        viewer.close()
