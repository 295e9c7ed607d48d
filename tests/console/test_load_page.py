"""The Load page in a real browser: start, live charts, stop, report, comparison, history."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.browser import WIDTHS, horizontal_overflow, serious_findings
from tests.console.conftest import KeyedConsole, Show
from tests.console.test_system_page import HOSTILE, log_in

pytestmark = pytest.mark.xdist_group("console")
FIGURES = {
    "outcome": "pass",
    "headline": HOSTILE,
    "began_at": "2026-11-29T03:00:00+00:00",
    "commit": HOSTILE,
    "p50_ms": 5.0,
    "p99_ms": 9.0,
    "ok_per_s": 80.0,
    "capacity_per_s": 160.0,
    "error_share": 0.0,
    "load_ms": None,
}


def run(number: int, **changes: Any) -> dict[str, Any]:
    """A run whose every text is an attack."""
    made = {
        "id": f"steady-20261129-03000{number}-abcdef",
        "scenario": HOSTILE,
        "target": HOSTILE,
        "state": "passed",
        "started_at": "2026-11-29T03:00:00+00:00",
        "client": HOSTILE,
        "model": HOSTILE,
        "error": HOSTILE,
        "has_report": False,
        "figures": FIGURES,
    }
    return made | changes


def answer_runs(page: Page, runs: list[dict[str, Any]]) -> None:
    """Makes the page show these runs."""
    content = json.dumps({"runs": runs, "running": None})
    page.route("**/gateway/v1/load/runs", lambda route: route.fulfill(body=content, content_type="application/json"))


def test_run_is_started_watched_and_stopped_and_has_a_report(show: Show) -> None:
    """Charts move while it runs; after the stop, the report is on the page, in a sandbox."""
    with show("/load") as page:
        page.get_by_label("Scenario", exact=True).select_option("image-burst")
        expect(page.get_by_text("does the queue drain in time?")).to_be_visible()
        expect(page.get_by_text("Duration: about")).to_be_visible()
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text("starts and warms up").first).to_be_visible()
        expect(page.get_by_text("phase 1 of 3")).to_be_visible(timeout=20_000)
        expect(page.get_by_role("img", name="Latency: p50")).to_be_visible()
        expect(page.locator(".key.series-0").first).to_have_text("p50")  # the color that it has on a model's page
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("stopped", exact=True)).to_be_visible()
        report = page.frame_locator("iframe[title=Report]")
        expect(report.locator(".verdict")).to_contain_text("the run was stopped before its end")
        height = "element => element.scrollHeight - element.clientHeight"
        assert report.locator("html").evaluate(height) <= 0, "the report is cut at the frame's bottom"
        assert page.locator("iframe").get_attribute("sandbox") == ""
        page.get_by_role("link", name="All runs").click()
        expect(page.get_by_role("row").filter(has_text="image-burst")).to_contain_text("stopped")


def test_two_runs_are_compared_and_names_are_text(show: Show) -> None:
    """The history has a chart from two runs on; two chosen runs are compared, the older first."""
    with show("/load") as page:
        answer_runs(page, [run(2), run(1)])
        asked: list[str] = []
        row = {"measure": "p99_ms", "unit": "ms", "a": 9, "b": 12, "sentence": HOSTILE, "is_larger_than_spread": True}
        found = {"a": "a", "b": "b", "rows": [row], "warnings": [HOSTILE], "changes": [HOSTILE]}
        page.route("**/comparison?**", lambda route: (asked.append(route.request.url), route.fulfill(json=found)))
        expect(page.get_by_role("img", name="Rate: throughput")).to_be_visible()
        compare = page.get_by_role("button", name="Compare the two")
        expect(compare).to_be_disabled()
        for box in page.get_by_role("checkbox").all():
            box.check()
        compare.click()
        expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
        assert [url.partition("/runs/")[2] for url in asked] == [
            "steady-20261129-030001-abcdef/comparison?with=steady-20261129-030002-abcdef"
        ]
        assert page.locator("main img, dialog img").count() == 0


STATES = {
    "failed": ({"is_invalid": False}, "ended: target missed"),
    "invalid": ({"is_invalid": True}, "ended: not valid"),
    "error": (None, "broken off: no result"),
}


@pytest.mark.parametrize("case", STATES)
def test_run_that_missed_a_target_differs_from_one_that_broke(show: Show, case: str) -> None:
    """The state says whether the run ended; what else decided the figures stands beside the verdict."""
    changes, text = STATES[case]
    figures = None if changes is None else FIGURES | changes | {"note": "other programs kept 1.5 cores busy"}
    shown = run(1, state="error" if changes is None else "failed", figures=figures)
    with show("/load") as page:
        answer = {"run": shown, "progress": [], "next": 0}
        page.route(f"**/gateway/v1/load/runs/{shown['id']}?**", lambda route: route.fulfill(json=answer))
        page.evaluate(
            "path => { history.pushState(null, '', path); dispatchEvent(new PopStateEvent('popstate')); }",
            f"/load/{shown['id']}",
        )
        expect(page.get_by_text(text, exact=True)).to_be_visible()
        expect(page.locator(".load-verdict + .load-note")).to_have_count(0 if changes is None else 1)
        expect(page.get_by_text("No figures were measured.").first).to_be_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_page_fits_and_is_accessible(show: Show, width: int) -> None:
    """The page fits each width and has no serious findings of axe-core."""
    with show("/load", width=width, scheme="dark" if width == min(WIDTHS) else "light") as page:
        answer_runs(page, [run(2), run(1)])
        expect(page.get_by_role("img", name="Rate: throughput")).to_be_visible()
        assert horizontal_overflow(page) == 0
        assert serious_findings(page) == []


def test_reader_sees_which_role_it_needs(show_keyed: Show, keyed_console: KeyedConsole) -> None:
    """A key without the role admin sees that load tests require it."""
    with show_keyed("/load") as page:
        log_in(page, keyed_console.secrets["read"])
        expect(page.get_by_text("require an API key with the role admin")).to_be_visible()
