"""The System page in a real browser: state, findings, logs, audit log, settings."""

import pytest
from playwright.sync_api import Page, expect

from tests.console.browser import TIMEOUT_MS
from tests.console.conftest import KeyedConsole, Show
from tests.support.http import post_json
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("console")
HOSTILE = "<img src=x onerror=alert(1)>"


def log_in(page: Page, secret: str) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key").fill(secret)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()


def test_overview_shows_engine_and_processes_with_their_load(show: Show) -> None:
    """From the second response on, the CPU column shows the use of each process."""
    with show("/system") as page:
        expect(page.get_by_text("ONNX Runtime")).to_be_visible()
        row = page.get_by_role("row").filter(has_text="gateway").first
        expect(row.get_by_role("cell").nth(3)).to_contain_text(" %")
        expect(page.get_by_role("row").filter(has_text="console").first).to_be_visible()
        expect(page.get_by_text("2 ready")).to_be_visible()


def test_findings_show_passed_checks_and_what_to_do(show: Show) -> None:
    """Passed checks are collapsed, and the checks can be run again."""
    with show("/system") as page:
        page.get_by_role("link", name="Findings").click()
        expect(page.get_by_text("checks passed")).to_be_visible(timeout=TIMEOUT_MS)
        page.get_by_text("checks passed").click()
        expect(page.get_by_role("cell", name="engine").first).to_be_visible()
        page.get_by_role("button", name="Run checks again").click()
        expect(page.get_by_text("Checked")).to_be_visible()
        assert page.get_by_text("is taken by").count() == 0, "the stack's own ports are no fault"


def test_logs_are_filtered_and_followed_and_show_names_as_text(show: Show, console_stack: RunningStack) -> None:
    """A new line appears by itself; what a client sent is text, not markup."""
    with show("/system/logs") as page:
        log = page.get_by_role("log")
        expect(log).to_contain_text("engine is ready")
        page.get_by_label("Text").fill("no such text anywhere")
        expect(page.get_by_text("No line matches.")).to_be_visible()
        page.get_by_label("Text").fill("model loaded")
        expect(log).to_contain_text("model loaded")
        expect(log).not_to_contain_text("engine is ready")
        lines = log.get_by_role("listitem").count()
        for action in ("unload", "load"):
            post_json(f"{console_stack.http_url}/v2/repository/models/street/{action}", {})
        expect(log.get_by_role("listitem")).to_have_count(lines + 1)
        page.get_by_label("Text").fill("")
        page.route("**/gateway/v1/logs**", lambda route: route.fulfill(json={"lines": [_line(HOSTILE)], "next": "1-1"}))
        page.get_by_label("Level and above").select_option("error")
        expect(log).to_contain_text(HOSTILE)
        assert page.locator(".log img").count() == 0


def _line(text: str) -> dict[str, object]:
    head = {"level": "error", "time": "2026-11-29T03:00:00.000000Z", "process": text, "pid": 1, "component": text}
    return {**head, "event": text, "fields": {text: text}}


def test_settings_show_where_each_value_came_from(show: Show) -> None:
    """The list can be limited to changed settings, or filtered by text."""
    with show("/system/config") as page:
        expect(page.get_by_role("cell", name="grace_s")).to_be_visible()
        page.get_by_label("Only changed settings").check()
        expect(page.get_by_role("cell", name="grace_s")).to_be_hidden()
        expect(page.get_by_role("row").filter(has_text="console_port")).to_contain_text("flag --console-port")
        page.get_by_label("Filter").fill("decoders")
        expect(page.get_by_role("row").filter(has_text="PENSTOCK_DECODERS")).to_contain_text("variable")
        expect(page.get_by_role("cell", name="console_port")).to_be_hidden()


def test_audit_log_that_is_not_written_names_the_flag(show: Show) -> None:
    """The view names --audit-log instead of showing an empty table."""
    with show("/system/audit") as page:
        expect(page.get_by_text("start with --audit-log FILE")).to_be_visible()


def test_reader_sees_the_state_and_an_admin_also_the_audit_log(show_keyed: Show, keyed_console: KeyedConsole) -> None:
    """A page that needs another role says which one; refused logins are in the audit log."""
    with show_keyed("/system") as page:
        log_in(page, keyed_console.secrets["read"])
        expect(page.get_by_text("ONNX Runtime")).to_be_visible()
        for part in ("Findings", "Logs", "Audit log", "Configuration"):
            page.get_by_role("link", name=part).click()
            expect(page.get_by_text("role admin").first).to_be_visible()
    with show_keyed("/system/audit") as page:
        log_in(page, keyed_console.secrets["all"])
        expect(page.get_by_role("row").filter(has_text="permission_denied").first).to_be_visible()
        expect(page.get_by_role("cell", name="read").first).to_be_visible()
