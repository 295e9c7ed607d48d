"""What may be opened, how long that may take, and what is said where it fails."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder
from penstock_video.errors import DecodeError, PipelineError, SourceNotAllowed, SourceRefused, SourceUnavailable
from tests.deepstream_pipeline.clips import truncated, write_clip
from tests.deepstream_pipeline.decode.web import Web, web

SHORT = DecodeOptions(open_timeout_s=1.0, read_timeout_s=1.0)


@pytest.fixture(name="site")
def _site() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest.fixture(name="clip", scope="module")
def _clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.ts", frames=10)


def frames_of(uri: str, options: DecodeOptions = SHORT) -> int:
    """How many pictures it has."""
    decoder = Decoder(uri, options)
    try:
        return sum(len(decoder.decode(packet)) for packet in decoder.packets())
    finally:
        decoder.close()


def failure(uri: str) -> PipelineError:
    """How it fails."""
    with pytest.raises(PipelineError) as raised:
        frames_of(uri)
    return raised.value


def posing_as_videos(clip: Path, secret: str) -> dict[str, str]:
    """Texts that lead FFmpeg elsewhere, if it lets them."""
    return {
        "m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile '{secret}'\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
        "mpd": f'<?xml version="1.0"?><MPD type="static"><BaseURL>{secret}</BaseURL><Period></Period></MPD>',
        "text": "no video at all\n" * 50,
    }


@pytest.mark.parametrize("kind", ["m3u8", "concat", "sdp", "mpd", "text"])
@pytest.mark.parametrize("suffix", [".mp4", ".m3u8", ".ts", ".ffconcat", ".sdp", ""])
def test_text_that_poses_as_a_video_opens_nothing(kind: str, suffix: str, clip: Path, tmp_path: Path) -> None:
    """A playlist, a list of files or a session description is no source, whatever its name: it would read others."""
    for number, secret in enumerate((f"file://{clip}", str(clip), clip.name, "file:///etc/passwd")):
        path = tmp_path / f"{number}{suffix}"
        path.write_text(posing_as_videos(clip, secret)[kind])
        (tmp_path / clip.name).write_bytes(clip.read_bytes())
        assert isinstance(failure(str(path)), SourceNotAllowed | DecodeError), secret
        assert isinstance(failure(f"file:{path}"), SourceNotAllowed | DecodeError), secret


def test_file_that_is_no_video_is_a_decode_error(tmp_path: Path, clip: Path) -> None:
    """The error names the fault and the file: empty, a text, an MP4 without its index or of an unknown codec."""
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video\n" * 100)
    truncated(tmp_path / "cut.mp4", write_clip(tmp_path / "whole.mp4", frames=10))
    whole = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "unknown.mp4").write_bytes(whole.replace(b"avc1", b"xxxx"))
    for name in ("empty.mp4", "text.mp4", "cut.mp4", "unknown.mp4"):
        error = failure(str(tmp_path / name))
        assert isinstance(error, DecodeError)
        assert name in error.message


def test_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for without end, a device read without end; a folder is none."""
    os.mkfifo(tmp_path / "pipe.mp4")
    began = time.monotonic()
    for path in (tmp_path / "pipe.mp4", tmp_path, Path("/dev/zero")):
        assert isinstance(failure(str(path)), SourceNotAllowed)
    assert time.monotonic() - began < 5
    assert isinstance(failure(str(tmp_path / "missing.mp4")), SourceUnavailable)
    assert isinstance(failure("/dev/video99"), SourceUnavailable)


@pytest.mark.parametrize("suffix", [".ts", ".mp4", ".mkv", ".avi"])
def test_file_over_http_is_read(site: Web, tmp_path: Path, suffix: str) -> None:
    """A clip that a web server holds is a file, with all its frames."""
    site.pages[f"/a{suffix}"] = write_clip(tmp_path / f"a{suffix}", frames=10).read_bytes()
    assert frames_of(site.url(f"/a{suffix}")) == 10
    site.redirects["/moved"] = f"/a{suffix}"
    assert frames_of(site.url("/moved")) == 10


def test_mp4_that_needs_a_server_that_seeks_says_so(site: Web, tmp_path: Path) -> None:
    """Its index stands behind its pictures, and this server answers no Range."""
    noise = np.random.default_rng(1).integers(0, 255, (480, 640, 3), np.uint8)
    clip = write_clip(tmp_path / "a.mp4", frames=8, size=(640, 480), picture=lambda *_: noise)
    site.pages["/a.mp4"] = clip.read_bytes()
    decoder = Decoder(site.url("/a.mp4"), SHORT)
    with pytest.raises(SourceUnavailable, match=r"Range, an MP4 has to begin with its index"):
        next(decoder.packets())
    decoder.close()


def test_mjpeg_camera_over_http_is_read(site: Web, tmp_path: Path) -> None:
    """The oldest kind of camera: JPEGs in a multipart answer without an end. That it hangs up is no end in order."""
    container = av.open(str(write_clip(tmp_path / "a.avi", frames=10, codec="mjpeg")))
    jpegs = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    container.close()
    head = b"--b\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
    site.pages["/mjpeg"] = b"".join(head % len(jpeg) + jpeg + b"\r\n" for jpeg in jpegs)
    site.kinds["/mjpeg"] = "multipart/x-mixed-replace;boundary=b"
    decoder = Decoder(site.url("/mjpeg"), SHORT)
    assert decoder.facts.is_live
    pictures: list[object] = []
    with pytest.raises(SourceUnavailable):
        pictures.extend(picture for packet in decoder.packets() for picture in decoder.decode(packet))
    decoder.close()
    assert len(pictures) >= 9


def test_hls_over_http_is_read(site: Web, clip: Path) -> None:
    """A playlist that comes over HTTP leads to segments over HTTP."""
    site.pages["/1.ts"] = clip.read_bytes()
    site.pages["/live.m3u8"] = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n1.ts\n#EXT-X-ENDLIST\n"
    assert frames_of(site.url("/live.m3u8")) == 10


def test_address_over_http_leads_to_no_file(site: Web, clip: Path) -> None:
    """Neither a playlist nor a redirection of a web server makes this machine read its own files."""
    for number, secret in enumerate((f"file://{clip}", str(clip), f"concat:{clip}", f"crypto:file://{clip}")):
        for name, content in posing_as_videos(clip, secret).items():
            site.pages[f"/{number}.{name}"] = content.encode()
            assert isinstance(failure(site.url(f"/{number}.{name}")), PipelineError), secret
        site.redirects[f"/{number}"] = secret
        assert isinstance(failure(site.url(f"/{number}")), PipelineError)


def test_playlist_may_not_name_a_file_among_its_segments(site: Web, clip: Path) -> None:
    """The segments before it are read, the file is not: ten frames would be twenty."""
    site.pages["/1.ts"] = clip.read_bytes()
    lines = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n1.ts\n#EXTINF:9,\nfile://{clip}\n#EXT-X-ENDLIST\n"
    site.pages["/live.m3u8"] = lines.encode()
    assert frames_of(site.url("/live.m3u8")) == 10


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/status/401", SourceRefused),
        ("/status/403", SourceRefused),
        ("/status/404", SourceUnavailable),
        ("/status/500", SourceUnavailable),
        ("/status/429", SourceUnavailable),
        ("/silent", SourceUnavailable),
    ],
)
def test_refusals_of_a_server_are_distinguished(site: Web, path: str, expected: type[PipelineError]) -> None:
    """Another password, or another time: the first is asked slowly. A silent server costs the time-out, not more."""
    began = time.monotonic()
    error = failure(site.url(path + "?token=hunter2", "anna:hunter2@"))
    assert type(error) is expected
    assert time.monotonic() - began < 10
    assert "hunter2" not in error.message
    assert "anna" not in error.message
    assert f"127.0.0.1:{site.port}" in error.message


def test_port_that_no_one_listens_on_is_unavailable() -> None:
    """A camera that is off refuses the connection, and its password stays secret."""
    for scheme in ("rtsp", "http"):
        error = failure(f"{scheme}://anna:hunter2@127.0.0.1:1/1")
        assert type(error) is SourceUnavailable
        assert "hunter2" not in error.message


def test_server_that_stops_in_the_middle_is_unavailable(site: Web, tmp_path: Path) -> None:
    """Its connection stays open and says nothing more: the read time-out ends it."""
    site.pages["/a.ts"] = write_clip(tmp_path / "a.ts", frames=200, size=(320, 240)).read_bytes()
    decoder = Decoder(site.url("/a.ts/stops"), SHORT)
    pictures: list[object] = []
    began = time.monotonic()
    with pytest.raises(SourceUnavailable):
        pictures.extend(picture for packet in decoder.packets() for picture in decoder.decode(packet))
    decoder.close()
    assert pictures
    assert time.monotonic() - began < 10


def test_pictures_that_are_too_large_are_refused(tmp_path: Path) -> None:
    """A limit of pixels holds before the first is decoded."""
    path = str(write_clip(tmp_path / "a.mp4", frames=2, size=(320, 240)))
    assert frames_of(path, DecodeOptions(max_pixels=320 * 240)) == 2
    with pytest.raises(DecodeError, match="320x240"):
        frames_of(path, DecodeOptions(max_pixels=320 * 240 - 1))


def test_camera_that_takes_the_call_and_says_nothing_is_unavailable() -> None:
    """A stopped RTSP server: the connection is there, no word comes, the time-out ends it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        error = failure(f"rtsp://anna:hunter2@127.0.0.1:{silent.getsockname()[1]}/1")
    assert type(error) is SourceUnavailable
    assert time.monotonic() - began < 10
    assert "hunter2" not in error.message
