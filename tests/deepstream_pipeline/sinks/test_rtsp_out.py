"""Pushing to an RTSP server: GStreamer's, real, killed, stopped and returning."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks import rtsp_out
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink, shown
from penstock_video.types import FrameResult
from tests.deepstream_pipeline.clips import number_of
from tests.deepstream_pipeline.sinks.results import PLAIN, Clock, numbered, result
from tests.deepstream_pipeline.sinks.videos import read_video
from tests.support.ports import free_port

SYSTEM_PYTHON = "/usr/bin/python3"
SERVER = Path(__file__).parent / "rtsp_record_server.py"
DEADLINE_S = 40.0  # for a machine that stands still at times
UNHURRIED_S = 3.0  # a write may take so long on such a machine; a server that hangs would make it far longer


@contextmanager
def serving(port: int, folder: Path, *account: str) -> Iterator[subprocess.Popen[bytes]]:
    """GStreamer's server on that port; what is pushed to /NAME lies in folder/NAME.h264."""
    command = [SYSTEM_PYTHON, str(SERVER), str(port), str(folder), *account]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            if server.stdout.readline() != b"ready\n":
                server.kill()
                pytest.skip(f"no GStreamer RTSP server here: {server.stderr.read().decode()[-200:]}")
            yield server
        finally:
            server.send_signal(signal.SIGCONT)
            server.kill()


class Writer:
    """Writes pictures as a camera would, and notes what is reported and how long a write takes at most."""

    def __init__(self, sink: RtspOutSink, picture: Callable[[int], FrameResult] = numbered) -> None:
        self.sink, self.picture = sink, picture
        self.number = 0
        self.reported: list[str] = []
        self.longest_s = 0.0

    def until(self, is_enough: Callable[[], bool]) -> None:
        """Write until it is enough."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_enough():
            assert time.monotonic() < deadline, self.reported
            begun = time.monotonic()
            try:
                self.sink.write(self.picture(self.number))
            except SinkFailed as failure:
                self.reported.append(failure.message)
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.number += 1
            time.sleep(0.02)

    def is_connected(self) -> bool:
        """Whether the server takes what is sent."""
        ways = self.sink._ways.values()
        return all(way.push is not None and way.push.is_connected for way in ways) and bool(ways)


@pytest.fixture
def port() -> int:
    """Of the server."""
    return free_port()


def sink_to(port: int, *, timeout_s: float = 10.0, account: str = "") -> RtspOutSink:
    """A sink of one source that pushes to the server's /one."""
    options = RtspOutOptions(f"rtsp://{account}127.0.0.1:{port}/one", timeout_s=timeout_s)
    return RtspOutSink(options, Osd(PLAIN), is_single=True)


def has_begun(path: Path) -> bool:
    """Whether the server writes the stream: before that, a goodbye makes it forget what it was sent."""
    return path.exists() and path.stat().st_size > 0


def wait_for_frames(path: Path, count: int) -> list[int]:
    """The numbers of the pictures in a file that a server writes, when they are there."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        numbers = [number_of(picture) for picture in read_video(path).pictures] if path.exists() else []
        if len(numbers) >= count or time.monotonic() > deadline:
            return numbers
        time.sleep(0.2)


def test_rtsp_out_of_several_sources_goes_to_a_path_of_each(tmp_path: Path, port: int) -> None:
    """Each source has a stream of its own behind the URL; one that changes its size goes on in it."""
    with serving(port, tmp_path):
        sink = RtspOutSink(RtspOutOptions(f"rtsp://127.0.0.1:{port}/"), Osd(PLAIN))
        writer = Writer(
            sink, lambda number: numbered(number // 2, source_id=f"cam{number % 2}", size=size_of(number // 2))
        )
        files = [tmp_path / "cam0.h264", tmp_path / "cam1.h264"]
        writer.until(lambda: writer.number >= 80 and all(has_begun(path) for path in files))
        count = writer.number // 2
        sink.end_source("cam0")
        sink.close()
        for path in files:
            assert wait_for_frames(path, count)[:count] == list(range(count))


def size_of(number: int) -> tuple[int, int]:
    """Another one from the twentieth frame on."""
    return (160, 96) if number < 20 else (320, 192)


def test_rtsp_out_server_that_dies_is_reported_once_and_found_again(tmp_path: Path, port: int) -> None:
    """FAULTS 58: refused, there, killed, there again: reported once each time, and the stream goes on by itself."""
    sink = sink_to(port)
    writer = Writer(sink)
    writer.until(lambda: bool(writer.reported))
    assert "Connection refused" in writer.reported[0]
    with serving(port, tmp_path) as server:
        writer.until(writer.is_connected)
        assert len(writer.reported) == 1
        server.kill()
        writer.until(lambda: len(writer.reported) == 2)
    with serving(port, tmp_path):
        writer.until(writer.is_connected)
        sink.close()
    assert len(writer.reported) == 2
    assert sink.lost > 0
    assert writer.longest_s < UNHURRIED_S


def test_rtsp_out_server_that_hangs_blocks_nothing(tmp_path: Path, port: int) -> None:
    """FAULTS 58: a stopped server, at the connection or in the stream, costs its own stream only and no write waits."""
    noise = np.random.default_rng(1).integers(0, 255, (240, 320, 3), np.uint8)

    def noisy(number: int) -> FrameResult:
        reported = result(number)
        return replace(reported, frame=replace(reported.frame, image=np.roll(noise, number * 7, axis=1)))

    sink = sink_to(port, timeout_s=1.0)
    writer = Writer(sink, noisy)
    with serving(port, tmp_path) as server:
        server.send_signal(signal.SIGSTOP)
        writer.until(lambda: bool(writer.reported))
        assert "the server takes longer than 1 s" in writer.reported[0]
        server.send_signal(signal.SIGCONT)
        writer.until(writer.is_connected)
        server.send_signal(signal.SIGSTOP)
        writer.until(lambda: len(writer.reported) == 2)
        assert "the server takes longer than 1 s" in writer.reported[1]
        server.send_signal(signal.SIGCONT)
        writer.until(writer.is_connected)
        sink.close()
    assert writer.longest_s < UNHURRIED_S


def test_rtsp_out_wrong_password_is_reported_without_it(tmp_path: Path, port: int) -> None:
    """A server that refuses says so; neither user nor password is in the text; the right ones are let in."""
    with serving(port, tmp_path, "ann", "right"):
        writer = Writer(sink_to(port, account="ann:wrong@"))
        writer.until(lambda: bool(writer.reported))
        writer.sink.close()
        assert "401 Unauthorized" in writer.reported[0]
        assert "wrong" not in writer.reported[0]
        assert "ann" not in writer.reported[0]
        right = Writer(sink_to(port, account="ann:right@"))
        right.until(right.is_connected)
        right.sink.close()


DEAF = ("sleep", "600")


def test_rtsp_out_process_that_reads_nothing_is_bounded_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits has a bound; pictures over it are dropped and counted; a process that is stuck is ended in time."""
    monkeypatch.setattr(rtsp_out, "_MAX_PENDING_BYTES", 20_000)
    clock = Clock()
    options = RtspOutOptions("rtsp://127.0.0.1:1/one", timeout_s=1.0)
    sink = RtspOutSink(options, Osd(PLAIN), is_single=True, clock=clock, command=DEAF)
    noise = np.random.default_rng(1).integers(0, 255, (240, 320, 3), np.uint8)
    for number in range(60):
        reported = result(number)
        sink.write(replace(reported, frame=replace(reported.frame, image=np.roll(noise, number * 7, axis=1))))
    way = sink._ways["cam"]
    assert way.push is not None
    assert len(way.push._pending) < 20_000 + 500_000
    assert sink.lost > 10
    pid = way.push._process.pid
    clock.now += 2.5
    with pytest.raises(SinkFailed, match="its process takes nothing"):
        sink.write(numbered(61, size=(320, 240)))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    sink.close()


def test_rtsp_out_close_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes no goodbye holds no one up, however many sources push to it; no process is left."""
    monkeypatch.setattr(rtsp_out, "CLOSE_S", 0.5)
    sink = RtspOutSink(RtspOutOptions("rtsp://127.0.0.1:1/"), Osd(PLAIN), command=DEAF)
    for number in range(4):
        sink.write(numbered(0, source_id=f"cam{number}"))
    pids = [way.push._process.pid for way in sink._ways.values() if way.push is not None]
    begun = time.monotonic()
    sink.close()
    assert time.monotonic() - begun < UNHURRIED_S
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rtsp_out_url_is_shown_without_secrets() -> None:
    """Neither user, password nor query of a URL is shown."""
    assert shown("rtsp://ann:secret@host:8554/live?token=x") == "rtsp://host:8554/live"
    assert shown("rtsps://host/a") == "rtsps://host/a"


def test_rtsp_out_of_a_source_that_comes_later_goes_elsewhere() -> None:
    """A program of one source pushes to the address itself; two streams never go to one."""
    sink = RtspOutSink(RtspOutOptions("rtsp://127.0.0.1:1/one"), Osd(PLAIN), is_single=True, command=DEAF)
    for source_id in ("first", "second"):
        reported = numbered(0)
        sink.write(replace(reported, frame=replace(reported.frame, source_id=source_id)))
    urls = [way.url for way in sink._ways.values()]
    for way in sink._ways.values():
        assert way.push is not None
        way.push.kill()
        way.push = None
    sink.close()
    assert urls == ["rtsp://127.0.0.1:1/one", "rtsp://127.0.0.1:1/one/second"]
