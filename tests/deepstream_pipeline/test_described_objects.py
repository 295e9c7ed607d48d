"""Objects of a clip as several secondary models describe them, in objects.jsonl and in the annotated video."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from penstock.engines.model_health import KnownModel
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, tensor_from_numpy
from penstock_video.infer.options import EngineAddress
from penstock_video.main import Program
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.infer.fake_core import FakeCore
from tests.deepstream_pipeline.settings.reading import read

FRAMES, SIZE = 8, (160, 96)
SETTINGS = """
source: {uri: clip.mp4, camera_id: cam}
primary-gie: {model: one_box}
secondary-gie: [{model: pose}, {model: plates}, {model: reid}]
sink: [{type: jsonl, folder: out}, {type: mp4, folder: out}]
osd: {display-text: no, display-trail: no, display-title: no}
api: {enable: false}
"""
# A box of the whole crop, two keypoints in its 100 x 100 pixels; "AB" in steps of blank, A, A, B; a vector.
OUTPUTS = {
    "pose": np.array([[[0, 0, 100, 100, 0.9, 0, 25, 50, 0.8, 75, 50, 0.7]]], np.float32),
    "plates": np.eye(3, dtype=np.float32)[[[0, 1, 1, 2]]],
    "reid": np.array([[0.6, 0.8]], np.float32),
}
PARAMETERS = {
    "pose": {"network-type": "0", "layout": "yolo-end2end-pose", "keypoint-shape": "2;3", "skeleton": "0-1"},
    "plates": {"network-type": "100", "layout": "ctc", "characters": "AB"},
    "reid": {"network-type": "100", "layout": "embedding"},
}


def described(name: str) -> ModelConfig:
    """Takes crops of 100 x 100, one a call."""
    inputs, outputs = TensorSpec("x", Datatype.FP32, (3, 100, 100)), TensorSpec("y", Datatype.FP32, (-1,))
    return ModelConfig(name, "python", 1, (inputs,), (outputs,), PARAMETERS[name], unmerged="")


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    (tmp_path / "run").mkdir()
    core = FakeCore(tmp_path / "run")
    for name, output in OUTPUTS.items():
        core.models[name] = KnownModel(name, True, config=described(name))
        core.answers[name] = (tensor_from_numpy("y", output),)
    yield core
    core.end()


def test_objects_have_poses_texts_and_vectors(core: FakeCore, tmp_path: Path) -> None:
    """Keypoints are in pixels of the frame, in every frame; a vector is in the line of the frame that made it."""
    write_clip(tmp_path / "clip.mp4", frames=FRAMES, size=SIZE)
    program = Program(read(SETTINGS, tmp_path), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    try:
        program.start()
        assert program.wait(60)
    finally:
        program.stop(10)
    lines = [json.loads(line) for line in (tmp_path / "out" / "objects.jsonl").read_bytes().splitlines()]
    shown: list[dict[str, Any]] = [line["objects"][0] for line in lines if line["objects"]]
    objects = [one for one in shown if one["track_id"] is not None]
    assert (len(lines), len(shown), len(objects)) == (FRAMES, FRAMES, FRAMES - 2)  # two frames of probation
    width, height = SIZE
    for one in objects:
        assert one["keypoints"] == [[width / 4, height / 2, 0.8], [width * 3 / 4, height / 2, 0.7]]
        assert one["attributes"][0] == {"model": "plates", "class_id": -1, "label": "AB", "score": 1.0}
    vectors = [[row["vector"] for row in one["attributes"][1:]] for one in objects]
    assert vectors == [[[0.6, 0.8]], [], [], [], [], []]
    assert "mask" not in objects[0]
    with av.open(tmp_path / "out" / "annotated.mp4") as video:
        *_, last = (frame.to_ndarray(format="rgb24") for frame in video.decode(video=0))
    line = last[height // 2, width // 4 + 10 : width * 3 // 4 - 10].astype(int)
    assert np.ptp(line, axis=0).max() < 90  # one colour over the clip's red, green, blue and grey quarters
