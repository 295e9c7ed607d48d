"""Frames to the engine and back in order."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock_video.errors import InferFailed, InferRefused
from penstock_video.mux import MuxOptions
from penstock_video.runner.dispatch import Dispatcher, DispatchOptions
from penstock_video.types import DropPolicy
from tests.deepstream_pipeline.runner.fakes import FakeEngine, Slots, a_dispatcher, a_way

WAIT_S = 30.0


def numbers(dispatcher: Dispatcher, count: int) -> list[int]:
    """Frame numbers of the next outcomes; -1 for a source's end."""
    found = []
    for _ in range(count):
        outcome = dispatcher.take(WAIT_S)
        assert outcome is not None
        found.append(outcome.prepared.frame.frame_num if outcome.prepared is not None else -1)
    return found


@contextmanager
def taking(dispatcher: Dispatcher) -> Iterator[None]:
    """A thread takes an outcome meanwhile, and sleeps by now."""
    thread = threading.Thread(target=dispatcher.take, args=(2 * WAIT_S,))
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        dispatcher.wake()
        thread.join()


def asked_in_time(engine: FakeEngine, count: int) -> list[list[int]]:
    """What the engine is asked, once it is so much."""
    until = time.monotonic() + WAIT_S
    while len(engine.asked) < count and time.monotonic() < until:
        time.sleep(0.01)
    return [asked.names for asked in engine.asked]


def test_engine_is_asked_as_far_as_it_has_room() -> None:
    """The first frame goes at once; what comes meanwhile makes the next batch."""
    engine, slots, way = FakeEngine(), Slots(), a_way("cam")
    dispatcher = a_dispatcher(engine, way)
    for number in range(3):
        dispatcher.on_frame(slots.prepared("cam", number))
    assert [asked.names for asked in engine.asked] == [[0]]
    engine.asked[0].answer()
    assert [asked.names for asked in engine.asked] == [[0], [1, 2]]
    engine.asked[1].answer()
    assert numbers(dispatcher, 3) == [0, 1, 2]
    assert way.inferred == 3


def test_answers_out_of_order_come_out_in_order() -> None:
    """Two calls run at once and the later one is answered first."""
    engine, slots = FakeEngine(), Slots()
    dispatcher = a_dispatcher(engine, a_way("clip", DropPolicy.BLOCK), options=DispatchOptions(max_batches=2))
    dispatcher.on_frame(slots.prepared("clip", 0))
    dispatcher.on_frame(slots.prepared("clip", 1))
    engine.asked[1].answer()
    assert dispatcher.take(0.0) is None
    engine.asked[0].answer()
    assert numbers(dispatcher, 2) == [0, 1]


def test_frame_that_is_not_inferred_waits_for_those_before_it() -> None:
    """interval: frames without a row never see the engine, and keep their place."""
    engine, slots = FakeEngine(), Slots()
    dispatcher = a_dispatcher(engine, a_way("cam"))
    dispatcher.on_frame(slots.prepared("cam", 0))
    dispatcher.on_frame(slots.prepared("cam", 1, has_row=False))
    assert dispatcher.take(0.0) is None
    engine.asked[0].answer()
    assert numbers(dispatcher, 2) == [0, 1]
    assert len(engine.asked) == 1


def test_frame_of_a_camera_that_the_gate_refuses_goes_on_without_boxes_and_is_counted() -> None:
    """A live frame is not asked for twice: it would be late."""
    engine, slots, way = FakeEngine(), Slots(), a_way("cam")
    dispatcher = a_dispatcher(engine, way)
    dispatcher.on_frame(slots.prepared("cam", 0))
    engine.asked[0].fail(InferRefused("too late"))
    outcome = dispatcher.take(WAIT_S)
    assert outcome is not None
    assert outcome.answer is not None
    assert isinstance(outcome.answer.error_of(0), InferRefused)
    assert dict(way.drops) == {"refused": 1}
    assert len(engine.asked) == 1


@pytest.mark.parametrize("error", [InferRefused("full"), InferFailed("the engine is down")])
def test_frame_of_a_file_is_asked_for_until_it_is_answered(error: InferFailed) -> None:
    """A file loses nothing while the engine is full or restarts, and its rows stay where they are meanwhile."""
    engine, slots, way = FakeEngine(), Slots(), a_way("clip", DropPolicy.BLOCK)
    dispatcher = a_dispatcher(engine, way)
    dispatcher.on_frame(slots.prepared("clip", 7))
    engine.asked[0].taken()
    engine.asked[0].fail(error)
    assert slots.released == []
    until = time.monotonic() + WAIT_S
    while len(engine.asked) < 2 and time.monotonic() < until:
        assert dispatcher.take(0.05) is None
    assert engine.asked[1].names == [7]
    engine.asked[1].answer()
    assert numbers(dispatcher, 1) == [7]
    assert dict(way.drops) == {}


def test_slot_of_a_camera_is_free_as_soon_as_its_row_was_read() -> None:
    """The ring of a camera is small: only a picture keeps a slot until it was drawn."""
    engine, slots = FakeEngine(), Slots()
    dispatcher = a_dispatcher(engine, a_way("cam"), options=DispatchOptions(max_batches=2))
    dispatcher.on_frame(slots.prepared("cam", 0))
    dispatcher.on_frame(slots.prepared("cam", 1, image=True))
    for asked in engine.asked:
        asked.taken()
    assert slots.released == [("cam", 0)]


def test_frame_that_loses_its_place_delays_no_other() -> None:
    """drop-oldest: it is released, counted, and the frames behind it go on."""
    engine, slots, way = FakeEngine(), Slots(), a_way("cam")
    dispatcher = a_dispatcher(engine, way)
    for number in range(5):  # 0 is in the engine, 1 and 2 lose their places
        dispatcher.on_frame(slots.prepared("cam", number))
    assert slots.released == [("cam", 1), ("cam", 2)]
    assert dict(way.drops) == {"queue_full": 2}
    engine.asked[0].answer()
    engine.asked[1].answer()
    assert numbers(dispatcher, 3) == [0, 3, 4]


def test_frame_that_waits_too_long_is_given_up_by_time_alone() -> None:
    """Without a push or an answer: taking outcomes also pushes due batches."""
    engine, slots, way = FakeEngine(), Slots(), a_way("cam")
    dispatcher = a_dispatcher(engine, way)
    dispatcher.on_frame(slots.prepared("cam", 0))
    dispatcher.on_frame(slots.prepared("cam", 1, captured_at=time.monotonic() - 0.9))  # max_latency_s is 1
    until = time.monotonic() + WAIT_S
    while not way.drops and time.monotonic() < until:
        dispatcher.take(0.5)
    assert dict(way.drops) == {"too_old": 1}
    assert slots.released == [("cam", 1)]


def test_batch_waits_no_longer_than_its_push_timeout_without_other_frames() -> None:
    """Who takes outcomes slept for an empty mux: the frame that comes first wakes it, and no second frame is needed."""
    engine, slots = FakeEngine(), Slots()
    mux = MuxOptions(batch_size=4, push_timeout_s=0.02)
    dispatcher = a_dispatcher(engine, a_way("clip", DropPolicy.BLOCK), mux=mux)
    with taking(dispatcher):
        dispatcher.on_frame(slots.prepared("clip", 0))
        assert asked_in_time(engine, 1) == [[0]]


def test_batch_goes_when_there_is_room_again_though_no_outcome_comes_of_it() -> None:
    """The later of two batches is answered first: order holds its frames back, and one that waits has room all the
    same."""
    engine, slots = FakeEngine(), Slots()
    mux, options = MuxOptions(batch_size=2, push_timeout_s=0.02), DispatchOptions(max_batches=2)
    dispatcher = a_dispatcher(engine, a_way("clip", DropPolicy.BLOCK), mux=mux, options=options)
    for number in range(4):
        dispatcher.on_frame(slots.prepared("clip", number))
    with taking(dispatcher):
        dispatcher.on_frame(slots.prepared("clip", 4))
        engine.asked[1].answer()
        assert asked_in_time(engine, 3) == [[0, 1], [2, 3], [4]]


def test_end_of_a_file_comes_behind_its_last_frame() -> None:
    """What waits of a file is still inferred."""
    engine, slots, way = FakeEngine(), Slots(), a_way("clip", DropPolicy.BLOCK)
    dispatcher = a_dispatcher(engine, way)
    for number in range(3):
        dispatcher.on_frame(slots.prepared("clip", number))
    dispatcher.on_end("clip")
    while engine.asked:
        engine.asked.pop(0).answer()
    assert numbers(dispatcher, 4) == [0, 1, 2, -1]
    dispatcher.add(a_way("clip"))
    dispatcher.on_frame(slots.prepared("clip", 0))
    assert len(engine.asked) == 1


def test_end_of_a_camera_that_is_taken_out_gives_up_what_waits() -> None:
    """It leaves at once, with what is in the engine already."""
    engine, slots, way = FakeEngine(), Slots(), a_way("cam")
    dispatcher = a_dispatcher(engine, way)
    dispatcher.on_frame(slots.prepared("cam", 0))
    dispatcher.on_frame(slots.prepared("cam", 1))
    way.is_leaving = True
    dispatcher.on_frame(slots.prepared("cam", 2))
    dispatcher.on_end("cam")
    assert slots.released == [("cam", 2), ("cam", 1)]
    engine.asked[0].answer()
    assert numbers(dispatcher, 2) == [0, -1]
    assert len(engine.asked) == 1


def test_results_that_are_not_taken_hold_the_engine_back() -> None:
    """A slow sink of a file run slows the run down: outcomes are bounded."""
    engine, slots = FakeEngine(), Slots()
    options = DispatchOptions(max_batches=1, max_outcomes=2)
    dispatcher = a_dispatcher(engine, a_way("clip", DropPolicy.BLOCK), options=options)
    for number in range(6):
        dispatcher.on_frame(slots.prepared("clip", number))
    engine.asked[0].answer()
    engine.asked[1].answer()
    assert len(engine.asked) == 2
    assert numbers(dispatcher, 2) == [0, 1]
    assert len(engine.asked) == 3


def test_slot_of_a_camera_is_free_once_its_row_was_read_also_beside_a_file() -> None:
    """A file's row in the same batch may have to be sent again and stays; the camera must not lose frames for it."""
    engine, slots = FakeEngine(), Slots()
    dispatcher = a_dispatcher(engine, a_way("cam"), a_way("clip", DropPolicy.BLOCK))
    dispatcher.on_frame(slots.prepared("cam", 0))
    dispatcher.on_frame(slots.prepared("cam", 1))
    dispatcher.on_frame(slots.prepared("clip", 0))
    engine.asked[0].answer()
    assert len(engine.asked[1].rows) == 2
    before = list(slots.released)
    engine.asked[1].taken()
    assert [slot for slot in slots.released if slot not in before] == [("cam", 1)]


def test_files_have_the_engine_for_themselves_when_the_cameras_are_gone() -> None:
    """An engine that was too slow for a camera was given less at once; a file has time."""
    engine, slots = FakeEngine(), Slots()
    ways = a_way("cam"), a_way("clip", DropPolicy.BLOCK)
    dispatcher = a_dispatcher(engine, *ways, options=DispatchOptions(max_batches=2))
    dispatcher.on_frame(slots.prepared("cam", 0))
    engine.asked[0].fail(InferRefused("too late"))
    dispatcher.on_frame(slots.prepared("clip", 0))
    dispatcher.on_frame(slots.prepared("clip", 1))
    assert [asked.names for asked in engine.asked[1:]] == [[0]]
    dispatcher.on_end("cam")
    assert [asked.names for asked in engine.asked[1:]] == [[0], [1]]


def test_frame_of_an_unknown_source_is_released() -> None:
    """It was taken out meanwhile."""
    slots = Slots()
    a_dispatcher(FakeEngine()).on_frame(slots.prepared("gone", 0))
    assert slots.released == [("gone", 0)]
