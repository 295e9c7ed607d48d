"""One stream's NVDEC decoder, and two streams in one decoder, over a stand-in of the driver's library."""

import ctypes
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from penstock_video.decode import cuvid, pairing, verification
from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.cuvid import Cuvid, CuvidFailed, PictureFormat
from penstock_video.decode.cuvid_structures import (
    Caps,
    CreateInfo,
    DecodeStatus,
    DisplayInfo,
    ParserParams,
    ProcessParams,
    SourcePacket,
    VideoFormat,
)
from penstock_video.decode.pairing import DecoderPool, PictureIndices, may_pair
from penstock_video.errors import GpuFull, NeedsCpu
from penstock_video.types import DecoderSharing
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.decode.broken_clips import SIZE, annex_b_packets, damaged_packet
from tests.deepstream_pipeline.decode.cameras import Camera, Card, assert_right, expected


def test_layouts_are_those_of_the_header_files() -> None:
    """Sizes and places in bytes, as a C++ compiler gives them for Video Codec SDK 13."""
    sizes = {
        Caps: 88, VideoFormat: 64, CreateInfo: 176, ParserParams: 136, SourcePacket: 32,
        DisplayInfo: 24, ProcessParams: 264, DecodeStatus: 192,
    }  # fmt: skip
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    places = {
        (VideoFormat, "surfaces"): 15, (VideoFormat, "display_area"): 24, (VideoFormat, "chroma"): 40,
        (CreateInfo, "display_area"): 80, (CreateInfo, "target_width"): 96, (CreateInfo, "lock"): 120,
        (ParserParams, "on_format"): 48, (ParserParams, "extended"): 128,
        (ProcessParams, "stream"): 56, (ProcessParams, "histogram"): 248,
    }  # fmt: skip
    assert {(kind, name): getattr(kind, name).offset for kind, name in places} == places


@pytest.mark.parametrize(("codec", "first", "step"), [("h264", 72, 7), ("hevc", 109, 1)])
def test_indices_of_a_picture_and_of_its_references_are_moved(codec: str, first: int, step: int) -> None:
    """By the base of the stream's half; the original stays as it is. The other stream's pictures are named for HEVC."""
    picture = np.full(cuvid.PICTURE_BYTES // 4, -1, np.int32)
    picture[2], picture[first], picture[first + 15 * step] = 3, 0, 2
    before = picture.copy()
    indices = PictureIndices(codec, 5, 4)
    moved = np.frombuffer(ctypes.string_at(indices.moved(picture.ctypes.data, [1, 4]), cuvid.PICTURE_BYTES), np.int32)
    after = before.copy()
    after[[2, first, first + 15 * step]] = 8, 5, 7
    if codec == "hevc":
        after[[first + 1, first + 2]] = 1, 4
    assert np.array_equal(moved, after)
    assert np.array_equal(picture, before)
    assert indices.held == ((5, 7, 8) if codec == "hevc" else ())


def test_scaled_pictures_are_of_a_decoder_of_their_own(card: Card, tmp_path: Path) -> None:
    """They could not be compared with FFmpeg's to the bit, as those of a shared decoder are."""
    packets, size = annex_b_packets(tmp_path, "h264", size=(322, 182)), (322, 182)
    card.camera("h264", size).give(packets[0], 0)
    second = card.camera("h264", size)
    second.decoder = second.opener("h264", 77, size, (162, 92))
    (surface,) = second.give(packets[0], 0)
    assert (surface.width, surface.height, second.opener.sharing) == (162, 92, DecoderSharing.OWN)
    assert [(one["target_width"], one["target_height"]) for one in card.library.made] == [(336, 192), (162, 92)]
    small = cv2.resize(expected(packets[:1])[0][:182], (162, 92), interpolation=cv2.INTER_AREA)
    assert np.abs(second.shown[0][1][:92].astype(int) - small).max() <= 1


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_pictures_equal_ffmpegs_and_say_their_number(card: Card, tmp_path: Path, codec: str) -> None:
    """Each of its packet, cropped; what the decoder held is given back."""
    packets = annex_b_packets(tmp_path, codec, size=(322, 182))
    camera = card.camera(codec, (322, 182))
    for number, packet in enumerate(packets):
        (surface,) = camera.give(packet, number)
        assert (surface.width, surface.height, surface.is_damaged) == (322, 182, False)
    assert_right(camera, packets, codec)
    assert camera.decoder.flush() == []
    assert card.library.made[0]["codec"] == cuvid.CODECS[codec]
    camera.decoder.close()
    assert (card.library.decoders, card.library.parsers) == ({}, {})


def test_flush_shows_more_pictures_than_can_be_mapped(card: Card, tmp_path: Path) -> None:
    """The rest lies in memory of its own, until the next call."""
    path = write_clip(tmp_path / "b.ts", frames=12, size=SIZE, codec="libx264", b_frames=3)
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    camera = card.camera()
    shown = [one for number, packet in enumerate(packets) for one in camera.give(packet, number)]
    card.library.surfaces = 16
    left = camera.decoder.flush()
    assert len(shown) + len(left) == 12
    camera.decoder.close()
    assert card.device._driver.is_all_given_back


def test_damaged_picture_is_marked(card: Card, tmp_path: Path) -> None:
    """By the decoder's status of it."""
    packets = annex_b_packets(tmp_path, "h264", size=(320, 192))
    packets[7] = damaged_packet(packets[7])
    camera = card.camera(size=(320, 192))
    found = [one for number, packet in enumerate(packets) for one in camera.give(packet, number)]
    assert 7 in [one.stamp for one in found if one.is_damaged]
    assert not found[6].is_damaged


@pytest.mark.parametrize(
    ("function", "code", "error", "words"),
    [
        ("cuvidCreateDecoder", 2, GpuFull, r"no more decoders \(CUDA's error 2\): .* fewer cameras, or with decoder"),
        ("cuvidCreateDecoder", 801, NeedsCpu, "NVDEC does not take this stream .cuvidCreateDecoder answers 801."),
        ("cuvidCreateDecoder", 1, PacketRefused, "NVDEC: cuvidCreateDecoder answers 1"),
        ("cuvidDecodePicture", 2, PacketRefused, "NVDEC: cuvidDecodePicture answers 2"),
        ("cuvidMapVideoFrame64", 1, PacketRefused, "NVDEC: cuvidMapVideoFrame64 answers 1"),
    ],
)
def test_failure_of_the_driver_is_ours_in_one_line(
    card: Card, clips: tuple[list[bytes], list[bytes]], function: str, code: int, error: type[Exception], words: str
) -> None:
    """A card that is full and a stream that it does not take are known with the first packet; nothing is left."""
    camera = card.camera()
    card.library.fails[function] = code
    with pytest.raises(error, match=words):
        camera.give(clips[0][0], 0)
    camera.decoder.close()
    assert (card.library.decoders, card.library.parsers) == ({}, {})


def test_decoder_that_cannot_be_is_the_cpus(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small a picture, a driver that does not answer, no library: each says why."""
    with pytest.raises(NeedsCpu, match="NVDEC takes h264 of 48x16 and more, and this is 32x32"):
        card.opener("h264", 0, (32, 32))
    card.library.fails["cuvidGetDecoderCaps"] = 101
    with pytest.raises(NeedsCpu, match="cuvidGetDecoderCaps answers 101"):
        card.opener("h264", 0, SIZE)
    monkeypatch.setattr(cuvid, "LIBRARY", "libnone-of-that-name.so.1")
    with pytest.raises(NeedsCpu, match="libnone-of-that-name"):
        Cuvid()


LIKE = PictureFormat("h264", 1, 8, (1280, 720), (0, 0, 1280, 720), 4)


@pytest.mark.parametrize(
    ("other", "is_paired"),
    [
        (LIKE, True),
        (LIKE._replace(surfaces=3), True),
        (LIKE._replace(surfaces=5), False),  # the half that is left has four
        (LIKE._replace(surfaces=pairing.MOST_SHARED_SURFACES + 1), False),
        (LIKE._replace(codec="hevc"), False),  # one decoder has one codec
        (LIKE._replace(coded=(1280, 736)), False),
        (LIKE._replace(area=(0, 0, 1280, 718)), True),
        (LIKE._replace(bit_depth=10), False),
        (LIKE._replace(chroma=2), False),
    ],
)
def test_streams_share_a_decoder_if_their_pictures_are_alike(other: PictureFormat, is_paired: bool) -> None:
    """Codec, coded size, depth and colours, and few reference pictures."""
    assert may_pair(other, LIKE) is is_paired


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_two_cameras_take_turns_at_one_decoder(card: Card, tmp_path: Path, codec: str) -> None:
    """All pictures of both are right; a third camera gets another decoder, and the last of two frees theirs."""
    (tmp_path / "other").mkdir()
    clips = annex_b_packets(tmp_path, codec), annex_b_packets(tmp_path / "other", codec, first=7)
    one, two = card.camera(codec), card.camera(codec)
    for number, packets in enumerate(zip(*clips, strict=True)):
        one.give(packets[0], number)
        assert card.opener.may_join(codec, SIZE) is (number == 0)
        two.give(packets[1], number)
    assert len(card.library.decoders) == 1
    assert one.opener.sharing is two.opener.sharing is DecoderSharing.SHARED
    for camera, packets in ((one, clips[0]), (two, clips[1])):
        assert_right(camera, packets, codec)
    three = card.camera(codec)
    three.give(clips[0][0], 0)
    assert len(card.library.decoders) == 2
    assert not card.opener.may_join(codec, (640, 360))
    one.decoder.close()
    three.decoder.close()
    assert len(card.library.decoders) == 1
    two.decoder.close()
    assert not card.library.decoders


def test_camera_that_fails_leaves_its_partner_alone(card: Card, clips: tuple[list[bytes], list[bytes]]) -> None:
    """The partner misses no picture; the other camera's next decoder is its own, and theirs gets no third camera."""
    one, two = card.camera(), card.camera()
    one.give(clips[0][0], 0)
    two.give(clips[1][0], 0)
    card.library.fails["cuvidDecodePicture"] = 700
    with pytest.raises(PacketRefused):
        two.give(clips[1][1], 1)
    card.library.fails.clear()
    two.decoder.close()
    two.reopen()
    two.give(clips[1][0], 0)
    card.camera().give(clips[0][0], 0)
    assert len(card.library.decoders) == 3
    for number, packet in enumerate(clips[0][1:], 1):
        one.give(packet, number)
    assert_right(one, clips[0])


def test_wrong_pictures_of_a_shared_decoder_are_found(
    card: Card,
    clips: tuple[list[bytes], list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The camera says it in one line and gets a decoder of its own; the partner is right in the shared one."""
    monkeypatch.setattr(PictureIndices, "moved", lambda self, address, others: address)  # both use the same surfaces
    monkeypatch.setattr(DecoderPool, "_new", _with_one_base)
    one, two = card.camera(), card.camera()
    one.give(clips[0][0], 0)
    with pytest.raises(PacketRefused, match="differ from FFmpeg's"):
        give_both(two, one, clips)
    assert capfd.readouterr().err.count("it gets a decoder of its own at its next keyframe\n") == 1
    wrong = next(camera for camera in (one, two) if camera.opener.is_alone)
    wrong.decoder.close()
    wrong.shown.clear()
    wrong.reopen()
    for number, packet in enumerate(clips[1]):
        wrong.give(packet, number)
    assert_right(wrong, clips[1])
    assert {one.opener.sharing, two.opener.sharing} == {DecoderSharing.OWN, DecoderSharing.MISMATCH}
    assert len(card.library.decoders) == 2


def give_both(one: Camera, other: Camera, clips: tuple[list[bytes], list[bytes]]) -> None:
    """Their packets in turn: of the second clip to one, and of the first one to the other."""
    for number, packets in enumerate(zip(*clips, strict=True)):
        one.give(packets[1], 2 * number)
        other.give(packets[0], 2 * number + 1)


def _with_one_base(self: DecoderPool, like: PictureFormat, streams: int) -> pairing.SharedDecoder:
    decoder = self._new_decoder(self.cuvid, like, streams * like.surfaces, streams * pairing.OUTPUTS)
    shared = pairing.SharedDecoder(decoder, like, [0] * streams)
    self._decoders.append(shared)
    return shared


def test_pictures_that_were_right_are_compared_no_more(
    card: Card, clips: tuple[list[bytes], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until another camera joins."""
    monkeypatch.setattr(verification, "PICTURES", 5)
    looks: list[int] = []
    look = verification.PictureCheck.look
    monkeypatch.setattr(verification.PictureCheck, "look", lambda self, *what: looks.append(1) or look(self, *what))
    one, two = card.camera(), card.camera()
    two.give(clips[1][0], 0)
    one.give(clips[0][0], 0)
    for number, packet in enumerate(clips[0][1:], 1):
        one.give(packet, number)
    assert len(looks) == 5
    two.decoder.close()
    three = card.camera()
    three.give(clips[1][0], 0)
    one.give(clips[0][0], 100)
    assert len(card.library.decoders) == 1
    assert len(looks) == 5 + 1 + 1


def test_damaged_stream_that_cannot_be_compared_is_alone(
    card: Card, clips: tuple[list[bytes], list[bytes]], tmp_path: Path
) -> None:
    """After three attempts; one damaged picture changes nothing."""
    packets = annex_b_packets(tmp_path, "h264", size=(320, 192), gop=3)
    two = card.camera(size=(320, 192))
    card.camera(size=(320, 192)).give(packets[0], 0)
    broken = [damaged_packet(one) if place % 3 == 1 else one for place, one in enumerate(packets)]
    with pytest.raises(PacketRefused, match="too damaged to be compared"):
        give_both(two, two, (broken[1::2], broken[::2]))
    assert two.opener.is_alone


def test_decoder_has_one_streams_picture_at_a_time(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its decoding to its mapping; a stream whose partner does not end gives up, and the decoder gets no other."""
    monkeypatch.setattr(pairing, "TURN_S", 0.01)
    pool = card.opener.pool
    one, two = (pool.lane(LIKE, is_alone=False) for _ in range(2))
    monkeypatch.setattr(pairing.HardwareDecoder, "decode", lambda self, picture: None)
    picture = np.full(cuvid.PICTURE_BYTES // 4, -1, np.int32)
    picture[cuvid.CURRENT] = 0
    one.decode(picture.ctypes.data)
    with pytest.raises(CuvidFailed, match="the decoder's other stream answers not within"):
        two.decode(picture.ctypes.data)
    one.end_turn()
    two.decode(picture.ctypes.data)
    two.end_turn()
    two.close()
    assert not pool.has_room("h264", LIKE.size)
    one.close()


def test_turn_ends_when_pictures_that_are_shown_later_are_decoded(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those to which B-frames refer; one that is mapped is decoded, and so is one of a decoder without a partner."""
    asked: list[int] = []
    monkeypatch.setattr(pairing.HardwareDecoder, "decode", lambda self, picture: None)
    monkeypatch.setattr(pairing.HardwareDecoder, "map", lambda self, index, stream: None)
    monkeypatch.setattr(
        pairing.HardwareDecoder, "is_under_way", lambda self, index: asked.append(index) or len(asked) < 3
    )
    one, two = (card.opener.pool.lane(LIKE, is_alone=False) for _ in range(2))
    picture = np.full(cuvid.PICTURE_BYTES // 4, -1, np.int32)
    for index in (0, 1):
        picture[2] = index
        two.decode(picture.ctypes.data)
    two.map(0, 77)
    two.end_turn()
    assert asked == [LIKE.surfaces + 1] * 3
    one.close()
    two.decode(picture.ctypes.data)
    two.end_turn()
    assert len(asked) == 3


def test_wrong_pictures_of_several_cameras_end_all_sharing_of_that_size(card: Card) -> None:
    """Other sizes go on."""
    pool = card.opener.pool
    for _ in range(pairing.MOST_WRONG):
        pool.refuse(LIKE)
    lanes = [pool.lane(like, is_alone=False) for like in (LIKE, LIKE, LIKE._replace(coded=(640, 368)))]
    assert [lane.is_shared for lane in lanes] == [False] * 3
    assert len(pool) == 3
    assert pool.lane(LIKE._replace(coded=(640, 368)), is_alone=False).is_shared
    assert len(pool) == 3
