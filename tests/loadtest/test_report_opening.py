"""The opening of a report: verdict, key figures, charts, and the comparison with the last run."""

from collections.abc import Callable

import msgspec
import pytest

from penstock_load.measure.compare import compare
from penstock_load.measure.run_folder import RunFolder
from penstock_load.report.comparison import LastRun
from penstock_load.report.document import Absence, Section
from penstock_load.report.opening import headline, key_charts, key_figures, shown_results
from penstock_load.report.pages import compose, render_html
from penstock_load.report.plots import draw
from penstock_load.results import Run, State
from tests.loadtest.report_runs import changed, knee_run, ladder, one_phase, verdict
from tests.loadtest.runs import make_phase, make_records, make_run, make_run_records


def test_headline_says_verdict_rate_and_p99_against_the_slo() -> None:
    """The first sentence is the answer: the verdict, the rate, and the p99 beside what is allowed."""
    run = changed(make_run(), verdicts=(verdict(State.PASS), verdict(State.NOT_MEASURED)))
    rate = next(it.spread.median for it in run.measurements if it.measure == "offered_per_s")
    p99 = next(it.spread.median for it in run.measurements if it.measure == "p99_ms")
    assert headline(run) == (
        f"PASS: p99 {p99:.3g} ms, limit 100 ms, at {rate:.3g} requests/s; 1 of 1 target met (1 not measured)"
    )


@pytest.mark.parametrize(
    ("verdicts", "complaints", "begins"),
    [
        ((State.PASS, State.FAIL), (), "FAIL: p99 20.1 ms, limit 250 ms; 1 of 2 targets missed"),
        ((State.NOT_COMPARABLE,), (), "NO VERDICT: no target could be judged (1 not comparable); "),
        ((State.PASS,), ("its core was full",), "FAIL: the run is invalid: its core was full"),
        ((), (), "NO VERDICT: no target applies to this scenario; "),
    ],
)
def test_headline_never_passes_what_did_not(
    verdicts: tuple[State, ...], complaints: tuple[str, ...], begins: str
) -> None:
    """A failed row, a complaint, or nothing to judge: none of them reads as a pass."""
    run = msgspec.structs.replace(make_run(), verdicts=tuple(map(verdict, verdicts)), complaints=complaints)
    assert headline(run).startswith(begins)


def test_terms_of_the_opening_are_explained_once() -> None:
    """Terms of the opening have a meaning; one that it does not use has none."""
    assert [term for term, _ in compose(make_run()).terms] == ["p99", "SLO", "closed loop"]
    assert "knee" in dict(compose(knee_run(9)).terms)


def test_targets_of_other_hardware_are_folded() -> None:
    """They are a table of their own that is closed, and the headline does not count them."""
    run = changed(make_run(), verdicts=(verdict(State.PASS), verdict(State.NOT_COMPARABLE, target_id="h200")))
    section = next(one for one in compose(run).sections if one.id == "verdict")
    shown, folded = section.tables
    assert (shown.is_folded, [row[0].text for row in shown.rows]) == (False, ["PASS"])
    assert (folded.is_folded, folded.caption) == (True, "1 target of other hardware, models or SLO")
    assert "not comparable" not in headline(run)
    assert '<details class="folded"><summary>1 target of other hardware' in render_html(run)


def overloaded_run() -> Run:
    """Half of the requests are refused; the time to a refusal is judged."""
    phase = make_phase(make_records(refused=0.5))
    rows = (verdict(State.FAIL, measure="refusal_p99_ms", figure=50.0),)
    return changed(make_run(), phases=(phase,), rounds=1, verdicts=rows)


def growing_run() -> Run:
    """Memory grows, and its growth is judged."""
    phase = make_phase(make_records(), rss_slope_mib=1.0)
    return changed(
        make_run(), phases=(phase,), rounds=1, verdicts=(verdict(State.PASS, measure="rss_slope_mib_per_min"),)
    )


@pytest.mark.parametrize(
    ("run_of", "plots"),
    [
        pytest.param(make_run, ("key-latency", "key-rates", "key-percentiles"), id="one rate"),
        pytest.param(
            lambda: changed(make_run(), phases=(ladder(), *make_run().phases)),
            ("key-latency", "key-rates", "key-curve"),
            id="several rates",
        ),
        pytest.param(overloaded_run, ("key-refusals", "key-rates", "key-queue"), id="overload"),
        pytest.param(growing_run, ("key-latency", "key-rates", "key-memory"), id="soak"),
        pytest.param(lambda: knee_run(9), ("key-curve", "key-answered", "key-percentiles"), id="knee"),
        pytest.param(one_phase(failed=1.0), ("key-rates",), id="no answer"),
        pytest.param(
            lambda: changed(make_run(has_reloads=True), phases=()), ("key-loads", "key-first-answers"), id="reloads"
        ),
    ],
)
def test_charts_beside_the_verdict_are_those_that_support_it(run_of: Callable[[], Run], plots: tuple[str, ...]) -> None:
    """What is judged decides which charts stand first; each has a sentence and can be drawn."""
    run = run_of()
    charts = key_charts(run)
    assert tuple(chart.plot for chart in charts) == plots
    assert all(chart.finding.endswith(".") and draw(chart.plot, run).startswith("<svg") for chart in charts)


def test_charts_show_the_round_with_the_median_p99() -> None:
    """Of three rounds neither the best nor the worst is shown, and the sentence says which one it is."""
    run = make_run()
    by_p99 = sorted((it for it in run.phases if it.is_judged), key=lambda it: it.all.latency.p99)
    assert shown_results(run)[0] == by_p99[1]
    assert f"Shown: round {by_p99[1].round} of 3" in key_charts(run)[0].finding


def test_key_figures_say_what_was_not_answered() -> None:
    """Refusals are counted in words; they are no failures, which are marked as bad."""
    refused = {figure.name: figure.cell for figure in key_figures(overloaded_run())}["not answered"]
    failed = {figure.name: figure.cell for figure in key_figures(one_phase(failed=1.0)())}["not answered"]
    assert refused.detail.endswith(" refused")
    assert (refused.tone, failed.tone, failed.text) == ("plain", "bad", "100 %")


def test_comparison_marks_what_is_larger_than_the_spread() -> None:
    """A p99 twice as high is named and marked; what overlaps is not, and the commits are shown."""
    before, slower = make_run(), make_run(make_run_records(median_ms=20.0, seed=0))
    folders = (RunFolder("monday", msgspec.structs.replace(before, commit="aaa"), None), RunFolder("b", slower, None))
    section = compose(slower, LastRun(before.began_at, compare(*folders))).comparison
    assert isinstance(section, Section)
    rows = {row[0].text: row for row in section.tables[0].rows}
    assert section.sentences[0].startswith("Since monday (2025-11-21 08:00 UTC), ")
    assert "p99 is" in section.sentences[0]
    assert (rows["p99, ms"][3].tone, rows["p99, ms"][4].text) == ("bad", "yes")
    assert (rows["rate, /s"][3].tone, rows["rate, /s"][4].text) == ("plain", "no")
    assert "Changed: commit: aaa in A, unknown in B." in section.remarks


def test_first_run_is_compared_with_nothing_and_says_so() -> None:
    """Without an earlier run the report says why there is no comparison."""
    assert isinstance(compose(make_run()).comparison, Absence)
