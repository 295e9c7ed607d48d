"""The stream mux, under a manual clock."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.mux import Drop, MuxOptions, StreamMux
from penstock_video.types import CloseReason, DropPolicy, DropReason, Frame, FrameBatch, PreparedFrame

ROW = np.zeros((3, 2, 2), np.uint8)


def prepared(source_id: str, frame_num: int, at: float = 0.0) -> PreparedFrame:
    return PreparedFrame(Frame(source_id, frame_num, frame_num / 10, at, 8, 6), ROW, lambda: None)


def a_mux(options: MuxOptions, *sources: str, policy: DropPolicy = DropPolicy.DROP_OLDEST) -> StreamMux:
    mux = StreamMux(options)
    for source_id in sources:
        mux.add(source_id, policy)
    return mux


def names(batch: FrameBatch | None) -> list[str]:
    assert batch is not None
    return [f"{item.frame.source_id}{item.frame.frame_num}" for item in batch.frames]


def lost(drops: list[Drop]) -> list[tuple[str, DropReason]]:
    return [(f"{drop.prepared.frame.source_id}{drop.prepared.frame.frame_num}", drop.reason) for drop in drops]


def test_batch_goes_at_once_without_a_push_timeout() -> None:
    """Without batched-push-timeout the engine's room alone decides, as at the gate."""
    mux = a_mux(MuxOptions(batch_size=4), "a", "b")
    assert mux.pop(0.0) is None
    mux.push(prepared("a", 0), 0.0)
    batch = mux.pop(0.0)
    assert names(batch) == ["a0"]
    assert batch is not None
    assert batch.reason is CloseReason.SLOT_FREE
    assert len(mux) == 0


def test_batch_waits_for_its_timeout_and_not_for_a_stalled_stream() -> None:
    """FAULTS 52: a batch is pushed at batched-push-timeout without the stream that is silent."""
    mux = a_mux(MuxOptions(batch_size=3, push_timeout_s=0.04), "a", "b", "silent")
    mux.push(prepared("a", 0), 1.0)
    mux.push(prepared("b", 0), 1.03)
    assert mux.pop(1.039) is None
    assert mux.next_wakeup() == pytest.approx(1.0)  # captured at 0.0, so too old at 1.0 already
    batch = mux.pop(1.04)
    assert (names(batch), batch and batch.reason) == (["a0", "b0"], CloseReason.TIMEOUT)


def test_batch_that_is_full_goes_before_its_timeout() -> None:
    """batch-size frames are enough."""
    mux = a_mux(MuxOptions(batch_size=2, push_timeout_s=10.0), "a", "b")
    mux.push(prepared("a", 0), 0.0)
    mux.push(prepared("b", 0), 0.0)
    batch = mux.pop(0.0)
    assert (names(batch), batch and batch.reason) == (["a0", "b0"], CloseReason.FULL)


def test_batch_holds_no_more_of_a_source_than_was_said() -> None:
    """max-same-source-frames."""
    mux = a_mux(MuxOptions(batch_size=4, max_same_source=1), "a", "b", policy=DropPolicy.BLOCK)
    for number in range(3):
        mux.push(prepared("a", number), 0.0)
    mux.push(prepared("b", 0), 0.0)
    assert names(mux.pop(0.0)) == ["a0", "b0"]
    assert names(mux.pop(0.0)) == ["a1"]


def test_source_that_drops_its_oldest_keeps_the_newest() -> None:
    """A live source never has more than MAX_PENDING frames here; the oldest is dropped and counted."""
    mux = a_mux(MuxOptions(batch_size=8), "a")
    drops = [drop for number in range(4) for drop in mux.push(prepared("a", number), 0.0)]
    assert lost(drops) == [("a0", DropReason.QUEUE_FULL), ("a1", DropReason.QUEUE_FULL)]
    assert names(mux.pop(0.0)) == ["a2", "a3"]


def test_batch_is_pushed_at_its_timeout_though_its_frames_are_replaced() -> None:
    """One quick camera with room in the batch for more: what replaces a frame waits since that frame came."""
    mux = a_mux(MuxOptions(batch_size=8, push_timeout_s=0.1), "a")
    for number in range(5):  # 50 frames a second
        mux.push(prepared("a", number, at=number * 0.02), number * 0.02)
    assert mux.pop(0.099) is None
    batch = mux.pop(0.1)
    assert (names(batch), batch and batch.reason) == (["a3", "a4"], CloseReason.TIMEOUT)


def test_frame_that_keeps_newer_ones_out_loses_its_place_after_a_while() -> None:
    """A decode process makes nothing ready while MAX_PENDING of its frames wait; so none of them waits for long."""
    mux = a_mux(MuxOptions(batch_size=8), "a")
    mux.refresh_s = 0.25
    mux.push(prepared("a", 0, at=10.0), 10.0)
    mux.push(prepared("a", 1, at=10.1), 10.1)
    assert mux.next_wakeup() == pytest.approx(10.25)
    assert mux.expire(10.24) == []
    assert lost(mux.expire(10.25)) == [("a0", DropReason.QUEUE_FULL)]
    assert mux.expire(10.9) == [], "nothing waits for the place of the one that is left"
    mux.push(prepared("a", 2, at=10.9), 10.9)
    assert lost(mux.expire(10.9)) == [("a1", DropReason.QUEUE_FULL)]


def test_oldest_frames_are_kept_where_the_newest_are_dropped() -> None:
    """drop-newest: what waits keeps its place until it is too old."""
    mux = a_mux(MuxOptions(batch_size=8), "a", policy=DropPolicy.DROP_NEWEST)
    mux.refresh_s = 0.25
    mux.push(prepared("a", 0, at=10.0), 10.0)
    mux.push(prepared("a", 1, at=10.1), 10.1)
    assert mux.expire(10.99) == []
    assert lost(mux.expire(11.0)) == [("a0", DropReason.TOO_OLD)]


def test_source_that_drops_its_newest_keeps_the_oldest() -> None:
    """The other policy."""
    mux = a_mux(MuxOptions(batch_size=8), "a", policy=DropPolicy.DROP_NEWEST)
    drops = [drop for number in range(3) for drop in mux.push(prepared("a", number), 0.0)]
    assert lost(drops) == [("a2", DropReason.QUEUE_FULL)]


def test_frame_that_is_too_old_is_dropped_and_never_inferred() -> None:
    """Counted from its decoding; a frame of a file is never too old."""
    mux = a_mux(MuxOptions(batch_size=8, max_latency_s=0.5), "live")
    mux.add("file", DropPolicy.BLOCK)
    mux.push(prepared("live", 0, at=10.0), 10.1)
    mux.push(prepared("live", 1, at=10.3), 10.3)
    mux.push(prepared("file", 0, at=0.0), 10.3)
    assert mux.next_wakeup() == pytest.approx(10.5)
    assert lost(mux.expire(10.6)) == [("live0", DropReason.TOO_OLD)]
    assert sorted(names(mux.pop(10.6))) == ["file0", "live1"]


def test_source_that_is_removed_takes_its_frames_along() -> None:
    """Its waiting frames are dropped as stopped, and later frames too."""
    mux = a_mux(MuxOptions(batch_size=8), "a", "b")
    mux.push(prepared("a", 0), 0.0)
    assert lost(mux.remove("a")) == [("a0", DropReason.STOPPED)]
    assert lost(mux.push(prepared("a", 1), 0.0)) == [("a1", DropReason.STOPPED)]
    assert mux.pop(0.0) is None


def test_sources_have_equal_shares_when_all_wait() -> None:
    """At overload no source starves: 16 sources, batches of 3, equal to one frame."""
    sources = [f"s{index}-" for index in range(16)]
    mux = a_mux(MuxOptions(batch_size=3), *sources)
    served: Counter[str] = Counter()
    for step in range(160):
        for source_id in sources:
            mux.push(prepared(source_id, step, at=float(step)), float(step))
        batch = mux.pop(float(step))
        assert batch is not None
        served.update(item.frame.source_id for item in batch.frames)
    assert max(served.values()) - min(served.values()) <= 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from(DropPolicy),
)
def test_every_frame_comes_out_once(
    steps: list[tuple[str, int]], batch_size: int, max_same_source: int, policy: DropPolicy
) -> None:
    """In a batch or as a drop, in the order of its source, whatever happens."""
    options = MuxOptions(batch_size, push_timeout_s=0.2, max_same_source=max_same_source, max_latency_s=1.0)
    mux = a_mux(options, "a", "b", "c", policy=policy)
    pushed: list[tuple[str, int]] = []
    batched: list[tuple[str, int]] = []
    dropped: list[Drop] = []
    for step, (source_id, action) in enumerate(steps):
        now = step * 0.1
        dropped += mux.push(prepared(source_id, step, at=now), now)
        pushed.append((source_id, step))
        if action == 0:
            dropped += mux.expire(now)
        if action == 1 and (batch := mux.pop(now)) is not None:
            assert len(batch) <= batch_size
            batched += [(item.frame.source_id, item.frame.frame_num) for item in batch.frames]
    dropped += [drop for source_id in "abc" for drop in mux.remove(source_id)]
    out = batched + [(drop.prepared.frame.source_id, drop.prepared.frame.frame_num) for drop in dropped]
    assert sorted(out) == sorted(pushed)
    for source_id in "abc":
        mine = [number for owner, number in batched if owner == source_id]
        assert mine == sorted(mine)


def said(batch: FrameBatch | None) -> tuple[list[str], CloseReason, float] | None:
    return None if batch is None else (names(batch), batch.reason, batch.oldest_at)


class LookingAnew(StreamMux):
    """Keeps in mind nothing that it could look up in its lanes."""

    def expire(self, now: float) -> list[Drop]:
        self._due_at = -math.inf
        return super().expire(now)

    def _oldest_at(self) -> float | None:
        return min((lane.frames[0].since for lane in self._lanes.values() if lane.frames), default=None)

    def _is_full(self, size: int) -> bool:
        most = self.options.max_same_source or size
        return sum(min(len(lane.frames), most) for lane in self._lanes.values()) >= size


@pytest.mark.parametrize("timeout_s", [0.0, 0.1])
@pytest.mark.parametrize("same", [0, 1, 2])
def test_what_a_mux_keeps_in_mind_changes_nothing(timeout_s: float, same: int) -> None:
    """Drops, batches, their reasons and their age are those of a mux that looks at every lane each time, and whatever
    time brings has its wakeup."""
    chance = random.Random(same)
    options = MuxOptions(batch_size=4, push_timeout_s=timeout_s, max_same_source=same)
    muxes = (StreamMux(options), LookingAnew(options))
    policies = dict.fromkeys("abc", DropPolicy.DROP_OLDEST) | {"d": DropPolicy.DROP_NEWEST, "e": DropPolicy.BLOCK}
    for name, policy in policies.items():
        for mux in muxes:
            mux.add(name, policy)
    now = 0.0
    for number in range(4000):
        step = chance.choices(["push", "pop", "refresh", "leave"], [60, 25, 10, 5])[0]
        name, wakeup = chance.choice("abcde"), muxes[0].next_wakeup()
        now += chance.choice([0.0, 0.01, 0.05, 0.2])
        expired, expected = (lost(mux.expire(now)) for mux in muxes)
        assert expired == expected
        assert not expired or (wakeup is not None and wakeup <= now)
        if step == "push":
            ours, theirs = (lost(mux.push(prepared(name, number, now), now)) for mux in muxes)
            assert ours == theirs
        elif step == "pop":
            most = chance.randint(1, 5)
            batch, other = (mux.pop(now, most) for mux in muxes)
            assert said(batch) == said(other)
        refresh_s = chance.uniform(0.1, 1.2)
        for mux in muxes:
            if step == "refresh":
                mux.refresh_s = refresh_s
            elif step == "leave":
                mux.remove(name)
                mux.add(name, policies[name])


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "refresh", "leave"]), st.integers(0, 4), st.floats(0.01, 0.5)),
        max_size=60,
    )
)
def test_what_is_too_old_is_always_found(steps: list[tuple[str, int, float]]) -> None:
    """Whatever happened between two looks, among many sources: a look leaves nothing that is too old, and no wakeup
    comes later than the next deadline."""
    mux, now, numbers = a_mux(MuxOptions(batch_size=3, max_latency_s=1.0), *"abcde"), 0.0, Counter[str]()
    waiting: dict[str, list[float]] = {name: [] for name in "abcde"}
    for step, index, pause_s in steps:
        name, now = "abcde"[index], now + pause_s
        for drop in mux.expire(now):
            waiting[drop.prepared.frame.source_id].remove(drop.prepared.frame.captured_at)
        left = [at for times in waiting.values() for at in times]
        assert all(now < at + 1.0 for at in left)
        wakeup = mux.next_wakeup()
        assert not left or (wakeup is not None and wakeup <= min(left) + 1.0)
        if step == "push":
            numbers[name] += 1
            waiting[name].append(now)
            for drop in mux.push(prepared(name, numbers[name], now), now):
                waiting[name].remove(drop.prepared.frame.captured_at)
        elif step == "pop" and (batch := mux.pop(now)) is not None:
            for one in batch.frames:
                waiting[one.frame.source_id].remove(one.frame.captured_at)
        elif step == "refresh":
            mux.refresh_s = pause_s * 3
        elif step == "leave":
            for drop in mux.remove(name):
                waiting[name].remove(drop.prepared.frame.captured_at)
            mux.add(name, DropPolicy.DROP_OLDEST)
        assert len(mux) == sum(map(len, waiting.values()))
