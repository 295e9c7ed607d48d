"""Who encodes previews, and what happens when the card does not."""

from typing import Any

import pytest
import simplejpeg
from structlog.testing import capture_logs

from penstock_video.errors import GpuUnavailable, SinkFailed
from penstock_video.gpu.device import Device
from penstock_video.sinks import jpeg
from penstock_video.sinks.jpeg import GpuJpeg, JpegKind, NvJpeg, SoftwareJpeg, jpeg_encoder
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.preview import PreviewBoard, PreviewOptions
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install
from tests.deepstream_pipeline.gpu.test_nvjpeg import FakeNvjpeg, picture
from tests.deepstream_pipeline.sinks.results import result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvjpeg:
    """A stand-in for nvJPEG, found where the real one is looked for."""
    stand_in = FakeNvjpeg()
    monkeypatch.setattr("penstock_video.sinks.jpeg._found_library", lambda: stand_in)
    return stand_in


@pytest.mark.parametrize("kind", [JpegKind.AUTO, JpegKind.CPU])
def test_previews_without_a_card_are_encoded_on_the_cpu(kind: JpegKind) -> None:
    """The program opens no card for previews alone."""
    assert isinstance(jpeg_encoder(kind, None), SoftwareJpeg)


def test_previews_on_the_cpu_touch_no_card(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """Who says cpu uses nothing of a card that is open."""
    assert isinstance(jpeg_encoder(JpegKind.CPU, Device.open()), SoftwareJpeg)
    assert library.handles == set()


@pytest.mark.parametrize("kind", [JpegKind.AUTO, JpegKind.NVJPEG])
def test_previews_with_a_card_are_encoded_on_it(kind: JpegKind, driver: FakeDriver, library: FakeNvjpeg) -> None:
    """Where the program has a card open anyway."""
    encoder = jpeg_encoder(kind, Device.open())
    assert isinstance(encoder, GpuJpeg)
    assert simplejpeg.decode_jpeg(encoder.encode(picture(64, 48))).shape == (48, 64, 3)
    assert library.jpeg
    encoder.close()
    encoder.close()
    assert driver.is_all_given_back


def test_previews_set_to_use_nvjpeg_without_a_card_are_refused() -> None:
    """At start, with what to say instead."""
    with pytest.raises(SinkFailed, match="jpeg is nvjpeg, and the program has no GPU open"):
        PreviewBoard(PreviewOptions(jpeg=JpegKind.NVJPEG), Osd())


def test_previews_without_the_library_are_refused_or_encoded_on_the_cpu(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvjpeg is refused with the reason; auto goes on without it, with a warning."""

    def missing() -> Any:
        raise GpuUnavailable("libnvjpeg is not here")

    monkeypatch.setattr("penstock_video.sinks.jpeg._found_library", missing)
    with pytest.raises(SinkFailed, match="libnvjpeg is not here; or say jpeg: auto"):
        jpeg_encoder(JpegKind.NVJPEG, Device.open())
    with capture_logs() as logs:
        assert isinstance(jpeg_encoder(JpegKind.AUTO, Device.open()), SoftwareJpeg)
    assert [(log["log_level"], log["why"]) for log in logs] == [("warning", "libnvjpeg is not here")]


def test_previews_after_a_failure_of_the_card_are_encoded_on_the_cpu(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """No picture is lost, there is one warning, and the card is asked no more."""
    encoder = GpuJpeg(NvJpeg(Device.open(), quality=jpeg.QUALITY, library=library))
    library.failing = "nvjpegEncodeImage"
    with capture_logs() as logs:
        for _ in range(3):
            assert simplejpeg.decode_jpeg(encoder.encode(picture(64, 48))).shape == (48, 64, 3)
    assert [(log["log_level"], log["why"]) for log in logs] == [
        ("warning", "nvjpegEncodeImage: nvJPEG answers EXECUTION_FAILED")
    ]
    assert driver.is_all_given_back
    encoder.close()


def test_previews_of_a_card_that_is_gone_go_on(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """A card that answers nothing any more, not even closing: pictures are encoded all the same."""
    encoder = GpuJpeg(NvJpeg(Device.open(), quality=jpeg.QUALITY, library=library))
    encoder.encode(picture(64, 48))
    for function in ("cuCtxSetCurrent", "cuMemcpyAsync", "cuStreamQuery"):
        driver.fail(function, "CUDA_ERROR_LAUNCH_FAILED")
    assert encoder.encode(picture(64, 48)).startswith(b"\xff\xd8")


def test_board_shows_what_its_encoder_made_and_closes_it() -> None:
    """The board asks the encoder for each preview, and closes it with itself."""

    class Words:
        """A stand-in whose JPEGs are words."""

        closed = 0

        def encode(self, picture: object) -> bytes:
            return b"a picture"

        def close(self) -> None:
            self.closed += 1

    words = Words()
    board = PreviewBoard(PreviewOptions(), Osd(), jpeg=words)
    board.wait("cam", 0, 0.0)
    board.write(result(0))
    assert board.wait("cam", 0, 0.0) == (1, b"a picture")
    board.close()
    assert words.closed == 1
