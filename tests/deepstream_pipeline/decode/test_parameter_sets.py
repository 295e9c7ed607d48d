"""What a packet's headers say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.decode.bitstream import Headers, headers_of, is_annex_b
from tests.deepstream_pipeline.decode.broken_clips import annex_b_packets

START = b"\x00\x00\x00\x01"
H264_SETS = START + b"\x67SPS" + START + b"\x68PPS"
HEVC_SETS = START + b"\x40\x01VPS" + START + b"\x42\x01SPS" + START + b"\x44\x01PPS"


@pytest.mark.parametrize(
    ("codec", "packet", "expected"),
    [
        pytest.param("h264", H264_SETS + START + b"\x65I", Headers(b"\x67SPS", H264_SETS, True, True), id="a keyframe"),
        pytest.param("h264", b"\x00\x00\x01\x41P", Headers(b"", b"", True, True), id="a short start code"),
        pytest.param("h264", START + b"\x09\xf0" + START + b"\x06SEI", Headers(), id="no picture"),
        pytest.param("h264", START + b"\x41P" + H264_SETS, Headers(b"", b"", True, True), id="sets behind the picture"),
        pytest.param("h264", START + b"\xe5I", Headers(), id="the forbidden bit"),
        pytest.param(
            "hevc", HEVC_SETS + START + b"\x26\x01I", Headers(b"\x42\x01SPS", HEVC_SETS, True, True), id="hevc"
        ),
        pytest.param("hevc", START + b"\x02\x01P", Headers(b"", b"", True), id="hevc without sets"),
        pytest.param("hevc", START + b"\x12\x01R", Headers(b"", b"", True, False, True), id="hevc leading"),
        pytest.param("h264", b"", Headers(), id="nothing"),
        pytest.param("h264", START, Headers(), id="a start code alone"),
        pytest.param("h264", bytes(500), Headers(), id="noughts"),
    ],
)
def test_headers_are_read(codec: str, packet: bytes, expected: Headers) -> None:
    """The sets before the first slice, with start codes, and whether there is a slice."""
    assert headers_of(packet, codec) == expected


def test_two_sequences_are_both_reported() -> None:
    """A stream may hold several, of which a change of any counts."""
    packet = START + b"\x67one" + START + b"\x67two" + START + b"\x65I"
    assert headers_of(packet, "h264").sequence == b"\x67one\x67two"


@pytest.mark.parametrize(("codec", "other"), [("h264", "hevc"), ("hevc", "h264")])
def test_keyframe_of_another_codec_is_none(tmp_path: Path, codec: str, other: str) -> None:
    """A stream that changed its codec is known by its first keyframe."""
    packets = annex_b_packets(tmp_path, codec)
    assert all(headers_of(packet, codec).has_picture for packet in packets)
    assert headers_of(packets[0], codec).sequence
    assert not headers_of(packets[0], other).may_be_key


@pytest.mark.parametrize(
    ("extradata", "expected"), [(None, True), (b"", True), (START + b"\x67", True), (b"\x01\x64\x00\x1f", False)]
)
def test_container_tells_whether_units_have_start_codes(extradata: bytes | None, expected: bool) -> None:
    """MP4, Matroska and FLV begin theirs with a version."""
    assert is_annex_b(extradata) is expected


@given(st.binary(max_size=400), st.sampled_from(["h264", "hevc"]))
def test_any_bytes_are_read(packet: bytes, codec: str) -> None:
    """Nothing that a camera sends is more than no headers."""
    headers = headers_of(packet + START + packet, codec)
    assert len(headers.sets) <= 3 * (2 * len(packet) + 8)


def test_packet_of_start_codes_alone_costs_little() -> None:
    """No more than a few units are looked at."""
    assert headers_of(b"\x00\x00\x01\x09" * 100_000 + START + b"\x65I", "h264") == Headers()
