"""The seam to PyNvVideoCodec, over a stand-in of it."""

import sys
from pathlib import Path

import pytest

from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.nvcodec import NvdecOpener
from penstock_video.errors import GpuFull, NeedsCpu
from tests.deepstream_pipeline.decode.broken_clips import annex_b_packets
from tests.deepstream_pipeline.decode.fake_library import FakeLibrary, PyNvVCException, text_of
from tests.deepstream_pipeline.decode.fake_nvcodec import LIMITS


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """In PyNvVideoCodec's stead."""
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", library)  # type: ignore[arg-type]
    return library


def test_decoder_is_asked_for_without_delay_and_in_the_card(library: FakeLibrary) -> None:
    """On the card and the CUDA stream that were given."""
    NvdecOpener(3, LIMITS.__getitem__)("hevc", 77, (640, 360))
    expected = {"gpuid": 3, "codec": "hevc", "cudacontext": 0, "cudastream": 77, "usedevicememory": True}
    assert library.asked == [{**expected, "latency": "low"}]


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_pictures_say_their_number_and_where_they_lie(library: FakeLibrary, tmp_path: Path, codec: str) -> None:
    """Each of its packet; after a flush the decoder goes on."""
    packets = annex_b_packets(tmp_path, codec, size=(322, 182))
    decoder = NvdecOpener(0, LIMITS.__getitem__)(codec, 0, (322, 182))
    surfaces = [one for number, packet in enumerate(packets) for one in decoder.decode(packet, number)]
    surfaces += decoder.flush()
    assert [one.stamp for one in surfaces] == list(range(20))
    assert {(one.width, one.height, one.pitch) for one in surfaces} == {(322, 182, 322)}
    assert {one.chroma - one.luma for one in surfaces} == {322 * 182}
    assert [one.stamp for one in decoder.decode(packets[0], 20) + decoder.flush()] == [20]


def test_failure_of_the_library_is_ours_in_one_line(library: FakeLibrary, tmp_path: Path) -> None:
    """Without the library's source lines."""
    decoder = NvdecOpener(0, LIMITS.__getitem__)("h264", 0, (160, 96))
    library.decoders[0].inner.fails = True
    with pytest.raises(PacketRefused, match=r"it fails\Z") as refused:
        decoder.decode(annex_b_packets(tmp_path, "h264")[0], 0)
    assert refused.value.is_fatal


def test_stream_that_the_card_does_not_take_is_the_cpus(library: FakeLibrary, tmp_path: Path) -> None:
    """The library says so with its first packet, by an exception that is none of its others."""
    decoder = NvdecOpener(0, LIMITS.__getitem__)("h264", 0, (160, 96))
    library.decoders[0].refuses = True
    with pytest.raises(NeedsCpu, match=r"NVDEC does not take this stream \(Codec not supported on this GPU\)"):
        decoder.decode(annex_b_packets(tmp_path, "h264")[0], 0)


def test_card_without_room_for_a_decoder_says_so_and_nothing_of_the_stream(
    library: FakeLibrary, tmp_path: Path
) -> None:
    """The library finds it with the first packet; what can be done is in the sentence."""
    decoder = NvdecOpener(0, LIMITS.__getitem__)("h264", 0, (160, 96))
    library.decoders[0].is_full = True
    with pytest.raises(GpuFull, match=r"no more decoders \(CUDA's error 2\): .* fewer cameras, or with decoder: auto"):
        decoder.decode(annex_b_packets(tmp_path, "h264")[0], 0)


@pytest.mark.parametrize(
    "refusal",
    [PyNvVCException(text_of(2, "CUDA_ERROR_OUT_OF_MEMORY")), RuntimeError("cuCtxCreate failed: out of memory")],
)
def test_card_without_room_is_reported_before_the_first_packet_too(library: FakeLibrary, refusal: Exception) -> None:
    """Where the library asks it for memory as soon as a decoder is wanted, in whatever words."""
    library.refusal = refusal
    with pytest.raises(GpuFull, match="the GPU makes no more decoders"):
        NvdecOpener(0, LIMITS.__getitem__)("h264", 0, (640, 360))


def test_decoder_that_finds_no_memory_among_its_pictures_has_failed(library: FakeLibrary, tmp_path: Path) -> None:
    """It was made: another one, at the next keyframe, may find some."""
    packets = annex_b_packets(tmp_path, "h264")
    decoder = NvdecOpener(0, LIMITS.__getitem__)("h264", 0, (160, 96))
    assert decoder.decode(packets[0], 0)
    library.decoders[0].is_full = True
    with pytest.raises(PacketRefused, match="cuvidCreateDecoder") as refused:
        decoder.decode(packets[1], 1)
    assert refused.value.is_fatal


def test_decoder_that_cannot_be_is_the_cpus(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small a picture, another card, no library: each says why."""
    opener = NvdecOpener(0, LIMITS.__getitem__)
    with pytest.raises(NeedsCpu, match="NVDEC takes h264 of 48x16 and more, and this is 32x32"):
        opener("h264", 0, (32, 32))
    library.refusal = PyNvVCException(text_of(201, "CUDA_ERROR_INVALID_CONTEXT"))
    with pytest.raises(NeedsCpu, match=r"NVDEC cannot decode h264 of 640x360 \(CUDA_ERROR_INVALID_CONTEXT\)"):
        opener("h264", 0, (640, 360))
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    with pytest.raises(NeedsCpu, match="PyNvVideoCodec"):
        NvdecOpener(0, LIMITS.__getitem__)
