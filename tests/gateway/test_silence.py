"""A silent engine first costs the calls that wait for it, then its process."""

from penstock.engines.failures import Silence, SilenceAction


def test_silence_cuts_once_and_asks_for_restarts_at_intervals() -> None:
    """Nothing is due at first; calls are cut once after 5 s, restarts are due every 30 s."""
    silence = Silence(cut_s=5, restart_s=30)
    due = {now: silence.probe_missed(float(now)) for now in (100, 104, 105, 106, 129, 130, 131, 160)}
    assert {now: what for now, what in due.items() if what is not SilenceAction.NOTHING} == {
        105: SilenceAction.CUT,
        130: SilenceAction.RESTART,
        160: SilenceAction.RESTART,
    }


def test_silence_that_is_broken_starts_anew() -> None:
    """An answer forgets everything."""
    silence = Silence(cut_s=5, restart_s=30)
    silence.probe_missed(0.0)
    assert silence.probe_missed(6.0) is SilenceAction.CUT
    silence.answered()
    assert silence.probe_missed(29.0) is SilenceAction.NOTHING
    assert silence.probe_missed(34.0) is SilenceAction.CUT
