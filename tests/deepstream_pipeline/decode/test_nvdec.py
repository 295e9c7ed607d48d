"""NVDEC's side of a decoder beyond the contract, over the stand-in: its decoders come and go, damage is marked."""

from pathlib import Path

import av
import numpy as np
import pytest
from av.video.stream import VideoStream

from penstock_video.decode import nvdec
from penstock_video.decode.bitstream import headers_of
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder, Picture
from penstock_video.decode.nvcodec import refusal_of
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.decode.verification import nv12_of
from penstock_video.errors import DecodeError, GpuFull, NeedsCpu
from penstock_video.types import UPRIGHT, DecoderKind, DevicePicture
from tests.deepstream_pipeline.clips import joined, write_clip
from tests.deepstream_pipeline.decode.broken_clips import without
from tests.deepstream_pipeline.decode.fake_nvcodec import FakeOpener, frame_of, read_host

INTERLACED = {"flags": "+ildct+ilme", "x264-params": "tff=1:keyint=12"}


class Run:
    """A clip that is decoded packet by packet."""

    def __init__(self, path: Path, opener: FakeOpener | None = None) -> None:
        self.opener = opener or FakeOpener()
        self.scaled: tuple[int, int] | None = None
        codecs = NvdecCodecs(self.opener, 77, lambda size: self.scaled)
        self.decoder = Decoder(str(path), DecodeOptions(), 0.0, codecs)
        self._packets = self.decoder.packets()

    def read(self, count: int = 10_000) -> list[list[Picture]]:
        """What came with each of so many packets."""
        return [self.decoder.decode(packet) for _, packet in zip(range(count), self._packets, strict=False)]


def pixels(picture: Picture) -> np.ndarray:
    """(H * 3 / 2, W), as it lies in memory now."""
    assert isinstance(picture.frame, DevicePicture)
    return nv12_of(frame_of(picture.frame, read_host))


def test_picture_says_where_it_lies_and_how_it_is_meant(tmp_path: Path) -> None:
    """Addresses, the stream in whose order it is complete, the matrix and range of its colours."""
    how = {"pixel_format": "yuvj420p", "options": {"x264-params": "colormatrix=bt709:keyint=12"}}
    run = Run(write_clip(tmp_path / "a.mp4", frames=3, size=(322, 182), **how))
    picture = run.read(1)[0][0].frame
    assert isinstance(picture, DevicePicture)
    assert picture.chroma == picture.luma + picture.pitch * 182
    assert (picture.width, picture.height, picture.stream) == (322, 182, 77)
    assert (picture.matrix, picture.is_full_range, picture.orientation) == (1, True, UPRIGHT)
    assert run.decoder.facts.decoder is DecoderKind.NVDEC


def test_scaled_pictures_keep_the_streams_size_and_change_at_a_keyframe(tmp_path: Path) -> None:
    """A new size of the decoder's pictures begins with the next keyframe; none is lost or repeated."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=24, options={"x264-params": "keyint=12:min-keyint=12"}))
    run.scaled = (80, 48)
    first = run.read(6)
    run.scaled = None
    pictures = [picture for came in (first + run.read()) for picture in came]
    frames = [picture.frame for picture in pictures]
    assert [frame.width for frame in frames if isinstance(frame, DevicePicture)] == [80] * 12 + [160] * 12
    assert {frame.upright_size for frame in frames if isinstance(frame, DevicePicture)} == {(160, 96)}
    assert (run.decoder.facts.width, [picture.is_new for picture in pictures].count(True)) == (160, 0)


def test_picture_is_borrowed_until_the_next_packet(tmp_path: Path) -> None:
    """Then its memory is another's."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=3))
    picture = run.read(1)[0][0]
    before = pixels(picture)
    run.read(1)
    assert not np.array_equal(pixels(picture), before)


def test_another_size_is_another_decoder_and_the_last_pictures_stay(tmp_path: Path) -> None:
    """What was left in the one before comes out with the packet that ends it, and is there as long as others are."""
    small = write_clip(tmp_path / "small.ts", frames=12, b_frames=2)
    large = write_clip(tmp_path / "large.ts", frames=12, size=(320, 192))
    run = Run(joined(tmp_path / "both.ts", small, large))
    run.read(12)
    change = run.read(1)[0]
    assert [(one.frame.width, one.is_new) for one in change] == [(160, False), (160, False), (320, True)]
    assert [opened.is_closed for opened in run.opener.opened] == [False, False]
    with av.open(str(small)) as container:
        assert np.array_equal(pixels(change[1]), nv12_of([*container.decode(video=0)][-1]))
    run.read(1)
    assert [opened.is_closed for opened in run.opener.opened] == [True, False]
    run.decoder.close()
    assert [opened.is_closed for opened in run.opener.opened] == [True, True]


def test_loop_and_equal_streams_need_no_other_decoder(tmp_path: Path) -> None:
    """Neither a rewound clip nor the same parameter sets again open one."""
    part = write_clip(tmp_path / "part.ts", frames=12)
    run = Run(joined(tmp_path / "twice.ts", part, part))
    run.read()
    assert len(run.opener.opened) == 1
    looped = Run(write_clip(tmp_path / "a.mp4", frames=12))
    for _ in range(3):
        assert sum(len(pictures) for pictures in looped.read()) == 12
        looped.decoder.rewind()
        looped._packets = looped.decoder.packets()
    assert len(looped.opener.opened) == 1


def test_decoder_that_failed_once_is_replaced_at_the_next_keyframe(tmp_path: Path) -> None:
    """Its packet counts as damaged, and nothing is shown until then."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=30, gop=12))
    run.read(5)
    run.opener.opened[0].fails = True
    after = run.read()
    assert [len(pictures) for pictures in after] == [0] * 7 + [1] * 18 + [0]
    assert (len(run.opener.opened), run.decoder.bad_packets) == (2, 1)
    assert run.opener.opened[0].is_closed


def test_decoder_that_fails_again_and_again_ends_the_source(tmp_path: Path) -> None:
    """No loop of openings."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=30, gop=1))
    run.read(5)
    opened = run.opener.opened
    opened[0].fails = True
    assert run.read(1) == [[]]
    run.opener.are_broken = True
    with pytest.raises(DecodeError, match=r"NVDEC: it fails"):
        run.read(2)


def test_full_card_is_reported_at_once_and_counts_as_no_damage(tmp_path: Path) -> None:
    """With the first packet, and whenever it is asked again; the decoder's place is free once there is one."""
    path = write_clip(tmp_path / "a.mp4", frames=12)
    run = Run(path, FakeOpener(room=0))
    with pytest.raises(GpuFull):
        run.read(1)
    assert (len(run.opener.opened), run.decoder.bad_packets) == (1, 0)
    run.decoder.close()
    assert run.opener.opened[0].is_closed
    run.opener.room = 1
    assert sum(len(pictures) for pictures in Run(path, run.opener).read()) == 12


def test_other_size_on_a_full_card_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Where nothing was left in that one, as of every camera without B-frames."""
    parts = [write_clip(tmp_path / f"{width}.ts", frames=12, size=(width, 192)) for width in (320, 352)]
    path = joined(tmp_path / "both.ts", *parts)
    full, wide = Run(path, FakeOpener(room=1)), Run(path)
    assert [one.frame.width for pictures in full.read() for one in pictures] == [320] * 12 + [352] * 12
    wide.read()
    assert full.decoder.bad_packets == wide.decoder.bad_packets


def test_card_that_became_full_ends_a_stream_of_another_size_and_opens_no_third(tmp_path: Path) -> None:
    """The pictures left in the decoder before it still lie there, and need its place; it is no loop of openings."""
    small = write_clip(tmp_path / "small.ts", frames=12, b_frames=2)
    large = write_clip(tmp_path / "large.ts", frames=12, size=(320, 192))
    path = joined(tmp_path / "both.ts", small, large)
    run, wide = Run(path, FakeOpener(room=1)), Run(path)
    assert sum(len(pictures) for pictures in run.read(12)) == 10
    with pytest.raises(GpuFull):
        run.read(1)
    wide.read(13)
    assert (len(run.opener.opened), run.decoder.bad_packets) == (2, wide.decoder.bad_packets)
    run.decoder.close()
    assert [opened.is_closed for opened in run.opener.opened] == [True, True]


def test_stream_without_a_keyframe_is_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refreshes bit by bit would stay dark."""
    monkeypatch.setattr(nvdec, "MOST_UNKEYED", 40)
    whole = write_clip(tmp_path / "a.ts", frames=60, gop=1000)
    run = Run(without(tmp_path / "unkeyed.ts", whole, [0]))
    with pytest.raises(NeedsCpu, match="keyframe"):
        run.read()


def test_stream_that_becomes_one_for_the_cpu_is_reported_at_its_second_keyframe(tmp_path: Path) -> None:
    """The first may be damage: what follows it is not shown, and the decoder stays."""
    first = write_clip(tmp_path / "first.ts", frames=12)
    laced = write_clip(tmp_path / "laced.ts", frames=24, options=INTERLACED)
    run = Run(joined(tmp_path / "both.ts", first, laced))
    assert [len(pictures) for pictures in run.read(13)] == [1] * 12 + [0]
    assert run.decoder.bad_packets >= 1
    with pytest.raises(NeedsCpu, match="interlaced"):
        run.read()
    damaged = Run(
        joined(tmp_path / "once.ts", first, write_clip(tmp_path / "l.ts", frames=12, options=INTERLACED), first)
    )
    shown = [one.is_dropped for pictures in damaged.read() for one in pictures]
    assert (shown[:12], shown[-12:]) == ([False] * 12, [False] * 12)
    assert len(damaged.opener.opened) == 1


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_parameter_sets_beside_the_stream_are_given(tmp_path: Path, codec: str) -> None:
    """As a camera tells them in its SDP alone: before the first keyframe, and again after a seek."""
    path = write_clip(tmp_path / "a.ts", frames=12, size=(176, 144), codec={"hevc": "libx265"}.get(codec, "libx264"))
    opener = FakeOpener()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoder = NvdecCodecs(opener)(stream, stream.codec_context)
        packets = [bare(packet, codec) for packet in container.demux(stream) if packet.size]
        for _ in range(2):
            assert sum(len(decoder.decode(packet)) for packet in [*packets, None]) == 12
            decoder.reset()
        decoder.close()
    assert len(opener.opened) == 1


def bare(packet: "av.Packet[VideoStream]", codec: str) -> "av.Packet[VideoStream]":
    """Without its parameter sets."""
    content = bytes(packet)
    for unit in headers_of(content, codec).sets.split(b"\x00\x00\x00\x01")[1:]:
        content = content.replace(
            b"\x00\x00\x01" + unit, b"\x00\x00\x01" + (b"\x09\xf0", b"\x46\x01\x50")[codec == "hevc"]
        )
    assert not headers_of(content, codec).sets
    other = av.Packet(content)
    other.pts, other.dts, other.time_base = packet.pts, packet.dts, packet.time_base
    other.is_keyframe = packet.is_keyframe
    return other


def test_mended_picture_and_what_builds_on_it_are_marked(tmp_path: Path) -> None:
    """Until the next keyframe."""
    whole = write_clip(tmp_path / "a.ts", frames=36, gop=12, size=(320, 192))
    with av.open(str(whole)) as container:
        cut = [bytes(packet) for packet in container.demux(video=0)][15]
    run = Run(without(tmp_path / "cut.ts", whole, [15], cut[: len(cut) // 2]))
    pictures = [picture for pictures in run.read() for picture in pictures]
    assert [place for place, picture in enumerate(pictures) if picture.is_corrupt] == list(range(15, 24))


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((1280, 720), {}, ""),
        ((1280, 720), {"num_decoder_engines": 0}, "the GPU has no video engine"),
        ((32, 32), {"width_min": 48, "height_min": 16}, "NVDEC takes h264 of 48x16 and more, and this is 32x32"),
        ((5000, 500), {"width_max": 4096, "height_max": 4096}, "at most, and this is 5000x500"),
        ((4096, 4096), {"width_max": 4096, "height_max": 4096, "mb_num_max": 8192}, "at most, and this is 4096x4096"),
        ((4096, 4096), {"width_max": 4096, "height_max": 4096, "mb_num_max": 65536}, ""),
    ],
)
def test_card_says_what_it_takes(size: tuple[int, int], limits: dict[str, int], expected: str) -> None:
    """Sides and their product; a card without an engine takes nothing."""
    refusal = refusal_of("h264", size, limits)
    assert refusal.endswith(expected)
    assert bool(refusal) is bool(expected)
