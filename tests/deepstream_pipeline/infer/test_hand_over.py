"""Rows on the card, to an engine that reads the card's memory: NVIDIA's driver and the engine are stand-ins."""

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.gateway.shared_memory.regions import SWITCHED_OFF
from penstock.testing import FakeMode
from penstock_video.errors import InferFailed, InferRefused
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import CudaRing
from penstock_video.infer import gpu_client as card_line
from penstock_video.infer import gpu_trial as trial
from penstock_video.infer.calls import Row, RowsResult
from penstock_video.infer.clients import BACK, GONE
from penstock_video.infer.engine import Engine
from penstock_video.infer.gpu_client import GpuMemoryClient
from penstock_video.infer.network import Network
from penstock_video.infer.options import RowMemory, RowMemoryChoice
from penstock_video.types import DeviceRow
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install
from tests.deepstream_pipeline.infer.card_gateway import CardGateway
from tests.deepstream_pipeline.infer.fake_core import ASTRAY, SIDE, Asked, row, submit
from tests.support.waiting import wait_for

SHAPE = (3, SIDE, SIDE)
ON_CARD = RowMemoryChoice(RowMemory.DEVICE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def gateway() -> Iterator[CardGateway]:
    gateway = CardGateway()
    yield gateway
    gateway.end()


class Rig:
    """A program with a card: its engine, and a ring on the card whose rows a decode process would write."""

    def __init__(self, gateway: CardGateway, model: str = "owned") -> None:
        self.device = Device.open()
        self.engine = Engine(gateway.place, device=self.device)
        self.engine.start(20)
        self.network: Network = self.engine.network(model, 20)
        self.ring = CudaRing(self.device, 16, 4 * 3 * SIDE * SIDE)

    @property
    def line(self) -> GpuMemoryClient:
        assert self.engine._life is not None
        assert self.engine._life.card is not None
        return self.engine._life.card

    def on_card(self, values: Sequence[float]) -> list[DeviceRow]:
        """Rows of the card whose means are the values."""
        rows = [self.ring.row(slot, SHAPE, np.float32) for slot in range(len(values))]
        for one, value in zip(rows, values, strict=True):
            pixels = row(value)
            self.device.copy(one.address, pixels.ctypes.data, one.nbytes, 0)
        return rows

    def submit(self, rows: Sequence[Row], within_s: float = 20.0) -> Asked:
        asked = Asked()
        deadline = time.monotonic() + within_s
        self.engine.submit(self.network, rows, deadline=deadline, taken=asked.taken, done=asked.done)
        return asked

    def close(self) -> None:
        self.engine.close()
        self.ring.close()


@pytest.fixture
def rig(driver: FakeDriver, gateway: CardGateway) -> Iterator[Rig]:
    """Whatever happens, all is given back at the end: the engine's region and the card's memory."""
    rig = Rig(gateway)
    yield rig
    rig.close()
    assert driver.is_all_given_back
    assert gateway.engine.regions == {}


def means(answer: RowsResult, count: int) -> list[float]:
    found = [answer.row(index) for index in range(count)]
    return [float(response.outputs[0].to_numpy()[place or 0][1]) for response, place in found]


def test_rows_on_the_card_are_answered_in_order_in_one_call_without_a_byte_sent(gateway: CardGateway, rig: Rig) -> None:
    """The memory is registered once, and the engine reads each call's rows at their offset; taken comes before done."""
    assert rig.engine.hand_over(rig.network, RowMemory.AUTO) == ON_CARD
    gateway.engine.inferred.clear()
    gateway.engine.messages.clear()
    for _ in range(2):
        asked = rig.submit(rig.on_card([0.1, 0.2, 0.3]))
        assert means(asked.answer(), 3) == pytest.approx([0.1, 0.2, 0.3], abs=1e-5)
        assert (asked.calls, asked.threads) == (["taken", "done"], {"engine"})
    assert [(bool(region), rows) for region, rows in gateway.engine.inferred] == [(True, 3)] * 2
    assert max(map(len, gateway.engine.messages)) < 300
    assert gateway.engine.asked == ["register 0"]
    wait_for(lambda: len(rig.line._slab) == 0)


def test_trial_asks_with_the_same_row_through_either_memory(gateway: CardGateway, rig: Rig) -> None:
    """One row each; the one on the card does not lie at the memory's begin."""
    rig.engine.hand_over(rig.network, RowMemory.DEVICE)
    assert [(bool(region), rows) for region, rows in gateway.engine.inferred] == [(False, 1), (True, 1)]
    assert b"shared_memory_offset" in gateway.engine.messages[1]


def test_sizes_go_beside_rows_on_the_card(driver: FakeDriver, gateway: CardGateway) -> None:
    """A model with a second input is tried, and then called, with rows in GPU memory and sizes in the message."""
    rig = Rig(gateway, "sized")
    assert rig.engine.hand_over(rig.network, RowMemory.AUTO) == ON_CARD
    gateway.engine.inferred.clear()
    answer = submit(rig.engine, rig.network, rig.on_card([0.1, 0.2]), sizes=[(640, 480), (320, 240)]).answer()
    assert [(bool(region), rows) for region, rows in gateway.engine.inferred] == [(True, 2)]
    (response, _), _ = answer.row(0), answer.row(1)
    assert response.outputs[0].to_numpy().tolist() == [[640, 480], [320, 240]]
    rig.close()


def test_rows_may_be_written_again_once_they_are_taken(rig: Rig) -> None:
    """The engine reads the gathered copy."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    asked, rows = Asked(), rig.on_card([0.25])

    def scribble() -> None:
        rig.on_card([7.0])
        asked.taken()

    rig.engine.submit(rig.network, rows, deadline=time.monotonic() + 20, taken=scribble, done=asked.done)
    assert means(asked.answer(), 1) == pytest.approx([0.25])


def test_rows_of_both_memories_in_one_batch_share_no_call_and_are_all_answered(gateway: CardGateway, rig: Rig) -> None:
    """A batch has frames of sources that the card decodes, and of others."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    gateway.engine.inferred.clear()
    first, second = rig.on_card([0.1, 0.3])
    answer = rig.submit([first, row(0.2), second, row(0.4)]).answer()
    assert means(answer, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-5)
    assert sorted((bool(region), rows) for region, rows in gateway.engine.inferred) == [(False, 2), (True, 2)]


def test_more_rows_than_a_call_may_have_are_several_calls(gateway: CardGateway, rig: Rig) -> None:
    """As few as the model allows."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    gateway.engine.inferred.clear()
    answer = rig.submit(rig.on_card([value / 10 for value in range(6)])).answer()
    assert means(answer, 6) == pytest.approx([value / 10 for value in range(6)], abs=1e-5)
    assert sorted(rows for _, rows in gateway.engine.inferred) == [2, 4]


def test_rows_of_a_model_that_are_not_merged_are_each_a_call(driver: FakeDriver, gateway: CardGateway) -> None:
    """The model config that the gateway returns says so."""
    gateway.plane.unmerged = {"owned": ASTRAY}
    rig = Rig(gateway)
    assert (rig.network.max_batch_size, rig.network.unmerged) == (1, ASTRAY)
    answer = rig.submit([row(0.1), row(0.3)]).answer()
    assert means(answer, 2) == pytest.approx([0.1, 0.3], abs=1e-5)
    assert [rows for _, rows in gateway.engine.inferred] == [1, 1]
    rig.close()


def test_model_without_a_batch_axis_is_asked_for_each_row(driver: FakeDriver, gateway: CardGateway) -> None:
    """With the leading one that it declares."""
    rig = Rig(gateway, "lone")
    assert rig.engine.hand_over(rig.network, RowMemory.AUTO) == ON_CARD
    answer = rig.submit(rig.on_card([0.1, 0.2])).answer()
    found = [float(answer.row(index)[0].outputs[0].to_numpy()[0, 1]) for index in range(2)]
    assert found == pytest.approx([0.1, 0.2], abs=1e-5)
    rig.close()


def test_engine_that_was_started_again_gets_the_memory_registered_once(gateway: CardGateway, rig: Rig) -> None:
    """All calls that it cannot resolve are sent again; no caller gets an error."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    rows = rig.on_card([0.1])
    for _ in range(2):
        gateway.restart_engine()
        gateway.engine.asked.clear()
        asked = [rig.submit(rows) for _ in range(8)]
        assert [means(one.answer(), 1) for one in asked] == [pytest.approx([0.1])] * 8
        assert gateway.engine.asked == ["register 0"]


def test_region_that_is_known_already_is_ours(gateway: CardGateway, rig: Rig) -> None:
    """The memory is registered, but the engine's answer was not awaited."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    rig.line._registrations = 0
    assert means(rig.submit(rig.on_card([0.1])).answer(), 1) == pytest.approx([0.1])


def test_engine_that_is_gone_fails_rows_on_the_card_at_once(gateway: CardGateway, rig: Rig) -> None:
    """As all others; afterwards they are answered."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    gateway.plane.unready_reason = "the engine is restarting"
    wait_for(lambda: not rig.engine.is_up)
    assert type(rig.submit(rig.on_card([0.1]), within_s=600).answer().error) is InferFailed
    gateway.plane.unready_reason = ""
    wait_for(lambda: rig.engine.is_up)
    assert rig.submit(rig.on_card([0.1])).answer().error is None


def test_rows_on_the_card_before_anything_was_tried_are_refused(rig: Rig) -> None:
    """There is no memory that the engine reads."""
    assert "which is not shared with the engine" in str(rig.submit(rig.on_card([0.1])).answer().error)


def test_card_that_fails_is_logged_and_costs_those_rows_alone(driver: FakeDriver, rig: Rig) -> None:
    """CUDA's word is in the answer, and once in the log; nothing stays leased."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    rows = rig.on_card([0.1])
    driver.fail("cuMemcpyDtoDAsync", "CUDA_ERROR_INVALID_VALUE")
    with capture_logs() as lines:
        answers = [rig.submit([*rows, row(0.5)]).answer() for _ in range(3)]
    assert all("CUDA_ERROR_INVALID_VALUE" in str(answer.error) for answer in answers)
    assert ["cannot be copied" in line["event"] for line in lines if line["log_level"] == "warning"] == [True]
    driver.fail("cuMemcpyDtoDAsync", None)
    assert rig.submit(rows).answer().error is None
    wait_for(lambda: len(rig.line._slab) == 0)


def test_card_that_does_nothing_more_is_known_to_be_lost(driver: FakeDriver, rig: Rig) -> None:
    """A single failed copy is no reason: a context that fails every call is. It is logged once."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    rows = rig.on_card([0.1])
    driver.fail("cuMemcpyDtoDAsync", "CUDA_ERROR_LAUNCH_FAILED")
    rig.submit(rows).answer()
    assert not rig.engine.is_card_lost
    driver.fail("cuMemcpyDtoDAsync", None)
    assert rig.submit(rows).answer().error is None
    driver.fail("cuMemcpyDtoDAsync", "CUDA_ERROR_LAUNCH_FAILED")
    driver.fail("cuCtxSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
    with capture_logs() as lines:
        rig.submit(rows).answer()
        rig.submit(rows).answer()
    assert rig.engine.is_card_lost
    assert ["through the host from now on" in line["event"] for line in lines if line["log_level"] == "warning"] == [
        True
    ]
    driver.fail("cuMemcpyDtoDAsync", None)
    driver.fail("cuCtxSynchronize", None)


def test_engine_is_closed_in_order_where_the_card_is_lost(driver: FakeDriver, rig: Rig) -> None:
    """Memory that the card does not release does not stop the rest of the shutdown."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    slab = rig.line._slab
    driver.fail("cuCtxSetCurrent", "CUDA_ERROR_LAUNCH_FAILED")
    with capture_logs() as lines:
        rig.engine.close()
    driver.fail("cuCtxSetCurrent", None)
    assert [line for line in lines if line["log_level"] in ("warning", "error")] == []
    slab.close()  # for who counts what is left


def test_rows_that_find_no_room_are_refused(rig: Rig) -> None:
    """What waits is asked again; what is late is dropped."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    slab = rig.line._slab
    whole = slab.lease(slab.size_bytes)
    assert whole is not None
    answer = rig.submit(rig.on_card([0.1])).answer()
    assert isinstance(answer.error, InferRefused)
    assert "do not fit into" in str(answer.error)
    whole.release()
    assert rig.submit(rig.on_card([0.1])).answer().error is None


def test_card_that_is_stuck_fails_rows_in_time_and_serves_again_when_it_moves(
    driver: FakeDriver, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait is bounded; what it still copies has its room until it is done."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    monkeypatch.setattr(card_line, "GATHER_S", 0.05)
    moves, rows = threading.Event(), rig.on_card([0.1])
    query = driver.cuStreamQuery
    monkeypatch.setattr(driver, "cuStreamQuery", lambda stream: (moves.wait(20), query(stream))[1])
    with capture_logs() as lines:
        assert "has not copied rows" in str(rig.submit(rows).answer().error)
        assert not rig.engine.is_up
        assert "has not copied rows" in rig.engine.reason
        assert "has not copied rows" in str(rig.submit(rows).answer().error)
        assert len(rig.line._slab) == 1
        wait_for(lambda: any(line["event"] == GONE for line in lines))
        moves.set()
        wait_for(lambda: any(line["event"] == BACK for line in lines))
    assert rig.engine.is_up
    assert rig.submit(rows).answer().error is None


def test_rows_that_were_given_up_keep_their_room_while_the_engine_may_read_it(gateway: CardGateway, rig: Rig) -> None:
    """And the program's end waits until the engine has let go of the memory."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    gateway.engine.mode = FakeMode.SLOW
    assert isinstance(rig.submit(rig.on_card([0.1]), within_s=0.2).answer().error, InferRefused)
    assert len(rig.line._slab) == 1
    rig.engine.close()
    assert gateway.engine.regions == {}


def test_close_answers_rows_that_are_at_the_engine(gateway: CardGateway, rig: Rig) -> None:
    """Once, and the memory goes after them."""
    rig.engine.hand_over(rig.network, RowMemory.AUTO)
    gateway.engine.mode = FakeMode.SLOW
    asked = rig.submit(rig.on_card([0.1]), within_s=600)
    wait_for(lambda: len(gateway.engine.inferred) == 3)
    rig.engine.close()
    assert (asked.answer(0.1).error is not None, asked.calls) == (True, ["taken", "done"])


def test_gateway_that_shares_no_memory_leaves_rows_in_the_host(
    driver: FakeDriver, gateway: CardGateway, rig: Rig
) -> None:
    """With its own sentence; who insists on the card gets it as an error. Nothing stays on the card."""
    gateway.plane.refusal = SWITCHED_OFF
    choice = rig.engine.hand_over(rig.network, RowMemory.AUTO)
    assert (choice.kind, choice.is_on_card) == (RowMemory.HOST, False)
    assert "start the gateway with --allow-client-shm" in choice.reason
    with pytest.raises(InferFailed, match="--allow-client-shm; or set gpu: hand-over: host"):
        rig.engine.hand_over(rig.network, RowMemory.DEVICE)
    assert len(driver.blocks) == 1, "the ring's alone"
    assert rig.submit([row(0.5)]).answer().error is None


def test_engine_that_reads_elsewhere_is_found_out(gateway: CardGateway, rig: Rig) -> None:
    """What comes of it is not the same."""
    gateway.engine.skew_bytes = 4 * 3 * SIDE * SIDE
    choice = rig.engine.hand_over(rig.network, RowMemory.AUTO)
    assert choice.reason == "output 'y' differs between rows in GPU memory and rows in host memory"


def test_engine_that_does_not_answer_the_trial_leaves_rows_in_the_host(
    gateway: CardGateway, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts all the same."""
    monkeypatch.setattr(trial, "FIRST_S", 0.1)
    gateway.engine.mode = FakeMode.SLOW
    reason = rig.engine.hand_over(rig.network, RowMemory.AUTO).reason
    assert reason == "model 'owned' did not answer the trial: the trial was not answered within 0.1 s"
    gateway.engine.mode = FakeMode.ERROR
    assert "the fake engine is in mode ERROR" in rig.engine.hand_over(rig.network, RowMemory.AUTO).reason


def test_card_without_room_leaves_rows_in_the_host(driver: FakeDriver, rig: Rig) -> None:
    """CUDA's word is the reason."""
    driver.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in rig.engine.hand_over(rig.network, RowMemory.AUTO).reason


def test_model_whose_batches_the_gateway_forms_gets_rows_from_the_host(
    driver: FakeDriver, gateway: CardGateway
) -> None:
    """They would pass its batches by; nothing is tried."""
    rig = Rig(gateway, "batched")
    assert "batch_owner gateway" in rig.engine.hand_over(rig.network, RowMemory.AUTO).reason
    assert gateway.engine.inferred == []
    rig.close()


def test_who_wants_the_host_or_has_no_card_gets_the_host_and_nothing_is_tried(gateway: CardGateway) -> None:
    """As the settings say."""
    engine = Engine(gateway.place)
    engine.start(20)
    network = engine.network("owned", 20)
    assert engine.hand_over(network, RowMemory.HOST) == RowMemoryChoice(RowMemory.HOST, "the settings say host")
    assert engine.hand_over(network, RowMemory.AUTO) == RowMemoryChoice(RowMemory.HOST, "no GPU is in use")
    assert gateway.engine.inferred == []
    engine.close()
    assert "closed" in engine.hand_over(network, RowMemory.AUTO).reason
