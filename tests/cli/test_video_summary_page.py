"""summary.html: what the page of a run says, and that hostile names stay text."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import typer
from click.testing import Result
from typer.testing import CliRunner

from penstock_video.cli import commands as video
from penstock_video.cli.markup import Markup, joined, tag
from penstock_video.cli.run_charts import Series, TimeAxis, crossing_chart, line_chart
from penstock_video.cli.run_page import MAX_DETAILED, RuleCounts, counts_by_rule, heat_picture, run_page, sentence
from penstock_video.cli.summary import Summary
from penstock_video.interfaces import SourceStatistics
from penstock_video.settings.models import PrimarySettings, VideoSettings
from penstock_video.settings.section import Plain
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.run_record import SourceRecord, SummaryOptions, SummarySink
from penstock_video.types import AnalyticsEvent, CrossingDirection, SourceState
from tests.cli.video_program import FakeProgram, no_engine
from tests.deepstream_pipeline.sinks.results import result

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e"
SETTINGS = VideoSettings((), PrimarySettings("yolox-nano"))
COUNTS = {"line-crossing/door.in": 3, "line-crossing/door.out": 5, "line-crossing/Exit": 2, "roi-filtering/Lawn": 1}


def recorded(*source_ids: str, frames: int = 30, label: str = "person") -> Mapping[str, SourceRecord]:
    """Records of sources with two objects, a crossing each second and a stay."""
    sink = SummarySink(SummaryOptions(None), Osd())  # type: ignore[arg-type]
    for number in range(frames):
        for source_id in source_ids:
            way = CrossingDirection.IN if number % 20 else CrossingDirection.OUT
            events = (
                AnalyticsEvent("line-crossing", source_id, number, number / 10, 1, "door", 1.0, 0, direction=way),
                AnalyticsEvent("dwell", source_id, number, number / 10, 1, "Bench", number / 10 + 2, 0),
            )
            frame = result(number, source_id=source_id, events=events if number % 10 == 0 else ())
            sink.write(replace(frame, labels=(label, "car")))
    return sink.records


def source(source_id: str, **more: object) -> SourceStatistics:
    """Statistics of a file that ended."""
    known = SourceStatistics(source_id, "", f"{source_id}.mp4", SourceState.ENDED, frames=30, inferred=30, active_s=3.0)
    return replace(known, counts=COUNTS, events={"line-crossing/door.in": 3}, **more)  # type: ignore[arg-type]


def page_of(summary: Summary, records: Mapping[str, SourceRecord], settings: VideoSettings = SETTINGS) -> str:
    """The page as text."""
    return run_page(summary, records, settings, "its own", time.time()).decode()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`penstock video run WORDS…` for a clip, with a FakeProgram of these options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")

    def call(*words: str, **options: Any) -> Result:
        monkeypatch.setattr(video, "engine_for", lambda *_, **__: no_engine())
        monkeypatch.setattr(video, "program_of", lambda settings, *_, **__: FakeProgram(settings, **options))
        app = typer.Typer(pretty_exceptions_enable=False)
        app.add_typer(video.app, name="video")
        common = ("video", "run", "--source", "clip.mp4", "--model", "m", "--no-api")
        return CliRunner().invoke(app, [*common, *words])

    return call


@pytest.mark.parametrize("words", [("--summary",), ("--sink", "jsonl", "--summary"), ("--sink", "summary")])
def test_run_with_summary_writes_the_page_and_lists_it(run: Callable[..., Result], words: tuple[str, ...]) -> None:
    """Beside other sinks, or as the only one."""
    done = run("--out", "out", *words, seen=recorded("clip"), counts=COUNTS)
    assert done.exit_code == 0, done.output
    assert done.output.count("out/summary.html  ") == 1
    page = Path("out/summary.html").read_text()
    assert "Crossings of door" in page
    assert "the gateway at http://127.0.0.1:9" in page


def test_run_with_summary_that_cannot_be_written_fails_with_its_path(run: Callable[..., Result]) -> None:
    """The rest of the results is there, and the table too."""
    Path("out/summary.html").mkdir(parents=True)
    done = run("--out", "out", "--summary")
    assert done.exit_code == 1
    assert "sink summary failed: out/summary.html" in done.stdout
    assert "100 frames in" in done.stdout


def test_run_with_summary_and_no_folder_is_refused(run: Callable[..., Result]) -> None:
    """With what to do."""
    done = run("--summary")
    assert done.exit_code == 2
    assert "give a folder, or --out for all sinks" in done.output


class Tags(HTMLParser):
    """The elements of a page, and every attribute."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_has_the_run_its_counts_charts_and_pictures() -> None:
    """One well-formed file: a sentence, tables, a chart for each line and zone, a picture and a heat map."""
    summary = Summary((source("cam", drops={"too_old": 4}),), (), 6.0, 0)
    page = page_of(summary, recorded("cam"))
    tags = Tags(page)
    assert tags.open == []
    assert "1 source, 30 frames in 6 s, 5.0 frames/s. Tracked: person 1, car 1." in page
    assert "Crossed: Exit 2; door 3 in, 5 out." in page
    for text in ("Crossings of door", "Stays in Bench", "Where objects were", "4 too_old", "yolox-nano", "its own"):
        assert text in page
    assert (tags.names.count("img"), tags.names.count("svg")) == (2, 4)
    assert all(alt for name, alt in tags.attributes if name in ("alt", "aria-label"))


def test_page_loads_nothing_and_runs_nothing() -> None:
    """No script, no handler, no address but pictures in the file; its policy forbids the rest."""
    page = page_of(Summary((source("cam"),), (), 6.0, 0), recorded("cam"))
    tags = Tags(page)
    assert "script" not in tags.names
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "href"]
    assert all(value.startswith("data:image/jpeg;base64,") for name, value in tags.attributes if name == "src")
    assert any("default-src 'none'" in value for name, value in tags.attributes if name == "content")
    assert not re.search(r"url\(|@import|https?://", page)


def test_page_with_hostile_names_shows_them_as_text() -> None:
    """Of cameras, labels, rules, reasons and models; no name reverses the text after it."""
    events = {f"line-crossing/{EVIL[:20]}.in": 3, f"user:Rule/{EVIL[:20]}": 1}
    hostile = source("cam", camera_name=EVIL, reason=EVIL, drops={EVIL: 1})
    hostile = replace(hostile, state=SourceState.FAILED, events=events, uri=f"rtsp://a/{EVIL}")
    settings = replace(SETTINGS, analytics=Plain({"line-crossing": [{"name": EVIL}]}, "analytics"))
    page = page_of(Summary((hostile,), (), 6.0, 1, sink_failures=(EVIL,)), recorded("cam", label=EVIL), settings)
    tags = Tags(page)
    assert tags.open == []
    assert "script" not in tags.names
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 6


def test_page_hides_what_follows_the_question_mark_of_an_address() -> None:
    """It may be a token; user and password are never in statistics."""
    assert "secret" not in page_of(Summary((source("cam", uri="http://a/b?token=secret"),), (), 6.0, 0), {})


def test_page_of_many_sources_details_the_busiest() -> None:
    """All are in the table; pictures and charts are of a bounded number."""
    names = [f"cam{number}" for number in range(MAX_DETAILED + 3)]
    page = page_of(Summary(tuple(map(source, names)), (), 6.0, 0), recorded(*names, frames=12))
    assert Tags(page).names.count("h2") == MAX_DETAILED + 1
    assert all(f"<td>{name}<small>" in page for name in names)


def test_page_of_a_run_without_frames_says_so() -> None:
    """As of a camera that was never reached."""
    failed = replace(source("cam"), state=SourceState.FAILED, reason="no route to host", frames=0, counts={}, events={})
    page = page_of(Summary((failed,), (), 0.0, 1, is_stopped=True), {})
    assert "1 source, 0 frames in 0 s. It was stopped before its end." in page
    assert "cam failed: no route to host" in page


def test_counts_by_rule_joins_the_two_counters_of_a_line() -> None:
    """A rule named like a counter stays itself; classes and numbers of objects are no rules."""
    counts = COUNTS | {"line-crossing/door.in/person": 3, "objects/person": 2, "line-crossing/Gate.in": 7}
    counts |= {"line-crossing/Gate": 1}
    rows = counts_by_rule(replace(source("cam"), counts=counts, events={"line-crossing/door.out": 5}))
    assert rows == [
        RuleCounts("line-crossing", "Exit", total=2),
        RuleCounts("line-crossing", "Gate", total=1),
        RuleCounts("line-crossing", "Gate.in", total=7),
        RuleCounts("line-crossing", "door", into=3, out_of=5, events=5),
        RuleCounts("roi-filtering", "Lawn", present=1),
    ]


def test_sentence_of_several_sources_names_them() -> None:
    """Lines of the same name differ by their source."""
    text = sentence(Summary((source("a"), source("b"), source("c")), (), 6.0, 0), {})
    assert "a: Exit 2; a: door 3 in, 5 out; b: Exit 2; b: door 3 in, 5 out and 2 more" in text


@pytest.mark.parametrize("values", [[], [None], [0.0], [1e9, 0.0, None, 3.5]])
def test_line_chart_of_any_values_stays_in_its_frame(values: list[float | None]) -> None:
    """Gaps interrupt the line; nothing is drawn outside."""
    axis = TimeAxis(len(values), 1.0, lambda at_s: f"{at_s:g}")
    chart = line_chart("Objects", [Series("person", values)], axis, text="objects")
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", chart)]
    assert len(points) == len([value for value in values if value is not None])
    assert all(0 <= x <= 380 and 0 <= y <= 190 for x, y in points)


def test_crossing_chart_has_in_above_out() -> None:
    """A bar for each bin with crossings; its height follows the number."""
    axis = TimeAxis(3, 1.0, lambda at_s: f"{at_s:g}")
    chart = crossing_chart("Door", [2, 0, 1], [0, 1, 0], axis, text="door")
    bars = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" class="bar s(\d)"', chart)
    (top, high, _), (_, low, _), (foot, _, _) = bars
    assert [number for *_, number in bars] == ["0", "0", "1"]
    assert float(high) == pytest.approx(2 * float(low), rel=0.01)
    assert float(foot) == pytest.approx(float(top) + float(high), abs=0.02)


def test_heat_picture_is_bright_where_feet_were() -> None:
    """Without a picture the ground is black."""
    heat = np.zeros((36, 64), np.float32)
    heat[18, 32] = 5.0
    picture = simplejpeg.decode_jpeg(heat_picture(b"", heat))
    assert picture.shape == (540, 960, 3)
    assert picture[277, 487].sum() > 400
    assert picture[10:200, 10:400].max() < 20


def test_tag_escapes_what_is_not_markup() -> None:
    """Text and attributes; finished markup is not escaped twice."""
    assert tag("p", "<b>", Markup("<i>x</i>"), 3, None, title='"') == '<p title="&quot;">&lt;b&gt;<i>x</i>3</p>'
    assert joined("a & b") == "a &amp; b"
