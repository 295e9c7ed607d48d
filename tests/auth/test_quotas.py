"""How much a caller may ask for, by a manual clock."""

import pytest

from penstock.gateway.auth.rate_limiter import MAX_BUCKETS, ClientUsage, RateLimiter
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.protocol.errors import QuotaExceeded
from penstock.protocol.identity import Identity, Quota


def caller(name: str = "camera", *, rate: int = 0, period_s: float = 1.0, share: float = 1.0) -> Identity:
    return Identity(name, quota=Quota(rate, period_s, share))


def quotas() -> RateLimiter:
    return RateLimiter(max_requests=10, max_bytes=1000)


def test_rate_lets_so_many_through_at_once_and_then_one_by_one() -> None:
    """Four in two seconds: four now, and another each half second; a refusal says when, and takes nothing."""
    asked, kept = caller(rate=4, period_s=2.0), quotas()
    for _ in range(4):
        kept.take(asked, 100.0)
    for _ in range(3):
        with pytest.raises(
            QuotaExceeded, match=r"'camera' has sent its 4 requests per 2 s; retry after 0\.5 s"
        ) as refused:
            kept.take(asked, 100.0)
        assert refused.value.retry_after_s == pytest.approx(0.5)
    kept.take(asked, 100.5)
    with pytest.raises(QuotaExceeded):
        kept.take(asked, 100.5)


def test_rate_after_a_pause_is_whole_again_and_no_more() -> None:
    """What was not used is not saved up beyond the bucket."""
    asked, kept = caller(rate=4), quotas()
    kept.take(asked, 100.0)
    for _ in range(4):
        kept.take(asked, 1000.0)
    with pytest.raises(QuotaExceeded):
        kept.take(asked, 1000.0)


def test_rate_holds_over_a_long_flood() -> None:
    """Asked a thousand times a second for a minute, a rate of 10 a second gives 10 at once and 10 a second."""
    asked, kept = caller(rate=10), quotas()
    served = 0
    for tick in range(60_000):
        try:
            kept.take(asked, tick / 1000)
        except QuotaExceeded:
            continue
        served += 1
    assert 600 <= served <= 610


def test_check_rate_takes_nothing() -> None:
    """The door looks before the body is read; the request itself is counted once."""
    asked, kept = caller(rate=1), quotas()
    for _ in range(5):
        kept.check_rate(asked, 1.0)
    kept.take(asked, 1.0)
    with pytest.raises(QuotaExceeded):
        kept.check_rate(asked, 1.0)


def test_rate_of_one_caller_is_not_anothers() -> None:
    """Nor is anybody limited without one."""
    kept = quotas()
    kept.take(caller("a", rate=1), 1.0)
    kept.take(caller("b", rate=1), 1.0)
    for _ in range(100):
        kept.take(caller("c"), 1.0)
        kept.take(Identity("d"), 1.0)


def test_share_bounds_requests_and_bytes_and_is_given_back() -> None:
    """Half of ten requests and of a thousand bytes; what has ended makes room."""
    asked, kept = caller(share=0.5), quotas()
    for _ in range(5):
        kept.enter(asked, 1)
    with pytest.raises(QuotaExceeded, match=r"'camera' has 5 requests in flight \(its share is 5\); retry after 0.2 s"):
        kept.enter(asked, 1)
    kept.leave(asked, 1)
    with pytest.raises(QuotaExceeded, match=r"4 bytes in flight and asks for 497 more \(its share is 500\)"):
        kept.enter(asked, 497)
    kept.enter(asked, 496)
    assert kept.in_flight() == {"camera": 5}
    for size in (1, 1, 1, 1, 496):
        kept.leave(asked, size)
    assert kept.in_flight() == {}


def test_share_lets_one_big_request_through() -> None:
    """As admission does: a request that is alone may be as big as a body may be."""
    kept = quotas()
    kept.enter(caller(share=0.1), 900)
    with pytest.raises(QuotaExceeded):
        kept.enter(caller(share=0.1), 1)


def test_share_bounds_bodies_on_their_way_apart_from_what_is_in_flight() -> None:
    """Half of a thousand bytes, though a caller's only body may be longer; another caller has its own."""
    asked, kept = caller(share=0.5), quotas()
    kept.receive(asked, 400, before=0)
    kept.receive(asked, 400, before=400)
    with pytest.raises(QuotaExceeded, match=r"'camera' has 800 bytes of bodies on their way \(its share is 500\)"):
        kept.receive(asked, 1, before=0)
    kept.receive(caller("other", share=0.5), 500, before=0)
    kept.enter(asked, 1)
    kept.received(asked, 800)
    kept.receive(asked, 1, before=0)
    assert kept.in_flight() == {"camera": 1}
    kept.leave(asked, 1)
    kept.received(asked, 1)
    kept.received(caller("other"), 500)
    assert kept.in_flight() == {}


def test_flood_of_one_leaves_the_others_their_places() -> None:
    """However often one tenant tries, with half as its share, another finds a place in what all have together."""
    kept, admission = quotas(), InFlightLimiter(InFlightLimits(10, 1000))
    flooder, other = caller("flooder", share=0.5), caller("other", share=0.5)
    refused = 0
    for _ in range(100):
        try:
            kept.enter(flooder, 10)
            admission.enter(10)
        except QuotaExceeded:
            refused += 1
    assert refused == 95
    for _ in range(5):
        kept.enter(other, 10)
        admission.enter(10)
    assert admission.statistics().requests == 10


def test_callers_without_a_key_are_one() -> None:
    """Anonymous clients share one quota, whatever their addresses, and the message says so."""
    kept = quotas()
    for number in range(2):
        kept.enter(Identity(address=f"10.0.0.{number}", quota=Quota(share=0.2)), 1)
    with pytest.raises(QuotaExceeded, match="the caller without a key has 2 requests in flight"):
        kept.enter(Identity(address="10.0.0.9", quota=Quota(share=0.2)), 1)


def test_buckets_of_endless_subjects_are_bounded() -> None:
    """There may be any number of token subjects: the least recently active one is forgotten."""
    kept, steady = quotas(), caller("steady", rate=1, period_s=1e9)
    kept.take(steady, 1.0)
    for number in range(3 * MAX_BUCKETS):
        kept.take(caller(f"token:{number}", rate=1000), 1.0)
        if number % 1000 == 0:
            with pytest.raises(QuotaExceeded):
                kept.take(steady, 1.0)
    assert len(kept) <= MAX_BUCKETS


class Spent:
    """Other processes, in which every caller has used up its rate."""

    def others(self, _: str) -> ClientUsage:
        return ClientUsage()

    def note(self, _: str, __: ClientUsage) -> None:
        return

    def full_again(self, _: str) -> float:
        return 1e9

    def set_full_again(self, _: str, __: float) -> None:
        return

    def in_flight(self) -> list[tuple[str, int]]:
        return []


def test_callers_that_spent_their_rate_elsewhere_are_as_few_in_memory() -> None:
    """Clients that are rejected for requests of another process are forgotten like all others."""
    kept = RateLimiter(max_requests=10, max_bytes=1000, board=Spent())
    for number in range(MAX_BUCKETS + 10):
        with pytest.raises(QuotaExceeded):
            kept.check_rate(caller(f"token:{number}", rate=1000), 1.0)
    assert len(kept) <= MAX_BUCKETS
