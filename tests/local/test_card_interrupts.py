"""Which cores the cards' interrupts keep busy, as the system counts them."""

import math
from pathlib import Path

import pytest

from server.local.card_interrupts import (
    BUSY_PER_S,
    CALM_PER_S,
    CALM_S,
    MANY_PER_S,
    Interrupts,
    InterruptWatch,
    mostly_interrupted,
)
from tests.local.own_sys import OwnSys


def test_counts_of_all_lines_of_a_card_are_added(tmp_path: Path) -> None:
    """By core; a line of another device counts for nothing."""
    first, second = OwnSys(tmp_path, "42"), OwnSys(tmp_path, "43")
    first.count(3, 10)
    second.count(3, 5)
    second.count(0, 1)
    other = tmp_path / "kernel/irq/7"
    other.mkdir()
    (other / "per_cpu_count").write_text("9,9\n")
    found = Interrupts(tmp_path).by_core()
    assert {core: count for core, count in found.items() if count} == {3: 15, 0: 1}


def test_system_without_a_card_has_none(tmp_path: Path) -> None:
    """And a line that went away since, or says what is no number, is none either."""
    assert Interrupts(tmp_path).by_core() == {}
    OwnSys(tmp_path).count(1, 2)
    seen = Interrupts(tmp_path)
    path = tmp_path / "kernel/irq/42/per_cpu_count"
    path.write_text("many\n")
    assert seen.by_core() == {}
    path.unlink()
    assert seen.by_core() == {}


def test_folder_that_is_not_for_us_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that hides it: nothing starts less for that."""

    def refuse(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    OwnSys(tmp_path).count(1, 2)
    for look in ("glob", "is_dir"):
        monkeypatch.setattr(Path, look, refuse)
    seen = Interrupts(tmp_path)
    assert not seen.has_cards
    assert seen.by_core() == {}


def test_counters_that_begin_again_are_no_calm() -> None:
    """The system's have 32 bits."""
    watch = InterruptWatch(0.0, {2: 2**32 - 100})
    assert watch.busy(1.0, {2: 8900}) == {2}


def test_core_is_busy_by_its_rate_since_the_last_look() -> None:
    """Not by what was before; a core that was not known had none."""
    watch = InterruptWatch(10.0, {0: 1_000_000, 1: 0})
    at_most = int(2 * BUSY_PER_S)
    assert watch.busy(12.0, {0: 1_000_000 + at_most, 1: at_most + 1, 2: at_most + 1}) == {1, 2}
    assert watch.busy(13.0, {0: 2_000_000, 1: at_most + 1, 2: at_most + 1}) == {0}
    assert watch.busy(13.0, {0: 2_000_000, 1: at_most + 1, 2: at_most + 1}) == frozenset()


def test_core_is_crowded_until_it_was_calm_for_a_while() -> None:
    """A full core answers few interrupts: that they become fewer is no reason to come back."""
    watch, count = InterruptWatch(0.0, {3: 0}), 0
    for now, rate, expected in (
        (1.0, MANY_PER_S, frozenset()),
        (2.0, MANY_PER_S + 1, {3}),
        (3.0, CALM_PER_S + 1, {3}),
        (4.0, 0, {3}),
        (3.0 + CALM_S - 1, 0, {3}),
        (3.0 + CALM_S, 0, frozenset()),
        (4.0 + CALM_S, CALM_PER_S + 1, frozenset()),
    ):
        count += math.ceil(rate * (now - watch._seen_at))
        assert watch.crowded(now, {3: count}) == expected, now


def test_core_with_a_good_part_of_all_will_have_the_next() -> None:
    """Where there were none at all, nothing is known of any."""
    assert mostly_interrupted({0: 12, 5: 900, 6: 88, 7: 0}) == {5}
    assert mostly_interrupted({0: 0, 1: 0}) == frozenset()
    assert mostly_interrupted({}) == frozenset()
