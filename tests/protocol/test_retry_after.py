"""When those who were sent away come back."""

from penstock.gateway.grpc.status_codes import status_of
from penstock.gateway.rest.responses import response_of
from penstock.protocol.errors import (
    MAX_SPREAD_S,
    EngineUnavailable,
    Overloaded,
    QuotaExceeded,
    retry_after_s,
    retry_after_whole_s,
)

MANY = 400


def test_wait_is_never_shorter_than_it_is_known_to_be_nor_much_longer() -> None:
    """From what is known to twice that, and at most a few seconds more."""
    for known in (0.0, 0.2, 1.0, 30.0):
        waits = [retry_after_s(known) for _ in range(MANY)]
        assert min(waits) >= known
        assert max(waits) <= known + min(known, MAX_SPREAD_S)
        whole = {retry_after_whole_s(known) for _ in range(MANY)}
        assert min(whole) >= max(1, known)
        assert max(whole) <= max(1, known) + max(1, min(known, MAX_SPREAD_S))


def test_herd_that_was_refused_together_gets_different_times() -> None:
    """Over both protocols the refusals of one moment are spread: the herd does not come back as one."""
    herd = [Overloaded("512 requests in flight", retry_after_s=0.2) for _ in range(MANY)]
    grpc_waits = [dict(status_of(error).trailing_metadata)["retry-after"] for error in herd]
    assert len(set(grpc_waits)) > MANY // 10
    seconds = [response_of(error).headers["retry-after"] for error in (*herd, *[EngineUnavailable("down")] * MANY)]
    assert set(seconds) == {"1", "2"}
    assert MANY // 2 < seconds.count("2") < 3 * MANY // 2


def test_quota_says_the_callers_own_time() -> None:
    """The moment at which a client's bucket has a token again is its own, and known."""
    error = QuotaExceeded("3 requests per hour", retry_after_s=3600.0)
    assert {response_of(error).headers["retry-after"] for _ in range(20)} == {"3600"}
    assert {dict(status_of(error).trailing_metadata)["retry-after"] for _ in range(20)} == {"3600"}
