"""Admission counts what is in flight and refuses at its bounds."""

import pytest

from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.protocol.errors import Overloaded


def test_admission_at_request_limit_refuses_with_numbers() -> None:
    """The request over the limit is refused, and the message says how many are in flight."""
    admission = InFlightLimiter(InFlightLimits(max_requests=2, max_bytes=100))
    admission.enter(1)
    admission.enter(1)
    with pytest.raises(Overloaded, match=r"2 requests in flight \(limit 2\)"):
        admission.enter(1)


def test_admission_at_byte_limit_refuses_and_recovers_after_leave() -> None:
    """Bytes are bounded too, and a place given back is a place again."""
    admission = InFlightLimiter(InFlightLimits(max_requests=9, max_bytes=100))
    admission.enter(80)
    with pytest.raises(Overloaded, match="80 bytes in flight and 30 more"):
        admission.enter(30)
    admission.leave(80)
    admission.enter(30)
    assert admission.statistics().requests == 1
    assert admission.statistics().size_bytes == 30


def test_admission_of_one_oversized_request_when_idle_lets_it_in() -> None:
    """A request larger than the byte bound is not refused for ever: alone it may pass."""
    admission = InFlightLimiter(InFlightLimits(max_requests=9, max_bytes=100))
    admission.enter(500)
    assert admission.statistics().size_bytes == 500


def test_admission_tells_the_truth_about_itself() -> None:
    """Its text is what is in flight."""
    admission = InFlightLimiter(InFlightLimits())
    admission.enter(7)
    assert repr(admission) == "<Admission 1/1024 requests, 7 bytes>"


def test_admission_of_bodies_on_their_way_is_bounded_apart_from_what_is_in_flight() -> None:
    """Slow senders fill their own bound and no other; a body that is alone may pass it."""
    admission = InFlightLimiter(InFlightLimits(max_requests=9, max_bytes=100))
    admission.receive(90, before=0)
    admission.receive(90, before=90)
    with pytest.raises(Overloaded, match=r"180 bytes of bodies are on their way \(limit 100\)"):
        admission.receive(1, before=0)
    admission.enter(80)
    assert admission.statistics().receiving_bytes == 180
    admission.received(180)
    admission.receive(1, before=0)
    assert admission.statistics().receiving_bytes == 1


def test_admission_counts_answers_that_wait_for_their_readers() -> None:
    """They are never refused themselves; what comes after them is, while they are too many."""
    admission = InFlightLimiter(InFlightLimits(max_requests=9, max_bytes=100))
    admission.enter(10)
    admission.hold(500)
    with pytest.raises(Overloaded, match="510 bytes in flight"):
        admission.enter(10)
    admission.release(500)
    admission.enter(10)
