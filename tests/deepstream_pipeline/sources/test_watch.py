"""What is done about a source, rule by rule, by a clock that the test moves."""

from dataclasses import replace

import pytest

from penstock_video.sources.lifecycle import FILE_ATTEMPTS, WAITING_BEATS_S, WAITS_FOR_CARD, Action, LifecycleOptions
from penstock_video.sources.protocol import EndReason
from penstock_video.types import SourceState
from tests.deepstream_pipeline.sources.life import FILE, LIVE, LOOP, REMOTE, Life


def test_source_is_connecting_until_its_first_frame() -> None:
    """Open is not running: the first frame is."""
    life = Life()
    assert (life.state, life.watch.next_wakeup()) == (SourceState.CONNECTING, life.now)
    life.open()
    assert life.state is SourceState.CONNECTING
    life.play(0.04)
    assert (life.state, life.watch.reason) == (SourceState.RUNNING, "")


def test_source_unreachable_at_start_keeps_connecting_ever_slower() -> None:
    """Fault 42: it stays in connecting, says why, and is tried after pauses that double up to half a minute."""
    life = Life(jitter=0.999)
    pauses = []
    for _ in range(8):
        life.start()
        life.end(EndReason.UNAVAILABLE, "no route")
        assert (life.state, life.watch.reason) == (SourceState.CONNECTING, "no route")
        due = life.watch.next_wakeup()
        assert due is not None
        pauses.append(due - life.now)
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30], rel=0.01)
    assert life.watch.restarts == 7


def test_source_that_dies_in_mid_stream_reconnects_and_forgets_after_running_well() -> None:
    """Fault 43: reconnecting, then running; after ten good seconds the pauses begin anew."""
    life = Life()
    for seconds in (1.0, 1.0, 11.0):
        life.run(seconds)
        life.end(EndReason.UNAVAILABLE, "reset by peer")
        assert life.state is SourceState.RECONNECTING
    due = life.watch.next_wakeup()
    assert due == pytest.approx(life.now + 0.5)
    life.run()
    assert (life.state, life.watch.reason, life.watch.restarts) == (SourceState.RUNNING, "", 3)


def test_source_without_a_frame_is_stalled_and_killed_at_its_interval() -> None:
    """Fault 44: silence ends the process after reconnect_interval_s, whatever TCP thinks; then it is opened anew."""
    life = Life()
    life.run()
    began = life.now
    assert life.wait(60.0) is Action.KILL
    assert life.now - began == pytest.approx(10.0)
    assert (life.state, life.watch.reason) == (SourceState.STALLED, "no frame for 10 s")
    assert life.wait(60.0) is Action.NONE
    life.die("was ended by SIGKILL")
    assert (life.state, life.watch.reason) == (SourceState.STALLED, "no frame for 10 s")
    life.start()
    assert life.state is SourceState.RECONNECTING


def test_source_open_and_never_a_frame_is_stalled() -> None:
    """The first frame, too, has to come in time."""
    life = Life()
    life.open()
    assert life.wait(60.0) is Action.KILL
    assert life.state is SourceState.STALLED


def test_source_whose_frames_are_decoded_and_lost_is_not_stalled() -> None:
    """A ring without room, and pictures too damaged to show, are no silence: the process says that it decodes."""
    life = Life()
    life.run()
    for second in range(60):
        life.now += 1.0
        life.watch.beat(life.now, 100 + second)
        assert life.watch.tick(life.now) is Action.NONE
    for _ in range(60):
        life.now += 1.0
        life.watch.beat(life.now, 159)
        life.watch.lost(life.now, 5)
        assert life.watch.tick(life.now) is Action.NONE
    assert life.watch.decoded == 25 + 300
    life.watch.beat(life.now + 9.0, 159)
    assert life.wait(10.1) is Action.KILL


def test_source_that_waits_for_its_turn_at_the_card_is_not_stalled() -> None:
    """Its process says so, and its state says why nothing comes; once the process is silent the clock runs again."""
    life = Life()
    life.open()
    for _ in range(60):
        life.now += 1.0
        life.watch.beat(life.now, 0, is_waiting=True)
        assert life.watch.tick(life.now) is Action.NONE
    assert (life.state, life.watch.reason) == (SourceState.CONNECTING, WAITS_FOR_CARD)
    life.play(1.0)
    assert (life.state, life.watch.reason) == (SourceState.RUNNING, "")
    assert life.wait(10.1) is Action.KILL


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_source_for_which_the_card_has_no_room_is_the_cpus_at_once(seconds: float) -> None:
    """Before its first frame and after: nothing of it is a failure, however often it comes to that."""
    life = Life(LifecycleOptions(is_live=True, reconnect_attempts=0))
    for _ in range(3):
        life.open()
        life.play(seconds)
        before = (life.state, life.now)
        life.end(EndReason.NO_CARD, "full")
        assert (life.state, life.watch.next_wakeup(), life.watch.reason) == (*before, "")
    life.start()
    assert life.watch.restarts == 0


def test_wait_for_a_turn_is_longer_than_a_short_timeout_of_the_source() -> None:
    """The process says so each second, whatever silence of its source is allowed."""
    life = Life(LifecycleOptions(is_live=True, reconnect_interval_s=0.5))
    life.open()
    for _ in range(5):
        life.watch.beat(life.now, 0, is_waiting=True)
        assert life.wait(1.2) is Action.NONE
    assert life.wait(WAITING_BEATS_S) is Action.KILL


def test_reason_of_a_wait_for_a_turn_goes_with_the_wait() -> None:
    """Whether the same process goes on, or another decoder takes the source."""
    life = Life()
    life.open()
    life.watch.beat(life.now, 0, is_waiting=True)
    life.watch.beat(life.now, 0)
    assert life.watch.reason == ""
    life.watch.beat(life.now, 0, is_waiting=True)
    life.end(EndReason.NO_CARD, "full")
    life.open()
    assert (life.state, life.watch.reason) == (SourceState.CONNECTING, "")


def test_source_that_may_not_be_the_cpus_waits_for_room_on_the_card() -> None:
    """After the usual pauses, for good, and it says why; then it runs as any other."""
    life = Life(LifecycleOptions(is_live=True, may_use_cpu=False), jitter=0.999)
    pauses = []
    for _ in range(8):
        life.open()
        life.end(EndReason.NO_CARD, "full")
        assert (life.state, life.watch.reason) == (SourceState.CONNECTING, "full")
        pauses.append((life.watch.next_wakeup() or 0.0) - life.now)
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30], rel=0.01)
    life.run()
    assert (life.state, life.watch.reason) == (SourceState.RUNNING, "")


def test_file_waits_for_room_on_the_card_as_a_camera_does() -> None:
    """It was not what it holds that ended it."""
    life = Life(replace(FILE, may_use_cpu=False))
    for _ in range(FILE_ATTEMPTS + 3):
        life.open()
        life.end(EndReason.NO_CARD, "full")
        assert (life.state, life.watch.reason) == (SourceState.CONNECTING, "full")
    life.run()


def test_file_that_waits_for_us_is_not_stalled() -> None:
    """While the parent holds its frames the silence is the parent's; once they are back the clock runs again."""
    life = Life(FILE)
    life.run()
    for _ in range(5):
        due = life.watch.next_wakeup()
        assert due is not None
        life.now = due
        assert life.watch.tick(life.now, is_ours=True) is Action.NONE
    assert life.wait(10.1) is Action.KILL


def test_file_whose_frames_were_just_given_back_has_its_time_from_then() -> None:
    """However long we held what it waits for, and whenever that was looked at: the silence begins when it can go on."""
    life = Life(FILE)
    life.run()
    for held_s in (0.5, 9.9):
        life.now += 10.0
        assert life.watch.tick(life.now, is_ours=True) is Action.NONE
        life.now += held_s
        life.watch.progress(life.now)
        assert life.wait(9.9) is Action.NONE
        assert life.play(0.04) == []
    life.now += 9.9
    life.watch.progress(life.now)
    began = life.now
    assert life.wait(60.0) is Action.KILL
    assert life.now - began == pytest.approx(10.0)


def test_source_whose_end_is_awaited_gets_no_time_by_frames_given_back() -> None:
    """A process that said its last has its moment, whatever comes back meanwhile."""
    life = Life(FILE)
    life.run()
    began = life.now
    life.watch.end_reported(life.now, EndReason.EOF, "")
    life.now += 1.9
    life.watch.progress(life.now)
    assert life.wait(60.0) is Action.KILL
    assert life.now - began == pytest.approx(2.0)


def test_source_that_does_not_open_is_killed() -> None:
    """A process that says nothing at all has its open_timeout_s, and a margin to start in."""
    life = Life()
    life.start()
    began = life.now
    assert life.wait(60.0) is Action.KILL
    assert life.now - began == pytest.approx(15.0)
    life.die("was ended by SIGKILL")
    assert (life.state, life.watch.reason) == (SourceState.CONNECTING, "not open after 10 s")


@pytest.mark.parametrize(
    ("options", "frames", "reason", "state"),
    [
        (FILE, 5, EndReason.EOF, SourceState.ENDED),
        (REMOTE, 5, EndReason.EOF, SourceState.ENDED),
        (LOOP, 5, EndReason.EOF, SourceState.ENDED),
        (FILE, 0, EndReason.UNAVAILABLE, SourceState.FAILED),
        (FILE, 0, EndReason.DECODE, SourceState.FAILED),
        (FILE, 5, EndReason.DECODE, SourceState.FAILED),
        (LIVE, 5, EndReason.NOT_ALLOWED, SourceState.FAILED),
        (FILE, 5, EndReason.INTERNAL, SourceState.FAILED),
        (REMOTE, 5, EndReason.UNAVAILABLE, SourceState.FAILED),
        (LIVE, 5, EndReason.PLAYED_OUT, SourceState.ENDED),
        (LIVE, 5, EndReason.EOF, SourceState.RECONNECTING),
        (LIVE, 0, EndReason.EOF, SourceState.CONNECTING),
        (LIVE, 5, EndReason.DECODE, SourceState.RECONNECTING),
        (LIVE, 5, EndReason.INTERNAL, SourceState.RECONNECTING),
        (LIVE, 5, EndReason.AUTH_FAILED, SourceState.AUTH_FAILED),
        (REMOTE, 0, EndReason.UNAVAILABLE, SourceState.CONNECTING),
        (LOOP, 5, EndReason.INTERNAL, SourceState.RECONNECTING),
    ],
)
def test_source_that_ends_by_itself_is_over_or_tried_again(
    options: LifecycleOptions, frames: int, reason: EndReason, state: SourceState
) -> None:
    """Fault 45 and its neighbours: what is over for good says so, and why; the rest is tried again."""
    life = Life(options)
    life.open()
    life.play(frames / 25)
    life.end(reason)
    assert life.state is state
    is_over = state in (SourceState.ENDED, SourceState.FAILED)
    assert life.watch.is_over == is_over
    assert (life.watch.next_wakeup() is None) == is_over
    assert (life.watch.reason == "") == (state is SourceState.ENDED)


def test_file_that_fails_after_frames_says_after_how_many() -> None:
    """It is not read again, which would count its frames twice, and the reason says how far it came."""
    life = Life(FILE)
    life.run()
    life.die()
    assert life.state is SourceState.FAILED
    assert "SIGSEGV, after 25 frames" in life.watch.reason


def test_file_that_kills_its_decoder_at_once_is_given_up() -> None:
    """A file that gave nothing is tried a few times, and then not any more."""
    life = Life(FILE)
    for _ in range(FILE_ATTEMPTS):
        life.start()
        life.die()
        assert not life.watch.is_over
    life.start()
    life.die()
    assert life.state is SourceState.FAILED
    assert "given up after 3 attempts" in life.watch.reason


def test_source_with_a_limit_of_attempts_fails_beyond_it() -> None:
    """rtsp-reconnect-attempts counts failures in a row."""
    life = Life(LifecycleOptions(is_live=True, reconnect_attempts=2))
    life.run(11.0)
    for _ in range(2):
        life.end(EndReason.UNAVAILABLE)
        life.start()
    life.end(EndReason.UNAVAILABLE, "no route")
    assert (life.state, life.watch.reason) == (SourceState.FAILED, "given up after 3 attempts: no route")


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 48.0), (0.5, 60.0), (0.999, 72.0)])
def test_source_that_refuses_its_password_is_asked_slowly(jitter: float, pause_s: float) -> None:
    """Fault 54: auth_failed, which stays while it is asked again after about a minute, and ends with a frame."""
    life = Life(jitter=jitter)
    for _ in range(3):
        life.start()
        assert life.state in (SourceState.CONNECTING, SourceState.AUTH_FAILED)
        life.end(EndReason.AUTH_FAILED, "401")
        assert (life.state, life.watch.reason) == (SourceState.AUTH_FAILED, "401")
        due = life.watch.next_wakeup()
        assert due is not None
        assert due - life.now == pytest.approx(pause_s, rel=0.01)
    life.start()
    assert life.state is SourceState.AUTH_FAILED
    life.watch.opened(life.now, 25.0, is_live=True)
    life.play(0.04)
    assert life.state is SourceState.RUNNING


def test_source_that_runs_away_is_cut() -> None:
    """Fault 50: 60 frames a second where 25 were said are cut within four seconds, and the reason says so."""
    life = Life()
    life.open(fps=25.0)
    began = life.now
    actions: list[Action] = []
    while not actions and life.now < began + 10.0:
        actions = life.play(0.1, fps=60.0)
    assert actions == [Action.KILL]
    assert life.now - began < 4.0
    life.die("was ended by SIGKILL")
    assert life.state is SourceState.RECONNECTING
    assert "60 frames/s, where 25 are expected" in life.watch.reason


def test_source_with_an_expected_fps_is_judged_by_it() -> None:
    """What the configuration expects counts, not what the stream says."""
    life = Life(LifecycleOptions(is_live=True, expected_fps=55.0))
    life.open(fps=5.0)
    assert life.play(8.0, fps=60.0) == []


def test_file_that_is_read_fast_is_no_runaway() -> None:
    """Files are read as fast as they can be."""
    life = Life(FILE)
    life.open(fps=25.0)
    assert life.play(8.0, fps=400.0) == []


def test_source_that_shows_the_same_picture_is_frozen_and_runs() -> None:
    """Fault 49: it is reported, and nothing is done; another picture ends it."""
    life = Life()
    life.open()
    assert life.play(29.0, digest=7) == []
    assert not life.watch.is_frozen
    life.play(2.0, digest=7)
    assert (life.watch.is_frozen, life.state) == (True, SourceState.RUNNING)
    life.play(0.04, digest=8)
    assert not life.watch.is_frozen


def test_file_is_frozen_by_its_own_time() -> None:
    """A file read at sixteen times its speed is frozen after thirty of its seconds, not of ours."""
    life = Life(FILE)
    life.open()
    for n in range(25 * 31):
        life.now += 1 / 400
        life.watch.frame(life.now, 7, n / 25)
        assert life.watch.is_frozen == (n / 25 >= 30)
