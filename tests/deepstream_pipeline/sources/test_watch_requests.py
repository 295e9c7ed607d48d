"""How a source's process ends, and what people ask of it, by a clock that the test moves."""

import pytest

from penstock_video.sources.lifecycle import Action
from penstock_video.sources.protocol import EndReason
from penstock_video.types import SourceState
from tests.deepstream_pipeline.sources.life import FILE, REMOTE, Life


def test_process_that_dies_by_a_signal_is_replaced_within_a_second() -> None:
    """Fault 55: its state and reason say what happened."""
    life = Life(jitter=0.999)
    life.run()
    life.die()
    assert (life.state, life.watch.reason) == (SourceState.RECONNECTING, "the decode process was ended by SIGSEGV")
    due = life.watch.next_wakeup()
    assert due is not None
    assert due - life.now <= 1.0


def test_process_that_said_its_last_and_stays_is_killed_and_its_word_counts() -> None:
    """Who does not end after Ended is ended, and what it said remains the reason."""
    life = Life(FILE)
    life.run()
    life.watch.end_reported(life.now, EndReason.EOF, "")
    assert life.wait(60.0) is Action.KILL
    life.die("was ended by SIGKILL")
    assert life.state is SourceState.ENDED


def test_process_that_hangs_up_and_stays_is_killed() -> None:
    """A closed socket without a word is no way to stay."""
    life = Life()
    life.run()
    life.watch.await_exit(life.now)
    assert life.wait(60.0) is Action.KILL
    life.die("was ended by SIGKILL")
    assert (life.state, life.watch.reason) == (SourceState.RECONNECTING, "its process hung up, and did not end")


def test_process_that_breaks_a_promise_is_killed_once() -> None:
    """It is not read any more, and the reason is kept."""
    life = Life()
    life.run()
    assert life.watch.kill("it sent rubbish") is Action.KILL
    assert life.watch.kill("it sent more") is Action.NONE
    assert not life.watch.is_receiving
    life.die("was ended by SIGKILL")
    assert (life.state, life.watch.reason) == (SourceState.RECONNECTING, "it sent rubbish")


def test_live_source_paused_is_left_and_comes_back_at_once() -> None:
    """Its process is asked to end; resumed, it is opened anew without a pause, which counts as no restart."""
    life = Life()
    life.run()
    assert life.watch.pause(life.now) is Action.STOP
    assert (life.state, life.watch.is_taken) == (SourceState.PAUSED, False)
    life.die("ended with status 0")
    assert (life.state, life.watch.next_wakeup()) == (SourceState.PAUSED, None)
    assert life.watch.resume(life.now) is Action.NONE
    assert (life.state, life.watch.next_wakeup()) == (SourceState.CONNECTING, life.now)
    life.run()
    assert life.watch.restarts == 0


def test_live_source_resumed_before_its_process_ended_gets_another() -> None:
    """Pause and resume in one breath lose nothing but the old process."""
    life = Life()
    life.run()
    life.watch.pause(life.now)
    life.watch.resume(life.now)
    assert life.wait(60.0) is Action.KILL
    life.die("was ended by SIGKILL")
    assert (life.state, life.watch.next_wakeup()) == (SourceState.CONNECTING, life.now)


def test_file_paused_is_held_however_long() -> None:
    """Its process waits where it is, no silence counts, and it goes on."""
    life = Life(FILE)
    life.run()
    assert life.watch.pause(life.now) is Action.HOLD
    assert life.wait(3600.0) is Action.NONE
    assert life.state is SourceState.PAUSED
    assert life.watch.resume(life.now) is Action.GO_ON
    assert life.state is SourceState.RUNNING
    assert life.wait(10.1) is Action.KILL


def test_source_paused_while_it_waits_for_its_turn_is_not_started() -> None:
    """It is started once it is resumed."""
    life = Life()
    assert life.watch.pause(life.now) is Action.NONE
    assert life.wait(100.0) is Action.NONE
    life.watch.resume(life.now)
    life.run()
    assert life.state is SourceState.RUNNING


@pytest.mark.parametrize("is_started", [False, True])
def test_source_removed_is_over_with_its_process(is_started: bool) -> None:
    """At once where it has none; else its process is asked to end, and killed if it does not."""
    life = Life()
    if is_started:
        life.run()
    assert life.watch.remove(life.now) is (Action.STOP if is_started else Action.NONE)
    assert life.watch.is_over is not is_started
    if is_started:
        assert not life.watch.is_taken
        assert life.wait(60.0) is Action.KILL
        life.die("was ended by SIGKILL")
    assert (life.watch.is_over, life.state) == (True, SourceState.ENDED)


def test_remote_source_that_turns_out_live_is_watched_as_one() -> None:
    """What the stream says of itself, once it is open, is nearer to the truth than its address."""
    life = Life(REMOTE)
    life.start()
    life.watch.opened(life.now, 25.0, is_live=True)
    life.play(1.0)
    life.end(EndReason.EOF)
    assert life.state is SourceState.RECONNECTING
