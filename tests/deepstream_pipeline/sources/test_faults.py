"""What a decode process can do to the program: nothing but lose its own source for a while."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock_video.sources import lifecycle as watch
from penstock_video.sources.options import SourcesOptions
from penstock_video.sources.sources import Sources
from penstock_video.types import Frame, SourceState
from tests.deepstream_pipeline.sources.cycles import rings_now
from tests.deepstream_pipeline.sources.parent import COMMAND, NEEDS, OPTIONS, EventLog, camera, clip, one, running

QUICK = {"reconnect_interval_s": 0.5}
DEEP = replace(OPTIONS, ring_frames=64)  # two and a half seconds at 25 frames/s, which no machine stands still for
BREAKS_ITS_PROMISES = {
    "rubbish": "sent what is no message",
    "deep": "sent what is no message",
    "bad_slot": "slot 10000",
    "same_slot": "slot 0, which is not the process'",
    "big_row": "a frame that cannot be",
    "long_row": "a row of 17 bytes, where 16 are",
    "huge": "a picture of 100000x100000",
    "backwards": "a pts of -1.0",
    "flood": "1000 messages in a second",
}


def good_neighbour(sources: Sources, event_log: EventLog) -> None:
    """Another camera did not notice what happened to the first: it runs, was never restarted, and every frame of its
    only process came, in order. Only a parent that looked after no one for two and a half seconds loses one."""
    event_log.wait_for("frame", event_log.count("frame", "good") + 5, "good")
    seen = one(sources, "good")
    assert (seen.state, seen.restarts, dict(seen.drops)) == (SourceState.RUNNING, 0, {})
    came = [frame.frame_num for frame in event_log.of("frame", "good") if isinstance(frame, Frame)]
    assert came == list(range(len(came)))
    assert [what[0] for what in event_log.of("state", "good") if isinstance(what, tuple)] == [
        SourceState.CONNECTING,
        SourceState.RUNNING,
    ]
    assert (event_log.count("opened", "good"), event_log.of("lost", "good")) == (1, [])


@pytest.mark.parametrize("mode", BREAKS_ITS_PROMISES)
def test_process_that_breaks_its_promises_is_replaced_and_costs_no_other(mode: str) -> None:
    """Rubbish, slots and sizes that are not its own, time that runs backwards, a flood: killed, with the reason."""
    event_log = EventLog(is_keeping=True, keeps_only="a")
    with running(event_log, DEEP) as sources:
        sources.add(camera("live?fps=25", "good"), NEEDS)
        sources.add(camera(mode), NEEDS)
        event_log.wait_for("opened", 2)
        reasons = [what[1] for what in event_log.of("state") if isinstance(what, tuple)]
        assert any(BREAKS_ITS_PROMISES[mode] in reason for reason in reasons), reasons
        assert one(sources).restarts >= 1  # the next process may have broken them, too, by the time this is asked
        good_neighbour(sources, event_log)


def test_process_that_dies_by_segv_is_replaced() -> None:
    """Fault 55: only that source begins anew."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        sources.add(camera("live?fps=25", "good"), NEEDS)
        sources.add(camera("segv?frames=3&fps=100"), NEEDS)
        assert "was ended by SIGSEGV" in event_log.wait_for_state(SourceState.RECONNECTING)
        event_log.wait_for("frame", 6)
        good_neighbour(sources, event_log)


def test_process_that_is_killed_or_stopped_is_replaced() -> None:
    """Fault 44: one that stands still is noticed by its silence, killed as it is, and replaced."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        sources.add(camera("live?fps=25", "good"), NEEDS)
        sources.add(camera("live?fps=100", **QUICK), NEEDS)
        event_log.wait_for("frame", 3)
        stopped = one(sources).pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        assert event_log.wait_for_state(SourceState.STALLED) == "no frame for 0.5 s"
        event_log.wait_for("opened", 2)
        assert not psutil.pid_exists(stopped)
        killed = one(sources).pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        event_log.wait_for("opened", 3)
        good_neighbour(sources, event_log)


def test_source_that_never_opens_is_tried_again_and_others_start_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 42: dead cameras hold no place in front of those that live, and stay in connecting."""
    monkeypatch.setattr(watch, "START_MARGIN_S", 0.5)
    event_log = EventLog()
    options = replace(DEEP, max_opening=1)
    with running(event_log, options) as sources:
        for name in "abc":
            sources.add(camera("never_opens", name, open_timeout_s=0.1), NEEDS)
        sources.add(camera("live?fps=25", "good"), NEEDS)
        event_log.wait_for("frame", 10, "good")
        event_log.wait(lambda: all(one(sources, name).restarts >= 1 for name in "abc"))
        assert {what[0] for name in "abc" for what in event_log.of("state", name) if isinstance(what, tuple)} == {
            SourceState.CONNECTING
        }
        good_neighbour(sources, event_log)


def test_sources_that_begin_together_are_opened_a_few_at_a_time() -> None:
    """Fault 56: never are more than max_opening processes between their start and their first word."""
    event_log = EventLog()
    with running(event_log, replace(OPTIONS, max_opening=2)) as sources:
        names = [f"s{number}" for number in range(12)]
        for name in names:
            sources.add(camera("live?fps=10", name), NEEDS)
        most = 0
        while not all(event_log.count("frame", name) for name in names):
            most = max(most, sum(seen.pid is not None and seen.opened is None for seen in sources.snapshot()))
            time.sleep(0.002)
        assert most == 2


@pytest.mark.parametrize(
    ("mode", "state"), [("auth_failed", SourceState.AUTH_FAILED), ("not_allowed", SourceState.FAILED)]
)
def test_refusal_is_reported_without_the_password(mode: str, state: SourceState) -> None:
    """Fault 54: the state says it, and no text that anybody is shown holds user or password."""
    event_log = EventLog()
    with running(event_log) as sources:
        config = replace(camera(mode), uri=f"rtsp://root:s3cret%21@fake/{mode}")
        sources.add(config, NEEDS)
        reason = event_log.wait_for_state(state)
        assert reason == f"rtsp://***@fake/{mode} said no"
        assert one(sources).reason == reason


def test_process_that_ends_with_an_error_leaves_its_last_words() -> None:
    """What stands last in its standard error is in the reason: a module that is missing is seen at once."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(clip("dies_early"), NEEDS)
        reason = event_log.wait_for_state(SourceState.FAILED)
    assert reason == (
        f"given up after {watch.FILE_ATTEMPTS + 1} attempts: the decode process ended with status 3: "
        "ModuleNotFoundError: av"
    )


def test_program_that_cannot_start_processes_says_so() -> None:
    """Without its program a source is tried again, and others do not notice."""
    event_log = EventLog()
    with running(event_log, SourcesOptions(command=("/nowhere/python",))) as sources:
        sources.add(camera("live"), NEEDS)
        event_log.wait(lambda: one(sources).restarts >= 1)
        assert one(sources).reason == "the decode process could not be started (No such file or directory)"


def test_process_that_cuts_the_ring_is_not_let() -> None:
    """The memory keeps its size, so that no process can end its parent by taking it away."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(camera("cuts_ring?fps=100"), NEEDS)
        event_log.wait_for("frame", 3)


def test_process_that_does_not_read_is_ended() -> None:
    """Its messages wait in a bounded queue, and the thread waits for no one."""
    event_log = EventLog()
    with running(event_log, DEEP) as sources:
        sources.add(camera("live?fps=25", "good"), NEEDS)
        sources.add(camera("deaf"), NEEDS)
        event_log.wait_for("lost", 1)
        for number in range(3000):
            sources.want_images("a", bool(number % 2))
        assert event_log.wait_for_state(SourceState.CONNECTING) == ""
        event_log.wait(lambda: one(sources).restarts >= 1)
        assert ("state", "a", (SourceState.CONNECTING, "its process does not read its messages")) in event_log.events
        good_neighbour(sources, event_log)


def test_process_that_ignores_its_end_is_killed_and_its_word_counts() -> None:
    """A file that said it is over is over, whatever its process does then."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(clip("stubborn"), NEEDS)
        event_log.wait_for("ended")
        assert (one(sources).state, one(sources).pid) == (SourceState.ENDED, None)


def test_closed_in_the_midst_of_all_faults_nothing_is_left() -> None:
    """No process, thread, descriptor or memory of theirs outlives a close, and each source's end is reported once."""
    before = rings_now(), set(os.listdir("/proc/self/fd"))  # in this order: what others left is collected first
    event_log = EventLog()
    sources = Sources(replace(OPTIONS, max_opening=8), event_log)
    sources.start()
    modes = ["live", "never_opens", "silent?frames=0", "rubbish", "segv?frames=2", "stubborn", "deaf", "flood"]
    for mode in modes:
        sources.add(camera(mode, mode.partition("?")[0]), NEEDS)
    event_log.wait_for("frame", 5, "live")
    began = time.monotonic()
    assert sources.close(10.0)
    assert time.monotonic() - began < 9.0
    assert [len(event_log.of("ended", mode.partition("?")[0])) for mode in modes] == [1] * len(modes)
    assert [child.cmdline() for child in psutil.Process().children() if COMMAND[1] in child.cmdline()] == []
    event_log.events.clear()
    assert (rings_now(), set(os.listdir("/proc/self/fd"))) == before


def test_process_is_in_a_session_of_its_own_and_hides_its_address() -> None:
    """Ctrl-C in a terminal does not reach it, and its arguments, which everybody can read, hold two numbers only."""
    event_log = EventLog()
    with running(event_log) as sources:
        sources.add(replace(camera("live"), uri="rtsp://root:s3cret@fake/live"), NEEDS)
        event_log.wait_for("frame", 1)
        pid = one(sources).pid
        assert pid is not None
        assert os.getsid(pid) == pid
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert [word.decode() for word in arguments[: len(COMMAND)]] == list(COMMAND)
        assert all(word.isdigit() for word in arguments[len(COMMAND) : -1])
