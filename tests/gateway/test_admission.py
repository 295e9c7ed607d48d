"""Admission counts what is in flight and refuses at its bounds."""

import pytest

from server.admission import Admission, AdmissionLimits
from server.core.errors import Overloaded


def test_admission_at_request_limit_refuses_with_numbers() -> None:
    """The request over the limit is refused, and the message says how many are in flight."""
    admission = Admission(AdmissionLimits(max_requests=2, max_bytes=100))
    admission.enter(1)
    admission.enter(1)
    with pytest.raises(Overloaded, match=r"2 requests in flight \(limit 2\)"):
        admission.enter(1)


def test_admission_at_byte_limit_refuses_and_recovers_after_leave() -> None:
    """Bytes are bounded too, and a place given back is a place again."""
    admission = Admission(AdmissionLimits(max_requests=9, max_bytes=100))
    admission.enter(80)
    with pytest.raises(Overloaded, match="80 bytes in flight and 30 more"):
        admission.enter(30)
    admission.leave(80)
    admission.enter(30)
    assert admission.statistics().requests == 1
    assert admission.statistics().size_bytes == 30


def test_admission_of_one_oversized_request_when_idle_lets_it_in() -> None:
    """A request larger than the byte bound is not refused for ever: alone it may pass."""
    admission = Admission(AdmissionLimits(max_requests=9, max_bytes=100))
    admission.enter(500)
    assert admission.statistics().size_bytes == 500


def test_admission_tells_the_truth_about_itself() -> None:
    """Its text is what is in flight."""
    admission = Admission(AdmissionLimits())
    admission.enter(7)
    assert repr(admission) == "<Admission 1/512 requests, 7 bytes>"
