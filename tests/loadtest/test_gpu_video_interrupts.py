"""The core that a card's interrupts go to, and what the report says of it."""

import os

from loadtest.bench.gpu.video.results import stream_limit_text
from loadtest.bench.gpu.video.usage import CoreLook, interrupted_between, look_at_cores

BEFORE = CoreLook(10.0, {0: 5, 1: 1000}, {0: 100.0, 1: 50.0, 2: 7.0})
AFTER = CoreLook(20.0, {0: 5, 1: 81_000}, {0: 104.0, 1: 50.1, 2: 10.0})


def test_most_interrupted_core_is_compared_with_the_others() -> None:
    """Busy is what is not idle: the time of an interrupt may be counted nowhere."""
    found = interrupted_between(BEFORE, AFTER)
    assert (found["core"], found["per_s"]) == (1, 8000.0)
    assert (round(found["busy"], 3), round(found["others_busy"], 3)) == (0.99, 0.65)


def test_machine_without_a_card_tells_nothing() -> None:
    """Nor does one whose card is silent; how idle its cores were is there."""
    assert interrupted_between(CoreLook(1.0, {}, {0: 1.0}), CoreLook(2.0, {}, {0: 1.5})) == {}
    assert interrupted_between(CoreLook(1.0, {0: 7}, {0: 1.0}), CoreLook(2.0, {0: 7}, {0: 1.5})) == {}
    seen = look_at_cores()
    assert set(os.sched_getaffinity(0)) <= seen.idle_s.keys()
    assert sum(seen.idle_s.values()) > 0


def test_report_names_the_interrupted_core_where_it_alone_is_full() -> None:
    """With all cores full it is they; with time left there nothing."""
    found = interrupted_between(BEFORE, AFTER)
    words = stream_limit_text({"cores": {"machine": 10.5}, "interrupts": found}, 16)
    assert words.startswith("the one core that has all of the card's interrupts is full (")
    assert "core 1, to which the card's 8,000 interrupts/s go, 99 % busy, the others 65 %" in words
    all_full = stream_limit_text({"cores": {"machine": 15.9}, "interrupts": found | {"others_busy": 0.97}}, 16)
    assert all_full.startswith("the CPU's cores are the limit (")
    assert stream_limit_text({"interrupts": found | {"busy": 0.6}}, 16).startswith("nothing that was read is full")
