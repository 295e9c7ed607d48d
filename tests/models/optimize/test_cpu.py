"""What /proc/cpuinfo tells of 8-bit instructions."""

from pathlib import Path

import pytest

from penstock.models.optimize.profile import int8_instructions


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model name\t: A\nflags\t\t: fpu avx512f avx512_vnni\n", ("AVX512-VNNI",)),
        ("flags\t\t: fpu avx_vnni amx_tile amx_int8\n", ("AVX-VNNI", "AMX-INT8")),
        ("Features\t: fp asimd asimddp\n", ("Arm dot product",)),
        ("flags\t\t: fpu avx2\n", ()),
        ("something else\n", None),
    ],
)
def test_int8_instructions_are_read_from_the_flags(tmp_path: Path, text: str, names: tuple[str, ...] | None) -> None:
    """Known names, an empty tuple without one, or None if the file has no flags."""
    (tmp_path / "cpuinfo").write_text(text)
    assert int8_instructions(tmp_path / "cpuinfo") == names
