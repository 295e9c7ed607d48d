"""What the users send."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from penstock_load.clients import payloads
from penstock_load.clients.payloads import make_pictures, make_raw_tensor, read_pictures


def test_made_pictures_are_jpegs_that_differ_and_come_again() -> None:
    """The same seed makes the same pictures, another seed others, and no two of a run are alike."""
    pictures = make_pictures(3, seed=1)
    assert pictures == make_pictures(3, seed=1)
    assert not set(pictures) & set(make_pictures(3, seed=2))
    assert len(set(pictures)) == 3
    image = cv2.imdecode(np.frombuffer(pictures[0].content, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (480, 640, 3)


def test_made_tensor_has_its_shape_and_type() -> None:
    """A made tensor is the bytes of its shape and type, the same for the same seed."""
    raw = make_raw_tensor([2, 3], np.float32, seed=1)
    assert len(raw) == 24
    assert raw == make_raw_tensor([2, 3], np.float32, seed=1)
    assert np.frombuffer(raw, np.float32).max() < 1
    assert np.frombuffer(make_raw_tensor([64], np.int8, seed=1), np.int8).min() >= 0


def test_folder_of_many_pictures_is_read_as_far_as_memory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, up to a count and a size; one picture is always read."""
    for name in ("c.jpg", "a.jpg", "b.PNG", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    assert [picture.content[:5] for picture in read_pictures(tmp_path)] == [b"a.jpg", b"b.PNG", b"c.jpg"]
    monkeypatch.setattr(payloads, "MOST_PICTURES", 2)
    assert len(read_pictures(tmp_path)) == 2
    monkeypatch.setattr(payloads, "MAX_PAYLOAD_BYTES", 10)
    assert len(read_pictures(tmp_path)) == 1
