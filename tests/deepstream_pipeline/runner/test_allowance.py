"""How many frames a slow engine is given."""

import math

import pytest

from penstock_video.mux import InFlightLimit

MOST, LATENCY_S = 24, 1.0


def run(allowance: InFlightLimit, frame_s: float, batch_size: int = 8, batches: int = 200) -> tuple[int, int]:
    """(frames answered in time, frames asked) by an engine that takes so long a frame, one batch after the other."""
    now, free_at, in_time, asked = 0.0, 0.0, 0, 0
    there: list[tuple[float, float, int]] = []
    for _ in range(batches):
        while size := min(allowance.of_batch(sum(frames for _, _, frames in there)), batch_size):
            free_at = max(free_at, now) + frame_s * size
            there.append((free_at, now, size))
        now, since, size = there.pop(0)
        is_late = now - since > LATENCY_S
        allowance.answered(min(now - since, LATENCY_S), is_refused=is_late)
        asked += size
        in_time += 0 if is_late else size
    return in_time, asked


@pytest.mark.parametrize("frame_s", [0.001, 0.01, 0.05, 0.2, 0.5, 0.9])
def test_engine_answers_nearly_all_in_time_however_slow_it_is(frame_s: float) -> None:
    """Once it is known: of what it is given a twentieth at most is worth nothing."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    run(allowance, frame_s, batches=20)
    in_time, asked = run(allowance, frame_s)
    assert in_time >= 0.95 * asked


def test_quick_engine_has_all_batches() -> None:
    """Nothing is taken from one that answers at once."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    run(allowance, 0.001)
    assert allowance.frames == MOST
    assert allowance.of_batch(0) == MOST
    assert allowance.of_batch(MOST) == 0


def test_engine_that_was_slow_for_a_moment_has_all_again() -> None:
    """A first call that compiles, a neighbour's load: it grows back within some twenty answers."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    for _ in range(10):
        allowance.answered(1.0, is_refused=True)
    assert allowance.frames == 1
    for _ in range(20):
        allowance.answered(0.01, is_refused=False)
    assert allowance.frames == MOST


def test_one_frame_at_least_is_tried() -> None:
    """Else the recovery of the engine would not be noticed."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    for _ in range(100):
        allowance.answered(math.inf, is_refused=True)
    assert allowance.of_batch(0) == 1


def test_slow_engine_has_one_batch_waiting_while_it_works() -> None:
    """It never idles for the time that a new batch takes to come."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    allowance.answered(0.6, is_refused=False)
    assert allowance.of_batch(0) == 6
    assert allowance.of_batch(6) == 6
    assert allowance.of_batch(12) == 0


def test_unknown_engine_is_tried_with_one_frame_of_a_camera() -> None:
    """Or the first answers of a slow one would all be late. A quick one has all after some fifteen answers."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    assert allowance.of_batch(0) == MOST, "files wait as long as it takes"
    allowance.begin()
    assert (allowance.of_batch(0), allowance.of_batch(1)) == (1, 0)
    for _ in range(15):
        allowance.answered(0.01, is_refused=False)
        allowance.begin()
    assert allowance.frames == MOST


def test_frame_may_wait_as_long_as_its_answer_leaves() -> None:
    """Answered by three quarters of what is allowed; a slow answer is remembered for a while."""
    allowance = InFlightLimit(MOST, LATENCY_S)
    assert allowance.max_wait_s == pytest.approx(0.25)
    allowance.answered(0.5, is_refused=False)
    assert allowance.max_wait_s == pytest.approx(0.25)
    allowance.answered(5.0, is_refused=True)
    assert allowance.max_wait_s == pytest.approx(0.05)
    for _ in range(60):
        allowance.answered(0.1, is_refused=False)
    assert allowance.max_wait_s == pytest.approx(0.65)
