"""How long a connection is borne with, on a clock of the test's own."""

import pytest

from penstock.gateway.rest.limits import LINGER_S, ConnectionLimits, ConnectionPhase, ConnectionTimeouts, TimeoutAction

LIMITS = ConnectionLimits(head_timeout_s=10, idle_timeout_s=75, write_timeout_s=30, min_write_bytes_per_s=1000)


@pytest.fixture
def timeouts() -> ConnectionTimeouts:
    """A new connection's."""
    return ConnectionTimeouts(LIMITS)


@pytest.mark.parametrize(
    ("phase", "limit_s", "verdict"),
    [
        (ConnectionPhase.IDLE, 75, TimeoutAction.CLOSE),
        (ConnectionPhase.HEAD, 10, TimeoutAction.HEAD_TOO_SLOW),
        (ConnectionPhase.REFUSED, LINGER_S, TimeoutAction.ABORT),
    ],
)
def test_connection_in_one_phase_ends_at_its_limit(
    timeouts: ConnectionTimeouts, phase: ConnectionPhase, limit_s: float, verdict: TimeoutAction
) -> None:
    """Counted from when the phase was first seen, not a moment earlier."""
    assert timeouts.look(100, phase, turn=1) is TimeoutAction.KEEP
    assert timeouts.look(100 + limit_s - 0.01, phase, turn=1) is TimeoutAction.KEEP
    assert timeouts.look(100 + limit_s, phase, turn=1) is verdict


def test_connection_with_one_request_after_the_other_is_kept(timeouts: ConnectionTimeouts) -> None:
    """Each head has its own time, although every look sees one."""
    for turn in range(100):
        assert timeouts.look(turn * 9.0, ConnectionPhase.HEAD, turn=turn) is TimeoutAction.KEEP


def test_connection_at_work_is_never_too_slow(timeouts: ConnectionTimeouts) -> None:
    """How long a request may run is the request's own matter."""
    assert timeouts.look(0, ConnectionPhase.BUSY, turn=1) is TimeoutAction.KEEP
    assert timeouts.look(1e6, ConnectionPhase.BUSY, turn=1) is TimeoutAction.KEEP
    assert timeouts.look(1e6 + 1, ConnectionPhase.IDLE, turn=1) is TimeoutAction.KEEP


def test_reader_that_takes_nothing_is_cut_after_the_time(timeouts: ConnectionTimeouts) -> None:
    """Thirty seconds, however much it had taken before."""
    assert timeouts.look_at_reader(0, 5_000_000) is TimeoutAction.KEEP
    assert timeouts.look_at_reader(29.9, 5_000_000) is TimeoutAction.KEEP
    assert timeouts.look_at_reader(30, 5_000_000) is TimeoutAction.ABORT


def test_reader_that_dribbles_is_cut_and_a_slow_one_is_not(timeouts: ConnectionTimeouts) -> None:
    """A byte now and then is no progress; the stated rate is, window by window."""
    slow = ConnectionTimeouts(LIMITS)
    for second in range(121):
        assert slow.look_at_reader(second, second * 1000) is TimeoutAction.KEEP
    verdicts = [timeouts.look_at_reader(second, second * 999) for second in range(31)]
    assert verdicts == [TimeoutAction.KEEP] * 30 + [TimeoutAction.ABORT]


def test_reader_with_nothing_left_to_read_begins_anew(timeouts: ConnectionTimeouts) -> None:
    """What was read in between starts the next answer's time over."""
    timeouts.look_at_reader(0, 100)
    assert timeouts.look_at_reader(20, None) is TimeoutAction.KEEP
    assert timeouts.look_at_reader(31, 100) is TimeoutAction.KEEP
    assert timeouts.look_at_reader(60, 100) is TimeoutAction.KEEP
    assert timeouts.look_at_reader(61, 100) is TimeoutAction.ABORT
