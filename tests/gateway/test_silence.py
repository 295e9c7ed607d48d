"""A silent engine first costs the calls that wait for it, then its process."""

from server.backends.silence import Due, Silence


def test_silence_cuts_once_and_asks_for_restarts_at_intervals() -> None:
    """Nothing is due at first; calls are cut once after 5 s, restarts are due every 30 s."""
    silence = Silence(cut_s=5, restart_s=30)
    due = {now: silence.unheard(float(now)) for now in (100, 104, 105, 106, 129, 130, 131, 160)}
    assert {now: what for now, what in due.items() if what is not Due.NOTHING} == {
        105: Due.CUT,
        130: Due.RESTART,
        160: Due.RESTART,
    }


def test_silence_that_is_broken_starts_anew() -> None:
    """An answer forgets everything."""
    silence = Silence(cut_s=5, restart_s=30)
    silence.unheard(0.0)
    assert silence.unheard(6.0) is Due.CUT
    silence.heard()
    assert silence.unheard(29.0) is Due.NOTHING
    assert silence.unheard(34.0) is Due.CUT
