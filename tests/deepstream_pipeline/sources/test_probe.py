"""An address is tried before it is added: what it shows, one picture, or the sentence that its source would have."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import simplejpeg

from penstock_video.errors import DecodeError, SourceNotAllowed, SourceRefused, SourceUnavailable
from penstock_video.sources import probe as probing
from penstock_video.sources.options import SourcesOptions
from penstock_video.sources.probe import probe
from penstock_video.types import SourceConfig
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.rtsp.cameras import Camera, RtspServer, rtsp_server

OPTIONS = SourcesOptions(allowed_outbound=("127.0.0.1",))


@pytest.fixture(scope="module")
def cameras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RtspServer]:
    """A camera with a password, and one that never sends a second picture."""
    folder = tmp_path_factory.mktemp("probed")
    clip = write_clip(folder / "a.mp4", frames=25, fps=25, gop=12)
    with rtsp_server(
        [Camera("/gate", [clip], user="viewer", password="secret"), Camera("/mute", [clip], first_units=1)], folder
    ) as server:
        yield server


def of(uri: str, timeout_s: float = 10.0, *, is_from_api: bool = True) -> SourceConfig:
    return SourceConfig(uri, "probe", open_timeout_s=timeout_s, is_from_api=is_from_api)


def children() -> set[int]:
    return {child.pid for child in psutil.Process(os.getpid()).children()}


def test_camera_shows_its_facts_and_a_picture(cameras: RtspServer) -> None:
    """Size, codec and one picture come over RTSP; the process that opened it is gone afterwards."""
    before = children()
    found = probe(of(cameras.url("/gate")), OPTIONS)
    assert (found.width, found.height, found.codec, found.is_live, found.duration_s) == (160, 96, "h264", True, None)
    assert simplejpeg.decode_jpeg(found.jpeg).shape == (96, 160, 3)
    assert children() <= before


def test_file_shows_its_first_picture(tmp_path: Path) -> None:
    """Of a large one at a smaller size."""
    clip = write_clip(tmp_path / "a.mp4", frames=10, fps=25, size=(1280, 720), first=7)
    found = probe(of(str(clip)), OPTIONS)
    assert (found.width, found.height, found.is_live, found.duration_s) == (1280, 720, False, pytest.approx(0.4))
    assert simplejpeg.decode_jpeg(found.jpeg).shape == (540, 960, 3)
    assert found.is_recordable


def test_file_whose_events_will_have_no_film_says_so(tmp_path: Path) -> None:
    """Its packets do not fit into MP4."""
    assert not probe(of(str(write_clip(tmp_path / "old.avi", codec="msmpeg4v2"))), OPTIONS).is_recordable


def test_wrong_password_is_said_without_it(cameras: RtspServer) -> None:
    """The camera's refusal is the source's sentence."""
    with pytest.raises(SourceRefused) as refused:
        probe(of(cameras.url("/gate", user="viewer", password="wr0ng")), OPTIONS)
    assert "wr0ng" not in refused.value.message


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("rtsp://127.0.0.1:1/none", SourceUnavailable),
        ("rtsp://127.0.0.2:1/none", SourceNotAllowed),
        ("/no/such/file.mp4", SourceUnavailable),
        (__file__, DecodeError),
    ],
)
def test_address_that_shows_nothing_has_the_sentence_of_its_source(uri: str, error: type[Exception]) -> None:
    """Unreachable, not allowed, missing, no video: each is its own error."""
    with pytest.raises(error):
        probe(of(uri), OPTIONS)


def test_camera_that_stays_silent_ends_at_the_deadline(cameras: RtspServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it would take: nothing waits beyond the time to open and to start."""
    monkeypatch.setattr(probing, "START_S", 0.2)
    cameras.freeze()
    try:
        began = time.monotonic()
        with pytest.raises(SourceUnavailable):
            probe(of(cameras.url("/mute"), timeout_s=0.5), OPTIONS)
        assert time.monotonic() - began < 5.0
    finally:
        cameras.thaw()
