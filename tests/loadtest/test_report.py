"""Reports of a run in HTML and Markdown, and that foreign markup in their text is escaped."""

import functools
import html
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from penstock_load.measure.compare import compare
from penstock_load.measure.run_folder import RunFolder
from penstock_load.report.comparison import LastRun
from penstock_load.report.document import PlotName
from penstock_load.report.figures import ordered_verdicts
from penstock_load.report.pages import compose, render_html, render_markdown, write_html, write_markdown
from penstock_load.report.plots import draw
from penstock_load.results import PhaseResult, Run, State
from tests.loadtest.report_runs import changed, knee_run, ladder, one_phase, verdict
from tests.loadtest.runs import make_phase, make_records, make_run, make_run_records

HOSTILE = '<script>alert("x")</script> $x^2$ | `b` [a](http://evil.example) \x1b[31m\x00 漢'
PLOTS = {"latency", "time", "throughput", "batches", "stages", "load"}
MARKDOWN_ESCAPE = re.compile(r"\\([\\`*\[\]|~])")


class Page(HTMLParser):
    """What a browser would make of a page: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip() and self.tags and self.tags[-1][0] != "style":
            self.words.append(data.strip())


@functools.cache
def whole_run() -> Run:
    """A run that has everything: two sides, two rounds, a ladder, a GPU, disagreeing witnesses, refusals."""
    run = make_run(make_run_records(rounds=2, has_beside=True, refused=0.05))
    phases = [_with_gpu(phase) for phase in (*run.phases, ladder())]
    return changed(
        run,
        phases=tuple(phases),
        verdicts=(
            verdict(State.PASS, goal=10.0, meets_goal=False),
            verdict(State.NOT_COMPARABLE, target_id="v100", ratio=0.0175, hardware="a V100"),
        ),
    )


def _with_gpu(phase: PhaseResult) -> PhaseResult:
    seconds = tuple(msgspec.structs.replace(second, gpu=0.5, gpu_sm=0.125) for second in phase.timeline)
    witness = phase.witness and msgspec.structs.replace(phase.witness, disagreements=("the server counted 3 more",))
    return msgspec.structs.replace(phase, timeline=seconds, witness=witness)


@functools.cache
def whole_page() -> str:
    """The report of the run that has everything: its plots take a second."""
    return render_html(whole_run())


def hostile_run() -> Run:
    """A run in which every foreign text is an attack, and long."""
    long = HOSTILE + "long-" * 100
    run = whole_run()
    phases = tuple(
        msgspec.structs.replace(phase, phase=f"{long}{phase.phase}", all=_with_error(phase, long))
        for phase in run.phases[:2]  # of both sides
    )
    texts = dict.fromkeys(("scenario", "about", "command", "began_at", "server", "server_hardware"), long)
    rows = (verdict(State.FAIL, title=long, why=long, unit=long, source=long, hardware=long, target_id=long),)
    return msgspec.structs.replace(
        run, phases=phases, verdicts=rows, complaints=(long,), target_url=long, models=(long,), commit=long, **texts
    )


def hostile_last_run() -> LastRun:
    """An earlier run whose name, versions and warnings are attacks."""
    changed_run = msgspec.structs.replace(make_run(), commit=HOSTILE, server=HOSTILE)
    comparison = compare(RunFolder(HOSTILE, changed_run, None), RunFolder("b", make_run(), None))
    return LastRun(HOSTILE, msgspec.structs.replace(comparison, warnings=(HOSTILE,)))


def _with_error(phase: PhaseResult, text: str) -> object:
    return msgspec.structs.replace(phase.all, errors=((text, 7),))


def one_request() -> Run:
    """A single request in all."""
    return changed(make_run(), phases=(make_phase(make_records()[:1]),), rounds=1)


def long_soak() -> Run:
    """Three hours, second by second."""
    phase = make_phase(make_records(seconds=60.0, per_s=5.0), seconds=60.0)
    seconds = tuple(msgspec.structs.replace(phase.timeline[at % 60], at_s=float(at)) for at in range(10_800))
    return changed(make_run(), phases=(msgspec.structs.replace(phase, seconds=10_800.0, timeline=seconds),), rounds=1)


def test_rows_that_concern_this_run_come_first() -> None:
    """What was measured and is not to be trusted stands before what other hardware reached, the unmeasured last."""
    unmeasured = verdict(State.NOT_MEASURED, value=None)
    untrusted = verdict(State.NOT_MEASURED, value=20.0)
    rows = (unmeasured, verdict(State.NOT_COMPARABLE), untrusted, verdict(State.PASS), verdict(State.FAIL))
    assert [row.state for row in ordered_verdicts(rows)][:2] == [State.FAIL, State.PASS]
    assert ordered_verdicts(rows)[2:] == [untrusted, rows[1], unmeasured]


def test_html_fetches_nothing() -> None:
    """The file is whole: no address that a browser would fetch, and small enough to send around."""
    text = whole_page()
    page = Page(text)
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert sources
    assert all(value and value.startswith("data:") for value in sources)
    assert not re.search(r"url\(|@import|<(script|iframe|link rel=.stylesheet)", text)
    assert len(text) < 2_000_000


def test_html_has_every_section_and_its_plot_or_says_why_not() -> None:
    """Whatever the run lacks, each subject is either shown or named with the reason."""
    subjects = {"verdict", *PLOTS, "witnesses", "errors"}
    for run in (whole_run(), one_phase(failed=1.0)(), changed(make_run(has_reloads=True), phases=())):
        document = compose(run)
        shown = {section.id for section in document.sections}
        assert {section.plot for section in document.sections if section.plot} == shown & PLOTS
        assert len(shown & subjects) + len(document.absences) == len(subjects)
        page = Page(whole_page() if run is whole_run() else render_html(run))
        folded = {
            attributes.get("id") for tag, attributes in page.tags if tag == "details" and "open" not in attributes
        }
        assert {section.id for section in document.sections} <= folded
        assert all(absence.why in " ".join(page.words) for absence in document.absences)


def test_complaints_stand_before_everything_else() -> None:
    """Who opens the report of a run that counts for nothing reads that first."""
    complaints = ("the load generator was the bottleneck",)
    run = changed(make_run(), phases=(), verdicts=(verdict(State.PASS),), complaints=complaints)
    for text in (render_html(run), render_markdown(run)):
        assert text.index("the load generator was the bottleneck.") < text.index("FAIL: the run is invalid")
        assert text.index("FAIL: the run is invalid") < text.index("20.1 ms")


def test_html_and_markdown_say_the_same() -> None:
    """Every word and figure of the page, the plots and how to read them aside, is in the Markdown."""
    run = whole_run()
    plain = html.unescape(MARKDOWN_ESCAPE.sub(r"\1", render_markdown(run)))
    headings = ("How to read it", "Details")
    words = [words for words in Page(whole_page()).words if not words.startswith(headings)]
    assert len(words) > 500
    assert [missing for missing in words if missing not in plain] == []


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_hostile_text_stays_text(render: Callable[[Run, LastRun], str]) -> None:
    """A server's error, or the name of an earlier run, cannot add a tag, a link or a control character."""
    text = render(hostile_run(), hostile_last_run())
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "\x1b" not in text
    assert "\x00" not in text
    if render is render_markdown:
        assert not page.tags
        assert "[a](http" not in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert rows
        assert all(line.endswith("|") for line in rows)


@pytest.mark.parametrize(
    "run_of",
    [
        pytest.param(one_phase(failed=1.0), id="all failed"),
        pytest.param(one_phase(not_sent=1.0), id="nothing sent"),
        pytest.param(one_request, id="one request"),
        pytest.param(long_soak, id="three hours"),
        pytest.param(lambda: knee_run(14), id="14 trials", marks=pytest.mark.long),
        pytest.param(lambda: changed(make_run(has_reloads=True), phases=()), id="only reloads"),
        pytest.param(lambda: msgspec.structs.replace(make_run(), phases=()), id="nothing"),
    ],
)
def test_extremes_become_reports(run_of: Callable[[], Run], tmp_path: Path) -> None:
    """However a run went, there is a report of it, and it is not huge."""
    run = run_of()
    write_html(run, tmp_path / "report.html")
    write_markdown(run, tmp_path / "report.md")
    assert 1_000 < (tmp_path / "report.html").stat().st_size < 2_000_000
    assert "nan" not in (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\x", "")


def test_the_same_run_is_the_same_report() -> None:
    """No date, no random id: a report can be compared with another by its bytes."""
    assert draw(PlotName.LATENCY, make_run()) == draw(PlotName.LATENCY, make_run())
    assert render_markdown(make_run()) == render_markdown(make_run())


def test_knee_search_leads_with_the_curve() -> None:
    """A search for the knee is about its curve: it comes first, the best trial and the first broken one are shown."""
    document = compose(changed(knee_run(9), verdicts=(verdict(State.NOT_COMPARABLE),)))
    assert document.headline.startswith("KNEE: 90 requests/s keep p99 within 100 ms")
    ids = [section.id for section in document.sections]
    assert ids.index("throughput") < ids.index("figures")
    latency = next(section for section in document.sections if section.id == "latency")
    assert "“trial 4: 87.5/s” and “trial 5: 110/s”" in latency.remarks[0]


def test_ladder_shows_a_knee_and_one_rate_shows_none() -> None:
    """Steps within a phase are points of a curve; a single rate is none, and the report says how to get one."""
    run = changed(make_run(), phases=(ladder(),), rounds=1)
    curve = next(section for section in compose(run).sections if section.id == "throughput")
    assert curve.sentences[0].startswith("The knee: ")
    rates = [float(row[0].text) for row in curve.tables[0].rows]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(20, rel=0.4)
    assert [row[4].text for row in curve.tables[0].rows][-1] == "broken"
    why = [absence.why for absence in compose(make_run()).absences if absence.title.startswith("Throughput")]
    assert "Only one rate was offered" in why[0]


def test_gpu_share_is_said_to_be_nvmls() -> None:
    """The report explains what 50 % of a GPU hides, with SM activity beside it if a card reports it; without
    a GPU it says nothing of it."""
    text = render_markdown(whole_run())
    assert "however few of the GPU's cores" in text
    assert "SM activity beside it is the share of its SMs" in text
    assert re.search(r"\| GPU \| SM activity \|", text)
    assert re.search(r"\| 50 % \| 12(\.5)? % \|", text)
    assert "however few of the GPU's cores" not in render_markdown(make_run())
    assert "SM activity" not in render_markdown(make_run())


def test_gpu_share_of_a_card_that_tells_no_sm_activity_says_so() -> None:
    """Before Hopper, or where the counters are root's."""
    run = whole_run()
    phases = tuple(
        msgspec.structs.replace(
            phase, timeline=tuple(msgspec.structs.replace(second, gpu_sm=None) for second in phase.timeline)
        )
        for phase in run.phases
    )
    text = render_markdown(changed(run, phases=phases))
    assert "would be the better figure" in text
    assert "| SM activity |" not in text


def test_disagreeing_witnesses_are_described_in_words() -> None:
    """Client and server side by side, and each disagreement as a sentence with its phase and round."""
    text = render_markdown(whole_run())
    assert "steady, round 2: the server counted 3 more." in text
    assert "The two agree." not in text


def test_conditions_say_what_the_figures_belong_to() -> None:
    """Hardware, versions, command, seed and start: without them a figure says nothing."""
    run = make_run(seed=7)
    text = render_markdown(run)
    rows = ("Imagined 3000 @ 2.0 GHz, 2 cores", "penstock 0.1.0", run.command, run.began_at, "| seed | 7 |")
    assert all(words in text for words in rows)
    assert "from the moment at which the schedule meant a request to be sent" in text


def test_matplotlib_waits_until_a_report_is_written() -> None:
    """A command that writes no report does not pay for the plots' import."""
    code = (
        "import penstock_load.report.pages, penstock_load.report.terminal, sys; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_what_the_generator_could_not_send_says_nothing_of_the_server() -> None:
    """A rate at which the generator was the bottleneck neither keeps nor breaks the SLO, and does not end the curve."""
    phases = [
        make_phase(
            make_records(phase=name, began_s=began_s, per_s=per_s, median_ms=median_ms),
            began_s=began_s,
            complaint=complaint,
        )
        for name, began_s, per_s, median_ms, complaint in (
            ("low", 0.0, 20.0, 10.0, ""),
            ("stalled", 10.0, 40.0, 900.0, "its core was full"),
            ("high", 20.0, 80.0, 10.0, ""),
        )
    ]
    curve = next(
        section
        for section in compose(changed(make_run(), phases=tuple(phases), rounds=1)).sections
        if section.id == "throughput"
    )
    assert [row[4].text for row in curve.tables[0].rows] == ["kept", "generator's limit", "kept"]
    assert "the knee lies above it" in curve.sentences[0]
