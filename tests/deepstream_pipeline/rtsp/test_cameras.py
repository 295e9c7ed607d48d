"""The rig itself: its cameras do what the chaos tests take for granted."""

import time
from pathlib import Path

import av
import psutil
import pytest
from av.error import FFmpegError

from tests.deepstream_pipeline.clips import number_of
from tests.deepstream_pipeline.rtsp.cameras import Camera, frames_of, rate_of, rtsp_server


def numbers_of(frames: list[tuple[float, float, av.VideoFrame]]) -> list[int]:
    """What the pictures say."""
    return [number_of(frame.to_ndarray(format="rgb24")) for _, _, frame in frames]


def test_camera_plays_its_clip_in_real_time_again_and_again(folder: Path, clip: Path) -> None:
    """Every picture in its order from the first, at its rate, across the end of the clip."""
    with rtsp_server([Camera("/a", [clip])], folder) as server:
        frames = frames_of(server.url("/a"), 4.0)
    numbers = numbers_of(frames)
    assert numbers == [n % 50 for n in range(len(numbers))]
    assert len(numbers) > 60
    assert rate_of(frames) == pytest.approx(25.0, rel=0.15)
    assert (len(frames) - 1) / (frames[-1][1] - frames[0][1]) == pytest.approx(25.0, rel=0.02)


def test_slow_camera_sends_at_half_the_rate(folder: Path, clip: Path) -> None:
    """By the clock and by its own times."""
    with rtsp_server([Camera("/a", [clip], rate=0.5)], folder) as server:
        frames = frames_of(server.url("/a"), 3.0)
    assert (len(frames) - 1) / (frames[-1][1] - frames[0][1]) == pytest.approx(12.5, rel=0.02)
    assert 9.0 < rate_of(frames) < 18.0  # a reader on a busy machine is behind at first, and reads faster then


def test_camera_changes_its_resolution_in_mid_stream(folder: Path, clip: Path, other: Path) -> None:
    """Both sizes in one connection, the second after all of the first."""
    with rtsp_server([Camera("/a", [clip, other])], folder) as server:
        frames = frames_of(server.url("/a"), 3.5)
    sizes = [(frame.width, frame.height) for _, _, frame in frames]
    assert sizes[:50] == [(160, 96)] * 50
    assert (320, 192) in sizes[50:]


@pytest.mark.parametrize("is_digest", [False, True])
def test_camera_with_a_password_lets_in_who_has_it(folder: Path, clip: Path, is_digest: bool) -> None:
    """401 to others; its neighbour without one is open; what is not there is 404."""
    cameras = [Camera("/key", [clip], user="ann", password="pw"), Camera("/open", [clip])]
    with rtsp_server(cameras, folder, is_digest=is_digest) as server:
        assert len(frames_of(server.url("/key"), 0.5)) > 2
        assert len(frames_of(server.url("/open"), 0.5)) > 2
        for url in (server.url("/key", user=""), server.url("/key", password="wrong")):
            with pytest.raises(av.error.HTTPUnauthorizedError):
                frames_of(url, 0.5)
        with pytest.raises(av.error.HTTPNotFoundError):
            frames_of(server.url("/nothing"), 0.5)


def test_silent_camera_opens_and_sends_nothing(folder: Path, clip: Path) -> None:
    """A reader's own time-out ends the waiting, not the server."""
    with rtsp_server([Camera("/a", [clip], first_units=1)], folder) as server:
        began = time.monotonic()
        with pytest.raises(FFmpegError):
            frames_of(server.url("/a"), 5.0, timeout_s=1.0)
        assert time.monotonic() - began > 0.9
        assert server.tell("frames /a") == "1"


def test_camera_that_is_over_ends_its_stream(folder: Path, clip: Path) -> None:
    """The reader sees an end before long."""
    with rtsp_server([Camera("/a", [clip], end_after_s=1.0)], folder) as server:
        began = time.monotonic()
        try:
            frames = frames_of(server.url("/a"), 30.0, timeout_s=3.0)
        except FFmpegError:
            frames = []
        assert time.monotonic() - began < 15.0
        assert len(frames) < 60


def test_camera_is_silenced_and_speaks_again_while_it_plays(folder: Path, clip: Path) -> None:
    """By a line to the server."""
    options = {"rtsp_transport": "tcp"}
    with (
        rtsp_server([Camera("/a", [clip])], folder) as server,
        av.open(server.url("/a"), options=options, timeout=(10.0, 10.0)) as container,
    ):
        pictures = container.decode(video=0)
        next(pictures)
        server.tell("silence /a")
        time.sleep(0.2)
        sent = server.tell("frames /a")
        time.sleep(0.5)
        assert server.tell("frames /a") == sent
        server.tell("speak /a")
        for _ in range(30):
            next(pictures)
        assert int(server.tell("frames /a")) > int(sent)


def test_killed_server_comes_back_at_its_port(folder: Path, clip: Path) -> None:
    """With the same addresses."""
    with rtsp_server([Camera("/a", [clip])], folder) as server:
        url = server.url("/a")
        assert len(frames_of(url, 0.5)) > 2
        server.kill()
        with pytest.raises(FFmpegError):
            frames_of(url, 0.5)
        server.restart()
        assert server.url("/a") == url
        assert len(frames_of(url, 0.5)) > 2


def test_frozen_server_says_nothing_and_goes_on_when_thawed(folder: Path, clip: Path) -> None:
    """SIGSTOP: connections are taken by the kernel and no one answers."""
    with rtsp_server([Camera("/a", [clip])], folder) as server:
        server.freeze()
        with pytest.raises(FFmpegError):
            frames_of(server.url("/a"), 0.5, timeout_s=1.0)
        server.thaw()
        assert len(frames_of(server.url("/a"), 0.5)) > 2


def test_server_that_is_gone_leaves_no_process(folder: Path, clip: Path) -> None:
    """Whatever the test did to it: even one that stands still."""
    with rtsp_server([Camera("/a", [clip])], folder) as server:
        pid = server.pid
        server.freeze()
    assert not psutil.pid_exists(pid)


def test_word_that_is_not_known_is_answered(folder: Path, clip: Path) -> None:
    """A test that misspells a line fails."""
    with rtsp_server([Camera("/a", [clip])], folder) as server:
        for line in ("sing /a", "silence /b"):
            with pytest.raises(AssertionError):
                server.tell(line)
