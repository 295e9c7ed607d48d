"""What a region may be called, and which segments it may be."""

import uuid

import pytest

from penstock.engines.run_directory import region_prefix
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.shared_memory import check_region_name, segment_of


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a..b", "a\0b", "a\nb", "x" * 256, "é" * 128])
def test_region_name_that_looks_like_a_path_or_is_no_text_is_refused(name: str) -> None:
    """It stands in paths, logs and messages."""
    with pytest.raises(InvalidRequest, match="a shared memory region's name"):
        check_region_name(name)


@pytest.mark.parametrize(
    "key", ["", "/", "///", "/a/b", "/../etc/passwd", "..", "/.", "/a\0b", "/" + "x" * 256, "é" * 128]
)
def test_key_that_leads_elsewhere_is_refused(key: str) -> None:
    """A segment is a file directly in /dev/shm."""
    with pytest.raises(InvalidRequest, match="a shared memory key"):
        segment_of(key)


@pytest.mark.parametrize(
    "key",
    [
        "/" + region_prefix(uuid.uuid4().hex[:12]) + "whatever",
        f"triton_python_backend_shm_region_{uuid.uuid4()}",
        f"//triton_onnxruntime_backend_shm_region_{uuid.uuid4()}",
        "/sem.lock",
    ],
    ids=["ours", "python", "another backend", "semaphore"],
)
def test_key_of_the_engines_own_memory_is_refused(key: str) -> None:
    """A client that writes to the memory between Triton and its models owns both (CVE-2025-23320 and its kin)."""
    with pytest.raises(InvalidRequest, match="belongs to the engine"):
        segment_of(key)


@pytest.mark.parametrize("key", ["/input", "input", "//input", "/" + "x" * 255, "été.1"])
def test_key_is_a_file_with_or_without_its_slash(key: str) -> None:
    """As shm_open has it."""
    assert segment_of(key) == key.lstrip("/")
