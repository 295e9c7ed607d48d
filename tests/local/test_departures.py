"""Who left, and is counted once whatever the core says of it."""

from server.core.leaving import LeftAt
from server.local.departures import PATIENCE_S, Departures


def test_departure_is_told_once_by_the_core_or_without_it() -> None:
    """Its word, an answer that crossed the question, its silence, its end: what comes after counts no more."""
    departures, told = Departures(), []
    for number in (1, 2, 3):
        departures.wait(number, LeftAt.BATCH, 100.0).when_told(told.append)
    departures.tell(1, LeftAt.QUEUE)
    departures.tell(2)
    assert told == [LeftAt.QUEUE, LeftAt.BATCH]
    departures.expire(100.0 + PATIENCE_S / 2)
    assert len(told) == 2
    departures.expire(100.0 + PATIENCE_S)
    assert told[2:] == [LeftAt.BATCH]
    departures.wait(4, LeftAt.ENGINE, 200.0).when_told(told.append)
    departures.lose()
    departures.tell(4, LeftAt.QUEUE)
    departures.tell(77, LeftAt.QUEUE)
    assert told[3:] == [LeftAt.ENGINE]
    assert len(departures) == 0
