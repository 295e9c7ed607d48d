"""Results for frames of videos, cameras and iterables."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.client.video import LatestFrames, is_live
from penstock.protocol.errors import InvalidRequest
from tests.cli.conftest import StandIn
from tests.deepstream_pipeline.clips import write_clip


def frame(number: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """A frame of uniform brightness."""
    return np.full((16, 16, 3), number, np.uint8)


def test_every_frame_of_a_file_has_its_result(client: Client, stand_in: StandIn, tmp_path: Path) -> None:
    """Frames come in order with number and time; options are passed to infer."""
    path = write_clip(tmp_path / "video.mp4", frames=12)
    pairs = list(client.stream("ppe", path, conf=0.5))
    assert [one.number for one, _ in pairs] == list(range(12))
    times = [one.time_s for one, _ in pairs]
    assert times == sorted(times)
    assert all(len(result) == 2 for _, result in pairs)
    assert {asked.query for asked in stand_in.asked} == {"conf=0.5"}
    assert pairs[0][1].draw(pairs[0][0].image).shape == pairs[0][0].image.shape


def test_iterable_is_read_as_results_are_consumed(client: Client) -> None:
    """No frame is read beyond those in flight, and none after the stream is closed."""
    taken: list[int] = []

    def frames() -> Iterator["np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]:
        for number in range(100):
            taken.append(number)
            yield frame(number)

    stream = client.stream("ppe", frames(), concurrency=3)
    first, _ = next(stream)
    assert (first.number, first.time_s, taken) == (0, None, [0, 1, 2])
    stream.close()  # type: ignore[attr-defined]
    assert taken == [0, 1, 2]


def test_frames_that_are_not_consumed_in_time_are_dropped() -> None:
    """Only the newest frame is delivered; then the source's error is raised."""
    is_read = threading.Event()

    def frames() -> Iterator["np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]:
        for number in range(10):
            yield frame(number)
        is_read.set()
        raise RuntimeError("the camera is gone")

    latest = LatestFrames(frames())
    assert is_read.wait(10.0)
    assert next(latest).number == 9
    with pytest.raises(RuntimeError, match="the camera is gone"):
        next(latest)
    latest.close()


def test_closed_stream_ends_its_thread(client: Client) -> None:
    """The thread ends even if the camera never stops."""

    def frames() -> Iterator["np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]:
        while True:
            yield frame(0)

    stream = client.stream("ppe", frames(), drop=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("penstock")]


async def test_async_stream_is_the_same(stand_in: StandIn, tmp_path: Path) -> None:
    """AsyncClient.stream yields every frame in order, and no thread remains if it ends early."""
    path = write_clip(tmp_path / "video.mp4", frames=6)
    async with AsyncClient(stand_in.url, api_key="") as client:
        assert [one.number async for one, _ in client.stream("ppe", path)] == list(range(6))
        stream = client.stream("ppe", (frame(0) for _ in range(1000)), drop=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name == "penstock-frames"]


def test_source_that_cannot_be_opened_is_named_without_its_password(client: Client, tmp_path: Path) -> None:
    """The error does not contain the credentials in a camera's URL."""
    with pytest.raises(InvalidRequest, match=r"^rtsp://127.0.0.1:9/live cannot be opened as a video") as caught:
        next(client.stream("ppe", "rtsp://user:secret@127.0.0.1:9/live?token=secret"))
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest, match=r"gone\.mp4 cannot be opened"):
        next(client.stream("ppe", tmp_path / "gone.mp4"))


def test_cameras_are_live_and_files_are_not() -> None:
    """By default frames are dropped for webcams and camera URLs, not for files."""
    assert [is_live(one) for one in (0, "rtsp://a/b", "a.mp4", Path("a.mp4"), "https://a/b.mp4", [])] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
