"""Reads frames of a video file, a camera or an iterable with OpenCV, for Client.stream."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from penstock.protocol.errors import ConnectionFailed, InvalidRequest

LIVE_SCHEMES = ("rtsp", "rtsps", "rtmp", "udp")
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 10.0
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
VideoSource = str | PathLike[str] | int | Iterable[Pixels]


@dataclass(frozen=True, slots=True, eq=False)
class VideoFrame:
    """image: (height, width, 3) uint8 BGR. number: frame number in the source, from 0; dropped frames are counted.

    time_s: position in the video, or seconds since a camera's first frame; None for an iterable.
    """

    image: Pixels
    number: int
    time_s: float | None


def is_live(source: VideoSource) -> bool:
    """Whether the source is live: a webcam's index or a camera's URL."""
    return isinstance(source, int) or (
        isinstance(source, str) and urlsplit(source).scheme in ("rtsp", "rtsps", "rtmp", "udp")
    )


def frames_of(source: VideoSource) -> Iterator[VideoFrame]:
    """Yields all frames. Raises InvalidRequest, and ConnectionFailed if a camera stops sending."""
    if isinstance(source, int | str | PathLike):
        return _captured(source)
    return (VideoFrame(image, number, None) for number, image in enumerate(source))


class LatestFrames:
    """Iterates over the newest frames of a live source. Its own thread reads the source; older frames are dropped.

    Ends, or raises the source's error, when the source does. `close` ends the thread.
    """

    def __init__(self, source: VideoSource) -> None:
        """Starts the thread."""
        self._frames = frames_of(source)
        self._changed = threading.Condition()
        self._newest: VideoFrame | None = None
        self._error: BaseException | None = None
        self._is_ended = False
        self._thread = threading.Thread(target=self._read, name="penstock-frames", daemon=True)
        self._thread.start()

    def __iter__(self) -> "LatestFrames":
        return self

    def __next__(self) -> VideoFrame:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._is_ended)
            frame, self._newest = self._newest, None
            if frame is not None:
                return frame
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Ends the thread after its current read, at most READ_TIMEOUT_S."""
        with self._changed:
            self._is_ended = True
        self._thread.join()

    def _read(self) -> None:
        try:
            for frame in self._frames:
                with self._changed:
                    if self._is_ended:
                        return
                    self._newest = frame
                    self._changed.notify()
        except BaseException as error:  # noqa: BLE001 - at a thread's root: raised by the iterator
            self._error = error
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify()


def _captured(source: str | PathLike[str] | int) -> Iterator[VideoFrame]:
    import cv2

    name, ends_early = _shown(source), is_live(source)
    if isinstance(source, int):
        capture = cv2.VideoCapture(source)
    else:
        limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, int(OPEN_TIMEOUT_S * 1e3)]
        limits += [cv2.CAP_PROP_READ_TIMEOUT_MSEC, int(READ_TIMEOUT_S * 1e3)]
        capture = cv2.VideoCapture(fspath(source), cv2.CAP_FFMPEG, limits)
    try:
        if not capture.isOpened():
            raise InvalidRequest(
                f"{name} cannot be opened as a video: give a file, a camera's URL, or a webcam's index"
            )
        number = 0
        while True:
            is_read, image = capture.read()
            if not is_read:
                break
            yield VideoFrame(image, number, capture.get(cv2.CAP_PROP_POS_MSEC) / 1e3)
            number += 1
    finally:
        capture.release()
    if not number:
        raise InvalidRequest(f"{name} has no readable frame: check the file or the camera")
    if ends_early:
        raise ConnectionFailed(f"{name} stopped sending after {number} frames: check the camera and its network")


def _shown(source: str | PathLike[str] | int) -> str:
    """The URL without user, password and query."""
    if isinstance(source, int):
        return f"the camera {source}"
    text = fspath(source)
    parts = urlsplit(text)
    if not parts.netloc:
        return text
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
