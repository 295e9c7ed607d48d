"""NVDEC itself: the decoder's contract on a card, and two streams in one of its decoders."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from penstock.gpu.nvml import read_cards
from penstock_video.decode.codec import Codec, PacketRefused
from penstock_video.decode.nvcodec import NvdecOpener, Surface
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.decode.verification import Plane, nv12_of
from penstock_video.errors import NeedsCpu
from penstock_video.gpu.device import CudaStream, Device
from penstock_video.sources.decoder_meter import DecoderMeter
from penstock_video.types import DecoderKind
from tests.deepstream_pipeline.decode.broken_clips import SIZE, annex_b_packets, damaged_packet, plain_clip
from tests.deepstream_pipeline.decode.decoder_contract import DecoderContract, Kind
from tests.support.waiting import becomes_true

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    """The card."""
    return Device.open()


@pytest.fixture(scope="module")
def stream(device: Device) -> Iterator[CudaStream]:
    """In whose order the pictures are complete."""
    device.bind()
    stream = device.new_stream()
    yield stream
    stream.close()


class TestNvdec(DecoderContract):
    """The contract, kept by NVDEC."""

    @pytest.fixture
    def kind(self, device: Device, stream: CudaStream) -> Kind:
        """NvdecCodec over NVDEC; pictures are copied to the host to be looked at."""
        device.bind()
        opener = NvdecOpener(device)

        def codecs(video: VideoStream, context: VideoCodecContext) -> Codec:
            return NvdecCodecs(opener, stream.handle)(video, context)

        def read(address: int, size_bytes: int) -> bytes:
            host = np.empty(size_bytes, np.uint8)
            device.copy(host.ctypes.data, address, size_bytes, stream.handle)
            stream.synchronize()
            return host.tobytes()

        return Kind(DecoderKind.NVDEC, codecs, read)


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_pictures_come_out_with_their_packets(tmp_path: Path, device: Device, stream: CudaStream, codec: str) -> None:
    """Without B-frames nothing is held back: each packet's picture comes of that very call."""
    packets = annex_b_packets(tmp_path, codec)
    decoder = NvdecOpener(device)(codec, stream.handle, SIZE)
    numbers = [[one.stamp for one in decoder.decode(packet, number)] for number, packet in enumerate(packets)]
    assert numbers == [[number] for number in range(len(packets))]
    assert decoder.flush() == []
    decoder.close()


def test_flushed_decoder_goes_on_at_a_keyframe(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """A loop needs no other decoder."""
    packets = annex_b_packets(tmp_path, "h264")
    decoder = NvdecOpener(device)("h264", stream.handle, SIZE)
    numbers = []
    for number, packet in enumerate(packets * 2):
        numbers += [one.stamp for one in decoder.decode(packet, number)]
        if number == len(packets) - 1:
            numbers += [one.stamp for one in decoder.flush()]
    numbers += [one.stamp for one in decoder.flush()]
    assert numbers == list(range(len(packets) * 2))
    decoder.close()


def test_mended_picture_is_marked(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """A damaged packet's picture, and no other."""
    packets = annex_b_packets(tmp_path, "h264")
    packets[7] = damaged_packet(packets[7])
    decoder = NvdecOpener(device)("h264", stream.handle, SIZE)
    found = [one for number, packet in enumerate(packets) for one in decoder.decode(packet, number)]
    decoder.close()
    assert [one.stamp for one in found if one.is_damaged] == [7]


def test_packet_of_garbage_gives_no_picture(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """The others come out."""
    packets = annex_b_packets(tmp_path, "h264")
    packets[3] = bytes(range(7, 107)) * 9
    decoder = NvdecOpener(device)("h264", stream.handle, SIZE)
    numbers = [one.stamp for place, packet in enumerate(packets) for one in decoder.decode(packet, place)]
    decoder.close()
    assert numbers == [number for number in range(len(packets)) if number != 3]


def test_what_a_card_does_not_take_is_said(device: Device, stream: CudaStream) -> None:
    """Too small, and too large."""
    for size in ((16, 16), (20_000, 20_000)):
        with pytest.raises(NeedsCpu, match="NVDEC takes h264"):
            NvdecOpener(device)("h264", stream.handle, size)


def test_picture_of_another_size_fails(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """That a new decoder begins there is NvdecCodec's work."""
    small, large = annex_b_packets(tmp_path, "h264"), annex_b_packets(tmp_path, "h264", size=(320, 192))
    decoder = NvdecOpener(device)("h264", stream.handle, SIZE)
    for number, packet in enumerate(small):
        decoder.decode(packet, number)
    with pytest.raises(PacketRefused):
        _ = [decoder.decode(packet, number) for number, packet in enumerate(large, len(small))]
    decoder.close()


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_scaled_pictures_are_near_ffmpegs(tmp_path: Path, device: Device, stream: CudaStream, codec: str) -> None:
    """The decoder scales what is displayed, not what is cut off; the whole picture is in its place."""
    size, small = (322, 182), (162, 92)
    packets = annex_b_packets(tmp_path, codec, size=size)
    decoder = NvdecOpener(device)(codec, stream.handle, size, small)
    shown = [
        on_host(device, one, stream) for place, packet in enumerate(packets) for one in decoder.decode(packet, place)
    ]
    decoder.close()
    context = av.CodecContext.create(codec, "r")
    frames = [frame for packet in [*packets, None] for frame in context.decode(packet and av.Packet(packet))]
    right = [cv2.resize(nv12_of(frame)[:182], small, interpolation=cv2.INTER_AREA) for frame in frames]
    assert [one.shape for one in shown] == [(138, 162)] * len(right)
    apart = [np.abs(one[:92].astype(int) - wanted).mean() for one, wanted in zip(shown, right, strict=True)]
    assert max(apart) < 8


def test_load_of_the_decoders_is_read(device: Device) -> None:
    """By the UUID of the first card that NVML knows."""
    meter = DecoderMeter([read_cards().cards[0].uuid])
    meter.start()
    assert becomes_true(lambda: meter.readings()[0] is not None, 10.0)
    (reading,) = meter.readings()
    meter.close()
    assert reading is not None
    assert 0 <= reading.utilisation <= 1


SHARED: dict[str, dict[str, Any]] = {
    "h264": {"codec": "libx264"},
    "h264 slices": {"codec": "libx264", "options": {"x264-params": "slice-max-size=300:keyint=10"}},
    "h264 references": {"codec": "libx264", "options": {"x264-params": "ref=6:keyint=40"}},
    "h264 b-frames": {"codec": "libx264", "b_frames": 3},
    "hevc": {"codec": "libx265"},
    "hevc references": {"codec": "libx265", "options": {"x265-params": "ref=3:bframes=0:keyint=40:log-level=none"}},
    "hevc b-frames": {"codec": "libx265", "b_frames": 3},
}


@dataclass(frozen=True)
class Clip:
    """packets: in Annex B, each with its time of display. pictures: FFmpeg's."""

    packets: list[tuple[bytes, int]]
    pictures: list[Plane]


def clip_of(folder: Path, name: str, number: int) -> Clip:
    """number: of another one of that kind."""
    path = plain_clip(folder / f"{number}.ts", frames=40, first=7 * number, **SHARED[name])
    with av.open(str(path)) as container:
        packets = [(bytes(packet), packet.pts or 0) for packet in container.demux(video=0) if packet.size]
    with av.open(str(path)) as container:
        return Clip(packets, [nv12_of(frame) for frame in container.decode(video=0)])


def on_host(device: Device, one: Surface, stream: CudaStream) -> Plane:
    """A picture, (H * 3 / 2, W)."""
    lines = np.empty((one.height * 3 // 2, one.pitch), np.uint8)
    for part, address in ((lines[: one.height], one.luma), (lines[one.height :], one.chroma)):
        device.copy(part.ctypes.data, address, part.nbytes, stream.handle)
    stream.synchronize()
    return lines[:, : one.width]


def assert_right(made: list[Plane], clip: Clip) -> None:
    """All pictures of the clip, each as FFmpeg makes it."""
    assert len(made) == len(clip.pictures)
    wrong = [place for place, one in enumerate(made) if not np.array_equal(one, clip.pictures[place])]
    assert not wrong


@pytest.mark.parametrize("name", SHARED)
def test_two_streams_in_one_decoder_are_both_right(
    tmp_path: Path, device: Device, stream: CudaStream, name: str
) -> None:
    """Every picture of both equals FFmpeg's, and there is one decoder."""
    opener, codec = NvdecOpener(device), name.split()[0]
    clips = [clip_of(tmp_path, name, number) for number in range(2)]
    decoders = [opener.for_camera()(codec, stream.handle, SIZE) for _ in clips]
    shown: list[list[Plane]] = [[], []]
    for packets in zip(*(clip.packets for clip in clips), strict=True):
        for (packet, pts), decoder, pictures in zip(packets, decoders, shown, strict=True):
            pictures += [on_host(device, one, stream) for one in decoder.decode(packet, pts)]
    assert len(opener.pool) == 1
    for decoder, pictures, clip in zip(decoders, shown, clips, strict=True):
        pictures += [on_host(device, one, stream) for one in decoder.flush()]
        assert_right(pictures, clip)
        decoder.close()
    assert len(opener.pool) == 0


@pytest.mark.parametrize("name", ["h264", "hevc"])
def test_streams_of_several_threads_are_right_in_shared_decoders(tmp_path: Path, device: Device, name: str) -> None:
    """Eight at full speed, five times through a clip, each with a CUDA stream of its own."""
    opener, clips = NvdecOpener(device), [clip_of(tmp_path, name, number) for number in range(8)]

    def run(clip: Clip) -> None:
        device.bind()
        stream = device.new_stream()
        decoder, made, length = opener.for_camera()(name, stream.handle, SIZE), [], clip.packets[-1][1] + 3600
        for turn in range(5):
            for packet, pts in clip.packets:
                made += [on_host(device, one, stream) for one in decoder.decode(packet, pts + turn * length)]
        decoder.close()
        stream.close()
        assert_right(made, Clip([], clip.pictures * 5))

    with ThreadPoolExecutor(len(clips)) as pool:
        list(pool.map(run, clips))
    assert len(opener.pool) == 0


def test_damage_of_a_stream_does_not_reach_its_partner(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """Rubbish and damaged packets of one; every picture of the other equals FFmpeg's."""
    opener, clip, other = NvdecOpener(device), clip_of(tmp_path, "h264", 0), clip_of(tmp_path, "h264", 1)
    one, two = (opener.for_camera()("h264", stream.handle, SIZE) for _ in range(2))
    made: list[Plane] = []
    for number, (packet, pts) in enumerate(clip.packets):
        with suppress(PacketRefused):
            two.decode((damaged_packet(other.packets[number][0]), bytes(range(7, 107)) * 9)[number % 2], pts)
        made += [on_host(device, surface, stream) for surface in one.decode(packet, pts)]
    assert_right(made, clip)
    one.close()
    two.close()


def test_decoders_come_and_go(tmp_path: Path, device: Device, stream: CudaStream) -> None:
    """Thirty, one after another, each with a picture: what they held is given back."""
    first = annex_b_packets(tmp_path, "h264")[0]
    opener = NvdecOpener(device)
    for _ in range(30):
        decoder = opener("h264", stream.handle, SIZE)
        assert [one.stamp for one in decoder.decode(first, 5)] == [5]
        decoder.close()
