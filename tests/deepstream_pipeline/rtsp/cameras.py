"""Cameras for tests: GStreamer's RTSP server as a child, started, asked, stopped and killed.

with rtsp_server([Camera("/a", [clip])], folder) as server:
    open_video(server.url("/a"))
    server.tell("silence /a"); server.freeze(); server.thaw(); server.kill(); server.restart()
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import av
import psutil
import pytest

PYTHON = "/usr/bin/python3"  # Debian's, which has gi
PROGRAM = Path(__file__).with_name("server.py")
START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 15.0
_UNIT = struct.Struct(">IQ")


@dataclass(frozen=True)
class Camera:
    """A mount of the server. clips: H.264 files, played in turn and again; of other sizes: it changes in mid-stream.

    rate: of real time, 0.5 for a slow one. user: asked for, where there is one. first_units: so many pictures are sent
    and then nothing, -1 for no end (the first is needed to answer DESCRIBE). end_after_s: then the stream ends.
    is_shared: all clients see the same picture, and may come in the middle of a group. recording: instead of clips, an
    H.264 MP4 that each client gets from its beginning, with its duration, as a recorder plays it.
    """

    path: str
    clips: Sequence[Path] = ()
    fps: float = 25.0
    rate: float = 1.0
    user: str = ""
    password: str = ""
    first_units: int = -1
    end_after_s: float = 0.0
    is_shared: bool = False
    recording: str = ""


@functools.cache
def reason_against() -> str:
    """Why no RTSP server can run here, empty where one can."""
    if shutil.which(PYTHON) is None:
        return f"no {PYTHON}: the RTSP server needs Debian's Python"
    program = (
        "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import Gst, GstRtspServer; "
        "Gst.init(None); raise SystemExit(not all(map(Gst.ElementFactory.find, ('h264parse', 'rtph264pay', 'appsrc'))))"
    )
    tried = subprocess.run([PYTHON, "-c", program], capture_output=True, timeout=60, check=False)
    if tried.returncode:
        return "no RTSP server: Debian's gir1.2-gst-rtsp-server-1.0 and the good and bad plugins have it"
    return ""


class RtspServer:
    """A server process and its cameras. The same port after `restart`."""

    def __init__(self, cameras: Sequence[Camera], folder: Path, *, is_digest: bool = False, port: int = 0) -> None:
        """folder: for the clips' packets, which are written there once."""
        self._cameras = {camera.path: camera for camera in cameras}
        self._folder, self._is_digest = folder, is_digest
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._mounts = [self._mount(camera) for camera in cameras]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, path: str, *, user: str | None = None, password: str | None = None) -> str:
        """The camera's address, with its own user and password unless others are given."""
        camera = self._cameras.get(path)
        user = (camera.user if camera else "") if user is None else user
        password = (camera.password if camera else "") if password is None else password
        return f"rtsp://{f'{user}:{password}@' if user else ''}127.0.0.1:{self.port}{path}"

    def start(self) -> None:
        """Serve."""
        options_ = {"port": self.port, "is_digest": self._is_digest, "mounts": self._mounts}
        self._process = subprocess.Popen(
            [PYTHON, str(PROGRAM), json.dumps(options_)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
        )
        said = self._line(START_TIMEOUT_S)
        assert said.startswith("PORT "), said
        self.port = int(said.removeprefix("PORT "))

    def tell(self, line: str) -> str:
        """Have it do what server.py says a line does; what it answers after OK."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        said = self._line(ANSWER_TIMEOUT_S)
        assert said.startswith("OK"), said
        return said[2:].strip()

    def freeze(self) -> None:
        """It stands still (SIGSTOP), its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once (SIGKILL)."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(10.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def restart(self) -> None:
        """It comes back at the same port."""
        self.kill()
        self.start()

    def cpu_s(self) -> float:
        """What it took of the CPU so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def _line(self, timeout_s: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise AssertionError(f"the RTSP server said nothing within {timeout_s} s")
        return self._process.stdout.readline().decode().strip()

    def _mount(self, camera: Camera) -> dict[str, object]:
        return asdict(camera) | {"clips": [str(write_units(self._folder, Path(clip))) for clip in camera.clips]}


def write_units(folder: Path, clip: Path) -> Path:
    """The clip's H.264 access units, as server.py reads them; written once, beside nothing of the clip's own."""
    written = folder / f"{clip.name}.units"
    if written.exists():
        return written
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        is_framed = bool(stream.codec_context.extradata) and stream.codec_context.extradata[0] == 1
        bits = av.BitStreamFilterContext("h264_mp4toannexb", stream) if is_framed else None
        parts = []
        for packet in container.demux(stream):
            for unit in bits.filter(packet) if bits else [packet]:
                if unit.size:
                    pts_s = float((unit.pts or 0) * stream.time_base)
                    parts.append(_UNIT.pack(unit.size, max(int(pts_s * 1e6), 0)) + bytes(unit))
    written.write_bytes(b"".join(parts))
    return written


@contextlib.contextmanager
def rtsp_server(
    cameras: Sequence[Camera], folder: Path, *, is_digest: bool = False, port: int = 0
) -> Iterator[RtspServer]:
    """A server that runs until the block ends, whatever became of it. Skips where none can run."""
    if reason_against():
        pytest.skip(reason_against())
    server = RtspServer(cameras, folder, is_digest=is_digest, port=port)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def frames_of(url: str, seconds: float, *, timeout_s: float = 5.0) -> list[tuple[float, float, av.VideoFrame]]:
    """(when it came, its pts in seconds, picture) of what a plain reader sees in so long, from its first picture on."""
    frames: list[tuple[float, float, av.VideoFrame]] = []
    options = {"rtsp_transport": "tcp", "analyzeduration": "100000"}
    with av.open(url, options=options, timeout=(timeout_s, timeout_s)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "SLICE"  # by frames it would hold some back
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            now = time.monotonic()
            frames.append((now, float(frame.time or 0.0), frame))
            if now - frames[0][0] >= seconds:
                break
    return frames


def rate_of(frames: Sequence[tuple[float, float, av.VideoFrame]], *, after_s: float = 1.0) -> float:
    """Frames a second as they came, without the first second's: libav looks at a few before it gives the first."""
    steady = [came for came, _, _ in frames if came - frames[0][0] >= after_s]
    return (len(steady) - 1) / (steady[-1] - steady[0])
