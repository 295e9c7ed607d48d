"""The decoder's contract, kept by FFmpeg, and by NVDEC's side of it over a stand-in; and what concerns FFmpeg alone."""

from pathlib import Path

import pytest

from penstock_video.decode.codec import SoftwareCodec
from penstock_video.decode.decoder import StreamFacts
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.errors import DecodeError
from penstock_video.types import DecoderKind
from tests.deepstream_pipeline.clips import damaged, write_clip
from tests.deepstream_pipeline.decode.broken_clips import plain_clip
from tests.deepstream_pipeline.decode.decoder_contract import FRAMES, DecoderContract, Kind, seen_of
from tests.deepstream_pipeline.decode.fake_nvcodec import FakeOpener, read_host

CPU = Kind(DecoderKind.CPU, SoftwareCodec)


class TestFFmpeg(DecoderContract):
    """On the CPU."""

    @pytest.fixture
    def kind(self) -> Kind:
        """FFmpeg."""
        return CPU


class TestNvdecOverItsStandIn(DecoderContract):
    """All of NVDEC's side but the card."""

    @pytest.fixture
    def kind(self) -> Kind:
        """NvdecCodec over FFmpeg in NVDEC's manners."""
        return Kind(DecoderKind.NVDEC, NvdecCodecs(FakeOpener()), read_host)


def test_facts_of_a_file_tell_its_length(tmp_path: Path) -> None:
    """Where the container knows them: the number of frames and the seconds, for a progress bar."""
    facts, _ = seen_of(CPU, write_clip(tmp_path / "a.mp4", frames=FRAMES, fps=10))
    assert (facts.frames_total, facts.duration_s) == (FRAMES, pytest.approx(4.0))


def test_real_clip_is_decoded_whole(shared_dir: Path) -> None:
    """795 frames at ten a second."""
    decoder = CPU.opened(shared_dir / "media" / "vtest.avi")
    pts_s = [picture.pts_s for packet in decoder.packets() for picture in decoder.decode(packet)]
    assert decoder.facts == StreamFacts(768, 576, 10.0, decoder.facts.codec, False, 795, 79.5)
    assert pts_s == pytest.approx([number / 10 for number in range(795)])
    decoder.close()


def test_stream_that_comes_up_meanwhile_is_no_matter(tmp_path: Path) -> None:
    """A transport stream whose damaged table tells of others ends as any other does."""
    whole = plain_clip(tmp_path / "a.ts", frames=FRAMES, b_frames=2)
    _, seen = seen_of(CPU, damaged(tmp_path / "bad.ts", whole, flips=17, seed=136, spare=0.1))
    assert len(seen.numbers) > 10


def test_stream_that_is_rubbish_from_the_middle_on_ends(tmp_path: Path) -> None:
    """A codec's bytes replaced by nothing do not keep a decoder busy for ever."""
    whole = write_clip(tmp_path / "a.avi", frames=400, codec="mjpeg", size=(64, 48))
    content = bytearray(whole.read_bytes())
    position = content.find(b"00dc", len(content) // 4)
    while 0 <= position < content.rfind(b"idx1"):
        size = int.from_bytes(content[position + 4 : position + 8], "little")
        content[position + 8 : position + 8 + size] = bytes(size)
        position = content.find(b"00dc", position + 8 + size)
    (tmp_path / "bad.avi").write_bytes(content)
    with pytest.raises(DecodeError, match="packets in a row"):
        seen_of(CPU, tmp_path / "bad.avi")
