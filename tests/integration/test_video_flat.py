"""The judgement of the long runs: it sees what grows, and does not take noise for growth."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.integration.video_cycles import Held
from tests.integration.video_flat import MIB, Sample, expect_flat

HELD = Held(480 * MIB, 120 * MIB, threads=60, descriptors=90, processes=7, rings=6, series=300)


def run(change: Callable[[Sample, int], Sample] = lambda sample, _: sample, *, count: int = 16) -> list[Sample]:
    """So many samples, one a minute, with the noise that a run has, and a change by number."""
    dice = random.Random(5)
    samples = []
    for number in range(count):
        noise = int(dice.uniform(-2, 2) * MIB)
        held = replace(HELD, program_bytes=HELD.program_bytes + noise, threads=HELD.threads + dice.randrange(3))
        sample = Sample(2.0 + number, held, 200 * MIB, 16, 30 * MIB, dice.uniform(0.96, 1.01), 20)
        samples.append(change(sample, number))
    return samples


def held(sample: Sample, **more: int) -> Sample:
    """With so much more of that."""
    return replace(sample, held=replace(sample.held, **{k: getattr(sample.held, k) + v for k, v in more.items()}))


def test_run_with_noise_is_flat() -> None:
    """Also a short one, with one slow minute, and with a step of some MiB that stays."""
    expect_flat(run())
    expect_flat(run(count=2))
    expect_flat(run(lambda sample, number: replace(sample, rate=0.75) if number == 7 else sample))
    expect_flat(run(lambda sample, number: held(sample, memory_bytes=3 * MIB * (number > 8))))


@pytest.mark.parametrize(
    "change",
    [
        lambda sample, number: held(sample, threads=number),
        lambda sample, number: held(sample, descriptors=number // 2),
        lambda sample, number: held(sample, processes=int(number == 15)),
        lambda sample, number: held(sample, rings=int(number == 3)),
        lambda sample, number: replace(sample, shared=16 + number // 8),
        lambda sample, number: replace(sample, shared_bytes=sample.shared_bytes + MIB * number),
        lambda sample, number: held(sample, program_bytes=MIB * number, memory_bytes=MIB * number),
        lambda sample, number: held(sample, memory_bytes=MIB * number),
        lambda sample, number: replace(sample, engine_bytes=sample.engine_bytes + MIB * number),
        lambda sample, _: replace(sample, rate=sample.rate * 0.93),
        lambda sample, number: replace(sample, rate=0.5) if number == 7 else sample,
        lambda sample, number: replace(sample, previews=0) if number == 7 else sample,
    ],
)
def test_run_in_which_something_grows_or_starves_is_not_flat(change: Callable[[Sample, int], Sample]) -> None:
    """Each kind by itself: threads, descriptors, processes, rings, shared memory, memory, rates, previews."""
    with pytest.raises(AssertionError):
        expect_flat(run(change))


def test_short_run_that_grows_much_is_not_flat() -> None:
    """Two samples are no slope, but a difference."""
    with pytest.raises(AssertionError, match="the program"):
        expect_flat(run(lambda sample, number: held(sample, program_bytes=20 * MIB * number), count=2))
