"""Cameras that share decode processes: what one of them can do to the others, and what it cannot."""

import errno
import gc
import mmap
import os
import signal
import socket
import sys
import time
from dataclasses import replace

import psutil
import pytest
from structlog.testing import capture_logs

from penstock_video.sources import decode_host as hosts
from penstock_video.sources.options import GpuSources, ProcessSnapshot
from penstock_video.sources.protocol import Start
from penstock_video.sources.sources import Sources
from penstock_video.types import DecoderKind, Frame, SourceState
from tests.deepstream_pipeline.sources.cycles import held_now, rings_now
from tests.deepstream_pipeline.sources.fake_child import FULL
from tests.deepstream_pipeline.sources.parent import NEEDS, OPTIONS, EventLog, camera, one, running

SHARED = (sys.executable, "-m", "tests.deepstream_pipeline.sources.fake_shared_child")
DEEP = replace(OPTIONS, ring_frames=64, gpu=GpuSources(cameras_per_process=4, command=SHARED))
RESTART_S = 5.0  # at most, of cameras whose process died: measured 0.9 to 1.6 on two cores
QUICK = {"reconnect_interval_s": 0.5, "open_timeout_s": 0.5}
LIVE = "live?fps=25"


def add(sources: Sources, event_log: EventLog, *names: str, mode: str = LIVE, **changes: object) -> None:
    """Cameras, one after the other, so that they sit in this order."""
    for name in names:
        sources.add(camera(mode, name, **changes), NEEDS)
        event_log.wait_for("opened", 1, name)


def untouched(sources: Sources, event_log: EventLog, name: str) -> None:
    """It runs as if nothing had happened: one process, every frame, in order."""
    event_log.wait_for("frame", event_log.count("frame", name) + 5, name)
    seen = one(sources, name)
    assert (seen.state, seen.restarts, dict(seen.drops)) == (SourceState.RUNNING, 0, {})
    came = [frame.frame_num for frame in event_log.of("frame", name) if isinstance(frame, Frame)]
    assert came == list(range(len(came)))
    assert (event_log.count("opened", name), event_log.of("lost", name)) == (1, [])


def pid_of(sources: Sources, name: str) -> int:
    """Of the process that it is in."""
    pid = one(sources, name).pid
    assert pid is not None
    return pid


def reasons(event_log: EventLog, name: str) -> list[str]:
    """That its states had."""
    return [what[1] for what in event_log.of("state", name) if isinstance(what, tuple) and what[1]]


def test_cameras_fill_processes_and_keep_their_order() -> None:
    """Six cameras, four to a process: two processes, and each camera's frames are whole and in order."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, *"abcdef")
        for name in "abcdef":
            untouched(sources, event_log, name)
        first, second = pid_of(sources, "a"), pid_of(sources, "e")
        assert [pid_of(sources, name) for name in "abcdef"] == [first] * 4 + [second] * 2
        assert sources.processes() == (ProcessSnapshot(first, "nvdec", 4), ProcessSnapshot(second, "nvdec", 2))
        assert [one(sources, name).decoder for name in "af"] == ["nvdec"] * 2


def test_processes_have_even_numbers_of_cameras() -> None:
    """Of an odd maximum one place stays empty, so that no camera is without a partner for that reason."""
    event_log = EventLog()
    with running(event_log, replace(DEEP, gpu=GpuSources(cameras_per_process=3, command=SHARED))) as sources:
        add(sources, event_log, *"abc")
        assert pid_of(sources, "a") == pid_of(sources, "b") != pid_of(sources, "c")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_dead_process_begins_anew_with_its_cameras_and_costs_no_other(number: signal.Signals) -> None:
    """Its four cameras get the reason of its end and run again within RESTART_S; other processes' do not notice."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, *"abcd", "good")
        add(sources, event_log, "cpu", decoder=DecoderKind.CPU)
        for name in "abcd":
            event_log.wait_for("frame", 3, name)
        os.kill(pid_of(sources, "a"), number)
        died = time.monotonic()
        for name in "abcd":
            event_log.wait_for("opened", 2, name)
        restart_s = time.monotonic() - died
        event_log.wait(lambda: all(one(sources, name).state is SourceState.RUNNING for name in "abcd"))
        assert restart_s < RESTART_S
        how = f"the decode process was ended by {number.name}, with 3 other cameras"
        assert [reasons(event_log, name)[0] for name in "abcd"] == [how] * 4
        assert [one(sources, name).restarts for name in "abcd"] == [1] * 4
        assert len({pid_of(sources, name) for name in "abcd"}) == 1  # and not in the other's, which has room
        assert pid_of(sources, "a") != pid_of(sources, "good")
        untouched(sources, event_log, "good")
        untouched(sources, event_log, "cpu")


@pytest.mark.parametrize("mode", ["live?frames=3&fps=50", "unavailable", "auth_failed"])
def test_camera_that_fails_costs_no_neighbour(mode: str) -> None:
    """It ends by itself and is tried again; who shares its process does not notice."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        sources.add(camera(mode), NEEDS)
        event_log.wait(lambda: bool(reasons(event_log, "a")))
        untouched(sources, event_log, "good")
        event_log.wait(lambda: one(sources).restarts >= 1 or mode == "auth_failed")
        untouched(sources, event_log, "good")
        assert len(sources.processes()) == 1


def test_camera_that_stalls_or_runs_away_leaves_its_slot() -> None:
    """Its thread sees its socket's end and goes; its neighbour does not notice."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        add(sources, event_log, "a", mode="silent?frames=2", **QUICK)
        add(sources, event_log, "b", mode="live?fps=150&says=10")
        event_log.wait_for("opened", 2, "a")
        event_log.wait_for("opened", 2, "b")
        assert "no frame for 0.5 s" in reasons(event_log, "a")
        assert "where 10 are expected" in reasons(event_log, "b")[0]
        untouched(sources, event_log, "good")
        assert len(sources.processes()) == 1


@pytest.mark.parametrize("mode", ["rubbish", "bad_slot", "on_no_card"])
def test_process_that_breaks_a_promise_is_ended_and_its_culprit_sits_alone(mode: str) -> None:
    """What a process says is not believed once it lied: its cameras begin anew, the liar in a process of its own."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        add(sources, event_log, "neighbour")
        sources.add(camera(mode, "a"), NEEDS)
        event_log.wait_for("opened", 2, "neighbour")
        event_log.wait_for("opened", 2, "a")
        event_log.wait_for("frame", event_log.count("frame", "good") + 3, "good")
        assert reasons(event_log, "good")[0] == (
            "the decode process was ended by SIGKILL (a camera of it broke its promises), with 2 other cameras"
        )
        assert [one(sources, name).restarts for name in ("good", "neighbour")] == [1, 1]
        event_log.wait(lambda: one(sources).restarts >= 2)
        assert [one(sources, name).restarts for name in ("good", "neighbour")] == [1, 1]
        assert pid_of(sources, "good") == pid_of(sources, "neighbour")


def test_camera_that_kills_its_process_again_and_again_does_so_alone() -> None:
    """Once, and at most twice, it takes its neighbours along; never those who sat elsewhere, or came later."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good", "b", "c", "d", "elsewhere")
        sources.remove("d")
        event_log.wait_for("ended", 1, "d")
        sources.add(camera("segv?frames=2&fps=100", "a"), NEEDS)
        event_log.wait_for("opened", 2, "a")
        add(sources, event_log, "new")
        event_log.wait(lambda: one(sources, "a").restarts >= 3)  # of which the last came alone
        assert len(reasons(event_log, "good")) in (1, 2)
        assert pid_of(sources, "new") == pid_of(sources, "elsewhere")
        for name in ("elsewhere", "new"):
            untouched(sources, event_log, name)


def test_thread_that_hangs_is_ended_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its stream's time and a margin to end; then its process is killed, and all begin anew."""
    monkeypatch.setattr(hosts, "LEAVE_MARGIN_S", 0.1)
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        add(sources, event_log, "other", "c", "d", "elsewhere")
        sources.remove("d")
        event_log.wait_for("ended", 1, "d")
        began = time.monotonic()
        sources.add(camera("hangs?frames=2", "a", **QUICK), NEEDS)
        event_log.wait_for("opened", 2, "good")
        assert time.monotonic() - began < 10.0  # 0.5 of silence, 2.6 to leave, a second's look, its restart
        assert "(the thread of a camera did not end), with 3 other cameras" in reasons(event_log, "good")[0]
        untouched(sources, event_log, "elsewhere")


def test_process_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 44: its cameras fall silent together, no one in it is wanted any more, and it is killed as it is."""
    monkeypatch.setattr(hosts, "_ALL_LEFT_S", 0.5)
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, *"abcd", **QUICK)
        add(sources, event_log, "good")
        stopped = pid_of(sources, "a")
        os.kill(stopped, signal.SIGSTOP)
        for name in "abcd":
            event_log.wait_for("opened", 2, name)
            assert event_log.wait_for_state(SourceState.STALLED, name) == "no frame for 0.5 s"
        assert not psutil.pid_exists(stopped)
        untouched(sources, event_log, "good")


def test_process_that_does_not_end_in_time_is_reported_once_with_its_cameras() -> None:
    """Not once for each of them: of a program with hundreds."""
    event_log = EventLog()
    sources = Sources(DEEP, event_log)
    sources.start()
    try:
        add(sources, event_log, "a", "b")
        pid = pid_of(sources, "a")
    finally:
        with capture_logs() as lines:
            assert not sources.close(0.0)
    late = [line for line in lines if line["event"] == "a decode process did not end in time"]
    assert [(line["sources"], line["pid"], line["process"]) for line in late] == [("a, b", pid, "was killed")]
    assert not psutil.pid_exists(pid)


def test_camera_is_taken_out_paused_and_resumed_among_others() -> None:
    """Its slot is free for another, and it comes back to the same process; the neighbour does not notice."""
    event_log = EventLog()
    with running(event_log, replace(DEEP, gpu=GpuSources(cameras_per_process=2, command=SHARED))) as sources:
        add(sources, event_log, "good", "a")
        home = pid_of(sources, "good")
        sources.pause("a")
        event_log.wait_for_state(SourceState.PAUSED)
        event_log.wait(lambda: one(sources).pid is None)
        sources.resume("a")
        event_log.wait_for("opened", 2)
        assert pid_of(sources, "a") == home
        sources.remove("a")
        event_log.wait_for("ended")
        add(sources, event_log, "b")
        assert pid_of(sources, "b") == home
        untouched(sources, event_log, "good")


def test_process_without_cameras_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for those that come back, and then is no more."""
    monkeypatch.setattr(hosts, "_IDLE_S", 1.5)
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "a")
        pid = pid_of(sources, "a")
        sources.remove("a")
        event_log.wait_for("ended")
        assert sources.processes() == (ProcessSnapshot(pid, "nvdec", 0),)
        event_log.wait(lambda: not sources.processes())
        assert not psutil.pid_exists(pid)


def test_stream_that_the_card_does_not_take_goes_on_by_the_cpu_at_once() -> None:
    """No restart is counted, no failure reported, and its neighbour does not notice."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        sources.add(camera("needs_cpu?fps=50", "a"), NEEDS)
        event_log.wait_for("frame", 5)
        seen = one(sources)
        assert (seen.decoder, seen.restarts, reasons(event_log, "a")) == ("cpu", 0, [])
        assert sorted((process.decoder, process.cameras) for process in sources.processes()) == [
            ("cpu", 1),
            ("nvdec", 1),
        ]
        untouched(sources, event_log, "good")


def test_stream_that_the_card_does_not_take_fails_where_only_the_card_may() -> None:
    """With `decoder: nvdec`, and why."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        sources.add(camera("needs_cpu", "a", decoder=DecoderKind.NVDEC), NEEDS)
        assert event_log.wait_for_state(SourceState.FAILED) == "10 bit"


def test_card_that_cannot_be_used_for_a_while_ends_no_source_for_good() -> None:
    """Who may goes on by the CPU, and who may not is tried again: the card may come back."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        sources.add(camera("no_card?fps=50", "a"), NEEDS)
        sources.add(camera("no_card", "b", decoder=DecoderKind.NVDEC), NEEDS)
        event_log.wait_for("frame", 5, "a")
        assert (one(sources, "a").decoder, one(sources, "a").restarts) == ("cpu", 0)
        event_log.wait(lambda: one(sources, "b").restarts >= 2)
        assert set(reasons(event_log, "b")) == {FULL}
        assert (one(sources, "b").decoder, one(sources, "b").frames) == ("", 0)


def test_card_that_becomes_full_within_a_stream_hands_it_to_the_cpu_and_counts_nothing() -> None:
    """Its frames go on where they were: no restart, no loss, no reason reported; its neighbour keeps its process."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        add(sources, event_log, "good")
        sources.add(camera("card_fills?fps=50&frames=5", "a"), NEEDS)
        event_log.wait_for("frame", 12, "a")
        seen = one(sources, "a")
        assert (seen.decoder, seen.restarts, dict(seen.drops), reasons(event_log, "a")) == ("cpu", 0, {}, [])
        came = [frame.frame_num for frame in event_log.of("frame", "a") if isinstance(frame, Frame)]
        assert came == list(range(len(came)))
        untouched(sources, event_log, "good")


def test_source_that_wants_a_card_that_is_not_there_fails_and_auto_does_not() -> None:
    """The sentence says why there is none, and what to choose."""
    event_log = EventLog()
    with running(event_log, replace(OPTIONS, gpu_absence="the driver is missing")) as sources:
        sources.add(camera(LIVE, "a", decoder=DecoderKind.NVDEC), NEEDS)
        sources.add(camera(LIVE, "b"), NEEDS)
        event_log.wait_for("ended")
        assert one(sources).state is SourceState.FAILED
        assert one(sources).reason == "decoder nvdec: the driver is missing; choose auto or cpu"
        event_log.wait_for("frame", 3, "b")
        assert one(sources, "b").decoder == "cpu"


def test_shared_process_that_cannot_be_started_is_tried_again() -> None:
    """As one of a camera's own."""
    event_log = EventLog()
    with running(event_log, replace(DEEP, gpu=GpuSources(command=("/nowhere/python",)))) as sources:
        sources.add(camera(LIVE), NEEDS)
        assert one(sources).source_id == "a"
        event_log.wait(lambda: one(sources).restarts >= 1)
        assert one(sources).reason == "the decode process could not be started (No such file or directory)"
        assert sources.processes() == ()


@pytest.mark.parametrize("step", ["pipe2", "mmap", "send_fds"])
def test_slot_that_cannot_be_taken_leaves_no_descriptor(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has no descriptor left, one less with each try would be for ever."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    start = Start(uri="rtsp://fake/live", spec=b"", ring_frames=2, slot_bytes=4096, ring_bytes=8192, policy="block")
    host = hosts.DecodeHost((*SHARED, "0"), 4, "")
    try:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        owner = {"pipe2": os, "mmap": mmap, "send_fds": socket}[step]
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, refuse)
            with pytest.raises(OSError, match="Too many"):
                hosts.SharedDecodeProcess(host, start, "a")
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), host.members) == (before, set())
    finally:
        host.kill("the test is over")
        assert host.is_reaped(5.0)
        host.close()


def test_cameras_that_come_and_go_in_shared_processes_leave_nothing() -> None:
    """No descriptor, thread, process or memory more after forty of every kind than after eight."""
    modes = ("live", "live?frames=2&fps=200", "unavailable", "silent?frames=1", "never_opens", "needs_cpu")
    event_log = EventLog()
    with running(event_log, replace(DEEP, max_opening=8)) as sources:
        add(sources, event_log, "good")
        held = []
        for cycle in range(5):
            names = [f"s{cycle}{number}" for number in range(8)]
            for number, name in enumerate(names):
                sources.add(camera(modes[number % len(modes)], name, **QUICK), NEEDS)
            event_log.wait_for("opened", 1, names[0])
            for name in names:
                sources.remove(name)
            for name in names:
                event_log.wait_for("ended", 1, name)
            event_log.forget(names)
            event_log.wait(lambda: sum(process.cameras for process in sources.processes()) == 1)
            if cycle in (0, 4):
                held.append((held_now(), len(sources.processes())))
        assert one(sources, "good").restarts == 0
    (before, processes_before), (after, processes_after) = held
    assert processes_after <= processes_before
    own = (before.descriptors - 3 * processes_before, after.descriptors - 3 * processes_after)
    assert own[1] <= own[0]
    assert (after.threads, after.rings) == (before.threads, before.rings)


def test_closed_in_the_midst_of_faults_no_shared_process_is_left() -> None:
    """Whatever its cameras do, each end is reported once, and nothing outlives the close."""
    before = rings_now(), set(os.listdir("/proc/self/fd"))
    event_log = EventLog()
    sources = Sources(replace(DEEP, max_opening=8), event_log)
    sources.start()
    modes = ["live", "never_opens", "silent?frames=0", "hangs?frames=1", "stubborn", "live?frames=2"]
    for number, mode in enumerate(modes):
        sources.add(camera(mode, f"s{number}"), NEEDS)
    event_log.wait_for("frame", 5, "s0")
    pids = [process.pid for process in sources.processes()]
    began = time.monotonic()
    assert sources.close(6.0)
    assert time.monotonic() - began < 7.0
    assert [len(event_log.of("ended", f"s{number}")) for number in range(len(modes))] == [1] * len(modes)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    event_log.events.clear()
    assert (rings_now(), set(os.listdir("/proc/self/fd"))) == before
