"""Whether a program that ran for minutes holds what it held: the judgement apart from the run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from tests.integration.video_cycles import API_THREADS, Held

Row = TypeVar("Row")
MIB = 1 << 20
MAX_SLOPE_MIB_A_MINUTE = 0.5  # a tenth to a fifth is seen in the first minutes, and ever less
MAX_GROWN_MIB = 8.0  # of a run that is too short for a slope
SLOPE_FROM_MINUTES = 8.0
LATE_DESCRIPTORS = 2  # of a log or a connection that is opened at need


@dataclass(frozen=True)
class Sample:
    """What was held when it was quiet, and how the minute before was.

    minute: since the begin. engine_bytes: of the stack that infers. shared: descriptors of shared memory, of both, and
    shared_bytes behind them. rate: of the slowest steady camera, as a share of what it gives. previews: pictures that
    viewers got.
    """

    minute: float
    held: Held
    engine_bytes: int
    shared: int
    shared_bytes: int
    rate: float
    previews: int


def expect_flat(samples: Sequence[Sample]) -> None:
    """Counts are the same in every quiet, what may come late is bounded, memory does not rise, and none starved."""
    assert len(samples) >= 2, "too short to say anything"
    for name in ("processes", "rings"):
        assert len({getattr(each.held, name) for each in samples}) == 1, f"{name}: {_all(samples, name)}"
    assert len({each.shared for each in samples}) == 1, [each.shared for each in samples]
    first, last = _thirds(samples)
    for name, late in (("threads", API_THREADS), ("descriptors", LATE_DESCRIPTORS)):
        most = max(getattr(each.held, name) for each in first) + late
        assert max(getattr(each.held, name) for each in last) <= most, f"{name}: {_all(samples, name)}"
    rates = [round(each.rate, 3) for each in samples]
    assert statistics.median(rates) >= 0.95, f"cameras are slow: {rates}"
    assert min(rates) >= 0.7, f"a stream starves: {rates}"
    assert min(each.previews for each in samples) > 0, "a preview was never seen"
    expect_no_growth(samples)


def expect_no_growth(samples: Sequence[Sample]) -> None:
    """Neither of the program, nor of its decode processes, nor of the engine, nor of what they share."""
    minutes = [each.minute for each in samples]
    columns = {
        "the program": [each.held.program_bytes / MIB for each in samples],
        "its decode processes": [(each.held.memory_bytes - each.held.program_bytes) / MIB for each in samples],
        "the engine": [each.engine_bytes / MIB for each in samples],
        "shared memory": [each.shared_bytes / MIB for each in samples],
    }
    for name, sizes in columns.items():
        growth = f"{name}: {slope(minutes, sizes):.2f} MiB a minute, {[round(size, 1) for size in sizes]}"
        if minutes[-1] - minutes[0] >= SLOPE_FROM_MINUTES:
            assert slope(minutes, sizes) < MAX_SLOPE_MIB_A_MINUTE, growth
        else:
            first, last = _thirds(sizes)
            assert statistics.median(last) - statistics.median(first) < MAX_GROWN_MIB, growth


def slope(minutes: Sequence[float], sizes: Sequence[float]) -> float:
    """The median of the slopes of all pairs: one step, or one look at a bad moment, does not turn it."""
    pairs = combinations(zip(minutes, sizes, strict=True), 2)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)


def _thirds(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    third = max(len(rows) // 3, 1)
    return rows[:third], rows[-third:]


def _all(samples: Sequence[Sample], name: str) -> list[int]:
    return [getattr(each.held, name) for each in samples]
