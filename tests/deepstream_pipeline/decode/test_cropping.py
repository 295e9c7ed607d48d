"""What a sequence parameter set says of the edges that are cut off, as x264 and x265 write it."""

from pathlib import Path

import av
import pytest

from penstock_video.decode.bitstream import headers_of, is_cut_before
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.errors import NeedsCpu
from tests.deepstream_pipeline.decode.broken_clips import annex_b_packets, plain_clip
from tests.deepstream_pipeline.decode.fake_nvcodec import FakeOpener

X264, X265 = "x264-params", "x265-params"
CUT: list[tuple[str, dict[str, str], bool]] = [
    ("h264", {}, False),
    ("h264", {X264: "crop-rect=0,0,6,4"}, False),
    ("h264", {X264: "crop-rect=0,4,0,0"}, True),
    ("h264", {X264: "crop-rect=2,0,0,0"}, True),
    ("h264", {X264: "tff=1:crop-rect=0,4,0,0"}, True),
    ("h264", {"profile": "baseline", X264: "crop-rect=0,4,0,0"}, True),
    ("hevc", {}, False),
    ("hevc", {X265: "display-window=0,4,0,0"}, False),  # which no decoder follows
]


@pytest.mark.parametrize(("codec", "options", "is_cut"), CUT)
@pytest.mark.parametrize("size", [(176, 144), (322, 184)])
def test_edges_that_are_cut_off_before_the_picture_are_found(
    tmp_path: Path, codec: str, options: dict[str, str], is_cut: bool, size: tuple[int, int]
) -> None:
    """At the left or the top; at the right and the bottom every size has some that is no multiple of 16."""
    first = annex_b_packets(tmp_path, codec, options=options, size=size)[0]
    assert is_cut_before(headers_of(first, codec).sequence, codec) is is_cut


@pytest.mark.parametrize(("left", "top", "is_cut"), [(0, 0, False), (3, 0, True), (0, 2, True)])
@pytest.mark.parametrize("layers", [0, 1, 6])
def test_window_of_hevc_is_read_behind_all_layers(left: int, top: int, is_cut: bool, layers: int) -> None:
    """Bits as the standard has them: x265 writes no such window. Every other layer tells its profile and level."""
    reported = [(layer % 2, layer % 2) for layer in range(layers)]
    bits = f"{33 << 1:08b}{1:08b}{0:04b}{layers:03b}1{0:088b}{93:08b}"
    bits += "".join(f"{profile}{level}" for profile, level in reported) + "00" * (8 - layers if layers else 0)
    bits += "".join("1" * 88 * profile + "1" * 8 * level for profile, level in reported)
    bits += "".join(map(golomb, (0, 1, 640, 360))) + "1" + "".join(map(golomb, (left, 5, top, 7)))
    bits += "1" + "0" * (-(len(bits) + 1) % 8)
    unit = int(bits, 2).to_bytes(len(bits) // 8, "big")
    assert is_cut_before(unit.replace(bytes(3), b"\x00\x00\x03\x00"), "hevc") is is_cut


def golomb(number: int) -> str:
    """ue(v)."""
    bits = f"{number + 1:b}"
    return "0" * (len(bits) - 1) + bits


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_set_that_cannot_be_read_is_said_to_be_whole(codec: str) -> None:
    """Of a few bytes, or of noughts."""
    for unit in (b"", b"\x67", b"\x42\x01", bytes(64)):
        assert not is_cut_before(unit, codec)


def test_stream_that_is_cut_before_its_pictures_is_the_cpus(tmp_path: Path) -> None:
    """Its pictures would be shifted, of the right size."""
    path = plain_clip(tmp_path / "a.ts", frames=20, options={X264: "crop-rect=0,4,0,0"})
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = NvdecCodecs(FakeOpener())(stream, stream.codec_context)
        with pytest.raises(NeedsCpu, match="cut off at its left or top"):
            codec.decode(next(packet for packet in container.demux(stream) if packet.size))
