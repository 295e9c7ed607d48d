"""`penstock serve FILE`: from a file to detections of a photo, with one command."""

import json
from pathlib import Path

import pytest

from tests.support.http import call
from tests.support.stack import start_stack, stop_stack

pytestmark = pytest.mark.xdist_group("embedded")


def test_serve_answers_a_photo_from_nothing_but_the_file(tmp_path: Path, shared_dir: Path) -> None:
    """YOLOX-Nano as its author published it: recognised, its batch freed, loaded, a cat found; Ctrl-C stops it."""
    file = str(shared_dir / "models" / "yolox_nano.onnx")
    stack = start_stack(tmp_path, file, "--name", "cats", "--engine", "embedded", command="serve")
    try:
        photo = (shared_dir / "media" / "chelsea.jpg").read_bytes()
        answer = call("POST", f"{stack.http_url}/v2/models/cats/image", photo, {"content-type": "image/jpeg"})
        (found,) = answer.json["results"][0]["detections"]
        assert (answer.status, found["class_id"]) == (200, 15)
        assert found["score"] == pytest.approx(0.629, abs=0.005)
        assert found["xyxy"] == pytest.approx([0, 0, 449, 300], abs=1.0)
        index = json.loads(call("POST", f"{stack.http_url}/v2/repository/index", b"{}").body)
        assert [row["name"] for row in index if row.get("state") == "READY"] == ["cats"]
    finally:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])
