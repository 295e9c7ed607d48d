"""NVDEC itself: the decoder's contract on a card, and what PyNvVideoCodec was measured to do."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from penstock_video.decode.codec import Codec, PacketRefused
from penstock_video.decode.nvcodec import NvdecOpener
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.decode.nvdec_errors import DecodeErrors, watch_stdout
from penstock_video.errors import NeedsCpu
from penstock_video.gpu.device import CudaStream, Device
from penstock_video.types import DecoderKind
from tests.deepstream_pipeline.decode.broken_clips import SIZE, annex_b_packets, damaged_packet
from tests.deepstream_pipeline.decode.decoder_contract import DecoderContract, Kind

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    """The card."""
    pytest.importorskip("PyNvVideoCodec", reason="PyNvVideoCodec is not installed: `make gpu` does it")
    return Device.open()


@pytest.fixture(scope="module")
def stream(device: Device) -> Iterator[CudaStream]:
    """In whose order the pictures are complete."""
    device.bind()
    stream = device.new_stream()
    yield stream
    stream.close()


class Watch:
    """The standard output, watched from the first time that it is asked for; not before a test runs, since pytest lays
    its own file there as each begins."""

    def __init__(self) -> None:
        self._before = -1
        self._errors: DecodeErrors | None = None

    def errors(self) -> DecodeErrors:
        """What the library says."""
        if self._errors is None:
            self._before = os.dup(1)
            self._errors = watch_stdout()
        return self._errors

    def close(self) -> None:
        """The standard output is what it was."""
        if self._errors is not None:
            os.dup2(self._before, 1)
            os.close(self._before)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Of this test's standard output."""
    watch = Watch()
    yield watch
    watch.close()


class TestNvdec(DecoderContract):
    """The contract, kept by NVDEC."""

    @pytest.fixture
    def kind(self, device: Device, stream: CudaStream, watch: Watch) -> Kind:
        """NvdecCodec over PyNvVideoCodec; pictures are copied to the host to be looked at."""
        device.bind()
        opener = NvdecOpener()

        def codecs(video: VideoStream, context: VideoCodecContext) -> Codec:
            return NvdecCodecs(opener, stream.handle, watch.errors())(video, context)

        def read(address: int, size_bytes: int) -> bytes:
            host = np.empty(size_bytes, np.uint8)
            device.copy(host.ctypes.data, address, size_bytes, stream.handle)
            stream.synchronize()
            return host.tobytes()

        return Kind(DecoderKind.NVDEC, codecs, read)


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_pictures_come_out_with_their_packets(tmp_path: Path, stream: CudaStream, codec: str) -> None:
    """Without B-frames nothing is held back: each packet's picture comes of that very call."""
    packets = annex_b_packets(tmp_path, codec)
    decoder = NvdecOpener()(codec, stream.handle, SIZE)
    numbers = [[one.stamp for one in decoder.decode(packet, number)] for number, packet in enumerate(packets)]
    assert numbers == [[number] for number in range(len(packets))]
    assert decoder.flush() == []
    decoder.close()


def test_flushed_decoder_goes_on_at_a_keyframe(tmp_path: Path, stream: CudaStream) -> None:
    """A loop needs no other decoder."""
    packets = annex_b_packets(tmp_path, "h264")
    decoder = NvdecOpener()("h264", stream.handle, SIZE)
    numbers = []
    for number, packet in enumerate(packets * 2):
        numbers += [one.stamp for one in decoder.decode(packet, number)]
        if number == len(packets) - 1:
            numbers += [one.stamp for one in decoder.flush()]
    numbers += [one.stamp for one in decoder.flush()]
    assert numbers == list(range(len(packets) * 2))
    decoder.close()


def test_mended_picture_is_named_by_its_number(tmp_path: Path, stream: CudaStream, watch: Watch) -> None:
    """The number in the library's line is the place of the picture among those that its decoder decoded."""
    packets = annex_b_packets(tmp_path, "h264")
    packets[7] = damaged_packet(packets[7])
    errors = watch.errors()
    decoder = NvdecOpener()("h264", stream.handle, SIZE)
    marked = []
    for number, packet in enumerate(packets):
        surfaces = decoder.decode(packet, number)
        marked += errors.take({one.stamp for one in surfaces})
    decoder.close()
    assert marked == [7]
    assert errors.unclaimed == 0


def test_number_after_a_missing_picture_counts_what_was_decoded(
    tmp_path: Path, stream: CudaStream, watch: Watch
) -> None:
    """A packet of garbage gives no picture, and has no number of its own in the library's lines."""
    packets = annex_b_packets(tmp_path, "h264")
    packets[3] = bytes(range(7, 107)) * 9
    packets[7] = damaged_packet(packets[7])
    errors = watch.errors()
    decoder = NvdecOpener()("h264", stream.handle, SIZE)
    numbers = [one.stamp for place, packet in enumerate(packets) for one in decoder.decode(packet, place)]
    decoder.close()
    assert 3 not in numbers
    assert 6 in errors.take(set(range(len(packets))))


def test_what_a_card_does_not_take_is_said(tmp_path: Path, stream: CudaStream) -> None:
    """Too small, and too large."""
    for size in ((16, 16), (20_000, 20_000)):
        with pytest.raises(NeedsCpu, match="NVDEC takes h264"):
            NvdecOpener()("h264", stream.handle, size)


def test_larger_picture_than_the_first_fails(tmp_path: Path, stream: CudaStream) -> None:
    """The library does not follow a stream to a larger size: that a new decoder begins there is NvdecCodec's work."""
    small, large = annex_b_packets(tmp_path, "h264"), annex_b_packets(tmp_path, "h264", size=(320, 192))
    decoder = NvdecOpener()("h264", stream.handle, SIZE)
    for number, packet in enumerate(small):
        decoder.decode(packet, number)
    with pytest.raises(PacketRefused):
        _ = [decoder.decode(packet, number) for number, packet in enumerate(large, len(small))]
    decoder.close()


def test_decoders_come_and_go(tmp_path: Path, stream: CudaStream) -> None:
    """Thirty, one after another, each with a picture: what they held is given back."""
    first = annex_b_packets(tmp_path, "h264")[0]
    opener = NvdecOpener()
    for _ in range(30):
        decoder = opener("h264", stream.handle, SIZE)
        assert [one.stamp for one in decoder.decode(first, 5)] == [5]
        decoder.close()
