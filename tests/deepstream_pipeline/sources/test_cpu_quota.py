"""What a container's or a service's bound on CPU time leaves, as either version of Linux's control groups tells it."""

from pathlib import Path

import pytest

from deepstream_pipeline.sources.cpu_quota import quota_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "300000 100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "many 0\n"}, None),
        ({"cpu.max": "200000 0\n"}, None),
        ({}, None),
    ],
)
def test_quota_of_either_version_is_found(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    """This group's or one's above it, whichever is less; what cannot be read bounds nothing."""
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("1:cpu:/elsewhere\n0::/a/b\n")
    assert quota_cores(tmp_path / "groups", own) == cores
    assert quota_cores(tmp_path / "nowhere", tmp_path / "nothing") is None
