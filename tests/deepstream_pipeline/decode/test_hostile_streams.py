"""Streams that are made to harm: NVDEC's parser finds in them what no camera sends."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from penstock_video.decode import cuvid
from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.pairing import ForeignSurface, PictureIndices
from penstock_video.errors import NeedsCpu
from tests.deepstream_pipeline.decode.broken_clips import SIZE, annex_b_packets
from tests.deepstream_pipeline.decode.cameras import Card, assert_right


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_surface_of_the_other_stream_cannot_be_named(codec: str) -> None:
    """As the picture's own it would be written into, so that is refused; as a reference it counts as unused."""
    indices, picture = PictureIndices(codec, 4, 4), np.full(cuvid.PICTURE_BYTES // 4, -1, np.int32)
    for index in (4, -1, 1 << 30):
        picture[cuvid.CURRENT] = index
        with pytest.raises(ForeignSurface, match=f"surface {index} of 4"):
            indices.moved(picture.ctypes.data, [])
    picture[cuvid.CURRENT] = 0
    picture[cuvid.REFERENCES[codec]][:5] = 0, 3, 4, 127, 1 << 30
    moved = np.frombuffer(ctypes.string_at(indices.moved(picture.ctypes.data, []), cuvid.PICTURE_BYTES), np.int32)
    assert moved[cuvid.REFERENCES[codec]][:5].tolist() == [4, 7, -1, -1, -1]


def test_camera_that_names_its_partners_surface_fails_alone(card: Card, clips: tuple[list[bytes], list[bytes]]) -> None:
    """The decoder is not suspect: its partner goes on, and a third camera may join it."""
    one, two, three = card.camera(), card.camera(), card.camera()
    one.give(clips[0][0], 0)
    two.give(clips[1][0], 0)
    for parser in list(card.library.parsers.values())[1:]:
        parser._next = 4
    with pytest.raises(PacketRefused, match="NVDEC: the stream's parser answers surface 4 of 4"):
        two.give(clips[1][1], 1)
    two.decoder.close()
    three.give(clips[1][0], 0)
    assert len(card.library.decoders) == 1
    for number, packet in enumerate(clips[0][1:], 1):
        one.give(packet, number)
    assert_right(one, clips[0])


def test_stream_of_another_size_than_ffmpegs_gets_no_decoder(card: Card, tmp_path: Path) -> None:
    """A packet with two parameter sets can be read in two ways; memory is taken only for the size that was checked."""
    packets = annex_b_packets(tmp_path, "h264", size=(1280, 720))
    camera = card.camera(size=SIZE)
    with pytest.raises(NeedsCpu, match=f"NVDEC reads pictures of 1280x720 in a stream of {SIZE[0]}x{SIZE[1]}"):
        camera.give(packets[0], 0)
    assert card.library.made == []


def test_packet_of_many_pictures_takes_little_memory(card: Card, clips: tuple[list[bytes], list[bytes]]) -> None:
    """More pictures than the decoder has surfaces are no packet of a camera; what was copied is given back."""
    card.library.repeats = 1000
    camera = card.camera()
    with pytest.raises(PacketRefused, match="NVDEC: a packet shows more than 4 pictures"):
        camera.give(clips[0][0], 0)
    camera.decoder.close()
    assert card.device._driver.is_all_given_back
    assert not card.library.decoders
