"""How long a connection is borne with, on a clock of the test's own."""

import pytest

from server.rest.limits import ConnectionLimits
from server.rest.patience import LINGER_S, ConnectionPatience, Phase, Verdict

LIMITS = ConnectionLimits(head_timeout_s=10, idle_timeout_s=75, write_timeout_s=30, min_write_bytes_per_s=1000)


@pytest.fixture
def patience() -> ConnectionPatience:
    """A new connection's."""
    return ConnectionPatience(LIMITS)


@pytest.mark.parametrize(
    ("phase", "limit_s", "verdict"),
    [
        (Phase.IDLE, 75, Verdict.CLOSE),
        (Phase.HEAD, 10, Verdict.HEAD_TOO_SLOW),
        (Phase.REFUSED, LINGER_S, Verdict.ABORT),
    ],
)
def test_connection_in_one_phase_ends_at_its_limit(
    patience: ConnectionPatience, phase: Phase, limit_s: float, verdict: Verdict
) -> None:
    """Counted from when the phase was first seen, not a moment earlier."""
    assert patience.look(100, phase, turn=1) is Verdict.KEEP
    assert patience.look(100 + limit_s - 0.01, phase, turn=1) is Verdict.KEEP
    assert patience.look(100 + limit_s, phase, turn=1) is verdict


def test_connection_with_one_request_after_the_other_is_kept(patience: ConnectionPatience) -> None:
    """Each head has its own time, although every look sees one."""
    for turn in range(100):
        assert patience.look(turn * 9.0, Phase.HEAD, turn=turn) is Verdict.KEEP


def test_connection_at_work_is_never_too_slow(patience: ConnectionPatience) -> None:
    """How long a request may run is the request's own matter."""
    assert patience.look(0, Phase.BUSY, turn=1) is Verdict.KEEP
    assert patience.look(1e6, Phase.BUSY, turn=1) is Verdict.KEEP
    assert patience.look(1e6 + 1, Phase.IDLE, turn=1) is Verdict.KEEP


def test_reader_that_takes_nothing_is_cut_after_the_time(patience: ConnectionPatience) -> None:
    """Thirty seconds, however much it had taken before."""
    assert patience.look_at_reader(0, 5_000_000) is Verdict.KEEP
    assert patience.look_at_reader(29.9, 5_000_000) is Verdict.KEEP
    assert patience.look_at_reader(30, 5_000_000) is Verdict.ABORT


def test_reader_that_dribbles_is_cut_and_a_slow_one_is_not(patience: ConnectionPatience) -> None:
    """A byte now and then is no progress; the stated rate is, window by window."""
    slow = ConnectionPatience(LIMITS)
    for second in range(121):
        assert slow.look_at_reader(second, second * 1000) is Verdict.KEEP
    verdicts = [patience.look_at_reader(second, second * 999) for second in range(31)]
    assert verdicts == [Verdict.KEEP] * 30 + [Verdict.ABORT]


def test_reader_with_nothing_left_to_read_begins_anew(patience: ConnectionPatience) -> None:
    """What was read in between starts the next answer's time over."""
    patience.look_at_reader(0, 100)
    assert patience.look_at_reader(20, None) is Verdict.KEEP
    assert patience.look_at_reader(31, 100) is Verdict.KEEP
    assert patience.look_at_reader(60, 100) is Verdict.KEEP
    assert patience.look_at_reader(61, 100) is Verdict.ABORT
