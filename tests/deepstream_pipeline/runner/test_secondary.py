"""Frames that wait for what secondary models say of their objects."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock_video.errors import InferFailed
from penstock_video.infer.calls import CropResult
from penstock_video.infer.crops import SecondaryOptions
from penstock_video.metrics import VideoMetrics
from penstock_video.runner import secondary
from penstock_video.runner.dispatch import StreamPipeline
from penstock_video.runner.secondary import MAX_WAITING, MAX_WAITING_FRAMES, Secondaries, SecondaryModel
from penstock_video.types import ClassScore, Detections, Frame, FrameResult, Tracks
from tests.deepstream_pipeline.infer.test_crops import network
from tests.deepstream_pipeline.runner.fakes import FakeEngine, a_way

PICTURE = np.zeros((48, 64, 3), np.uint8)
RED = ClassScore("colour", 1, "red", 0.9)


class Held:
    """Secondaries over an engine that answers when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = CropResult((RED,))
        monkeypatch.setattr(secondary, "crop_result_of", lambda *_: self.answer)
        self.engine = FakeEngine()
        self.delivered: list[FrameResult] = []
        self.ended: list[str] = []
        whole: Any = self.engine
        card = replace(network().card, skeleton=((0, 1),))
        model = SecondaryModel(replace(network(), card=card), SecondaryOptions(reinfer_interval=1))
        self.secondaries = Secondaries(whole, (model,), VideoMetrics(), lambda: None)
        self.secondaries.deliver = lambda way, result: self.delivered.append(result)
        self.secondaries.ended = lambda way: self.ended.append(way.source_id)

    def look(self, way: StreamPipeline, number: int, *, objects: int = 1, **shapes: Any) -> None:
        boxes = np.tile(np.array([[4, 4, 30, 40]], np.float32), (objects, 1))
        seen = Detections(boxes, np.ones(objects, np.float32), np.zeros(objects, np.int64))
        ids = np.arange(objects) + number * objects  # no object twice, so that each is classified
        frame = Frame(way.source_id, number, number / 10, 0.0, 64, 48)
        self.secondaries.look(way, FrameResult(frame, Tracks(replace(seen, **shapes), ids, ids)), PICTURE)

    @property
    def numbers(self) -> list[int]:
        return [result.frame.frame_num for result in self.delivered]


def test_frame_waits_for_what_is_said_of_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is delivered with it, behind those before it; the source's end behind all."""
    held, way = Held(monkeypatch), a_way("cam")
    held.look(way, 0)
    held.look(way, 1)
    held.secondaries.finish(way)
    first, second = held.engine.asked
    second.answer()
    held.secondaries.pump()
    assert held.numbers == []
    first.answer()
    held.secondaries.pump()
    assert (held.numbers, held.ended) == ([0, 1], ["cam"])
    assert [result.attributes for result in held.delivered] == [((RED,),), ((RED,),)]


def test_keypoints_become_those_of_the_detections(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the skeleton of the model that found them; a primary model's own keypoints stay."""
    held, way = Held(monkeypatch), a_way("cam")
    held.answer = CropResult(keypoints=np.array([[13, 18, 0.5]], np.float32))
    own = np.ones((1, 2, 3), np.float32)
    held.look(way, 0)
    held.look(way, 1, keypoints=own)
    for asked in held.engine.asked:
        assert [(one.source_width, one.source_height) for one in asked.geometries] == [(26, 36)]
        asked.answer()
    held.secondaries.pump()
    first, second = (result.tracks.detections.keypoints for result in held.delivered)
    assert first is not None
    assert first.tolist() == [[[17, 22, 0.5]]]
    assert second is own
    assert [result.skeleton for result in held.delivered] == [((0, 1),), ()]


def test_engine_that_never_answers_holds_few_frames_and_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more frames than MAX_HELD the oldest goes on without; what is answered too late changes nothing."""
    held, ways = Held(monkeypatch), [a_way("a"), a_way("b")]
    for number in range(300):
        for way in ways:
            held.look(way, number, objects=3)
    assert len(held.delivered) >= 600 - MAX_WAITING_FRAMES
    assert all(len(lane.waiting) <= MAX_WAITING + 3 for lane in held.secondaries._lanes)
    while held.engine.asked:
        held.engine.asked.pop().fail(InferFailed("too late"))
        held.secondaries.pump()
    for way in ways:
        held.secondaries.finish(way)
    assert held.ended == ["a", "b"]
    for way in ways:
        mine = [result.frame.frame_num for result in held.delivered if result.frame.source_id == way.source_id]
        assert mine == list(range(300))


def test_frame_whose_crops_cannot_be_cut_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that one frame finds costs that frame."""
    held, way = Held(monkeypatch), a_way("cam")
    with monkeypatch.context() as broken:
        broken.setattr(secondary.SecondaryPlan, "cut", _broken)
        with pytest.raises(RuntimeError):
            held.look(way, 0)
    held.look(way, 1)
    held.engine.asked[0].answer()
    held.secondaries.finish(way)
    held.secondaries.pump()
    assert (held.numbers, held.ended) == ([1], ["cam"])


def _broken(*_: object) -> None:
    raise RuntimeError("a bug")
