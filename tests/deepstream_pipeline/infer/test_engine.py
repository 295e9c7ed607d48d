"""The engine's thread, as a client process of a core."""

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import structlog

from penstock.engines.run_directory import claim_run_directory
from penstock.gateway.batching.options import UNTRIED
from penstock.gateway.workers.running_stacks import publish_stack, reachable_folder, run_folders
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, Overloaded
from penstock_video.errors import InferFailed, InferRefused, ModelUnusable
from penstock_video.infer import clients as asking
from penstock_video.infer.calls import EngineClient
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import network_from
from penstock_video.infer.options import EngineAddress
from tests.deepstream_pipeline.infer.fake_core import ASTRAY, SIDE, Asked, FakeCore, classifier, engine_at, row, submit
from tests.support.waiting import wait_for


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    core = FakeCore(tmp_path)
    yield core
    core.end()


@pytest.fixture
def engine(core: FakeCore) -> Iterator[Engine]:
    with engine_at(place(core)) as engine:
        wait_for(lambda: engine._life is not None and engine._life.line.slab.generation > 0)  # type: ignore[union-attr]
        yield engine


def place(core: FakeCore) -> EngineAddress:
    return EngineAddress(core.folder, "http://127.0.0.1:8000", "127.0.0.1:8001")


def leases(engine: Engine) -> int:
    assert engine._life is not None
    return engine._life.line.slab.statistics().leases  # type: ignore[union-attr]


def test_rows_are_answered_in_order_in_one_call_through_the_slab(core: FakeCore, engine: Engine) -> None:
    """Rows of one shape share a call of the model's size; taken comes before done, both on the engine's thread."""
    network = engine.network("owned", 20)
    asked = submit(engine, network, [row(value) for value in (0.1, 0.2, 0.3)])
    answer = asked.answer()
    means = [answer.row(index)[0].outputs[0].to_numpy()[answer.row(index)[1]][1] for index in range(3)]
    assert means == pytest.approx([0.1, 0.2, 0.3], abs=1e-5)
    (request,) = core.asked
    assert (request.inputs[0].shape, request.inputs[0].place is not None) == ((3, 3, SIDE, SIDE), True)
    assert (answer.error, answer.infer_s) == (None, 0.5)
    assert (asked.calls, asked.threads) == (["taken", "done"], {"engine"})
    assert core.clients == ["client-1"]
    wait_for(lambda: leases(engine) == 0)
    wait_for(lambda: core.served == ["owned"])


def test_rows_may_be_written_again_once_they_are_taken(core: FakeCore, engine: Engine) -> None:
    """The engine reads its own copy."""
    network, values, asked = engine.network("owned", 20), row(0.25), Asked()

    def scribble() -> None:
        values[:] = 7
        asked.taken()

    engine.submit(network, [values], deadline=time.monotonic() + 20, taken=scribble, done=asked.done)
    assert asked.answer().row(0)[0].outputs[0].to_numpy()[0, 1] == pytest.approx(0.25)


def test_more_rows_than_a_call_may_have_are_several_calls(core: FakeCore, engine: Engine) -> None:
    """As few as the model allows; each row has its own answer."""
    network = engine.network("owned", 20)
    answer = submit(engine, network, [row(value / 10) for value in range(6)]).answer()
    assert sorted(request.inputs[0].shape[0] for request in core.asked) == [2, 4]
    rows = [answer.row(index) for index in range(6)]
    means = [response.outputs[0].to_numpy()[place][1] for response, place in rows]
    assert means == pytest.approx([value / 10 for value in range(6)], abs=1e-5)


@pytest.mark.parametrize(("model", "shapes"), [("sized", [(1, 2), (4, 2)]), ("sized_alone", [(1, 2)] * 5)])
def test_model_that_takes_sizes_gets_each_pictures_own(
    core: FakeCore, engine: Engine, model: str, shapes: list[tuple[int, int]]
) -> None:
    """Width and height of the rows' pictures, in the order of the rows, whether or not they share a call."""
    sizes = [(640, 480), (1920, 1080), (1280, 720), (320, 240), (64, 48)]
    asked = submit(engine, engine.network(model, 20), [row(0.5)] * 5, sizes=sizes)
    answer = asked.answer()
    assert sorted(request.inputs[1].shape for request in core.asked) == shapes
    found = [response.outputs[0].to_numpy()[place or 0] for response, place in map(answer.row, range(5))]
    assert [tuple(values) for values in found] == sizes


def test_rows_of_a_model_that_are_not_merged_are_each_a_call(core: FakeCore, engine: Engine) -> None:
    """The gateway's trial decides it; the log has the reason."""
    with structlog.testing.capture_logs() as lines:
        network = engine.network("astray", 20)
    assert (network.max_batch_size, network.unmerged) == (1, ASTRAY)
    assert [line["reason"] for line in lines if line["log_level"] == "warning"] == [ASTRAY]
    answer = submit(engine, network, [row(0.1), row(0.3)]).answer()
    assert [request.inputs[0].shape[0] for request in core.asked] == [1, 1]
    rows = [answer.row(index) for index in range(2)]
    assert [response.outputs[0].to_numpy()[place][1] for response, place in rows] == pytest.approx([0.1, 0.3], abs=1e-5)


async def test_trial_that_has_not_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it ends, frames do not share calls; the wait is not longer than for the model itself."""
    monkeypatch.setattr(asking, "RETRY_S", 0.0)
    tried, line = classifier("m", 4), Mock(EngineClient)
    trying = replace(tried, unmerged=None)
    line.config.side_effect = [trying, trying, tried]
    assert (await asking.find_network(line, "m", "", 20)).max_batch_size == 4
    line.config.side_effect = [trying]
    network = await asking.find_network(line, "m", "", 0.0)
    assert (network.max_batch_size, network.unmerged) == (1, UNTRIED)


def test_model_without_a_batch_axis_is_asked_for_each_row_at_once(core: FakeCore, engine: Engine) -> None:
    """FastestDet's shape is [1,3,352,352]: all calls are in flight together."""
    network = engine.network("lone", 20)
    core.holds = True
    asked = submit(engine, network, [row(value) for value in (0.1, 0.2, 0.3)])
    wait_for(lambda: len(core.asked) == 3)
    assert {request.inputs[0].shape for request in core.asked} == {(1, 3, SIDE, SIDE)}
    core.holds = False
    engine.close()
    assert asked.answer().error is not None
    assert core.asked[0].inputs[0].place is not None


def test_pictures_of_unlike_sizes_are_each_asked_as_they_are(core: FakeCore, engine: Engine) -> None:
    """A model that keeps sizes says how large a row may be."""
    network = engine.network("one_box", 20)
    assert (network.row_bytes, network.row_dtype) == (320 * 320 * 3, np.uint8)
    rows = [np.zeros((height, width, 3), np.uint8) for height, width in ((240, 320), (120, 200))]
    answer = submit(engine, network, rows).answer()
    boxes = [answer.row(index)[0].outputs[0].to_numpy().tolist() for index in range(2)]
    assert boxes == [[[0, 0, 320, 240]], [[0, 0, 200, 120]]]
    assert answer.row(0)[1] is None


def test_rows_that_find_no_room_in_the_slab_are_sent(core: FakeCore, engine: Engine) -> None:
    """Slower, and the same answer."""
    network = engine.network("owned", 20)
    assert engine._life is not None
    assert engine._life.line.slab is not None
    lease = engine._life.line.slab.lease(4 << 20)
    assert lease is not None
    answer = submit(engine, network, [row(0.5)]).answer()
    assert answer.row(0)[0].outputs[0].to_numpy()[0, 1] == pytest.approx(0.5)
    assert core.asked[0].inputs[0].place is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("2 s wait before it"), InferRefused),
        (DeadlineExceeded("late"), InferRefused),
        (EngineFailed("model 'owned' failed: no"), InferFailed),
        (EngineUnavailable("gone"), InferFailed),
    ],
)
def test_failure_keeps_the_gateways_text_and_is_distinct(
    core: FakeCore, engine: Engine, error: Overloaded, kind: type[InferFailed]
) -> None:
    """What the gate refuses is InferRefused; nothing stays leased."""
    core.error = error
    answer = submit(engine, engine.network("owned", 20), [row(0.5)]).answer()
    assert type(answer.error) is kind
    assert str(answer.error) == error.message
    with pytest.raises(kind):
        answer.row(0)


def test_row_that_fails_alone_costs_no_other_row_its_answer(core: FakeCore, engine: Engine) -> None:
    """The answer says that one failed, and each row whether it did."""
    core.error, core.fails_row = EngineFailed("no"), 0.5
    network = engine.network("lone", 20)
    answer = submit(engine, network, [row(value) for value in (0.25, 0.5, 0.75)]).answer()
    assert str(answer.error) == "no"
    assert [answer.error_of(index) is None for index in range(3)] == [True, False, True]
    assert answer.row(2)[0].outputs[0].to_numpy()[0, 1] == pytest.approx(0.75)


def test_deadline_that_has_passed_is_refused_and_nothing_is_asked(core: FakeCore, engine: Engine) -> None:
    """Not copied, either."""
    asked = submit(engine, engine.network("owned", 20), [row(0.5)], within_s=-1)
    assert isinstance(asked.answer().error, InferRefused)
    assert (asked.calls, core.asked) == (["taken", "done"], [])


def test_deadline_that_passes_at_the_engine_gives_the_request_up(core: FakeCore, engine: Engine) -> None:
    """The core gets the cancellation."""
    core.holds = True
    answer = submit(engine, engine.network("owned", 20), [row(0.5)], within_s=0.2).answer()
    assert isinstance(answer.error, InferRefused)
    wait_for(lambda: core.cancelled == 1)


def test_core_that_dies_fails_what_it_had_at_once_and_is_joined_again(core: FakeCore, engine: Engine) -> None:
    """No deadline is waited for; afterwards rows are answered, through the new slab."""
    network = engine.network("owned", 20)
    core.holds = True
    asked = submit(engine, network, [row(0.5)], within_s=600)
    wait_for(lambda: len(core.asked) == 1)
    core.die()
    assert type(asked.answer().error) is InferFailed
    wait_for(lambda: not engine.is_up)
    assert engine.reason == "it was stopped, or starts again"
    assert type(submit(engine, network, [row(0.5)], within_s=600).answer().error) is InferFailed
    core.holds = False
    core.revive()
    wait_for(lambda: engine.is_up)
    assert submit(engine, network, [row(0.5)]).answer().error is None


def test_stack_that_was_started_again_is_joined_in_its_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by its port, as at the start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    urls = "http://127.0.0.1:8000", "127.0.0.1:8001"
    first, _ = claim_run_directory(run_folders())
    core = FakeCore(reachable_folder(first.path))
    with engine_at(EngineAddress(first.path, *urls)) as engine:
        network = engine.network("owned", 20)
        core.end()
        first.release()
        wait_for(lambda: not engine.is_up)
        second, _ = claim_run_directory(run_folders())
        publish_stack(second.path, *urls)
        core = FakeCore(reachable_folder(second.path))
        wait_for(lambda: engine.is_up)
        assert submit(engine, network, [row(0.5)]).answer().error is None
        core.end()
        second.release()


def test_engine_that_falls_silent_ends_what_it_has_when_the_core_says_so(core: FakeCore, engine: Engine) -> None:
    """As it ends the fronts' own requests."""
    core.holds = True
    asked = submit(engine, engine.network("owned", 20), [row(0.5)], within_s=600)
    wait_for(lambda: len(core.asked) == 1)
    core.cut("it does not answer")
    answer = asked.answer()
    assert type(answer.error) is InferFailed
    assert "it does not answer" in str(answer.error)
    wait_for(lambda: core.cancelled == 1)


def test_engine_that_is_not_up_fails_rows_at_once_with_its_reason(core: FakeCore, engine: Engine) -> None:
    """They are not even copied."""
    network = engine.network("owned", 20)
    core.is_up, core.reason = False, "the engine is restarting"
    wait_for(lambda: not engine.is_up)
    answer = submit(engine, network, [row(0.5)], within_s=600).answer()
    assert str(answer.error) == "the engine is not ready: the engine is restarting"
    assert core.asked == []


def test_close_answers_everything_once_and_for_ever(core: FakeCore, engine: Engine) -> None:
    """What is at the engine, and what is submitted while it closes or later."""
    network = engine.network("owned", 20)
    core.holds = True
    before = [submit(engine, network, [row(0.5)], within_s=600) for _ in range(8)]
    stop, during = threading.Event(), list[Asked]()

    def press() -> None:
        while not stop.is_set():
            during.append(submit(engine, network, [row(0.5)], within_s=600))
            time.sleep(0.0005)

    presser = threading.Thread(target=press)
    presser.start()
    wait_for(lambda: len(core.asked) > 8)
    engine.close()
    stop.set()
    presser.join()
    after = submit(engine, network, [row(0.5)])
    for asked in (*before, *during, after):
        assert asked.answer(0.1).error is not None
        assert asked.calls == ["taken", "done"]
    assert not engine.is_up
    engine.close()


def test_close_answers_what_came_too_late_to_be_begun(
    core: FakeCore, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over in the thread's last moment."""
    network = engine.network("owned", 20)
    monkeypatch.setattr(engine, "_begin", lambda *_: None)
    asked = submit(engine, network, [row(0.5)], within_s=600)
    engine.close()
    assert asked.answer(0.1).error is not None
    assert asked.calls == ["taken", "done"]


def test_more_submissions_than_the_limit_are_refused(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission beyond the limit raises; requests at the engine are not affected."""
    monkeypatch.setattr("penstock_video.infer.engine.MAX_SUBMITTED", 2)
    engine = Engine(place(core))
    engine.start(20)
    network = engine.network("owned", 20)
    core.holds = True
    held = [submit(engine, network, [row(0.5)]) for _ in range(2)]
    assert isinstance(submit(engine, network, [row(0.5)]).answer().error, InferRefused)
    assert not any(asked.is_done for asked in held)
    engine.close()


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([], "no rows"),
        ([np.zeros((3, SIDE, SIDE), np.uint8)], "float32"),
        ([np.zeros((3, SIDE, SIDE + 1), np.float32)], "64x64"),
        ([np.zeros((SIDE, SIDE), np.float32)], "three axes"),
    ],
)
def test_what_is_no_row_of_the_network_is_not_sent(
    core: FakeCore, engine: Engine, rows: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], word: str
) -> None:
    """A batch is not poisoned by it."""
    answer = submit(engine, engine.network("owned", 20), rows).answer()
    assert word in str(answer.error)
    assert core.asked == []


def test_callbacks_that_fail_affect_no_other_call(core: FakeCore, engine: Engine) -> None:
    """The engine's thread lives on."""
    network = engine.network("owned", 20)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the caller's")

    engine.submit(network, [row(0.5)], deadline=time.monotonic() + 20, taken=broken, done=broken)
    assert submit(engine, network, [row(0.5)]).answer().error is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("absent", "no model 'absent'"),
        ("tensors", "network-type"),
        ("wrong", "offsets"),
        ("encoded", "video has frames: choose its twin"),
    ],
)
def test_model_that_is_no_image_model_is_unusable_and_says_what_to_do(engine: Engine, name: str, word: str) -> None:
    """Its name, and the fix."""
    with pytest.raises(ModelUnusable, match=word):
        engine.network(name, 20)


def test_network_says_what_rows_must_be(engine: Engine) -> None:
    """What a decode process and the parser need, and thresholds of one's own."""
    network = engine.network("owned", 20)
    assert (network.row_bytes, network.row_dtype, network.max_batch_size) == (3 * SIDE * SIDE * 4, np.float32, 4)
    assert (network.labels, network.is_classifier) == (("dark", "bright"), True)
    assert network.prepare_spec.unpack(network.spec) == network.prepare_spec
    assert network.with_threshold(0.9).card.layout_options.classifier_threshold == 0.9
    assert network.with_threshold(None) is network
    assert engine.network("one_box", 20).with_threshold(0.9).card.layout_options.pre_cluster_threshold == 0.9
    assert engine.network("one_box", 20).with_iou(0.6).card.layout_options.nms_iou_threshold == 0.6


@pytest.mark.parametrize(("cap", "rows"), [("", 4), ("2", 2)])
def test_network_takes_no_more_rows_than_its_batches_may_have(cap: str, rows: int) -> None:
    """The gateway's own cap in the model's parameters holds for what is asked at once."""
    parameters = {"batch_owner": "gateway"} | ({"max_batch_size": cap} if cap else {})
    config = classifier("owned", 4)
    assert network_from(replace(config, parameters={**config.parameters, **parameters})).max_batch_size == rows
    assert network_from(classifier("lone", 0)).max_batch_size == 0


@pytest.mark.parametrize("has_folder", [True, False])
def test_engine_that_does_not_answer_fails_in_time(tmp_path: Path, has_folder: bool) -> None:
    """A stack that stopped, or an address where nothing listens: one sentence, and the thread is gone."""
    engine = Engine(EngineAddress(tmp_path if has_folder else None, "http://127.0.0.1:9", "127.0.0.1:9"))
    with pytest.raises(InferFailed, match="penstock up"):
        engine.start(0.5)
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert not engine.is_up


def test_address_that_is_none_says_so(tmp_path: Path) -> None:
    """Before anything is tried."""
    with pytest.raises(InferFailed, match="no engine at"):
        Engine(EngineAddress(None, "nonsense", "x")).start(5)
