"""What is in flight in several processes of one gateway, each of them here an object of its own over the same file."""

from pathlib import Path

import pytest

from server.admission import Admission, AdmissionLimits
from server.core.errors import Overloaded
from server.local.limits_page import CORE, MAX_PROCESSES, LimitsPage, Row, SharedCounts, core_counts

LIMITS = AdmissionLimits(max_requests=3, max_bytes=1000)


@pytest.fixture
def page(tmp_path: Path) -> LimitsPage:
    return LimitsPage(tmp_path / "limits")


def admission(tmp_path: Path, column: int) -> Admission:
    """Of another process: it maps the file itself."""
    return Admission(LIMITS, SharedCounts(LimitsPage(tmp_path / "limits"), column))


def test_limits_hold_for_all_processes_together(tmp_path: Path) -> None:
    """Three places are three, whichever fronts have them; one given back is anybody's."""
    one, other = admission(tmp_path, 1), admission(tmp_path, 2)
    one.enter(10)
    other.enter(10)
    one.enter(10)
    with pytest.raises(Overloaded, match=r"3 requests in flight \(limit 3\)"):
        other.enter(10)
    one.leave(10)
    other.enter(10)
    assert one.statistics() == other.statistics()
    assert (one.statistics().requests, one.statistics().size_bytes) == (3, 30)


def test_bytes_of_requests_and_of_bodies_count_together(tmp_path: Path) -> None:
    """A body on its way in one front keeps one out of another; a request likewise."""
    one, other = admission(tmp_path, 1), admission(tmp_path, 2)
    one.receive(900, before=0)
    with pytest.raises(Overloaded, match="900 bytes of bodies are on their way"):
        other.receive(200, before=0)
    one.received(900)
    other.receive(200, before=0)
    one.enter(900)
    with pytest.raises(Overloaded, match="900 bytes in flight and 200 more asked"):
        other.enter(200)


def test_page_of_a_front_that_died_holds_nothing_of_it(tmp_path: Path, page: LimitsPage) -> None:
    """Its places are free at once; what only ever grows stays."""
    dead, other = admission(tmp_path, 1), admission(tmp_path, 2)
    for _ in range(3):
        dead.enter(10)
    page.write(Row.DECODER_RESTARTS, 1, 4)
    page.clear(1)
    other.enter(10)
    assert other.statistics().requests == 1
    assert page.total(Row.DECODER_RESTARTS) == 4


def test_core_that_begins_again_holds_nothing_of_the_former_one(page: LimitsPage) -> None:
    """Its column is its own to clear, and no other's."""
    page.write(Row.REQUESTS, CORE, 5)
    page.write(Row.REQUESTS, MAX_PROCESSES - 1, 2)
    assert core_counts(page).totals() == (2, 0)
