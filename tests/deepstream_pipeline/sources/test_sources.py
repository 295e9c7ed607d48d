"""The sources' thread with real processes: what comes, in which order, and what people may ask of it."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import structlog

from penstock_video.errors import PipelineError, SourceExists, TooManySources, UnknownSource
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.sources.options import SourceNeeds, SourceSnapshot, SourcesOptions
from penstock_video.sources.protocol import Beat, Cut
from penstock_video.sources.sources import Sources
from penstock_video.types import Frame, PreparedFrame, SourceState
from tests.deepstream_pipeline.sources.fake_child import HEIGHT, ROW_BYTES, WIDTH
from tests.deepstream_pipeline.sources.parent import COMMAND, NEEDS, OPTIONS, EventLog, camera, clip, one, running


def frames_of(event_log: EventLog, source_id: str = "a") -> list[Frame]:
    """Those that came so far."""
    return [frame for frame in event_log.of("frame", source_id) if isinstance(frame, Frame)]


def kinds_of(event_log: EventLog, source_id: str = "a") -> list[str]:
    """What was reported, in order, without what repeats."""
    kinds = [kind for kind, source, _ in event_log.events if source == source_id]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


def test_file_is_read_to_its_end_and_reported_in_order() -> None:
    """Connecting, opened, running, every frame once and in order, ended: and nothing after that."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(clip("live?frames=40&fps=400"), NEEDS)
        event_log.wait_for("ended")
        assert [frame.frame_num for frame in frames_of(event_log)] == list(range(40))
        assert kinds_of(event_log) == ["state", "opened", "state", "frame", "beat", "state", "ended"]
        seen = one(sources)
        assert (seen.state, seen.frames, seen.restarts, seen.pid) == (SourceState.ENDED, 40, 0, None)
        assert (seen.decode_s, seen.prepare_s) == (0.5, 0.25)
        sources.remove("a")
        assert sources.snapshot() == ()
    assert len(event_log.of("ended")) == 1


def test_file_that_falls_silent_has_its_time_from_when_its_frames_were_given_back() -> None:
    """The parent held all of its ring beyond the first look at its silence: that was no silence of the file."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(clip("silent?frames=6&fps=400", reconnect_interval_s=1.0), NEEDS)
        event_log.wait_for("frame", 6)
        time.sleep(1.6)
        assert one(sources).state is SourceState.RUNNING
        began = time.monotonic()
        for prepared in event_log.frames:
            prepared.release()
        event_log.wait_for_state(SourceState.STALLED)
        assert time.monotonic() - began >= 1.0


def test_frame_holds_what_its_process_wrote() -> None:
    """Row and picture are views of the ring that no one writes to, of the shapes that were agreed."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(clip("live?frames=3&fps=400"), SourceNeeds(b"", ROW_BYTES, np.uint8, 0, True))
        event_log.wait_for("frame", 3)
        for number, prepared in enumerate(event_log.frames):
            assert prepared.row is not None
            assert prepared.frame.image is not None
            assert (prepared.row.shape, prepared.frame.image.shape) == ((ROW_BYTES,), (HEIGHT, WIDTH, 3))
            assert set(prepared.row) == set(prepared.frame.image.flat) == {number}
            assert not prepared.row.flags.writeable
            prepared.release()


def test_frames_kept_bound_a_file_and_losses_of_a_camera_are_counted() -> None:
    """A file waits for room; a camera goes on, and every frame that found none is counted, and is a gap."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(clip("live?frames=20&fps=400"), NEEDS)
        sources.add(camera("live?fps=100", "b"), NEEDS)
        event_log.wait_for("lost", 10, "b")
        event_log.wait_for("frame", OPTIONS.ring_frames, "a")
        assert len(frames_of(event_log, "a")) == OPTIONS.ring_frames == one(sources, "a").waiting_frames
        while event_log.frames:
            event_log.frames.pop().release()
        event_log.wait(lambda: any(frame.frame_num > 10 for frame in frames_of(event_log, "b")))
        event_log.is_keeping = False
        while event_log.frames:
            event_log.frames.pop().release()
        event_log.wait_for("ended", source_id="a")
        assert one(sources, "b").drops["ring_full"] >= 10
    assert [frame.frame_num for frame in frames_of(event_log, "a")] == list(range(20))
    numbers = [frame.frame_num for frame in frames_of(event_log, "b")]
    assert numbers == sorted(set(numbers))
    assert numbers[OPTIONS.ring_frames] >= OPTIONS.ring_frames + 10


def test_file_whose_frames_are_kept_for_long_is_not_taken_for_stalled() -> None:
    """While we hold what it waits for, its silence is ours: an engine that stands still costs no file."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(clip("live?frames=10&fps=400", reconnect_interval_s=0.4), NEEDS)
        event_log.wait_for("frame", OPTIONS.ring_frames)
        time.sleep(1.5)  # three intervals, and nothing may happen in them
        assert (one(sources).state, one(sources).restarts) == (SourceState.RUNNING, 0)
        event_log.is_keeping = False
        while event_log.frames:
            event_log.frames.pop().release()
        event_log.wait_for("ended")
    assert [frame.frame_num for frame in frames_of(event_log)] == list(range(10))


def test_release_from_many_threads_and_twice_gives_each_slot_back_once() -> None:
    """However often and from wherever it is called, the process gets no slot that is still read."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(clip("live?frames=300&fps=3000"), NEEDS)

        def release() -> None:
            while not event_log.of("ended"):
                for prepared in event_log.frames[-12:]:
                    prepared.release()
                time.sleep(0.001)

        threads = [threading.Thread(target=release) for _ in range(4)]
        for thread in threads:
            thread.start()
        event_log.wait_for("ended")
        for thread in threads:
            thread.join()
        assert one(sources).state is SourceState.ENDED
    assert [frame.frame_num for frame in frames_of(event_log)] == list(range(300))


def test_frames_of_a_dead_process_can_be_read_and_released() -> None:
    """Its memory lives as long as someone looks at it, and its slots are not given to the next process."""
    event_log = EventLog(is_keeping=True)
    with running(event_log) as sources:
        sources.add(camera("segv?frames=3&fps=200"), NEEDS)
        event_log.wait_for("opened", 2)
        first = event_log.frames[:3]
        assert [int(prepared.row[0]) for prepared in first if prepared.row is not None] == [0, 1, 2]
        for prepared in first:
            prepared.release()
        event_log.wait_for("frame", 6)
        assert one(sources).drops == {}
    first[0].release()


def test_camera_that_reconnects_goes_on_counting() -> None:
    """Numbers go on, the segment rises, and the pts has gone on by as much as the clock."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("live?frames=5&fps=100"), NEEDS)
        event_log.wait_for("frame", 10)
        assert one(sources).restarts == 1
    frames = frames_of(event_log)[:10]
    assert [frame.frame_num for frame in frames] == list(range(10))
    assert [frame.segment for frame in frames] == [0] * 5 + [1] * 5
    gap_s = frames[5].captured_at - frames[4].captured_at
    assert gap_s > 0.5
    assert frames[5].pts_s - frames[4].pts_s == pytest.approx(gap_s, abs=1e-6)
    states = [what[0] for what in event_log.of("state") if isinstance(what, tuple)]
    wanted = [SourceState.CONNECTING, SourceState.RUNNING, SourceState.RECONNECTING, SourceState.RUNNING]
    assert states[:4] == wanted


def test_file_paused_goes_on_where_it_was() -> None:
    """Held, nothing comes; then every frame, once, from the same process."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(clip("live?frames=60&fps=100"), NEEDS)
        event_log.wait_for("frame", 5)
        sources.pause("a")
        event_log.wait_for_state(SourceState.PAUSED)
        time.sleep(0.2)  # frames on their way
        held, pid = len(frames_of(event_log)), one(sources).pid
        time.sleep(0.5)
        assert (len(frames_of(event_log)), one(sources).pid) == (held, pid)
        assert held < 60
        sources.resume("a")
        event_log.wait_for("ended")
    assert [frame.frame_num for frame in frames_of(event_log)] == list(range(60))


def test_camera_paused_has_no_process_and_comes_back() -> None:
    """No one is connected to a camera that is paused; resumed, it runs, without a restart being counted."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("live?fps=100"), NEEDS)
        event_log.wait_for("frame", 3)
        sources.pause("a")
        event_log.wait(lambda: one(sources).pid is None)
        assert one(sources).state is SourceState.PAUSED
        sources.resume("a")
        before = len(frames_of(event_log))
        event_log.wait_for("frame", before + 3)
        seen = one(sources)
        assert (seen.state, seen.restarts) == (SourceState.RUNNING, 0)


def test_images_travel_while_they_are_wanted() -> None:
    """want_images is sent to the process that runs, and to the next one."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("live?fps=100&frames=60"), NEEDS)
        event_log.wait_for("frame", 3)
        sources.want_images("a", True)
        event_log.wait(lambda: frames_of(event_log)[-1].image is not None)
        event_log.wait_for("opened", 2)
        event_log.wait(lambda: frames_of(event_log)[-1].segment == 1)
        assert all(frame.image is not None for frame in frames_of(event_log) if frame.segment == 1)
        sources.want_images("a", False)
        event_log.wait(lambda: frames_of(event_log)[-1].image is None)


def test_recording_is_reported_whatever_comes_of_it(tmp_path: Path) -> None:
    """By the process that makes it; without one, at once, with the reason."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("live"), NEEDS)
        event_log.wait_for("frame", 1)
        assert one(sources).is_open
        sources.record("a", Cut(str(tmp_path / "clip.mp4"), 5.0, 5.0))
        assert event_log.wait_for("recorded") == [(str(tmp_path / "clip.mp4"), "")]
        sources.pause("a")
        sources.record("a", Cut("late.mp4", 5.0, 5.0))
        assert event_log.wait_for("recorded", 2)[1] == ("late.mp4", "the source is paused")
        assert not one(sources).is_open
        with pytest.raises(ValueError, match="5000 characters"):
            sources.record("a", Cut("x" * 5000, 0.0, 0.0))


def test_slot_is_given_back_behind_what_was_asked_before_it() -> None:
    """A file's process ends with its last slot: a recording that the slot's frame asked for reaches it before."""
    said: list[str] = []
    sources: Any = Sources(OPTIONS, EventLog())
    process = Mock(is_behind=False)
    source = Mock(process=process, released=lambda process, slots, now: said.append("released"))
    sources._commands.append(lambda now: said.append("asked"))
    sources._returned.append((source, process, 0))
    sources._turn()
    assert said == ["asked", "released"]
    assert sources.close(1.0)


def test_id_that_was_removed_is_free_at_once() -> None:
    """Another source of the same id begins when the former's process is over, and is reported after its end."""
    event_log = EventLog()
    with running(event_log) as sources:
        for _ in range(3):
            sources.add(camera("live"), NEEDS)
            sources.remove("a")
        sources.add(clip("live?frames=2"), NEEDS)
        sources.want_images("a", True)
        event_log.wait_for("ended", 4)
        assert one(sources).state is SourceState.ENDED
        sources.add(clip("live?frames=2"), NEEDS)
        event_log.wait_for("ended", 5)
    assert kinds_of(event_log)[-1] == "ended"


def test_source_that_goes_is_known_until_its_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all its frames, though it is not among those that are there any more."""
    event_log = EventLog()
    last: list[SourceSnapshot | None] = []
    with running(event_log) as sources:
        tell = event_log.on_ended
        monkeypatch.setattr(event_log, "on_ended", lambda name: (last.append(sources.snapshot_of(name)), tell(name)))
        sources.add(camera("live"), NEEDS)
        event_log.wait_for("frame", 1)
        sources.remove("a")
        assert sources.snapshot() == ()
        event_log.wait_for("ended", 1)
    (known,) = last
    assert known is not None
    assert (known.reason, known.frames > 0) == (TAKEN_OUT, True)
    assert sources.snapshot_of("a") is None


def test_sources_refuse_what_cannot_be_meant() -> None:
    """Ids are unique and known, and there is a most of them."""
    event_log = EventLog()
    with running(event_log, SourcesOptions(command=COMMAND, max_sources=2)) as sources:
        sources.add(camera("live"), NEEDS)
        with pytest.raises(SourceExists, match="'a' already"):
            sources.add(camera("live"), NEEDS)
        sources.add(camera("live", "b"), NEEDS)
        with pytest.raises(TooManySources, match="2 sources"):
            sources.add(camera("live", "c"), NEEDS)
        for call in (sources.remove, sources.pause, sources.resume, lambda one: sources.want_images(one, True)):
            with pytest.raises(UnknownSource, match="'x'"):
                call("x")
    with pytest.raises(PipelineError, match="ends"):
        sources.add(camera("live"), NEEDS)
    assert [len(event_log.of("ended", source)) for source in "ab"] == [1, 1]


def test_source_that_was_added_just_before_the_end_is_reported_as_ended() -> None:
    """The caller that added it waits for that event."""
    event_log = EventLog()
    sources = Sources(OPTIONS, event_log)
    sources.add(camera("live"), NEEDS)
    sources._end_at = time.monotonic() + 5.0  # as close sets it, before the thread knows the source
    sources.start()
    event_log.wait_for("ended")
    assert sources.close(5.0)


def test_sources_never_started_can_be_closed() -> None:
    """A failure before the start leaves nothing."""
    gc.collect()  # descriptors of the tests before
    before = len(os.listdir("/proc/self/fd"))
    assert Sources(OPTIONS, EventLog()).close(1.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_sums_of_beats_go_on_over_processes() -> None:
    """What a process counts from 0 is added to what its predecessors counted."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("live?frames=4&fps=400"), NEEDS)
        beats = event_log.wait_for("beat", 2)
    assert beats[:2] == [Beat(4, 0, 0.5, 0.25), Beat(8, 0, 1.0, 0.5)]


def test_listener_that_fails_costs_its_source_a_process_and_no_other() -> None:
    """A fault of ours is counted, and the other sources go on."""
    event_log = EventLog()

    def fail(prepared: PreparedFrame) -> None:
        prepared.release()
        if prepared.frame.source_id == "a" and prepared.frame.frame_num == 3:
            raise RuntimeError("on purpose")

    event_log.on_frame_call = fail
    sources = Sources(OPTIONS, event_log)
    sources.start()
    try:
        with structlog.testing.capture_logs() as logs:
            sources.add(camera("live?fps=100"), NEEDS)
            sources.add(camera("live?fps=100", "b"), NEEDS)
            event_log.wait_for("opened", 2)
            event_log.wait_for("frame", 20, "b")
        assert [(line["event"], line["source"]) for line in logs] == [("a source's turn failed", "a")]
        assert (sources.faults, one(sources, "a").restarts, one(sources, "b").restarts) == (1, 1, 0)
    finally:
        assert sources.close(10.0)
    assert not sources.is_alive


def test_close_without_time_leaves_no_process() -> None:
    """What is killed in haste is reaped all the same, and reported as ended; that it was in haste is said."""
    event_log = EventLog()
    sources = Sources(OPTIONS, event_log)
    sources.start()
    sources.add(camera("live?fps=50"), NEEDS)
    event_log.wait_for("frame")
    pid = one(sources).pid
    assert not sources.close(0.0)
    assert not Path(f"/proc/{pid}").exists()
    assert len(event_log.of("ended")) == 1


def test_thread_that_fails_tells_every_source_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours ends every source, and no one waits for one of them."""
    event_log = EventLog()
    sources = Sources(OPTIONS, event_log)
    sources.start()
    sources.add(camera("live?fps=50"), NEEDS)
    event_log.wait_for("frame")
    monkeypatch.setattr(sources._gate, "next_wakeup", lambda: 1 / 0)
    event_log.wait_for("ended")
    sources.close(1.0)
    assert not sources.is_running
    assert sources.faults == 1
