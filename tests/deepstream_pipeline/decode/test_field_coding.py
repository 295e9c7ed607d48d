"""Which H.264 streams may hold fields."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.decode.bitstream import headers_of, may_hold_fields
from tests.deepstream_pipeline.decode.broken_clips import annex_b_packets


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("keyint=12", False),
        ("tff=1", True),
        ("fake-interlaced=1", True),
        ("fake-interlaced=1:cqm=jvt", True),
        ("cqm=jvt", False),
        ("cqm4i=1" + ",9" * 15, False),
        ("fake-interlaced=1:cqm8p=1" + ",17" * 63, True),
        ("bframes=0:ref=3:weightp=2", False),
    ],
)
def test_sequence_says_whether_it_may_hold_fields(tmp_path: Path, parameters: str, expected: bool) -> None:
    """Of real encodings: with scaling lists, without; whole pictures that are coded so all the same, too."""
    first = annex_b_packets(tmp_path, "h264", options={"x264-params": parameters})[0]
    assert may_hold_fields(headers_of(first, "h264").sequence) is expected


@given(st.binary(max_size=600))
def test_any_bytes_are_read(unit: bytes) -> None:
    """What is no parameter set is said to hold none, or any answer, but no error."""
    assert may_hold_fields(b"\x67" + unit) in (True, False)
    assert may_hold_fields(unit) in (True, False)
