"""The order of one source's frames."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_video.mux import ResultSequencer


def test_outcomes_go_on_in_the_order_of_their_frames() -> None:
    """A later frame that is answered first waits for the earlier one."""
    order: ResultSequencer[str] = ResultSequencer()
    for number in (3, 4, 7):
        order.expect(number)
    assert order.resolve(4, "four") == []
    assert order.resolve(3, "three") == ["three", "four"]
    assert (order.resolve(7, "seven"), len(order)) == (["seven"], 0)


def test_frame_that_is_dropped_delays_no_other() -> None:
    """What waits behind it goes on."""
    order: ResultSequencer[str] = ResultSequencer()
    order.expect(0)
    order.expect(1)
    assert order.resolve(1, "one") == []
    assert order.forget(0) == ["one"]


def test_unexpected_frame_changes_nothing() -> None:
    """Its source was taken out meanwhile."""
    order: ResultSequencer[str] = ResultSequencer()
    order.expect(0)
    assert (order.resolve(9, "nine"), order.forget(9)) == ([], [])
    assert order.resolve(0, "zero") == ["zero"]


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_whatever_the_order_of_answers_the_order_of_frames_is_kept(answers: list[int], gone: set[int]) -> None:
    """Each frame once, the dropped ones never."""
    order: ResultSequencer[int] = ResultSequencer()
    for number in range(12):
        order.expect(number)
    out: list[int] = []
    for number in answers:
        out += order.forget(number) if number in gone else order.resolve(number, number)
    assert out == [number for number in range(12) if number not in gone]
    assert len(order) == 0
