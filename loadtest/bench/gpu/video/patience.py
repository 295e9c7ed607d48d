"""How long streams that have no answers yet are waited for, and what is said of them. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from loadtest.bench.wire import BadAnswer

DECODERS_FULL = "makes no more decoders"  # in the reason of a source that found none left on the card
WAITS = "waits for its turn at the card"  # in that of one that has not asked the card yet, or asks again
STILL_S = 12.0  # without another stream's first answers; decoders are made at 13 to 16 a second, one after another
FULL_STILL_S = 5.0  # the same, where the streams that are waited for found that the card has no decoder left
MOSTLY = 0.9  # of the streams that are waited for, so that it is what bounds their number
_REASON_CHARACTERS = 240


class NotAllThere(BadAnswer):
    """Some streams had no answers in time. answered: how many had. is_full: it was for want of decoders."""

    def __init__(self, words: str, answered: int = 0, waited_s: float = 0.0, *, is_full: bool = False) -> None:
        super().__init__(words)
        self.answered, self.waited_s, self.is_full = answered, waited_s, is_full


class Patience:
    """Told what is seen, and when. progress: grows with every stream that gets further, 0 before the first."""

    def __init__(self, now: float, timeout_s: float, still_s: float = STILL_S) -> None:
        self._began, self._moved, self._progress = now, now, 0
        self._timeout_s, self._still_s = timeout_s, still_s

    def see(self, now: float, progress: int) -> None:
        """What there is by now."""
        if progress > self._progress:
            self._moved, self._progress = now, progress

    def waited_s(self, now: float) -> float:
        """Since the begin."""
        return now - self._began

    def is_still(self, now: float) -> bool:
        """So long that it is worth asking why."""
        return now - self._moved > FULL_STILL_S

    def is_over(self, now: float, *, is_full: bool) -> bool:
        """Whether more waiting is of no use. Programs that still start, so that nothing is there, get all the time.

        is_full: every stream that is waited for found the card without a decoder left.
        """
        if is_full and self.is_still(now):
            return True
        is_stuck = self._progress > 0 and now - self._moved > self._still_s
        return is_stuck or now - self._began > self._timeout_s


def all_full(cold: Sequence[str], said: Mapping[str, str]) -> bool:
    """Whether none of these streams has another reason than that the card makes no more decoders: some found that, the
    others may still wait for their turn to find it. One that found it is enough: a single wrong refusal bounds all."""
    reasons = [said.get(one, "") for one in cold]
    return _found_full(reasons) and all(_is_of_full(reason) for reason in reasons)


def heard(said: Mapping[str, str], now_said: Mapping[str, str]) -> dict[str, str]:
    """The last reason of each stream, but one that found no decoder, and waits to ask again, has found none."""
    again = {one for one, why in now_said.items() if WAITS in why and DECODERS_FULL in said.get(one, "")}
    return {**said, **{one: why for one, why in now_said.items() if one not in again}}


def not_all_there(cold: Sequence[str], count: int, said: Mapping[str, str], waited_s: float) -> NotAllThere | None:
    """Those of so many streams that have no answers, with the most frequent reason that they said: with both, where
    some found the card full and others wait for their turn. None without one."""
    reasons = Counter(_short(said[one]) for one in cold if said.get(one))
    if not reasons:
        return None
    full = {why: times for why, times in reasons.items() if _is_of_full(why)}
    is_full = _found_full(full) and sum(full.values()) >= MOSTLY * len(cold)
    told = Counter(full).most_common(2) if is_full else reasons.most_common(1)
    words = ", ".join(f"{times} × {why!r}" for why, times in told)
    return NotAllThere(
        f"{len(cold)} of {count} streams have no answers: {words}", count - len(cold), waited_s, is_full=is_full
    )


def _is_of_full(reason: str) -> bool:
    return DECODERS_FULL in reason or WAITS in reason


def _found_full(reasons: Iterable[str]) -> bool:
    return any(DECODERS_FULL in reason for reason in reasons)


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]}…"
