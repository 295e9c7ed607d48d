"""The terminal's tables: they fit, and they say the same as the report."""

import math

import msgspec
import pytest
from rich.console import Console, RenderableType

from penstock_load.report.terminal import figures_table, live_table, sparks, verdict_table
from penstock_load.results import LiveView, Side, State
from tests.loadtest.runs import make_run, make_run_records
from tests.loadtest.test_report import HOSTILE, hostile_run, verdict

VIEW = LiveView(
    phase="steady",
    phase_number=3,
    phase_count=4,
    round=2,
    rounds=3,
    elapsed_s=5.0,
    seconds=20.0,
    offered_per_s=60.0,
    sent=300,
    ok=295,
    refused=3,
    failed=0,
    timeouts=2,
    in_flight=4,
    rate_per_s=59.0,
    slo_p99_ms=100.0,
    generator_lag_ms=0.3,
    p50_ms=24.9,
    p99_ms=148.1,
    recent=(20.0, math.nan, 160.0),
)


def drawn(thing: RenderableType, width: int) -> list[str]:
    """The lines that a terminal of that width shows."""
    console = Console(width=width, color_system=None, force_terminal=True, highlight=False)
    with console.capture() as capture:
        console.print(thing)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(width: int) -> None:
    """No line is longer than the terminal, whatever the texts are, and none of them is obeyed by it."""
    run = hostile_run()
    lines = [*drawn(verdict_table(run.verdicts), width), *drawn(figures_table(run), width)]
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_verdict_table_has_failures_first_and_goals() -> None:
    """What failed is read first; a target of other hardware is only counted; a goal says whether it was reached."""
    h200 = verdict(State.NOT_COMPARABLE, target_id="h200")
    rows = (verdict(State.PASS, goal=10.0, meets_goal=False), h200, verdict(State.FAIL, target_id="other"))
    text = "\n".join(drawn(verdict_table(rows), 100))
    assert "h200" not in text
    assert "not shown: 1 target of other hardware, models or SLO" in text
    assert text.index("FAIL") < text.index("PASS")
    assert "goal 10 ms, not reached" in text
    assert "20.1 ms, at most 250 ms" in text


def test_figures_table_counts_what_went_wrong_on_both_sides() -> None:
    """A row a phase and side; what was not answered well is a number, not a silence."""
    run = make_run(make_run_records(has_beside=True, refused=0.1))
    lines = drawn(figures_table(run), 80)
    asked = [phase for phase in run.phases if phase.phase == "steady" and phase.side is Side.TARGET]
    wrong = sum(phase.all.intended - phase.all.ok for phase in asked)
    assert [line.split()[0] for line in lines[2:]] == ["capacity", "capacity", "steady", "steady"]
    assert next(line for line in lines if line.startswith("steady ")).split()[-1] == f"{wrong:,}"


@pytest.mark.parametrize(
    "view",
    [
        VIEW,
        msgspec.structs.replace(VIEW, phase=HOSTILE * 9, complaint=HOSTILE * 9, sent=10**9, ok=10**9, refused=10**9),
        msgspec.structs.replace(VIEW, seconds=0.0, offered_per_s=0.0, p50_ms=None, p99_ms=None, recent=()),
        msgspec.structs.replace(VIEW, elapsed_s=99.0, recent=tuple(map(float, range(500))), side=Side.BESIDE),
    ],
)
def test_live_table_keeps_its_size(view: LiveView) -> None:
    """At most eight lines of 80 columns, so that the screen does not jump."""
    lines = drawn(live_table(view), 80)
    assert 7 <= len(lines) <= 8
    assert max(map(len, lines)) <= 80


def test_live_table_says_what_happens() -> None:
    """Phase, round, rates, latencies against the SLO, what went wrong, how late the generator is."""
    text = "\n".join(drawn(live_table(VIEW), 80))
    expected = ("steady", "phase 3 of 4 · round 2 of 3", "5 of 20 s", "offered 60.0/s", "answered 59.0/s")
    assert all(words in text for words in (*expected, "in flight 4", "p99 148 ms", "SLO 100 ms: broken"))
    assert all(words in text for words in ("refused 3", "timed out 2", "lag 0.3 ms"))
    assert "SLO 200 ms: broken" not in "\n".join(drawn(live_table(msgspec.structs.replace(VIEW, slo_p99_ms=200)), 80))


def test_sparks_are_as_tall_as_the_values() -> None:
    """The highest is the tallest block, nothing is a blank, and nothing but nothing stays low."""
    assert sparks((0.0, 4.0, math.nan, 8.0)) == "▁▄ █"
    assert sparks((0.0, math.nan)) == "▁ "
    assert sparks(()) == ""
