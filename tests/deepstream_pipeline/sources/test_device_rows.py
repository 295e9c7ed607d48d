"""Rows on the card, in the parent: a ring of them for each run, and nothing that a process says of them is believed."""

from dataclasses import dataclass, replace
from threading import Event
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

from penstock_video.errors import GpuFailed
from penstock_video.sources.feed import Feed, FrameNumbers, RowRings
from penstock_video.sources.options import DeviceRing, GpuSources, SourceNeeds
from penstock_video.sources.process import BrokenPromise
from penstock_video.sources.protocol import FrameReady
from penstock_video.sources.ring import Ring, new_ring, ring_size
from penstock_video.types import DeviceRow, SourceState
from tests.deepstream_pipeline.sources.fake_child import ROW_BYTES
from tests.deepstream_pipeline.sources.parent import NEEDS, EventLog, camera, one, running
from tests.deepstream_pipeline.sources.test_decode_hosts import DEEP

READY = FrameReady(
    slot=1, frame_num=0, pts_s=0.0, captured_at=1.0, captured_unix_s=1.0, width=8, height=4, row_shape=(3, 2, 2),
    has_image=False, segment=0, is_corrupt=False, digest=0, is_on_device=True,
)  # fmt: skip


@dataclass
class FakeRing:
    """A DeviceRing of no memory."""

    frames: int = 4
    row_bytes: int = 48
    handle: bytes = b"h" * 64
    is_closed: bool = False

    def row(self, slot: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceRow:
        return DeviceRow(1 << 20 | slot, shape, np.dtype(dtype))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def feed_of(device_ring: DeviceRing | None) -> Feed:
    """One with rows of 48 bytes of float32 at most."""
    size = ring_size(4, 48, 8 * 4 * 3)
    return Feed("a", Ring(new_ring(size, "test"), size), SourceNeeds(b"", 48, np.float32), Mock(), device_ring)


def test_row_on_the_card_is_of_its_slot_and_leaves_the_ring_to_the_picture() -> None:
    """The picture lies at the slot's begin."""
    feed = feed_of(FakeRing())
    ready = replace_ready(has_image=True)
    prepared = feed.prepared(ready, FrameNumbers(), 1.0, max_pixels=100, is_live=True)
    assert prepared.row == DeviceRow(1 << 20 | 1, (3, 2, 2), np.dtype(np.float32))
    assert prepared.frame.image is not None
    assert feed.outside == {1}


@pytest.mark.parametrize(
    "shape", [(3, 2, 3), (-3, -2, 2), (0, 4), (1 << 62, 1 << 62), (13,)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("is_on_device", [True, False])
def test_row_that_cannot_be_is_a_broken_promise(shape: tuple[int, ...], is_on_device: bool) -> None:
    """Too large, empty, or of sides below nothing; wherever it is said to lie."""
    feed = feed_of(FakeRing())
    with pytest.raises(BrokenPromise, match="a row of"):
        feed.prepared(
            replace_ready(row_shape=shape, is_on_device=is_on_device), FrameNumbers(), 1.0, max_pixels=100, is_live=True
        )
    assert feed.outside == set()


def test_row_on_a_card_that_it_does_not_know_is_a_broken_promise() -> None:
    """There is no address to read."""
    with pytest.raises(BrokenPromise, match="on a GPU"):
        feed_of(None).prepared(READY, FrameNumbers(), 1.0, max_pixels=100, is_live=True)


def test_ring_is_used_again_once_its_last_row_is_read() -> None:
    """A run that begins before gets another; none is closed while it is read, and each is once."""
    made: list[FakeRing] = []

    def new() -> FakeRing:
        made.append(FakeRing())
        return made[-1]

    rings = RowRings(new)
    feed = feed_of(rings.take())
    feed.outside.update({1, 2})
    rings.leave("first", feed)
    second = feed_of(rings.take())
    rings.released("first", [1])
    rings.leave("second", second)
    assert rings.take() is made[1]
    rings.put_back(made[1])
    rings.released("first", [2])
    assert ([ring.is_closed for ring in made], len(made)) == ([True, False], 2)  # one is kept, no more
    rings.close()
    assert made[1].is_closed


def test_ring_that_is_read_after_its_source_is_over_goes_with_its_last_row() -> None:
    """Not before."""
    rings = RowRings(FakeRing)
    feed = feed_of(rings.take())
    feed.outside.add(3)
    rings.leave("run", feed)
    rings.close()
    ring = feed.device_ring
    assert isinstance(ring, FakeRing)
    assert not ring.is_closed
    rings.released("run", [3])
    assert ring.is_closed


def test_rows_of_a_source_lie_in_the_ring_that_its_process_was_given() -> None:
    """They come as DeviceRow; with the source their memory goes, once the last is released."""
    made: list[FakeRing] = []

    def new(frames: int, row_bytes: int) -> FakeRing:
        made.append(FakeRing(frames, row_bytes))
        return made[-1]

    event_log = EventLog(is_keeping=True)
    gpu = replace(DEEP.gpu or GpuSources(), new_device_ring=new)
    with running(event_log, replace(DEEP, gpu=gpu)) as sources:
        sources.add(camera("on_device"), NEEDS)
        event_log.wait_for("frame", 1)
        [prepared] = event_log.frames
        assert isinstance(prepared.row, DeviceRow)
        assert (prepared.row.shape, made[0].frames, made[0].row_bytes) == ((ROW_BYTES,), DEEP.ring_frames, ROW_BYTES)
        sources.remove("a")
        event_log.wait_for("ended")
        assert not made[0].is_closed
        prepared.release()
        event_log.wait(lambda: made[0].is_closed)
        assert len(made) == 1


def test_card_without_room_for_rows_leaves_them_in_the_host() -> None:
    """The camera runs all the same, and the reason is reported."""

    def new(frames: int, row_bytes: int) -> FakeRing:
        raise GpuFailed("CUDA_ERROR_OUT_OF_MEMORY: could not allocate")

    event_log = EventLog(is_keeping=True)
    gpu = replace(DEEP.gpu or GpuSources(), new_device_ring=new)
    with capture_logs() as lines, running(event_log, replace(DEEP, gpu=gpu)) as sources:
        sources.add(camera("live"), NEEDS)
        event_log.wait_for("frame", 1)
        assert isinstance(event_log.frames[0].row, np.ndarray)
    reasons = [line["reason"] for line in lines if line["event"] == "rows go through the host"]
    assert reasons == ["CUDA_ERROR_OUT_OF_MEMORY: could not allocate"]


def test_card_that_is_lost_moves_rows_to_the_host() -> None:
    """What the program shared of it is gone for good: its cameras begin anew, and give rows that can be handed over."""
    made: list[FakeRing] = []
    is_lost = Event()

    def new(frames: int, row_bytes: int) -> FakeRing:
        made.append(FakeRing(frames, row_bytes))
        return made[-1]

    event_log = EventLog(is_keeping=True)
    gpu = replace(DEEP.gpu or GpuSources(), new_device_ring=new, is_card_lost=is_lost.is_set)
    with running(event_log, replace(DEEP, gpu=gpu)) as sources:
        sources.add(camera("on_device"), NEEDS)
        event_log.wait_for("frame", 1)
        assert isinstance(event_log.frames[0].row, DeviceRow)
        event_log.frames[0].release()
        is_lost.set()
        event_log.wait(lambda: any(isinstance(prepared.row, np.ndarray) for prepared in event_log.frames))
        assert (one(sources).restarts, one(sources).state, len(made)) == (1, SourceState.RUNNING, 1)


def replace_ready(**changes: object) -> FrameReady:
    """READY, but for those."""
    fields: dict[str, object] = {name: getattr(READY, name) for name in READY.__struct_fields__}
    return FrameReady(**(fields | changes))  # type: ignore[arg-type]
